"""Reading request bodies: JSON only, and of limited size."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from framework import InvalidRequest

from .errors import BodyTooLarge, Problem

MAX_BODY = 16 * 2**20
"""Bytes."""


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


class JsonRoute(APIRoute):
    """A route whose body, if it has one, must be JSON of at most `MAX_BODY` bytes. A dialect that spells errors in its
    own way has a subclass with its `spell`."""

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
                await request.body()
            return await handler(request)

        return handle
