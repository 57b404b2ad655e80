"""Requests made of parts that may be wrong or not fit together, and bytes of them changed: what comes back is HTTP, and
never the server's fault."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from raw_http import BODY, GET, WHOLE, Sent, check, exchange, impatient, neighbour
from serving import Running


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with impatient(tiny_llama) as found:
        yield found


@pytest.fixture(autouse=True)
def others(server: Running) -> Iterator[None]:
    with neighbour(server):
        yield


METHODS = b"GET,POST,PUT,OPTIONS,DELETE,get,PRI,CONNECT,G\x00T,M-SEARCH,\xff,".split(b",")
PATHS = b"/v1/completions /v1/models /health /version /v1/models/%2e%2e/%00%ff * // /\xff /\xc3\xa9 /#a ?a".split()
PATHS += [b"http://a/v1/models", b"http://a", b"a:80", b"/" + b"a" * 9000, b"/v1/completions?\x01", b""]
VERSIONS = b"HTTP/1.1,HTTP/1.0,HTTP/0.9,HTTP/2.0,HTTP/9.9,HTTP/1.1 ,http/1.1,HTTP/1.1\x00,".split(b",")
HEADERS = [
    b"Host: a",
    b"Host: a",
    b"Content-Length: %d" % len(BODY),
    b"Content-Length: 0",
    b"Content-Length: -1",
    b"Content-Length: +5",
    b"Content-Length: 5, 5",
    b"Content-Length: 0x10",
    b"Content-Length: 99999999999999999999999",
    b"Content-Length: 100000000",
    b"Content-Length:",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: \x0bchunked",
    b"Transfer-Encoding : chunked",
    b"transfer-encoding: CHUNKED",
    b"Content-Type: application/json",
    b"Content-Type: application/json",
    b"Content-Type: \xff\xfe",
    b"Content-Encoding: gzip",
    b"Expect: 100-continue",
    b"Expect: the unexpected",
    b"Connection: close",
    b"Connection: keep-alive, Upgrade",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    b"X-Request-Id: \xc3\xa9\xff",
    b"X-Request-Id: a\rb",
    b"Authorization: Bearer \xff",
    b"traceparent: 00-\x01",
    b"Cookie: " + b"a" * 70_000,
    b": nameless",
    b"no colon",
    b" folded",
    b"\x00: \x00",
    b"A" * 3000 + b": b",
]
BODIES = [
    b"",
    BODY,
    BODY[:7],
    BODY + b"more",
    b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    b"%x\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % (len(BODY), BODY),
    b"5\r\nabc",
    b"fffffffffffffffff\r\n",
    b"-1\r\n\r\n",
    b"5;" + b"x" * 5000 + b"\r\nabcde\r\n0\r\n\r\n",
    b"\xff\xfe\x00",
    b"0\r\n\r\n",
]
ENDINGS = [b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n"]


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request whose parts may each be wrong, and may not fit together."""

    def one(choices: Sequence[bytes]) -> bytes:
        return draw(st.sampled_from(choices))

    if draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from([WHOLE, GET]))
    ending = one(ENDINGS)
    likely = draw(st.booleans())
    line = [b"POST", b"/v1/completions", b"HTTP/1.1"] if likely else [one(METHODS), one(PATHS), one(VERSIONS)]
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=6))
    return ending.join([b" ".join(line), *headers, b"", b""]) + one(BODIES)


@st.composite
def connections(draw: st.DrawFn) -> Sent:
    """Requests one behind the other, bytes of them changed, cut into pieces anywhere."""
    if draw(st.integers(0, 7)) == 0:
        data = draw(st.binary(max_size=200))
    else:
        data = b"".join(draw(st.lists(requests(), min_size=1, max_size=3)))
        for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
            at = draw(st.integers(0, max(len(data) - 1, 0)))
            data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 2)) :]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return Sent(pieces, draw(st.sampled_from(["wait", "wait", "wait", "half", "reset"])))


BATCHES = st.lists(connections(), min_size=30, max_size=40)
ONCE: dict[str, Any] = {
    "deadline": None,
    "phases": (Phase.explicit, Phase.generate),  # each connection stands by itself: what failed is shown as it is
    "suppress_health_check": list(HealthCheck),
}


@seed(0)
@settings(max_examples=25, **ONCE)
@given(BATCHES)
def test_generated_bytes(server: Running, sent: list[Sent]) -> None:
    fine(server, sent)


@pytest.mark.slow
def test_thousands_of_generated_connections(server: Running) -> None:
    count = 0

    @seed(1)
    @settings(max_examples=80, **ONCE)
    @given(BATCHES)
    def generated(sent: list[Sent]) -> None:
        nonlocal count
        fine(server, sent)
        count += len(sent)

    generated()
    assert count >= 2000


def fine(server: Running, sent: list[Sent]) -> None:
    """Each connection is answered as it should be, all of them at once."""

    async def all_of_them() -> list[bytes]:
        return await asyncio.gather(*(exchange(server, each) for each in sent))

    for each, data in zip(sent, asyncio.run(all_of_them()), strict=True):
        try:
            # Nobody takes HEAD for what it is here: its answers have no bodies.
            check(data, broken_off=each.end != "wait" or b"HEAD" in b"".join(each.pieces))
        except (AssertionError, h11.ProtocolError) as error:
            raise AssertionError(f"{each} was answered with {data[:1000]!r}") from error
