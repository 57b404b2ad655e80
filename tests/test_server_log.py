"""What the log of a server at its default level says of requests that are not answered whole: each end apart from the
others."""

from __future__ import annotations

import io
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from echo_engine import EchoProcess
from framework.server import protocol
from framework.server.supervisor import Pace
from serving import Running, eventually, running

from framework import log
from framework.settings import Settings

LIMIT = 1.5
LONG = {"prompt": [5] * 120, "max_tokens": 120, "extra": {"pace": 0.02}}
HELD = {"prompt": "a", "extra": {"hold": True}}


class Logged:
    """A server in this process, with what it has logged."""

    def __init__(self, server: Running, stream: io.StringIO) -> None:
        self.server = server
        self.stream = stream

    def lines(self, **fields: Any) -> list[dict[str, Any]]:
        """Those that have these fields."""
        found = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [line for line in found if all(line.get(name) == value for name, value in fields.items())]

    def one(self, **fields: Any) -> dict[str, Any]:
        [line] = eventually(lambda: self.lines(**fields))
        return dict(line)

    def told(self, id: str) -> tuple[int, int, str]:
        """Of the request with this id: the status of its access line, and status and cause of the other one."""
        early = self.one(event="response ended early", request_id=id)
        access = self.one(event="http request", request_id=id)
        assert early["level"] == access["level"] == "info" and isinstance(early["output_tokens"], int)
        return access["status"], early["status"], early["cause"]

    def ask(self, id: str, **body: Any) -> httpx.Response:
        return self.server.http.post("/v1/completions", json=body, headers={"X-Request-Id": id})


@pytest.fixture
def logged(tiny_llama: Path, logging_restored: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Logged]:
    stream = io.StringIO()
    log.configure("info", "json", stream)
    monkeypatch.setattr(protocol, "RECEIVE", LIMIT)
    settings = Settings(
        model=str(tiny_llama), served_model_name="echo", request_timeout=LIMIT, max_queued_requests=2, root_path="/at"
    )
    with running(settings, spawn=EchoProcess, pace=Pace(first=0.01)) as server:
        yield Logged(server, stream)


def test_whole_and_bad_ones_have_their_access_line_only(logged: Logged) -> None:
    assert logged.ask("whole", prompt="a", max_tokens=1).status_code == 200
    assert logged.ask("bad", prompt="a", top_p="secret").status_code == 400
    assert logged.one(event="http request", request_id="whole")["status"] == 200
    assert logged.one(event="http request", request_id="bad")["status"] == 400
    assert not logged.lines(event="response ended early") and "secret" not in logged.stream.getvalue()


@pytest.mark.parametrize("body", [LONG, HELD])
def test_a_client_that_leaves(logged: Logged, body: dict[str, Any]) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{logged.server.url}/v1/completions?a=b", json=body, headers={"X-Request-Id": "left"}, timeout=0.3)
    assert logged.told("left") == (499, 499, "the client went away")
    assert logged.one(event="http request", request_id="left")["path"].startswith("/v1/completions")


def test_a_client_that_leaves_a_stream(logged: Logged) -> None:
    body, headers = {**LONG, "stream": True}, {"X-Request-Id": "dropped"}
    with logged.server.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        next(response.iter_lines())
    assert logged.told("dropped") == (200, 499, "the client went away")


def test_a_client_that_leaves_before_its_request_is_there(logged: Logged) -> None:
    for path in (b"/v1/completions", b"/tokenize"):
        with socket.create_connection(("127.0.0.1", logged.server.http.base_url.port or 0)) as connection:
            head = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nX-Request-Id: half\r\n"
            connection.sendall(head % path + b"Content-Length: 100\r\n\r\n{")
            eventually(lambda: logged.server.http.get("/version").status_code == 200)
        eventually(lambda p=path.decode(): logged.lines(status=499, path=p, request_id="half"))


@pytest.mark.parametrize("stream", [False, True])
def test_time_limits(logged: Logged, stream: bool) -> None:
    cause = f"the request took longer than {LIMIT} s (--request-timeout)"
    assert logged.ask("cut", **LONG, stream=stream).status_code == 200
    assert logged.told("cut") == (200, 200, cause)
    assert logged.ask("nothing", **HELD, stream=stream).status_code == 504
    assert logged.told("nothing") == (504, 504, cause)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_aborted(logged: Logged, stream: bool) -> None:
    asking = threading.Thread(target=logged.ask, args=("aborted",), kwargs={**LONG, "stream": stream})
    asking.start()
    eventually(lambda: logged.server.engine.stats.running)
    assert logged.server.post("/abort_requests", request_ids=["aborted"]).json() == {"aborted": 1}
    asking.join(30)
    assert logged.told("aborted") == (200, 200, "the request was aborted")


def test_what_finds_the_queue_full(logged: Logged) -> None:

    ids = (f"full-{number}" for number in itertools.count())

    def full() -> str:
        """The id; nothing if the machine is so busy that what is held has ended already."""
        id = next(ids)
        holding = threading.Thread(target=logged.ask, args=("holds",), kwargs={**HELD, "n": 2})
        holding.start()
        while holding.is_alive() and len(logged.server.engine.waiting) < 2:
            time.sleep(0.001)
        found = len(logged.server.engine.waiting) == 2 and logged.ask(id, prompt="a").status_code == 429
        holding.join(30)
        return id if found else ""

    status, early, cause = logged.told(eventually(full, 30))
    assert (status, early) == (429, 429) and cause.startswith("the queue is full: 2 ")


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies(logged: Logged, stream: bool) -> None:
    logged.ask("dead", prompt="abc", stream=stream, extra={"die": 1})
    status, early, cause = logged.told("dead")
    assert (status, early) == (200 if stream else 503, 503) and "the engine process ended with exit code 3" in cause


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "the request is not valid HTTP"),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 2**17, 431, "the request line and headers are larger than 65536 bytes"),
        (b"GET / HTTP/1.1\r\n", 408, f"the request is not complete after {LIMIT} s"),
    ],
)
def test_what_is_no_request(logged: Logged, sent: bytes, status: int, reason: str) -> None:
    with socket.create_connection(("127.0.0.1", logged.server.http.base_url.port or 0)) as connection:
        port = connection.getsockname()[1]
        with suppress(OSError):
            connection.sendall(sent)
            connection.recv(1000)
        line = logged.one(event="request refused")
    assert (line["status"], line["reason"], line["level"]) == (status, reason, "info")
    assert line["client"] == f"127.0.0.1:{port}"
