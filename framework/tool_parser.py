"""Calls of tools in the text that a model writes, found piece by piece as the text comes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Generator
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

T = TypeVar("T")

Parsing = Generator[None, None, T]
"""What reads text and gives a `T`, with pauses in which further text comes: call it by `yield from`."""

_PIECE = 4096
"""Characters that are looked at together: reading takes each off the front."""
_SPACES = re.compile(r"\s*")
_WORD = re.compile(r"[\w.-]*")
_SCALAR = re.compile(r"[^\s,:{}\[\]<]*")


class ToolDelta(NamedTuple):
    """A piece of an answer: content, or a part of the arguments of the call that has this number, from 0 on. `name`:
    the call begins here, and this is the tool's name."""

    text: str = ""
    call: int | None = None
    name: str | None = None


class ToolParser:
    """Finds the calls in one answer, which is pushed in any pieces; what is no call is content.

    A subclass has `markers` and `parse`, which reads the text with the methods below it from the beginning to the end::

        class Mine(ToolParser):              # <call>{"name": "add", "arguments": {"a": 1}}</call>
            markers = ("<call>", "</call>")

            def parse(self):
                while (yield from self.until("<call>")):
                    if (yield from self.call()):
                        yield from self.skip("</call>")

    All that was read since the marker that `until` found is content after all, unless `begin` (or `call`, which calls
    it) finds the name of a known tool. From then on the call stands, and what is read beside its arguments is no
    content. Text that `parse` leaves unread is content. So an answer that is cut off, or is not what it began as, loses
    no text and is no error.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """What the markup is made of. Special tokens are left out of answers: not these."""
    separator: ClassVar[str] = ""
    """What stands between two calls, where `spelling` says how they are written."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: the tools that there are."""
        self.names = frozenset(names)
        self._text = ""  # not read yet
        self._held: list[str] = []  # read, and content unless a call begins
        self._begun = False  # a call: what is read now is its markup
        self._calls = 0
        self._behind = False  # a call, without content since
        self._out: list[ToolDelta] = []
        self._ended = False
        self._parsing = self.parse()

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether a model with this chat template writes calls in this form: for `--tool-parser auto`."""
        return any(marker in template for marker in cls.markers)

    @staticmethod
    def call_id() -> str:
        """A new id for a call, as the family's chat template wants them."""
        return f"call_{secrets.token_hex(12)}"

    @classmethod
    def spelling(cls, name: str) -> tuple[str, str] | None:
        """What models write before and behind the arguments of a call. Calls that have to be made are then made in this
        form; None: in one that the server reads itself."""
        return None

    # What the server calls

    def push(self, text: str) -> list[ToolDelta]:
        """What is certain now, without anything that later text could change."""
        for start in range(0, len(text), _PIECE):
            self._text += text[start : start + _PIECE]
            self._advance()
        return self._take()

    def finish(self) -> list[ToolDelta]:
        """The rest: no more text comes. Nothing may be pushed any more."""
        self._ended = True
        self._advance()
        self._parsing.close()
        rest, self._text = self._text, ""
        self._hold(rest)
        self._release()
        return self._take()

    # What a subclass writes

    def parse(self) -> Parsing[None]:
        """Read the whole text."""
        raise NotImplementedError

    # What it is made of

    def until(self, *markers: str) -> Parsing[str]:
        """Give text as content up to the first of `markers`, which is read and returned; "" at the end of the text.

        Spaces before a marker are content only if no call begins there.
        """
        self._begun = False
        self._release()
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            found = pattern.search(self._text)
            end = found.start() if found else len(self._text) - _partial(self._text, markers)
            spaces = len(self._text[:end]) - len(self._text[:end].rstrip())
            if end > spaces:
                self._read(end - spaces)
                self._release()
            self._read(spaces)
            if found:
                return self._read(len(found[0]))
            if not (yield from self._more()):
                return ""

    def peek(self) -> Parsing[str]:
        """The next character that is no space, without reading it; "" at the end of the text."""
        at = yield from self._spaces()
        return self._text[at : at + 1]

    def skip(self, text: str) -> Parsing[bool]:
        """Read `text` and the spaces before it, if that comes next; or what there is of it where the text ends."""
        at = yield from self._spaces()
        while True:
            rest = self._text[at : at + len(text)]
            whole, part = rest == text, text.startswith(rest)
            if whole or (part and rest and self._ended):
                self._read(at + len(text))
                return True
            if not part or not (yield from self._more()):
                return False

    def word(self) -> Parsing[str]:
        """Read letters, digits, "_", "." and "-": the name of a tool."""
        self._read((yield from self._spaces()))
        return (yield from self._run(_WORD))

    def value(self) -> Parsing[str]:
        """Read one JSON value: its text, which need not be valid."""
        parts: list[str] = []
        yield from self._scan(parts.append)
        return "".join(parts)

    def begin(self, name: str) -> bool:
        """Begin a call of this tool; False if there is no such tool."""
        if name not in self.names:
            return False
        self._held.clear()
        self._begun = self._behind = True
        self._out.append(ToolDelta("", self._calls, name))
        self._calls += 1
        return True

    def arguments(self) -> Parsing[None]:
        """Read one JSON value and give it as the arguments of the call begun, an object piece by piece."""
        if (yield from self.peek()) == "{":
            yield from self._scan(self._argue)
        else:
            self._argue(_as_object((yield from self.value())))

    def call(self) -> Parsing[bool]:
        """Read an object such as {"name": "add", "arguments": {"a": 1}}: whether it is a call of a tool there is.

        The arguments may be called "parameters", come before the name, be a string, or be missing; other keys are
        ignored.
        """
        self._begun = False
        if not (yield from self.skip("{")):
            return False
        early, given = "", False
        while (yield from self.peek()) == '"':
            key = yield from self.value()
            if not (yield from self.skip(":")):
                break
            if key == '"name"' and not self._begun:
                if not self.begin(_string((yield from self.value()))):
                    return False
                if early:
                    self._argue(_as_object(early))
                    given = True
            elif key in ('"arguments"', '"parameters"') and self._begun and not given:
                given = True
                yield from self.arguments()
            elif key in ('"arguments"', '"parameters"') and not self._begun:
                early = yield from self.value()
            else:
                yield from self.value()
            if not (yield from self.skip(",")):
                break
        if not self._begun:
            return False
        if (yield from self.skip("}")) and not given:
            self._argue("{}")
        return True

    def _more(self) -> Parsing[bool]:
        """Wait for further text; False if none comes."""
        if self._ended:
            return False
        yield
        return True

    def _spaces(self) -> Parsing[int]:
        """How many spaces come next, once it is known what follows them."""
        count = 0
        while True:
            count = _end(_SPACES, self._text, count)
            if count < len(self._text) or not (yield from self._more()):
                return count

    def _run(self, pattern: re.Pattern[str]) -> Parsing[str]:
        """Read the characters that `pattern` is a run of: each at once, so that it is not looked at again."""
        parts: list[str] = []
        while True:
            parts.append(self._read(_end(pattern, self._text, 0)))
            if self._text or not (yield from self._more()):
                return "".join(parts)

    def _read(self, length: int) -> str:
        piece, self._text = self._text[:length], self._text[length:]
        if not self._begun:
            self._hold(piece)
        return piece

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(text)

    def _release(self) -> None:
        """What was held is content; but not spaces alone behind a call, where the text ends."""
        text = "".join(self._held)
        self._held.clear()
        if text and not (self._ended and self._behind and text.isspace()):
            self._behind = False
            self._give(text, None)

    def _argue(self, text: str) -> None:
        self._give(text, self._calls - 1)

    def _give(self, text: str, call: int | None) -> None:
        if text:
            self._out.append(ToolDelta(text, call))

    def _scan(self, give: Callable[[str], object]) -> Parsing[None]:
        self._read((yield from self._spaces()))
        if self._text[:1] not in ("{", "[", '"'):
            give((yield from self._run(_SCALAR)))
            return
        brackets = _Brackets()
        while (end := brackets.feed(self._text)) is None:
            give(self._read(len(self._text)))
            if not (yield from self._more()):
                return
        give(self._read(end))

    def _advance(self) -> None:
        try:
            next(self._parsing)
        except StopIteration:  # what it left is content
            self._begun = False
            self._read(len(self._text))
            self._release()

    def _take(self) -> list[ToolDelta]:
        together = [list(pieces) for _, pieces in groupby(self._out, key=attrgetter("call"))]
        self._out = []
        return [pieces[0]._replace(text="".join(piece.text for piece in pieces)) for pieces in together]


class _Brackets:
    """Where a JSON string, array or object ends, over pieces of text.

    Brackets are counted outside strings, and not compared: whoever wrote [1} is told by the reader of the arguments.
    """

    _OUTSIDE = re.compile(r'["{}\[\]<]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> int | None:
        """How many characters of `text` belong to it; None: all of them, and it goes on."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while found := (self._INSIDE if self._quoted else self._OUTSIDE).search(text, at):
            at = found.end()
            match found[0]:
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case '"':
                    self._quoted = not self._quoted
                case "<":  # JSON has none here: most likely the markup's end
                    return found.start()
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if self._depth <= 0 and not self._quoted:
                return at
        return None


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Where a run that begins at `start`, and may be empty, ends."""
    found = pattern.match(text, start)
    assert found
    return found.end()


def _partial(text: str, markers: Collection[str]) -> int:
    """Length of the longest end of `text` that a marker begins with."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return ...


def _string(text: str) -> str:
    value = _loads(text)
    return value if isinstance(value, str) else ""


def _as_object(text: str) -> str:
    """Arguments that are an object, where the model wrote one into a string, or null for none."""
    value = _loads(text)
    if value is None:
        return "{}"
    return value if isinstance(value, str) and isinstance(_loads(value), dict) else text
