"""Middleware that plugins bring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_engine import EchoProcess
from fastapi import APIRouter
from framework.server.app import create_app
from framework.server.keys import Keys
from serving import Running, check_error, completion, events, eventually, running
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
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


class Door:
    """Answers some paths by itself, and fails for another."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/closed":
            await PlainTextResponse("closed", 418)(scope, receive, send)
        elif scope["path"] == "/broken":
            raise OSError("cannot read /home/ann/secret")
        else:
            await self.app(scope, receive, send)


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
    with pytest.raises(PluginError, match=rf"^plugin '.*mine.*': routes: {why}"):
        create_app(server.serving, plugins)
