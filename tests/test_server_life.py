"""Connections, clients that leave, records, logs, and engines that stall or die."""

from __future__ import annotations

import http.client
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import opentelemetry.trace
import pytest
from echo_engine import EchoProcess
from framework.server import client, stream
from opentelemetry.sdk.trace import TracerProvider
from serving import BASE, Running, check_error, completion, events, eventually, running

from framework.settings import Settings


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


@pytest.mark.slow
def test_an_idle_connection_stays_open_longer_than_clients_keep_theirs(server: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http.base_url.port or 0)
    for pause in (0, 6):
        time.sleep(pause)
        connection.request("GET", "/version")
        assert connection.getresponse().read()
    connection.close()


def test_much_that_comes_at_once_is_handled_in_parts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that others have their turn in between; it is all there, and the same."""
    prompts = [server.ids(f"this is number {i}.") for i in range(40)]
    fields = {"n": 2, "stop": ["5.", "r 3"], "extra": {"chunk": 1}}
    whole = completion(server, prompts, **fields)
    sizes: list[int] = []

    async def spy(self: stream.Stream, take: Any = stream.Stream.__anext__) -> Any:
        news = await take(self)
        sizes.append(len(news))
        return news

    monkeypatch.setattr(stream.Stream, "__anext__", spy)
    monkeypatch.setattr(stream, "INLINE_TOKENS", 2)
    assert completion(server, prompts, **fields) == whole
    assert max(sizes) == 2 and sum(sizes) >= 2 * 80
    assert {choice["finish_reason"] for choice in whole.values()} == {"stop", "length"}


def test_probes_are_logged_at_debug_level(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    def paths() -> list[Any]:
        return [r.args[2] for r in caplog.records if r.name == "uvicorn.access" and isinstance(r.args, tuple)]

    for level, expected in ((logging.INFO, ["/version"]), (logging.DEBUG, ["/health", "/metrics?a=b", "/version"])):
        caplog.clear()
        caplog.set_level(level)
        for path in ("/health", "/metrics?a=b", "/version"):
            httpx.get(server.url + path)
        eventually(lambda: "/version" in paths())
        assert paths() == expected


def test_what_clients_send_for_tracing_is_not_logged(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opentelemetry.trace, "_TRACER_PROVIDER", TracerProvider())
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x" * 300}
    assert server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers).is_success
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TICK", 0.05)
    monkeypatch.setattr(client, "STALLED_AFTER", 0.3)


@pytest.mark.usefixtures("impatient")
def test_an_engine_that_computes_may_be_silent(server: Running) -> None:
    assert completion(server, server.ids("slow"), extra={"spin": 2})[0]["text"] == "slow"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stopped", [True, False])
def test_an_engine_that_does_nothing_while_somebody_waits_is_given_up(server: Running, stopped: bool) -> None:
    """Stopped by a signal, or asleep: until it is heard again."""

    def healthy() -> bool:
        return server.http.get("/health").status_code == 200

    engine = server.process
    if stopped:
        engine.suspend()
    try:
        time.sleep(1)
        assert healthy()  # silent, but nobody waits
        message = check_error(server.post("/v1/completions", prompt="a", extra={"hold": True}), 503, None)
        assert "has done nothing" in message
        if stopped:
            assert check_error(server.http.get("/health"), 503, None) == message
            assert check_error(server.post("/v1/completions", prompt="a"), 503, None) == message
    finally:
        engine.resume()
    eventually(healthy)
    assert completion(server, server.ids("fine"))[0]["text"] == "fine"
    assert server.engine.stats.running == 0


# Disconnects, ids, records


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_a_client_that_leaves_frees_its_request(server: Running, stream: bool, hold: bool) -> None:
    id = f"leaver-{stream}-{hold}"
    extra = {"hold": True} if hold else {"pace": 0.05}
    body = {"prompt": [[5] * 100] * 2, "max_tokens": 100, "n": 2, "stream": stream, "extra": extra}
    timeout = httpx.Timeout(30, read=0.3)
    try:
        headers = {"X-Request-Id": id}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=timeout) as response:
            next(response.iter_raw())
            assert stream
    except httpx.ReadTimeout:
        pass
    record = server.record(f"cmpl-{id}")
    assert (record.status, record.error) == (499, None) and "abort" in record.finish_reasons
    eventually(lambda: server.engine.stats.running == 0)
    assert completion(server, server.ids("next"))[0]["text"] == "next"


def test_a_client_that_leaves_the_queue_is_never_run(tiny_llama: Path) -> None:
    """With one seat, which is taken: no token is computed for it, and nothing of it is left."""
    settings = Settings(model=str(tiny_llama), executor="scripted", executor_opt={"delay": 0.02}, max_num_seqs=1)
    with running(settings) as server:
        body = {"prompt": "a", "max_tokens": 150, "ignore_eos": True}
        with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as first:
            pieces = first.iter_raw()
            next(pieces)
            with pytest.raises(httpx.ReadTimeout):
                headers = {"X-Request-Id": "queued"}
                httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=0.2)
            eventually(lambda: server.supervisor.load == 1 and server.engine.stats.waiting == 0, 2.5)
            for _ in pieces:
                pass
        record = server.record("cmpl-queued")
        assert (record.status, record.output_tokens) == (499, 0)
        eventually(lambda: server.engine.stats.running == server.engine.stats.kv_holding == 0)
        assert server.engine.stats.generation_tokens == 150


def test_duplicate_ids_never_meet(server: Running) -> None:
    headers = {"X-Request-Id": "mine"}
    body = {"prompt": server.ids("same"), **BASE}
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=headers) as first:
        second = server.http.post("/v1/completions", json=body, headers=headers)
        assert second.headers["x-request-id"] == first.headers["x-request-id"] == "mine"
        assert second.json()["id"] == "cmpl-mine" and second.json()["choices"][0]["text"] == "same"
        assert first.read().decode().count("finish_reason") > 1
    odd = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "a b" * 100})
    assert odd.headers["x-request-id"] != "a b" * 100 and odd.json()["id"].startswith("cmpl-")
    assert server.http.get("/nothing").headers["x-request-id"]


def test_records(server: Running) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    for flag in ("01", "00"):
        response = server.http.post(
            "/v1/completions",
            json={"prompt": server.ids("ab 🙂"), "n": 2, "temperature": 0.5, **BASE},
            headers={"traceparent": f"00-{trace}-{parent}-{flag}"},
        )
        record = server.record(response.json()["id"])
        assert (record.trace_id, record.parent_span_id, record.sampled) == (trace, parent, flag == "01")
        assert record.traceparent == f"00-{trace}-{record.span_id}-{flag}" and record.span_id != parent
    count = len(server.ids("ab 🙂"))
    assert (record.prompt_tokens, record.output_tokens, record.choices) == (count, 2 * count, 2)
    assert server.recorder.tokens[record.id] == 2 * count
    assert record.finish_reasons == ["length", "length"] and record.status == 200 and record.error is None
    asked = {"max_tokens": 200, "temperature": 0.5, "choice.count": 2}
    assert record.attributes == {f"gen_ai.request.{name}": value for name, value in asked.items()}
    names = [name for name, _, _ in record.stages]
    assert names == ["http.receive", "tokenize", "http.send"]
    times = [record.start, *(t for _, start, end in record.stages[:2] for t in (start, end)), record.first_token]
    assert times == sorted(times) and record.first_token <= record.last_token <= record.end
    fresh = server.record(server.post("/v1/completions", prompt="a", max_tokens=1).json()["id"])
    assert fresh.parent_span_id is None and fresh.sampled and len(fresh.trace_id) == 32
    broken = {"traceparent": "00-" + "0" * 32 + "-zz-01"}
    response = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=broken)
    assert server.record(response.json()["id"]).parent_span_id is None


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"prompt": ""}, 400, "prompt: empty; give at least one token"),
        ({"prompt": "a", "extra": {"error": "no", "status": 429}, "stream": True}, 429, "no"),
        ({"prompt": "a", "model": "other"}, 404, 'model: "other" is not served here; available: echo'),
        ({"prompt": "a", "n": "x"}, 400, 'n: must be an integer, got "x"'),
        ({"prompt": "a", "top_p": 0}, 400, "top_p must be in (0, 1], got 0.0"),
        ({"messages": [], "stream_options": {}}, 400, "prompt: is required"),
        (b"{", 400, "the body is not valid JSON: Expecting property name enclosed in double quotes at character 1"),
        (b"a=b", 400, "Content-Type must be application/json, got application/x-www-form-urlencoded"),
    ],
)
def test_failures_are_recorded_once(server: Running, body: Any, status: int, error: str) -> None:
    id = secrets.token_hex(4)
    headers = {"X-Request-Id": id, "content-type": "application/json"}
    if body == b"a=b":
        headers["content-type"] = "application/x-www-form-urlencoded"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert server.http.post("/v1/completions", content=content, headers=headers).status_code == status
    record = server.record(f"cmpl-{id}")
    assert (record.status, record.error) == (status, error)
    assert 0 < record.start <= record.end and record.stages[0][0] == "http.receive"


def test_failures_are_counted_by_status(server: Running) -> None:
    def failed(status: int) -> float:
        text = server.http.get("/metrics").text
        found = re.search(rf'^framework_requests_failed_total{{status="{status}"}} (\S+)$', text, re.M)
        return float(found[1]) if found else 0.0

    before = {status: failed(status) for status in (400, 404)}
    server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], model="other")
    server.post("/v1/chat/completions", messages=1)
    eventually(lambda: all(failed(status) == count + 1 for status, count in before.items()))


def test_a_request_id_finds_the_request_in_the_engine(server: Running) -> None:
    """The engine's ids are the client's with a number behind."""
    body = {"prompt": ["a", "b"], "extra": {"error": "{id}", "status": 429}}
    message = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "find-me"})
    assert re.fullmatch(r"find-me-\d+", check_error(message, 429, None))


def test_a_slow_reader_harms_nobody(server: Running) -> None:
    """It reads nothing, though far more than the sockets hold is ready; others are served; then it gets all."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    prompts = [server.ids("abcdefghijklmnopqrstuvwxyz" * 5)] * 400
    body = {"prompt": prompts, "max_tokens": 130, "stream": True, "extra": {"pace": 0.001}}
    content = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.http.base_url.port))
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        eventually(lambda: server.engine.stats.running == 400)
        assert completion(server, server.ids("quick"))[0]["text"] == "quick"
        eventually(lambda: server.engine.stats.running == 0, 30)
        assert completion(server, server.ids("quick"))[0]["text"] == "quick"
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        texts: dict[int, str] = {}
        for line in answer.read().decode().split("\n\n")[:-2]:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(400), "abcdefghijklmnopqrstuvwxyz" * 5)


