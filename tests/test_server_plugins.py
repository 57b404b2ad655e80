"""Routes and middleware that plugins bring."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from echo_engine import EchoProcess
from fastapi import APIRouter
from fastapi.testclient import TestClient
from framework.server.app import create_app
from framework.server.keys import Keys
from serving import Running, check_error, check_tgi_error, completion, events, eventually, running
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from framework import PluginError, hookimpl
from framework.registry import load_plugins
from framework.settings import Settings

KEY = {"Authorization": "Bearer sk-1"}


class Mark:
    """Adds a word to a header of every answer, and notes whose the requests are."""

    def __init__(self, app: ASGIApp, word: str, seen: list[tuple[str, str | None]]) -> None:
        self.app, self.word, self.seen = app, word, seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append((scope["path"], scope["state"].get("tenant")))

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-mark", self.word.encode())]
            await send(message)

        await self.app(scope, receive, marked)


FAULTS = {
    "nothing": None,
    "cancelled": asyncio.CancelledError(),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "group": BaseExceptionGroup("two", [ValueError(), SystemExit(4)]),
}
"""What middleware may raise, or return without an answer."""


class Door:
    """Answers some paths by itself, and fails for another."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/closed":
            await PlainTextResponse("closed", 418)(scope, receive, send)
        elif scope["path"] == "/broken":
            raise OSError("cannot read /home/ann/secret")
        elif (fault := scope["query_string"].decode()) in FAULTS:
            if FAULTS[fault] is not None:
                raise FAULTS[fault]
        else:
            await self.app(scope, receive, send)


class EventSource(StreamingResponse):
    media_type = "text/event-stream"


class Marks:
    def __init__(self, *items: Any) -> None:
        self.items = items

    @hookimpl
    def routes(self, client: Any) -> list[Any]:
        return list(self.items)


SEEN: list[tuple[str, str | None]] = []


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(model=str(tiny_llama), served_model_name="echo")
    router = APIRouter()

    async def own() -> str:
        return "own"

    router.add_api_route("/own", own)
    marks = Marks(Middleware(Mark, "outer", SEEN), router, Middleware(Mark, word="inner", seen=SEEN), Middleware(Door))
    with running(settings, Keys([("ann", "sk-1")]), extra=[("marks", marks)], spawn=EchoProcess) as found:
        found.http.headers.update(KEY)
        yield found


