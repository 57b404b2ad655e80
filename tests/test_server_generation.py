"""What no dialect changes: another one beside OpenAI's, clients that leave or lag, a start that fails, the end."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from echo_engine import EchoProcess
from fastapi import APIRouter, FastAPI, Request, Response
from framework.server import errors, main, openai
from framework.server.app import RequestIds, create_app
from framework.server.body import JsonRoute
from framework.server.client import EngineClient
from framework.server.errors import Problem
from framework.server.generation import Ask, Choice, Generation, Serving, route
from framework.server.sse import Reply
from framework.server.supervisor import Supervisor
from framework.server.watch import Activity
from pydantic import BaseModel
from serving import Recorder, eventually

from framework import ConfigError, Delivery, PluginError, ResponseRecord, SamplingParams, hookimpl
from framework.checkpoint import open_checkpoint
from framework.detokenizer import Delta
from framework.inputs import Cut, InputProcessor
from framework.messages import Add
from framework.registry import Plugins, load_plugins
from framework.settings import Settings


class Served:
    """A ready echo engine and what serves it, in this loop."""

    def __init__(self, serving: Serving, plugins: Plugins, recorder: Recorder) -> None:
        self.serving = serving
        self.plugins = plugins
        self.recorder = recorder


@asynccontextmanager
async def served(model: Path, *more: tuple[str, object]) -> AsyncIterator[Served]:
    settings, recorder = Settings(model=str(model), served_model_name="echo"), Recorder()
    plugins = load_plugins([*more, ("recorder", recorder)])
    plugins.activate(settings, engine=False)
    client = Supervisor(settings, plugins, EchoProcess)
    try:
        info = await client.start()
        checkpoint = open_checkpoint(settings, plugins)
        tokenizer = checkpoint.tokenizer()
        inputs = InputProcessor(checkpoint, tokenizer, info)
        yield Served(Serving(client, inputs, tokenizer, info.model, 0), plugins, recorder)
    finally:
        await client.close()


# Another dialect


class Body(BaseModel):
    inputs: list[str]
    length: int = 200
    stream: bool = False
    extra: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    ask: dict[str, Any] = {}


class Route(JsonRoute):
    @staticmethod
    def spell(problem: Problem) -> tuple[int, Any]:
        status = 422 if problem.status == 400 else problem.status
        return status, {"error": problem.message, "field": problem.field}


class Dialect:
    done = b""

    def __init__(self, generation: Generation, body: Body) -> None:
        self.generation = generation
        self.given = body

    def ask(self) -> Ask:
        fields = {"max_tokens": self.given.length, **self.given.fields}
        more = {name: Cut(*value) if name == "truncate" else value for name, value in self.given.ask.items()}
        return Ask(fields, extra=self.given.extra, names={"max_tokens": "length", "truncate": "cut"}, **more)

    async def prompts(self) -> Sequence[list[int]]:
        return [self.generation.serving.inputs.encode(text, True, self.generation.cut) for text in self.given.inputs]

    def body(self) -> Any:
        return ["".join(choice.text) for choice in self.generation.choices]

    def headers(self) -> Mapping[str, str]:
        return {"x-dialect": "own"}

    def events(self, choice: Choice, delta: Delta) -> Iterable[Any]:
        yield {"piece": delta.text}

    def closing(self) -> Iterable[Any]:
        yield "end"


def both_dialects(serving: Serving, dialect: type[Dialect] = Dialect) -> RequestIds:
    app = FastAPI()
    errors.install(app, openai.spell)
    app.include_router(openai.router(serving))

    async def generate(body: Body, request: Request) -> Response:
        generation: Generation = request.state.generation
        return Reply(generation, dialect(generation, body), body.stream)

    generate.__annotations__ = {"body": Body, "request": Request}
    kind = route(Route, serving, "text_completion", "gen")
    app.router.add_api_route("/generate", generate, methods=["POST"], response_model=None, route_class_override=kind)
    return RequestIds(app)


async def test_a_dialect_has_its_own_errors_and_ends(tiny_llama: Path) -> None:
    async with served(tiny_llama) as found:
        transport = httpx.ASGITransport(both_dialects(found.serving))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

            async def ask(**body: Any) -> httpx.Response:
                return await http.post("/generate", json={"inputs": ["ab"], **body})

            assert (await ask()).json() == ["ab"]
            lines = [line for line in (await ask(stream=True)).text.split("\n\n") if line]
            pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
            assert "".join(piece["piece"] for piece in pieces[:-1]) == "ab" and pieces[-1] == "end"

            response = await ask(length=999)
            assert response.status_code == 422 and set(response.json()) == {"error", "field"}
            message = response.json()["error"]
            assert response.json()["field"] == "length" and message.startswith("length: ") and "+ 999 " in message
            response = await http.post("/generate", content=b"{", headers={"content-type": "application/json"})
            assert response.status_code == 422 and "not valid JSON" in response.json()["error"]
            assert (await ask(extra={"error": "full", "status": 529})).json() == {"error": "full", "field": None}
            assert [r.status for r in found.recorder.records] == [200, 200, 422, 422, 529]

            other = await http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 999})
            assert other.status_code == 400 and other.json()["error"]["param"] == "max_tokens"
            assert "error" in (await http.get("/nothing")).json()
            other = await http.post("/v1/completions", json={"prompt": "a", "extra": {"error": "full", "status": 529}})
            assert other.status_code == 529 and other.json()["error"]["type"] == "Error"

            last = (await ask(stream=True, extra={"die": 1})).text.split("\n\n")
            assert last[-1] == "" and set(json.loads(last[-2].removeprefix("data: "))) == {"error", "field"}


@asynccontextmanager
async def asking(model: Path) -> AsyncIterator[tuple[Callable[..., Awaitable[Generation]], Served]]:
    """A function that asks that dialect, and gives the generation that came of it."""
    async with served(model) as found:
        generations: list[Generation] = []

        class Noted(Dialect):
            def body(self) -> Any:
                generations.append(self.generation)
                return "done"

        app = both_dialects(found.serving, Noted)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:

            async def ask(*inputs: str, **body: Any) -> Generation:
                response = await http.post("/generate", json={"inputs": inputs, **body})
                assert response.json() == "done", response.text
                return generations[-1]

            yield ask, found


async def test_best_of(tiny_llama: Path) -> None:
    """The likeliest draws of each prompt, the best first; what was drawn in vain counts."""
    async with asking(tiny_llama) as (ask, found):
        for fields in ({}, {"logprobs": 2}):
            best = await ask("ab", "abc", fields=fields, extra={"scores": [-3, -1, -2, -1]}, ask={"n": 3, "best_of": 4})
            assert [choice.index for choice in best.choices] == list(range(6))
            assert [choice.mean_logprob for choice in best.choices] == [-1, -1, -2] * 2
            assert best.choices[0] is best.drawn[1] and best.choices[1] is best.drawn[3]
            lengths = [len(found.serving.inputs.encode(text)) for text in ("ab", "abc")]
            assert (best.prompt_tokens, best.output_tokens) == (sum(lengths), 4 * sum(lengths))
            record = found.recorder.records[-1]
            assert (record.choices, len(record.finish_reasons), record.output_tokens) == (8, 8, 4 * sum(lengths))
        same = await ask("ab", extra={"scores": [-3, -1]}, ask={"n": 2, "best_of": 2})
        assert same.choices == same.drawn and same.choices[0].logprobs == []  # as drawn, for streams


async def test_truncate(tiny_llama: Path) -> None:
    async with asking(tiny_llama) as (ask, found):
        text = "abcdefghijkl " * 100
        ids = found.serving.inputs.tokenize(text)
        for cut, kept in (((3,), ids[-3:]), ((3, "right"), ids[:3]), ((-1,), ids[-56:])):
            assert (await ask(text, ask={"truncate": cut})).choices[0].prompt == kept
        with pytest.raises(AssertionError, match="cut must be between 1 and"):
            await ask(text, ask={"truncate": [300]})


# Clients that leave, and clients that lag


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_aborted_before_its_response_ends(
    tiny_llama: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the garbage collector finds the time."""
    async with served(tiny_llama) as found:
        client, aborted = found.serving.client.client, []
        abort = client.abort
        monkeypatch.setattr(client, "abort", lambda ids, reason: (aborted.extend(ids), abort(ids, reason)))
        body = json.dumps({"prompt": [5] * 100, "max_tokens": 100, "stream": stream, "extra": {"pace": 0.02}}).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        requests = asyncio.Queue[dict[str, Any]]()
        requests.put_nowait({"type": "http.request", "body": body})

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        app = create_app(found.serving, found.plugins)
        response = asyncio.create_task(app(scope, requests.get, send))  # type: ignore[arg-type]
        while client.stats.running == 0:
            await asyncio.sleep(0.01)
        requests.put_nowait({"type": "http.disconnect"})
        await response
        assert len(aborted) == 1
        (record,) = found.recorder.records
        assert (record.status, record.finish_reasons) == (499, ["abort"])


