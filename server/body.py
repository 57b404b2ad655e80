"""Reading request bodies: JSON objects only, and of limited size."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from framework import InvalidRequest

from .errors import BodyTooLarge, Problem
from .limits import MAX_BODY


class _LimitedRequest(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            chunks, size = [], 0
            async with aclosing(self.stream()) as stream:
                async for chunk in stream:
                    size += len(chunk)
                    if size > MAX_BODY:
                        raise BodyTooLarge(f"the body is larger than {MAX_BODY} bytes")
                    chunks.append(chunk)
            self._body = b"".join(chunks)
        return self._body

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
    """A route whose body, if it has one, must be a JSON object of at most `MAX_BODY` bytes. A dialect that spells
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
                request = _LimitedRequest(request.scope, request.receive)
                await request.json()
            return await handler(request)

        return handle
