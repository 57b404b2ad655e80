"""A server in a thread of the test's own process, over any engine process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import psutil
import pytest
import uvicorn
from framework.server import tgi_schemas
from framework.server.app import create_app
from framework.server.calls import select_parser
from framework.server.client import EngineClient
from framework.server.generation import Serving
from framework.server.keys import Keys
from framework.server.main import bind
from framework.server.protocol import http_config
from framework.server.supervisor import Pace, Supervisor
from pydantic import ConfigDict, TypeAdapter

from framework import Delivery, ResponseRecord, hookimpl
from framework.checkpoint import open_checkpoint
from framework.inputs import InputProcessor
from framework.registry import load_plugins
from framework.settings import Settings

BASE = {"max_tokens": 200}
NEVER = Pace(first=3600)


class Recorder:
    """A plugin that keeps what the server tells plugins."""

    def __init__(self) -> None:
        self.records: list[ResponseRecord] = []
        self.tokens: dict[str, int] = {}
        self.first = 0

    @hookimpl
    def tokens_delivered(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self.tokens[delivery.record.id] = self.tokens.get(delivery.record.id, 0) + delivery.tokens
            self.first += delivery.ttft is not None
            assert (delivery.ttft is None) != (delivery.gap is None)

    @hookimpl
    def response_done(self, record: ResponseRecord) -> None:
        self.records.append(record)


class Running:
    """A running server: its URL, its engine client, what its plugins heard, and clients for it."""

    def __init__(self, url: str, supervisor: Supervisor, recorder: Recorder, serving: Serving) -> None:
        self.url = url
        self.supervisor = supervisor
        self.recorder = recorder
        self.serving = serving
        self.tokenizer = serving.tokenizer
        self.http = httpx.Client(base_url=url, timeout=30)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)

    @property
    def engine(self) -> EngineClient:
        """Of the present engine, or of the one that died."""
        return self.supervisor.client

    @property
    def process(self) -> psutil.Process:
        """The engine's."""
        return psutil.Process(self.engine._engine.process.pid)  # type: ignore[union-attr]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def record(self, id: str) -> ResponseRecord:
        """The record of a response: it comes a moment after its last byte."""
        found = eventually(lambda: [r for r in self.recorder.records if r.id == id])
        assert len(found) == 1
        return found[0]


def eventually(what: Callable[[], Any], seconds: float = 10) -> Any:
    """`what()` once it is true; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)
    return value


@contextmanager
def running(
    settings: Settings,
    keys: Keys | None = None,
    extra: Sequence[tuple[str, object]] = (),
    pace: Pace = NEVER,
    **options: Any,
) -> Iterator[Running]:
    """An engine that dies stays dead, unless `pace` says otherwise."""
    recorder = Recorder()
    plugins = load_plugins([("recorder", recorder), *extra])
    plugins.activate(settings, engine=False)
    checkpoint = open_checkpoint(settings, plugins)
    tokenizer = checkpoint.tokenizer()
    client = Supervisor(settings, plugins, pace=pace, **options)
    ready = threading.Event()
    found: list[Any] = []
    environment = pytest.MonkeyPatch()
    environment.setenv("OMP_NUM_THREADS", "1")  # of the engine process

    async def serve() -> None:
        try:
            info = await client.start()
            serving = Serving(
                client,
                InputProcessor(checkpoint, tokenizer, info),
                tokenizer,
                info.model,
                0,
                settings.served_model_name,
                select_parser(settings, plugins, tokenizer),
                None if settings.served_model_name else settings.model,
            )
            config = http_config(create_app(serving, plugins, keys), settings)
            config.timeout_graceful_shutdown = 5
            with bind("127.0.0.1", 0) as listener:
                server = uvicorn.Server(config)
                found[:] = [serving, server, listener.getsockname()[1]]
                ready.set()
                await server.serve([listener])
        finally:
            ready.set()
            await client.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(60) and found, "the server did not start"
        serving, _, port = found
        yield Running(f"http://127.0.0.1:{port}", client, recorder, serving)
    finally:
        if found:
            found[1].should_exit = True
        thread.join(30)
        environment.undo()
        assert not thread.is_alive()


# What clients of the OpenAI routes check


def events(response: httpx.Response) -> list[Any]:
    """Data of all events; the stream must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def completion(server: Running, prompt: object, **body: Any) -> dict[int, dict[str, Any]]:
    """Ask twice, whole and streamed; check that both say the same; return the choices by index."""
    request = {"prompt": prompt, **BASE, **body}
    response = server.post("/v1/completions", **request)
    assert response.status_code == 200, response.text
    whole = response.json()
    chunks = events(server.post("/v1/completions", **request, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None and chunk["object"] == whole["object"] == "text_completion"
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": None})
            assert choice.get("finish_reason") is None, "something came after the end"
            choice["text"] += piece["text"]
            choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
            for ids in {"prompt_token_ids", "token_ids"} & set(piece):
                choice[ids] = choice.get(ids, []) + piece[ids]
            if piece["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {key: [] for key in piece["logprobs"]}
                for key, values in piece["logprobs"].items():
                    choice["logprobs"][key] += values
    assert choices == {choice["index"]: choice for choice in whole["choices"]}
    return choices


def check_error(response: httpx.Response, status: int, param: str | None) -> str:
    assert response.status_code == status, response.text
    assert len(response.content) < 4000
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, status)
    assert error["message"] and "Traceback" not in error["message"]
    return str(error["message"])


# What clients of the TGI routes check


def checked(shape: Any, value: Any) -> Any:
    """`value`, which has the fields of the documented shape, and no others."""
    if isinstance(shape, type):
        shape.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[attr-defined]
    TypeAdapter(shape).validate_python(value)
    return value


def tgi_events(response: httpx.Response) -> list[Any]:
    """Data of all events: nothing else is in the stream, and nothing ends it."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    return [checked(tgi_schemas.StreamResponse, json.loads(line.removeprefix("data: "))) for line in lines]


def check_tgi_error(response: httpx.Response, status: int, kind: str, message: str) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json" and len(response.content) < 4000
    error = checked(tgi_schemas.ErrorResponse, response.json())
    assert error["error_type"] == kind and message in error["error"] and "Traceback" not in error["error"]
    return str(error["error"])