async def test_a_client_that_leaves_while_it_asks(tiny_llama: Path) -> None:
    async with served(tiny_llama) as found:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            pass

        await create_app(found.serving, found.plugins)(scope, receive, send)  # no exception: nothing went wrong here
        assert [(r.status, r.error) for r in found.recorder.records] == [(499, None)]


async def test_what_nobody_reads_takes_little_room(tiny_llama: Path) -> None:
    """Outputs that wait are one for each sequence, whatever their number was."""
    async with served(tiny_llama) as found:
        client = found.serving.client
        record = ResponseRecord(id="a", operation="chat", model="echo", trace_id="", span_id="")
        prompts = [list(range(1, 200)), list(range(1, 100))]
        adds = [Add("a", prompt, SamplingParams(logprobs=0), 1) for prompt in prompts]
        async with client.generate(adds, record) as stream:
            step = client.stats.step
            while client.stats.step == step or client.stats.running:
                await asyncio.sleep(0.01)
            outputs = [output async for outputs in stream for output in outputs]
        assert [index for index, _ in outputs] == [0, 1]
        for (_, output), prompt in zip(outputs, prompts, strict=True):
            assert (output.index, output.tokens, output.finish_reason) == (0, prompt, "length")
            assert [entry.token for entry in output.logprobs or ()] == prompt