# The engine's death: last, for this server does not survive it


@pytest.mark.parametrize("fatal", [None, "out of memory"])
def test_the_death_of_the_engine_fails_everybody(tiny_llama: Path, fatal: str | None) -> None:
    settings = Settings(model=str(tiny_llama), served_model_name="echo")
    extra = {"die": 2} | ({"fatal": fatal} if fatal else {})
    expected = fatal or "exit code 3"
    with running(settings, spawn=EchoProcess) as server:
        waiting = server.http.build_request("POST", "/v1/completions", json={"prompt": "a", "extra": {"hold": True}})
        found: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: found.append(httpx.Client(timeout=30).send(waiting)))
        thread.start()
        eventually(lambda: server.engine.stats.running == 1)
        chunks = events(server.post("/v1/completions", prompt=server.ids("a b c d"), extra=extra, stream=True))
        assert chunks[0]["choices"][0]["text"] == "a"
        assert expected in chunks[-1]["error"]["message"] and chunks[-1]["error"]["code"] == 503
        thread.join(30)
        assert expected in check_error(found[0], 503, None)
        assert expected in check_error(server.http.get("/health"), 503, None)
        check_error(server.post("/v1/completions", prompt="a"), 503, None)
        assert server.http.get("/v1/models").status_code == 200
        assert not server.engine.alive
        assert server.engine.stats.running == server.engine.stats.kv_holding == 0
        assert server.engine.stats.generation_tokens == 2
        assert "framework_requests_running 0.0" in server.http.get("/metrics").text


@pytest.mark.parametrize("junk", ["", "junk"])
def test_a_message_that_cannot_be_read_is_the_engine_s_end(tiny_llama: Path, junk: str) -> None:
    """As a plugin's wrong value can make it: nobody may wait for ever."""
    with running(Settings(model=str(tiny_llama)), spawn=EchoProcess) as server:
        engine = server.process
        message = check_error(server.post("/v1/completions", prompt="a", extra={"junk": junk}), 503, None)
        assert "cannot be handled" in message
        assert check_error(server.http.get("/health"), 503, None) == message
        check_error(server.post("/v1/completions", prompt="a"), 503, None)
        eventually(lambda: not engine.is_running())