def test_every_route_goes_through_all_in_their_order(server: Running) -> None:
    for path in ("/v1/models", "/own", "/health", "/metrics", "/nothing", "/docs"):
        answer = server.http.get(path)
        assert answer.headers.get_list("x-mark") == ["inner", "outer"], path  # the answer comes from the inside
        assert answer.headers["x-request-id"]
    assert completion(server, server.ids("fine"))[0]["text"] == "fine"
    chunks = events(server.post("/v1/completions", prompt=server.ids("ab"), max_tokens=5, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"


def test_only_those_with_a_key_reach_it(server: Running) -> None:
    SEEN.clear()
    denied = server.http.get("/own", headers={"Authorization": "Bearer sk-2"})
    assert denied.status_code == 401 and "x-mark" not in denied.headers and SEEN == []
    assert server.http.get("/own").json() == "own"
    assert SEEN == [("/own", "ann")] * 2
    assert server.http.get("/health", headers={"Authorization": ""}).status_code == 200
    assert SEEN[2:] == [("/health", None)] * 2


def test_it_may_answer_and_fail(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    closed = server.http.get("/closed")
    assert (closed.status_code, closed.text, closed.headers.get_list("x-mark")) == (418, "closed", ["inner", "outer"])
    message = check_error(server.http.get("/broken"), 500, None)
    assert message == "internal error; the server's log has the details"
    eventually(lambda: "cannot read /home/ann/secret" in caplog.text)  # a moment after the answer
    assert server.http.get("/own").status_code == 200


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_it_does_there_is_an_answer(server: Running, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    """In the words of the dialect, with an id, and a line in the log."""
    body = {"prompt": "a", "max_tokens": 1}
    for ask in (
        lambda: server.http.get(f"/health?{fault}"),
        lambda: server.http.post(f"/v1/completions?{fault}", json=body),
    ):
        caplog.clear()
        answer = ask()
        assert check_error(answer, 500, None) == "internal error; the server's log has the details"
        assert answer.headers["x-request-id"] and answer.headers["connection"] == "close"
        kind = "without starting response" if FAULTS[fault] is None else type(FAULTS[fault]).__name__
        eventually(lambda: kind in caplog.text)  # noqa: B023 - called at once
    answer = server.http.post(f"/generate?{fault}", json={"inputs": "a"}, headers={"X-Request-Id": "mine"})
    check_tgi_error(answer, 424, "generation", "internal error")
    assert answer.headers["x-request-id"] == "mine"
    assert server.http.get("/own").status_code == 200


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([Middleware(Mark, "no list")], "TypeError: .*seen"),
        ([Mark], "TypeError: expected APIRouters and Middleware, got <class '.*Mark'>"),
        ([None], "TypeError: expected APIRouters and Middleware, got None"),
        ([Middleware(Door), 3], "TypeError: expected APIRouters and Middleware, got 3"),
    ],
)
def test_what_is_no_middleware_stops_the_start(server: Running, items: list[Any], why: str) -> None:
    plugins = load_plugins([("mine", Marks(*items))])
    plugins.activate(Settings(), engine=False)
    with pytest.raises(PluginError, match=rf"^plugin 'mine': routes: {why}"):
        create_app(server.serving, plugins)


def test_a_plugin_may_bring_what_is_not_there(server: Running) -> None:
    """/v1/embeddings answers 404 without it."""
    routes = APIRouter()

    @routes.post("/v1/embeddings")
    async def embeddings() -> dict[str, str]:
        return {"object": "list"}

    plugins = load_plugins([("mine", Marks(routes))])
    plugins.activate(Settings(), engine=False)
    client = TestClient(create_app(server.serving, plugins))
    assert client.post("/v1/embeddings", json={}).json() == {"object": "list"}
    assert client.post("/v1/rerank", json={}).status_code == 404
    assert "/v1/rerank is not there" in server.http.post("/v1/rerank", json={}).text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("GET", "/v1/models/mine"),
        ("GET", "/first/{name}"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
    ],
)
def test_a_route_that_would_never_run_stops_the_start(server: Running, method: str, path: str) -> None:
    """Also within another router; one for another method is fine."""

    async def never() -> None:
        raise AssertionError

    def app(method: str) -> Any:
        first, inner, outer = APIRouter(), APIRouter(), APIRouter()
        first.add_api_route("/first/{word}", never, methods=["GET"])
        inner.add_api_route(path, never, methods=[method])
        outer.include_router(inner)
        plugins = load_plugins([("mine", Marks(outer)), ("first", Marks(first))])  # the last is asked first
        plugins.activate(Settings(), engine=False)
        return create_app(server.serving, plugins)

    with pytest.raises(PluginError, match=rf"^plugin 'mine': routes: {method} {re.escape(path)} .* would never run"):
        app(method)
    app("PUT")


async def test_the_document_has_routes_of_every_kind(server: Running) -> None:
    router, kinds = APIRouter(tags=["OpenAI"]), ({"status_code": 204}, {"response_class": EventSource}, {})

    async def anything(number: int = 0) -> None:
        pass

    for i, kind in enumerate(kinds):
        router.add_api_route(f"/mine/{i}", anything, **kind)
    router.add_api_route("/v1/completions", anything, methods=["PUT"])
    plugins = load_plugins([("mine", Marks(router))])
    plugins.activate(Settings(), engine=False)
    transport = httpx.ASGITransport(create_app(server.serving, plugins))
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert {f"/mine/{i}" for i in range(len(kinds))} < set(paths) and set(paths["/v1/completions"]) == {"post", "put"}
    assert "itemSchema" in paths["/v1/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert "itemSchema" not in paths["/mine/1"]["get"]["responses"]["200"]["content"]["text/event-stream"]
