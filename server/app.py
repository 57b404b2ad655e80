"""The web application: routes of every dialect, health, and what plugins add."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from fastapi.routing import iter_route_contexts
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from framework import EngineDead, FrameworkError, PluginError, __version__
from framework.registry import Plugins

from . import errors, openai, operations, reference, shapes, tgi, tokens
from .body import LimitedBody
from .fields import REQUEST_ID
from .generation import Serving
from .keys import Authentication, Keys
from .proxy import Prefixed


def spelling(path: str) -> errors.Spelling:
    """See `errors.Spellings`."""
    return tgi.spell if path in tgi.PATHS else openai.spell


class RequestIds:
    """Wraps the application: notes when a request came and how to spell errors for it, honours or mints its
    X-Request-Id, binds that to log lines."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        named = REQUEST_ID.fullmatch(given) is not None
        id = given if named else secrets.token_hex(12)
        state = scope.setdefault("state", {})
        state.update(start=time.monotonic_ns(), request_id=id, named=named, spell=spelling(scope["path"]))
        bind_contextvars(request_id=id)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            await send(message)

        await self._app(scope, receive, with_id)


class Heads:
    """Answers HEAD as GET, on the routes of plugins, too. What sends the answer leaves its body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def create_app(serving: Serving, plugins: Plugins, keys: Keys | None = None) -> ASGIApp:
    """The application for one ready engine; for everybody, unless there are `keys`."""
    # FastAPI's own instrumentation: the telemetry plugins see more, and it logs what clients send it
    app = FastAPI(
        title="framework",
        version=__version__,
        telemetry={"tracing": False, "metrics": False, "logs": False},
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=shapes.operation_id,
    )
    errors.install(app, openai.spell)
    client = serving.client

    async def health() -> Response:
        """Whether the engine works: 200, or else 503."""
        gone = client.dead or client.stalled
        if gone is not None:
            raise EngineDead(gone)
        return Response()

    async def version() -> Response:
        """The server's version."""
        return JSONResponse({"version": __version__})

    for path in ("/health", "/ping"):
        app.add_api_route(
            path, health, methods=["GET"], tags=["operations"], response_class=Response, responses=shapes.ERRORS
        )
    app.add_api_route(
        "/version",
        version,
        methods=["GET"],
        tags=["operations"],
        response_model=shapes.Version,
        responses=shapes.ERRORS,
    )
    reference.install(app)
    shapes.install(app, bool(keys))
    app.include_router(operations.router(serving))
    app.include_router(tokens.router(serving))
    app.include_router(openai.router(serving))
    app.include_router(tgi.router(serving))  # other dialects: one module with a `router` each, beside these two
    for plugin, items in plugins.each("routes", client=client):
        with _blamed(plugin):
            _add(app, plugin, items)
    app.include_router(openai.absent())  # last: a plugin may bring what is not there
    app.middleware_stack = app.build_middleware_stack()  # now: else the first request finds what is wrong with it
    inner: ASGIApp = LimitedBody(Heads(Prefixed(app)))
    if keys:
        inner = Authentication(inner, keys, spelling)
    return RequestIds(inner)  # outermost, so that every answer has an id


def _add(app: FastAPI, plugin: str, items: Any) -> None:
    """What a plugin gives, or raises. Raises anything."""
    if isinstance(items, BaseException):
        raise items
    for item in items:
        if isinstance(item, Middleware):
            app.user_middleware.append(Middleware(partial(_built, plugin, item)))  # the first is outermost
        elif isinstance(item, APIRouter):
            taken = list(app.routes)
            for route in iter_route_contexts(item.routes):
                for method in sorted(route.methods or ()):
                    scope: Scope = {"type": "http", "path": route.path, "method": method, "headers": []}
                    if any(other.matches(scope)[0] is Match.FULL for other in taken):
                        raise PluginError(
                            f"plugin {plugin!r}: routes: {method} {route.path} is a route of the server's, or of a "
                            "plugin before it, and would never run; choose another path",
                            plugin,
                        )
            app.include_router(item)
        else:
            raise TypeError(f"expected APIRouters and Middleware, got {item!r}")


def _built(plugin: str, item: Middleware, app: ASGIApp) -> ASGIApp:
    with _blamed(plugin):
        return item.cls(app, *item.args, **item.kwargs)


@contextmanager
def _blamed(plugin: str) -> Iterator[None]:
    """What is wrong with the routes of a plugin becomes a `PluginError` that names it; errors for the user stay."""
    try:
        yield
    except FrameworkError:
        raise
    except (Exception, SystemExit) as error:  # a plugin may give and raise anything
        raise PluginError(f"plugin {plugin!r}: routes: {type(error).__name__}: {error}", plugin) from error
