"""The end of the server: who may go on, for how long, and what everybody is told."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import pytest
from echo_engine import EchoProcess
from fastapi import APIRouter, Query
from framework.server import main
from framework.server.limits import INLINE_TEXT, MAX_TEXTS, MAX_TRIALS
from framework.server.supervisor import Pace, Supervisor
from serving import Recorder, check_tgi_error
from test_server_generation import Silent
from test_supervisor import SOON, Engines, fails, until

from framework import EngineDead, ResponseRecord, hookimpl
from framework.inputs import InputProcessor
from framework.registry import load_plugins
from framework.settings import Settings

PROMPT = [5] * 100
SLOW = {"pace": 0.02}
"""With `PROMPT`: two seconds."""
HOLD = {"hold": True}
BOMB = "|".join(f"[a-z]{{{i}}}" for i in range(1, 3000))
"""Takes for ever to compile."""


class Ending:
    """A server in this loop, to be ended by `signal`; `code` waits for its exit code."""

    def __init__(self, run: main._Run, whole: asyncio.Task[int], recorder: Recorder, http: httpx.AsyncClient) -> None:
        self.run = run
        self.whole = whole
        self.recorder = recorder
        self.http = http
        self.signal = run._on_signal
        self.supervisor = run._client

    @property
    def port(self) -> int:
        return self.http.base_url.port or 0

    @property
    def engine(self) -> psutil.Process:
        return psutil.Process(self.supervisor.client._engine.process.pid)  # type: ignore[union-attr]

    def ask(self, path: str = "/v1/completions", **body: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.http.post(path, json={"prompt": PROMPT, "max_tokens": len(PROMPT), **body}))

    async def begun(self, tokens: int = 1) -> None:
        await until(lambda: self.supervisor.stats.generation_tokens >= tokens)

    async def code(self, within: float) -> int:
        return await asyncio.wait_for(asyncio.shield(self.whole), within)


class Slow:
    @hookimpl
    def routes(self) -> list[Any]:
        router = APIRouter()

        @router.get("/slow")
        async def slow(seconds: Annotated[float, Query(alias="for")]) -> str:
            await asyncio.sleep(seconds)
            return "done"

        return [router]


@asynccontextmanager
async def serving(model: Path, spawn: Any = EchoProcess, pace: Pace = SOON, **more: Any) -> AsyncIterator[Ending]:
    """With a route /slow, which takes as many seconds as `for` says."""
    settings, recorder = Settings(model=str(model), served_model_name="echo", **more), Recorder()
    plugins = load_plugins([("recorder", recorder), ("slow", Slow())])
    plugins.activate(settings, engine=False)
    with main.bind("127.0.0.1", 0) as listener:
        run = main._Run(settings, plugins, Silent(), listener)
        run._client = Supervisor(settings, plugins, spawn, pace)
        whole = asyncio.create_task(run.main())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=30) as http:
            try:
                await until(lambda: run._gate.opened or whole.done(), 60)
                assert not whole.done() or whole.result()
                yield Ending(run, whole, recorder, http)
            finally:
                if not whole.done():
                    run._on_signal(signal.SIGINT)
                await asyncio.wait([whole], timeout=10)


def chunks(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def refused(response: httpx.Response) -> None:
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["message"] == "the server is shutting down"


async def test_sigterm_lets_responses_finish_and_refuses_others(tiny_llama: Path) -> None:
    """On connections old and new, which are closed: whoever comes back finds another server."""
    async with serving(tiny_llama) as server:
        assert (await server.http.get("/ready")).status_code == 200  # this connection stays open
        streamed, whole = server.ask(stream=True, extra=SLOW), server.ask(extra=SLOW)
        await server.begun()
        await until(lambda: server.supervisor.load == 2)
        server.signal(signal.SIGTERM)
        async with httpx.AsyncClient(base_url=server.http.base_url) as other:
            for http in (server.http, other):
                refused(await http.get("/ready"))
                for path, body in (
                    ("/v1/completions", {"prompt": "a"}),
                    ("/v1/completions", {"prompt": "a", "stream": True}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                ):
                    answer = await http.post(path, json=body)
                    refused(answer)
                    assert answer.headers["connection"] == "close"
                assert (await http.get("/health")).status_code == 200
                assert (await http.get("/metrics")).status_code == 200
        assert not whole.done() and not server.whole.done()
        assert (await whole).json()["choices"][0]["finish_reason"] == "length"
        assert chunks(await streamed)[-1]["choices"][0]["finish_reason"] == "length"
        assert await server.code(3) == 0
        with pytest.raises(httpx.ConnectError):
            await server.http.get("/ready")
        assert sorted(record.status for record in server.recorder.records) == [200, 200, *[503] * 6]


async def test_the_end_does_not_wait_if_nothing_is_unfinished(tiny_llama: Path) -> None:
    async with serving(tiny_llama) as server:
        assert (await server.ask()).status_code == 200
        server.signal(signal.SIGTERM)
        assert await server.code(3) == 0


@pytest.mark.parametrize("seconds", [0, 0.5])
@pytest.mark.parametrize("frozen", [False, True])
async def test_responses_end_with_what_there_is_when_the_time_is_over(
    tiny_llama: Path, seconds: float, frozen: bool
) -> None:
    """Even if the engine does not react any more; where there is nothing yet, with an error that says to come again."""
    async with serving(tiny_llama, drain_seconds=seconds) as server:
        streamed, whole = server.ask(stream=True, n=2, extra=SLOW), server.ask(extra=SLOW)
        waits = server.ask(extra=HOLD)
        await server.begun(9)
        await until(lambda: server.supervisor.load == 3)
        if frozen:
            server.engine.suspend()
        begin = time.monotonic()
        server.signal(signal.SIGTERM)
        body = (await whole).json()
        assert time.monotonic() - begin >= seconds
        assert body["choices"][0]["finish_reason"] == "abort" and body["choices"][0]["text"]
        assert 0 < body["usage"]["completion_tokens"] < len(PROMPT)
        refused(await waits)
        events = [chunk["choices"][0] for chunk in chunks(await streamed)]
        assert sorted(e["index"] for e in events if e["finish_reason"] == "abort") == [0, 1]
        assert await server.code(4) == 0
        found = sorted((r.status, r.error, r.finish_reasons) for r in server.recorder.records)
        assert found == [
            (200, None, ["abort"]),
            (200, None, ["abort"] * 2),
            (503, "the server is shutting down", ["abort"]),
        ]


async def test_tgi_s_responses_end_with_the_cause(tiny_llama: Path) -> None:
    """That dialect has no word for what is cut off; a stream has its tokens."""
    async with serving(tiny_llama, drain_seconds=0) as server:
        body = {"inputs": "a " * 100, "extra": SLOW}
        streamed, whole = (
            asyncio.create_task(server.http.post(path, json=body)) for path in ("/generate_stream", "/generate")
        )
        await server.begun(9)
        server.signal(signal.SIGTERM)
        check_tgi_error(await whole, 503, "healthcheck", "unhealthy: the server is shutting down")
        assert (await whole).headers["retry-after"] == "1"
        lines = (await streamed).text.strip().split("\n\n")
        *pieces, last = (json.loads(line.removeprefix("data: ")) for line in lines)
        assert last == (await whole).json() and pieces and all("token" in piece for piece in pieces)
        assert await server.code(4) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(tiny_llama: Path, number: int) -> None:
    async with serving(tiny_llama) as server:
        streamed, whole = server.ask(stream=True, extra=SLOW), server.ask(extra=HOLD)
        await server.begun()
        server.signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        server.signal(number)
        assert await server.code(3) == 0
        refused(await whole)
        assert "shutting down" in chunks(await streamed)[-1]["error"]["message"]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("what", ["grammar", "tokens"])
async def test_what_is_made_ready_is_told_of_the_end(
    tiny_llama: Path, what: str, again: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts as a response, at the end of the time to drain and at a second signal; nothing goes on behind it."""
    real = InputProcessor.encode

    def encode(self: InputProcessor, text: str, *more: Any) -> list[int]:
        time.sleep(2)
        return real(self, text[:9], *more)

    body: dict[str, Any] = {"structured_outputs": {"regex": BOMB}}
    if what == "tokens":
        monkeypatch.setattr(InputProcessor, "encode", encode)
        body = {"prompt": "a" * (INLINE_TEXT + 1)}
    async with serving(tiny_llama, drain_seconds=30 if again else 0.5) as server:
        asked = [server.ask(stream=stream, **body) for stream in (False, True)]
        await until(lambda: server.supervisor.load == 2)
        assert (await server.http.get("/load")).json() == {"server_load": 2}
        server.signal(signal.SIGTERM)
        if again:
            await asyncio.sleep(0.1)
            server.signal(signal.SIGTERM)
        for task in asked:
            answer = await task
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert "the server is shutting down" in answer.text
        assert await server.code(5) == 0
        assert [record.status for record in server.recorder.records] == [503] * 2
        assert server.supervisor.load == 0 == len(server.supervisor.waiting)
    assert "cut=2" in caplog.text


