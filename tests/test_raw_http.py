"""Requests that no client library would send: the server answers in HTTP or closes, in time and in little memory, and
serves others meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from framework.server import protocol
from framework.server.limits import MAX_HEAD, MAX_PIPELINED
from raw_http import BODY, GET, LONGEST, POST, RECEIVE, WHOLE, Answer, Sent, ask, check, exchange, impatient, neighbour
from serving import Running, eventually


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with impatient(tiny_llama) as found:
        yield found


@pytest.fixture(autouse=True)
def others(server: Running) -> Iterator[None]:
    with neighbour(server):
        yield


def statuses(found: list[Answer]) -> list[int]:
    return [answer.status for answer in found]


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"GET /version\tHTTP/1.1\r\n\r\n",
        b"GET /version HTTP/1.1\nHost: a\n\n",
        b"GET /version HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET /version HTTP/1.1\r\nA: b\r\n folded: c\r\n\r\n",
        b"GET /version HTTP/1.1\r\nA: \x00\r\n\r\n",
        b"GET /version\x00 HTTP/1.1\r\n\r\n",
        b"GET /v\xc3\xa9rsion HTTP/1.1\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET a:80 HTTP/1.1\r\n\r\n",
        b"GET http://a HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",  # HTTP/2
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,  # TLS
        b"\x05\x01\x00",  # SOCKS
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: +39\r\n\r\n" + BODY,
        POST + b"Content-Length: 39, 39\r\n\r\n" + BODY,
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
        POST + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http(server: Running, head: bytes) -> None:
    (answer,) = ask(server, head)
    assert answer.status == 400 and answer.headers["connection"] == "close"


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 39\r\nContent-Length: 39\r\n",
        b"Content-Length: 39\r\nContent-Length: 0\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding\r\n: chunked\r\n",
        b"X: y\rTransfer-Encoding: chunked\r\n",
        b"X: y\nTransfer-Encoding: chunked\r\n",
        b" Transfer-Encoding: chunked\r\n",
    ],
)
@pytest.mark.parametrize("body", [b"0\r\n\r\n" + SMUGGLED, BODY + SMUGGLED, SMUGGLED])
def test_where_a_body_ends_is_never_in_doubt(server: Running, head: bytes, body: bytes) -> None:
    """Two readings of one request are how a proxy in front is deceived: it is refused, and nothing behind it read."""
    assert statuses(ask(server, POST + head + b"\r\n" + body)) == [400]


def test_trailers_are_no_headers(server: Running) -> None:
    chunked = POST + b"Transfer-Encoding: chunked\r\nX-Request-Id: own\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    trailers = b"X-Request-Id: other\r\nAuthorization: Bearer other\r\n\r\n"
    (answer,) = ask(server, chunked, trailers)
    assert answer.status == 200 and answer.headers["x-request-id"] == "own"


def test_one_behind_the_other(server: Running) -> None:
    """Answers come in the order of the requests, whichever is ready first."""
    slow = b'{"prompt": "one two", "extra": {"pace": 0.05}}'
    first = POST + b"Content-Length: %d\r\n\r\n" % len(slow) + slow
    for pieces in ([first + GET + WHOLE], [first + GET[:9], GET[9:] + WHOLE[:60], WHOLE[60:]]):
        found = ask(server, *pieces)
        assert statuses(found) == [200] * 3
        assert b"one two" in found[0].body and b"version" in found[1].body and b"one two" in found[2].body


def test_who_leaves_with_requests_in_line_frees_all_of_them(server: Running) -> None:
    """Of a closed connection each request has to be told, not the last one only."""
    held = b'{"prompt": "one", "extra": {"hold": true}}'
    body = POST + b"Content-Length: %d\r\n\r\n" % len(held) + held
    with socket.create_connection(("127.0.0.1", server.http.base_url.port)) as connection:
        connection.sendall(body * 3)
        eventually(lambda: any(s.stream.record.id for s in server.engine._sequences.values()))
        time.sleep(0.1)
    eventually(lambda: server.engine.load == 0)


def test_nonsense_behind_a_request_is_not_its_answer(server: Running) -> None:
    """An answer that has begun is not broken into by another."""
    slow = b'{"prompt": "one two three four", "stream": true, "extra": {"pace": 0.05}}'
    first = POST + b"Content-Length: %d\r\n\r\n" % len(slow) + slow
    found = asyncio.run(exchange(server, Sent([first, b"nonsense\r\n\r\n"], "wait"), 0.15))
    assert b"HTTP/1.1 400" not in found and statuses(check(found, broken_off=True)) in ([200], [])
    assert statuses(ask(server, GET, b"nonsense\r\n\r\n", pause=0.2)) == [200, 400]


def test_upgrades_are_declined_by_an_ordinary_answer(server: Running) -> None:
    for protocol_name in (b"websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13", b"h2c", b"TLS/1.0"):
        upgrade = b"Connection: Upgrade\r\nUpgrade: " + protocol_name + b"\r\n"
        get = b"GET /version HTTP/1.1\r\nHost: a\r\n" + upgrade + b"\r\n"
        post = POST + upgrade + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        found = ask(server, get + post + GET)
        assert statuses(ask(server, post[:50], post[50:-4], post[-4:])) == [200]
        assert statuses(found) == [200, 200, 200]
        assert b"one two" in found[1].body


def test_older_http(server: Running) -> None:
    for head in (b"GET /version HTTP/1.0\r\n\r\n", b"GET /version HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"):
        begin = time.monotonic()
        (answer,) = ask(server, head)
        assert answer.status == 200 and answer.headers["connection"] == "close"
        assert time.monotonic() - begin < LONGEST / 2
    (answer,) = ask(server, WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert b"one two" in answer.body


def test_head_has_no_body(server: Running) -> None:
    data = asyncio.run(exchange(server, Sent([GET.replace(b"GET", b"HEAD")])))
    assert data.startswith(b"HTTP/1.1 200") and b"content-length: 0" not in data and data.endswith(b"\r\n\r\n")


def test_half_a_connection_is_none(server: Running) -> None:
    """As with most servers that notice clients who leave: who closes his half is taken to be gone."""
    held = b'{"prompt": "one", "extra": {"hold": true}}'
    assert ask(server, POST + b"Content-Length: %d\r\n\r\n" % len(held) + held, end="half", pause=0.2) == []
    assert ask(server, POST + b"Content-Length: 100\r\n\r\nabc", end="half", pause=0.2) == []
    assert ask(server, end="half") == []
    eventually(lambda: server.engine.load == 0)


# Too slow


def trickle(server: Running, start: bytes, drop: bytes, most: float = LONGEST) -> tuple[list[Answer], float]:
    """What comes back if `drop` is sent again and again, and the seconds that it was taken for."""
    begin = time.monotonic()
    got = b""
    with socket.create_connection(("127.0.0.1", server.http.base_url.port), timeout=LONGEST) as connection:
        try:
            connection.sendall(start)
            connection.settimeout(0.05)
            while time.monotonic() - begin < most:
                try:
                    data = connection.recv(2**16)
                    got += data
                    if not data:
                        break
                except TimeoutError:
                    connection.sendall(drop)
        except ConnectionError:
            pass
    return check(got), time.monotonic() - begin


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"", b"G"),
        (b"GET /version HTTP/1.1\r\n", b"A: b\r\n"),
        (b"GET /version HTTP/1.1\r\nA: ", b"b"),
        (POST + b"Content-Length: 1000\r\n\r\n", b" "),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n"),
    ],
)
def test_a_request_that_comes_too_slowly(server: Running, start: bytes, drop: bytes) -> None:
    (answer,), seconds = trickle(server, start, drop)
    expected = 400 if start == b"" else 408  # GGG is no method
    assert answer.status == expected and answer.headers["connection"] == "close"
    assert expected == 400 or RECEIVE / 2 < seconds < LONGEST / 2


def test_silence(server: Running) -> None:
    """Who says nothing is told nothing, whether at first, between requests, or with empty lines only."""
    assert ask(server) == []
    assert trickle(server, b"", b"\r\n")[0] in ([], trickle(server, b"", b"\r\n")[0])
    assert statuses(ask(server, GET, b"\r\n\r\n")) == [200]


def test_a_body_that_nobody_waits_for_has_a_deadline_too(server: Running) -> None:
    """The answer is out, the connection would stay open for the next request."""
    start = b"POST /none HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
    found, seconds = trickle(server, start, b" ")
    assert statuses(found) == [404] and seconds < LONGEST / 2


def test_an_answer_may_take_longer_than_a_request(server: Running) -> None:
    slow = b'{"prompt": "one two", "max_tokens": 4, "extra": {"pace": %f}}' % (RECEIVE / 2)
    body = POST + b"Content-Length: %d\r\n\r\n" % len(slow) + slow
    assert statuses(ask(server, body)) == [200]
    # Half of the next request is there: for all that time it is not late.
    assert statuses(ask(server, body + GET[:12]))[:1] == [200]


# Too much


def flood(server: Running, start: bytes, more: bytes, most: int = 2**26) -> tuple[list[Answer], int, int]:
    """What comes back if `more` is sent without end, how many bytes were taken, and by how many this process grew, in
    which the server is."""
    before = psutil.Process().memory_info().rss
    sent = 0
    got = b""
    with socket.create_connection(("127.0.0.1", server.http.base_url.port), timeout=LONGEST) as connection:
        try:
            connection.sendall(start)
            while sent < most:
                sent += connection.send(more)
        except ConnectionError:
            pass
        grown = psutil.Process().memory_info().rss - before
        try:
            while data := connection.recv(2**16):
                got += data
        except ConnectionError:
            pass
    return check(got, broken_off=True), sent, grown


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /", b"a" * 2**16),
        (b"GET / HTTP/1.1\r\nA: ", b"a" * 2**16),
        (b"GET / HTTP/1.1\r\n", b"A: b\r\n" * 10_000),
        (b"GET / HTTP/1.1\r\n" + b"a" * 9, b"a" * 2**16),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 2**16),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n \r\n0\r\nA: ", b"a" * 2**16),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n \r\n0\r\n", b"A: b\r\n" * 10_000),
        (b"", GET * 1000),
        (WHOLE, GET * 1000),
    ],
)
def test_what_has_no_end_is_not_kept(server: Running, start: bytes, more: bytes) -> None:
    found, sent, grown = flood(server, start, more)
    assert sent < 2**25 and grown < 2**26
    assert set(statuses(found)) <= {200, 431}


def test_large_heads(server: Running) -> None:
    """As large as it may be, it is taken in one piece and in many; one byte more is refused in the same words."""

    def head(size: int) -> bytes:
        return b"GET /version HTTP/1.1\r\nA: " + b"a" * (size - len("/versionA")) + b"\r\n\r\n"

    most = MAX_HEAD - 1000  # what stands between names and values is counted where it comes in pieces
    for data in (head(most), head(MAX_HEAD + 1)):
        for pieces in ([data], [data[at : at + 9999] for at in range(0, len(data), 9999)]):
            (answer,) = ask(server, *pieces)
            assert answer.status == (200 if len(data) < MAX_HEAD else 431)
            assert answer.status == 200 or str(MAX_HEAD) in json.loads(answer.body)["error"]["message"]


def test_few_requests_wait_in_line(server: Running) -> None:
    assert statuses(ask(server, GET * MAX_PIPELINED)) == [200] * MAX_PIPELINED
    assert len(ask(server, GET * (MAX_PIPELINED + 2))) <= MAX_PIPELINED + 2


def test_many_connections_at_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them never finish a word, which all have begun before the first is late."""
    monkeypatch.setattr(protocol, "RECEIVE", 10 * RECEIVE)

    async def all_of_them() -> list[bytes]:
        silent = [exchange(server, Sent([GET[:9]])) for _ in range(100)]
        return await asyncio.gather(*silent, *(exchange(server, Sent([WHOLE])) for _ in range(100)))

    done = [check(data) for data in asyncio.run(all_of_them())]
    assert [statuses(found) for found in done] == [[408]] * 100 + [[200]] * 100


GENERATE = b"POST /%67enerate?a=b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (GENERATE + b"A: " + b"a" * MAX_HEAD + b"\r\n\r\n", 431),
        (GENERATE + b"A : b\r\n\r\n", 400),
        (GENERATE + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", 400),
        (GENERATE, 408),
        (GENERATE + b"Content-Length: 9\r\n\r\n{", 408),
    ],
)
def test_each_dialect_has_its_own_errors(server: Running, data: bytes, status: int) -> None:
    """Once it is known which one the request is in: the beginning of a path is none."""
    (answer,) = ask(server, data)
    assert answer.status == status and set(json.loads(answer.body)) == {"error", "error_type"}
    (answer,) = ask(server, data.replace(b"/%67enerate", b"/v1/completions"))
    assert answer.status == status and set(json.loads(answer.body)["error"]) >= {"message", "type"}


def test_the_beginning_of_a_path_has_no_dialect_yet(server: Running) -> None:
    (answer,) = ask(server, b"POST /generate")
    assert answer.status == 408 and set(json.loads(answer.body)["error"]) >= {"message", "type"}
