"""The cases of the W3C's own suite for the traceparent header."""

from __future__ import annotations

import pytest
from framework.server.traceparent import parse

TRACE, SPAN = "12345678901234567890123456789012", "1234567890123456"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"00-{TRACE}-{SPAN}-ff", True),
        (f" \t00-{TRACE}-{SPAN}-01\t ", True),
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-00-what-the-future-will-be-like", False),
        (f"fe-{TRACE}-{SPAN}-01-", True),
    ],
)
def test_valid(header: str, sampled: bool) -> None:
    assert parse([header]) == (TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01-what-the-future-will-not-be-like",
        f"cc-{TRACE}-{SPAN}-01.what-the-future-will-be-like",
        f"ff-{TRACE}-{SPAN}-01",
        *(f"{version}-{TRACE}-{SPAN}-01" for version in (".0", "0.", "0", "000", "0000", "CC")),
        *(
            f"00-{trace}-{SPAN}-01"
            for trace in ("0" * 32, "." + TRACE[1:], TRACE[:-1] + ".", TRACE + "3", TRACE[1:], TRACE[:-1] + "A")
        ),
        *(
            f"00-{TRACE}-{span}-01"
            for span in ("0" * 16, "." + SPAN[1:], SPAN[:-1] + ".", SPAN + "7", SPAN[1:], SPAN[:-1] + "A")
        ),
        *(f"00-{TRACE}-{SPAN}-{flags}" for flags in (".0", "0.", "001", "1", "0A")),
        f"00-{TRACE}-{SPAN}-0\n1",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01,00-{TRACE}-{SPAN}-01",
    ],
)
def test_invalid(header: str) -> None:
    assert parse([header]) is None


def test_it_may_come_once() -> None:
    header = f"00-{TRACE}-{SPAN}-01"
    assert parse([]) is None and parse([header, header]) is None