async def test_what_comes_after_the_end_meets_it(tiny_llama: Path) -> None:
    """Whatever has passed the first look by then."""
    async with serving(tiny_llama) as server:
        server.supervisor.cut(EngineDead("it is over"))
        with pytest.raises(EngineDead, match="it is over"):
            server.supervisor.check()
        with pytest.raises(EngineDead, match="it is over"):
            server.supervisor.generate(
                [], ResponseRecord(id="a", operation="chat", model="a", trace_id="0", span_id="0")
            )


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGTERM], [signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]],
    ids=["term", "int", "term-term"],
)
async def test_who_never_reads_holds_nothing_up(
    tiny_llama: Path, signals: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Its response is generated at once, and far more than sockets hold."""
    async with serving(tiny_llama, drain_seconds=1) as server:
        prompts = [list(range(5, 105))] * 200
        body = {"prompt": prompts, "max_tokens": 100, "stream": True, "extra": {"pace": 0.001}}
        content = json.dumps(body).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(connection, head % len(content) + content)
            await server.begun(200 * 100)
            assert not server.recorder.records
            for number in signals:
                server.signal(number)
                await asyncio.sleep(0.3)
            assert await server.code(5) == (130 if signals == [signal.SIGINT] else 0)
        assert len(server.recorder.records) == 1
        assert "Traceback" not in caplog.text


async def test_what_else_is_answered_is_waited_for(tiny_llama: Path) -> None:
    """Others are told meanwhile, and it ends with the last."""
    async with serving(tiny_llama) as server:
        slow = asyncio.create_task(server.http.get("/slow?for=1.5"))
        await until(lambda: len(server.run._server.server_state.tasks) == 1)
        server.signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        async with httpx.AsyncClient(base_url=server.http.base_url) as other:
            refused(await other.get("/ready"))
        assert (await slow).json() == "done"
        assert await server.code(2) == 0


UPLOAD = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"


@pytest.mark.parametrize("sent", [UPLOAD[:20], UPLOAD], ids=["head", "body"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_who_has_not_sent_all_is_not_waited_for(tiny_llama: Path, number: int, sent: bytes) -> None:
    async with serving(tiny_llama) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        await until(lambda: any(one._begun for one in server.run._server.server_state.connections))
        server.signal(number)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and json.loads(body)["error"]["message"].endswith("shutting down")
        assert await server.code(1) == (130 if number == signal.SIGINT else 0)
        writer.close()


async def test_who_has_not_sent_all_in_time_is_not_waited_for_either(tiny_llama: Path) -> None:
    """While others are: it may go on until they are through."""
    async with serving(tiny_llama) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(UPLOAD)
        slow = asyncio.create_task(server.http.get("/slow?for=1"))
        await until(lambda: len(server.run._server.server_state.tasks) == 2)
        server.signal(signal.SIGTERM)
        assert (await slow).json() == "done"
        assert await server.code(2) == 0
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        writer.close()


@pytest.fixture
async def busy() -> AsyncIterator[threading.Event]:
    """All threads of the loop's pool work, as on long texts of clients, and more is to come."""
    over = threading.Event()
    works = [asyncio.get_running_loop().run_in_executor(None, over.wait, 60) for _ in range(100)]
    yield over
    over.set()
    await asyncio.gather(*works)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=["int", "term-term"])
