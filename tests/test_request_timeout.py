"""--request-timeout: what has taken too long ends with what there is of it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_engine import EchoProcess
from framework.server.stream import Stream
from serving import Running, check_error, check_tgi_error, completion, events, eventually, running

from framework.settings import Settings

LIMIT = 1.0
SLOW = {"pace": 0.06}
PROMPT = [5] * 100
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": len(PROMPT), "extra": SLOW}
"""Six seconds, at that pace."""


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(model=str(tiny_llama), served_model_name="echo", request_timeout=LIMIT)
    with running(settings, spawn=EchoProcess) as found:
        yield found


def free(server: Running) -> None:
    eventually(lambda: server.engine.stats.running == 0 == server.supervisor.load, 4)
    assert not len(server.supervisor.waiting)


def test_what_is_quick_is_whole(server: Running) -> None:
    assert completion(server, server.ids("quick"))[0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_ends_with_what_there_is(server: Running, stream: bool) -> None:
    begin = time.monotonic()
    response = server.post("/v1/completions", **LONG, n=2, stream=stream)
    assert LIMIT <= time.monotonic() - begin < 4.5
    assert response.status_code == 200
    free(server)
    if stream:
        pieces = [chunk["choices"][0] for chunk in events(response)]
        texts = ["".join(p["text"] for p in pieces if p["index"] == index) for index in (0, 1)]
        assert [p["finish_reason"] for p in pieces].count("abort") == 2
    else:
        body = response.json()
        texts = [choice["text"] for choice in body["choices"]]
        assert [choice["finish_reason"] for choice in body["choices"]] == ["abort", "abort"]
        assert 0 < body["usage"]["completion_tokens"] < 2 * len(PROMPT)
    whole = server.tokenizer.decode(PROMPT)
    assert all(text and whole.startswith(text) and text != whole for text in texts)
    id = response.headers["x-request-id"]
    record = server.record(f"cmpl-{id}")
    assert (record.status, record.error, record.finish_reasons) == (200, None, ["abort", "abort"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_of_which_there_is_nothing_is_an_error(server: Running, stream: bool) -> None:
    """A stream has not begun, then: it is an HTTP error, too."""
    response = server.post("/v1/completions", prompt="a", stream=stream, extra={"hold": True})
    assert check_error(response, 504, None) == f"the request took longer than {LIMIT} s (--request-timeout)"
    free(server)


@pytest.mark.parametrize("path", ["/generate", "/"])
def test_tgi_s_answers_name_the_cause(server: Running, path: str) -> None:
    """That dialect has no word for what is cut off."""
    response = server.post(path, inputs="a " * 100, extra=SLOW)
    check_tgi_error(response, 504, "incomplete_generation", f"took longer than {LIMIT} s (--request-timeout)")
    free(server)


def test_tgi_s_streams_have_their_tokens_and_the_cause(server: Running) -> None:
    response = server.post("/generate_stream", inputs="a " * 100, request_id="tgi", extra=SLOW)
    assert response.status_code == 200
    *pieces, last = (json.loads(line.removeprefix("data: ")) for line in response.text.strip().split("\n\n"))
    assert last["error_type"] == "incomplete_generation" and "--request-timeout" in last["error"]
    assert len(pieces) == server.record("gen-tgi").output_tokens > 0
    assert all(piece["generated_text"] is None for piece in pieces)
    assert (server.record("gen-tgi").status, server.record("gen-tgi").finish_reasons) == (504, ["abort"])
    free(server)


@pytest.mark.parametrize("stream", [False, True])
def test_what_comes_before_the_engine_counts(server: Running, stream: bool) -> None:
    """Here a grammar that takes for ever to try out."""
    bomb = {"regex": "|".join(f"[a-z]{{{i}}}" for i in range(1, 3000))}
    begin = time.monotonic()
    response = server.post("/v1/completions", prompt="a", stream=stream, structured_outputs=bomb)
    assert LIMIT <= time.monotonic() - begin < 4.5
    assert check_error(response, 504, None) == f"the request took longer than {LIMIT} s (--request-timeout)"
    assert server.record(f"cmpl-{response.headers['x-request-id']}").status == 504


def test_all_of_a_response_has_one_limit(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is made ready in counts for what comes after that."""
    ends: list[float] = []

    async def check(*_: object) -> None:
        await asyncio.sleep(LIMIT / 2)

    def spy(adds: Any, record: Any, generate: Any = server.engine.generate) -> Stream:
        stream = generate(adds, record)
        ends.append(stream.limit.when() - record.start / 1e9)
        return stream  # type: ignore[no-any-return]

    monkeypatch.setattr(server.engine.grammars, "check", check)
    monkeypatch.setattr(server.engine, "generate", spy)
    body = server.post("/v1/completions", **LONG, structured_outputs={"regex": "a"}).json()
    assert body["choices"][0]["finish_reason"] == "abort"
    assert ends == [pytest.approx(LIMIT, abs=LIMIT / 4)]
    free(server)


def test_choices_that_have_ended_stay_as_they_are(server: Running) -> None:
    """Of two prompts one is short."""
    body = server.post("/v1/completions", **{**LONG, "prompt": [[5] * 3, PROMPT]}).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "abort"]
    free(server)


def test_a_client_that_does_not_read_keeps_no_request_running(server: Running) -> None:
    content = json.dumps({**LONG, "prompt": [PROMPT] * 100, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.http.base_url.port))
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        eventually(lambda: server.engine.stats.running == 100)
        eventually(lambda: server.engine.stats.running == 0, 4)
