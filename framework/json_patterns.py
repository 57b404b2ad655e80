"""Regular expressions of JSON schemas, in a form that the grammar library follows."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from .errors import brief

_ATOM = re.compile(
    r"(\\(?:[^xucpPbB1-9]|x\w{2}|u\w{4})|\[\^?(?:\\[\s\S]|[^\]\\])*\]|[^\\\[\](){}|^$*+?])"
    r"(?:([*+?])|\{(\d+)(,?)(\d*)\})?"
)
"""One character of a pattern, and how often it comes."""
_TIMES: dict[str | None, tuple[float, float]] = {None: (1, 1), "*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}


class NoLength(ValueError):
    """No string is as long as it is to be."""


def of_length(pattern: str, least: Any, most: Any) -> str:
    """A pattern of single characters with these limits of its length, if one of them at most is repeated in a varying
    number. Raises `ValueError` for others, and `NoLength`."""
    inside = pattern.removeprefix("^").removesuffix("$")
    atoms = list(_ATOM.finditer(inside))
    counts = []
    for _, sign, few, comma, many in (atom.groups() for atom in atoms):
        top = int(many) if many else math.inf if comma else int(few or 0)
        counts.append((int(few), top) if few else _TIMES[sign])
    varying = [i for i, (few, many) in enumerate(counts) if few != many] or [0]
    known = atoms and len(varying) == 1 and "".join(atom[0] for atom in atoms) == inside
    if not known or type(least) not in (int, float) or type(most) not in (int, float):
        raise ValueError("pattern beside minLength or maxLength is supported with one repetition, like ^[a-z]+$")
    [i] = varying
    others = sum(few for few, _ in counts) - counts[i][0]
    few, many = max(counts[i][0], least - others), min(counts[i][1], most - others)
    if few > many:
        raise NoLength("no length is left that the string may have")
    parts = [atom[0] for atom in atoms]
    parts[i] = f"{atoms[i][1]}{{{math.ceil(few)},{'' if many == math.inf else math.floor(many)}}}"
    return f"^{''.join(parts)}$"


_PART = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c[A-Za-z]|[\s\S])"
    r"|\[\^?(?:\\[\s\S]|[^\]\\])*\]|\(\?<?[=!]|[\s\S]"
)
"""An escape, a class of characters, the beginning of a lookaround, another character."""
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", '"': '"', "\\": "\\"}


def matches(pattern: str, name: str) -> bool:
    """Whether a name of a property is found by a pattern. Raises `ValueError` for what is none."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        raise ValueError(f"patternProperties: {brief(repr(pattern), 80)} is no regular expression") from None


def escaped(pattern: object) -> str:
    """A regular expression for what stands between the quotes in JSON: a quote, a backslash or a control character has
    a backslash there. The library knows this of negated classes and of ranges, not of single characters.

    Raises `ValueError` for what it passes over.
    """
    if not isinstance(pattern, str):
        raise ValueError("pattern must be a string")
    found = []
    for part in _PART.findall(pattern):
        if part.startswith("(?") and len(part) > 2:
            raise ValueError("lookaround in a pattern is not supported")
        if part.startswith("[") and len(part) > 1:
            found.append(_class(part))
        else:
            written = _in_json(_character(part))
            found.append(f"(?:{written})" if written else part)
    return "".join(found)


def _character(part: str) -> str:
    """The one that a part of a pattern stands for; nothing if it stands for another thing, or for several."""
    if len(part) == 1:
        return part
    if not part.startswith("\\"):
        return ""
    match part[1]:
        case "x" | "u" if len(part) > 2:
            number = int(part[2:].strip("{}"), 16)
            return chr(number) if number < 0x110000 else ""
        case "c" if len(part) > 2:
            return chr(ord(part[2]) % 32)
    return _CONTROLS.get(part[1], "")


def _in_json(character: str) -> str:
    """The pattern of how it stands in JSON, if it does not stand for itself."""
    if character not in ('"', "\\") and not "" < character < " ":
        return ""
    return re.sub(r"(\\)", r"\\\1", json.dumps(character)[1:-1])


def _class(part: str) -> str:
    if part.startswith("[^"):
        return part
    parts = _PART.findall(part[1:-1])
    kept: list[str] = []
    special: list[str] = []
    for i, one in enumerate(parts):
        of_range = (i > 1 and parts[i - 1] == "-") or (0 < i + 1 < len(parts) - 1 and parts[i + 1] == "-")
        written = "" if of_range else _in_json(_character(one))
        (special if written else kept).append(written or one)
    if not special:
        return part
    inside = [f"[{''.join(kept)}]"] if kept else []
    return f"(?:{'|'.join([*inside, *special])})"