async def test_what_waits_for_a_thread_holds_nothing_up(
    tiny_llama: Path,
    signals: list[int],
    caplog: pytest.LogCaptureFixture,
    busy: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InputProcessor, "tokenize", lambda *_: busy.wait(60) and [])
    async with serving(tiny_llama) as server:
        long = "a" * (INLINE_TEXT + 1)
        waiting = [server.ask(prompt=long), *(server.ask("/tokenize", prompt=long) for _ in range(MAX_TEXTS + 1))]
        await until(lambda: server.supervisor.load == MAX_TEXTS + 2)
        for number in signals:
            server.signal(number)
        assert await server.code(6) == (130 if signals == [signal.SIGINT] else 0)
        for answer in await asyncio.gather(*waiting):
            refused(answer)
        assert [record.status for record in server.recorder.records] == [503]
        assert "Traceback" not in caplog.text


async def test_an_engine_that_cannot_be_replaced_while_the_server_drains(tiny_llama: Path) -> None:
    """It had died before. The server ends as it was told to, when it was to."""
    async with serving(tiny_llama, Engines(EchoProcess, fails("no memory")), drain_seconds=1) as server:
        waiting = asyncio.create_task(server.http.get("/slow?for=60"))
        await until(lambda: len(server.run._server.server_state.tasks) == 1)
        server.engine.kill()
        await until(lambda: server.supervisor.dead)
        server.signal(signal.SIGTERM)
        assert await server.code(8) == 0
        assert isinstance(server.supervisor._keeping.exception(), EngineDead)  # type: ignore[union-attr]
        assert await asyncio.gather(waiting, return_exceptions=True)