# Plugins


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (5, "TypeError: 'int' object is not iterable"),
        (["x"], "TypeError: expected APIRouters and Middleware, got 'x'"),
        (APIRouter(), "TypeError"),
        (ValueError("not today"), "ValueError: not today"),
    ],
)
async def test_routes_that_are_none_are_their_plugin_s_error(tiny_llama: Path, given: Any, why: str) -> None:
    class Plugin:
        @hookimpl
        def routes(self, client: Any) -> Any:
            if isinstance(given, Exception):
                raise given
            return given

    plugins = load_plugins([("wrong", Plugin())])
    async with served(tiny_llama) as found:
        with pytest.raises(PluginError, match=f"plugin 'wrong': routes: {why}") as caught:
            create_app(found.serving, plugins)
        assert caught.value.plugin == "wrong"


async def test_a_plugin_cannot_end_the_server(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Plugin:
        @hookimpl
        def tokens_delivered(self, deliveries: Sequence[Delivery]) -> None:
            sys.exit(0)

        @hookimpl
        def response_done(self, record: ResponseRecord) -> None:
            sys.exit("bye")

    async with served(tiny_llama, ("leaver", Plugin())) as found:
        transport = httpx.ASGITransport(both_dialects(found.serving))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for _ in range(2):
                assert (await http.post("/generate", json={"inputs": ["a"]})).json() == ["a"]
        assert found.serving.client.stats.plugin_faults == {"leaver": 4}
        assert [record.status for record in found.recorder.records] == [200, 200]
    assert "leaver" in caplog.text


# Start and end


async def test_a_folder_for_the_socket_whose_path_is_too_long(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No process is started that would have its own words for it."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    before = psutil.Process().children()
    client = EngineClient(Settings(model=str(tiny_llama)), load_plugins())
    with pytest.raises(ConfigError, match=r"^TMPDIR: .* at most 107 "):
        await client.start()
    await client.close()
    assert psutil.Process().children() == before and list(long.iterdir()) == []
    assert capfd.readouterr().err == ""


async def test_the_end_while_loading_waits_for_everything_at_once(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine, a plugin and the checkpoint's thread: each goes on only when all have begun to end."""
    together = threading.Barrier(3, timeout=10)

    class Slow(EchoProcess):
        def end(self, patience: float = 2.0) -> None:
            together.wait()
            super().end()

    class Plugin:
        @hookimpl
        def stopping(self) -> None:
            together.wait()

    class UI:
        def progress(self, stage: str, share: float) -> None:
            asyncio.get_running_loop().call_soon(run._on_signal, signal.SIGINT)

        def banner(self, *shown: object) -> None:
            raise AssertionError("it is not ready")

    monkeypatch.setattr(main, "_open", lambda settings, plugins: together.wait())
    settings = Settings(model=str(tiny_llama))
    plugins = load_plugins([("slow", Plugin())])
    plugins.activate(settings, engine=False)
    with main.bind("127.0.0.1", 0) as listener:
        run = main._Run(settings, plugins, UI(), listener)
        run._client = Supervisor(settings, plugins, Slow)
        assert await run.main() == 130
    assert not together.broken
    assert run._opening is not None and not run._opening.is_alive()


class Silent:
    """A user interface that shows nothing."""

    def progress(self, stage: str, share: float) -> None:
        pass

    def banner(self, *shown: object) -> None:
        pass


async def test_a_signal_the_moment_loading_ends(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither can loading be cancelled any more nor is there an application yet."""
    plugins, settings = load_plugins(), Settings(model=str(tiny_llama))
    with main.bind("127.0.0.1", 0) as listener:
        run = main._Run(settings, plugins, Silent(), listener)

        async def load() -> Any:
            asyncio.get_running_loop().call_soon(run._on_signal, signal.SIGINT)
            return ()

        monkeypatch.setattr(run, "_load", load)
        monkeypatch.setattr(run, "_open", lambda: pytest.fail("the signal is lost"))
        assert await run.main() == 130


@pytest.mark.parametrize("fails", [True, False])
async def test_who_comes_while_it_loads_is_told_so(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    plugins, settings = load_plugins(), Settings(model=str(tiny_llama))
    failed = asyncio.Event()

    async def load() -> Any:
        await failed.wait()
        raise ConfigError("no such model")

    with main.bind("127.0.0.1", 0) as listener:
        run = main._Run(settings, plugins, Silent(), listener)
        monkeypatch.setattr(run, "_load", load)
        whole = asyncio.create_task(run.main())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=10) as http:
            for asked in (http.get("/ready"), http.post("/v1/completions", json={"prompt": "a"})):
                response = await asked
                assert (response.status_code, response.headers["retry-after"]) == (503, "1")
                assert response.json()["error"]["message"] == "the engine is starting"
        if fails:
            failed.set()
        else:
            run._on_signal(signal.SIGTERM)
        if fails:
            with pytest.raises(ConfigError, match="no such model"):
                await whole
        else:
            assert await whole == 0


@pytest.mark.parametrize("host", [".", "a" * 70, "a.\0b", "no.such.host.invalid"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^--host .*: no such address"):
        main.bind(host, 0)


# Whether an engine works


def test_activity() -> None:
    code = "import sys\nfor _ in sys.stdin:\n    x = 10 ** 2_000_000 // 3"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.stdin
        activity = Activity(process.pid)

        def rests() -> bool:
            activity.restart()
            time.sleep(0.2)
            return activity.none_in(0.2)

        assert eventually(rests)  # once it has started
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert eventually(lambda: not activity.none_in(0.2))
        process.stdin.close()
