"""The W3C traceparent header (https://www.w3.org/TR/trace-context/): which span a request was made in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_FORMAT = re.compile(
    r"(?P<version>(?!ff)[0-9a-f]{2})"
    r"-(?P<trace>(?!0{32})[0-9a-f]{32})"
    r"-(?P<span>(?!0{16})[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-.*)?"
)


class Parent(NamedTuple):
    """Ids are lower-case hex."""

    trace_id: str
    span_id: str
    sampled: bool


def parse(headers: Sequence[str]) -> Parent | None:
    """What all values of the header say: None unless there is one, and valid. Later versions may have more fields."""
    found = _FORMAT.fullmatch(headers[0].strip()) if len(headers) == 1 else None
    if found is None or (found["version"] == "00" and found["more"] is not None):
        return None
    return Parent(found["trace"], found["span"], bool(int(found["flags"], 16) & 1))