async def test_the_death_of_the_engine_is_told_to_who_waits_for_a_grammar(tiny_llama: Path) -> None:
    """Whether it is being tried out, or waits for that."""
    async with serving(tiny_llama, Engines(EchoProcess, fails("no memory"))) as server:
        asked = [server.ask(structured_outputs={"regex": f"{BOMB}|{i}"}) for i in range(2 * MAX_TRIALS)]
        await until(lambda: len(server.supervisor.grammars._trying) == len(asked))
        server.engine.kill()
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 503 and "ended by SIGKILL" in answer.json()["error"]["message"]


async def test_an_engine_that_dies_while_the_server_drains_is_not_replaced(tiny_llama: Path) -> None:
    engines = Engines(EchoProcess)
    async with serving(tiny_llama, engines) as server:
        streamed = server.ask(stream=True, extra=SLOW)
        await server.begun()
        server.signal(signal.SIGTERM)
        server.engine.kill()
        assert "SIGKILL" in chunks(await streamed)[-1]["error"]["message"]
        assert await server.code(3) == 0
        assert len(engines.asked) == 1


async def test_the_server_ends_with_an_engine_that_cannot_be_replaced(tiny_llama: Path) -> None:
    """`framework serve` makes exit code 1 of it."""
    async with serving(tiny_llama, Engines(EchoProcess, fails("no memory"))) as server:
        streamed = server.ask(stream=True, extra=SLOW)
        await server.begun()
        server.engine.kill()
        assert "SIGKILL" in chunks(await streamed)[-1]["error"]["message"]
        with pytest.raises(EngineDead, match="did not start again in 3 tries; the last: no memory"):
            await server.code(20)
