"""Reading request bodies: JSON objects only, and of limited size."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from framework import InvalidRequest

from .errors import Problem
from .limits import MAX_BODY


class LimitedBody:
    """Wraps the application, routes of plugins included: reading a body of more than `MAX_BODY` bytes raises an
    `HTTPException`, before the first byte where the client says its length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        size = 0
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        too_large = declared.isdigit() and (len(declared) > 18 or int(declared) > MAX_BODY)

        async def limited() -> Message:
            nonlocal size
            message = {} if too_large else await receive()
            size += len(message.get("body", b""))
            if too_large or size > MAX_BODY:  # FastAPI passes on no other kind of error from here
                raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes")
            return message

        await self._app(scope, limited, send)


class _JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = _parse(await self.body())
        return self._json


def _parse(body: bytes) -> dict[str, Any]:
    """Raises `InvalidRequest` for what is no JSON object."""
    if not body:
        raise InvalidRequest("", "the body is empty; send a JSON object")
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        why = f"is not valid JSON: {error.msg} at character {error.pos}"
    except UnicodeDecodeError as error:
        why = f"is not valid UTF-8: {error.reason} at byte {error.start}"
    except RecursionError:
        why = "is nested too deeply"
    except ValueError:  # Python's own limit
        why = f"has an integer of more than {sys.get_int_max_str_digits()} digits"
    else:
        if isinstance(value, dict):
            return value
        why = "must be a JSON object"
    raise InvalidRequest("", f"the body {why}")


class JsonRoute(APIRoute):
    """A route whose body, if it has one, must be a JSON object. A dialect that spells
    errors in its own way has a subclass with its `spell`."""

    @staticmethod
    def spell(problem: Problem) -> tuple[int, Any]:
        """See `Spelling`."""
        raise NotImplementedError

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        has_body = self.body_field is not None

        async def handle(request: Request) -> Response:
            request.state.spell = self.spell
            if has_body:
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json" and not kind.endswith("+json"):
                    raise InvalidRequest(
                        "Content-Type", f"Content-Type must be application/json, got {kind[:100] or 'none'}"
                    )
                encoding = request.headers.get("content-encoding", "identity").strip().lower()
                if encoding != "identity":
                    raise HTTPException(
                        415,
                        f"Content-Encoding: {encoding[:100] or 'none'} is not read here; send the body as it is",
                        {"Accept-Encoding": "identity"},
                    )
                request = _JsonRequest(request.scope, request.receive)
                await request.json()
            return await handler(request)

        return handle
