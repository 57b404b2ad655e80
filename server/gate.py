"""What the server answers before the engine is ready."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .app import RequestIds, spelling
from .errors import Problem
from .limits import RETRY_AFTER


class Gate:
    """Stands before the application from the start: until there is one, everybody is told so by a 503."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._why = "the engine is starting"

    @property
    def opened(self) -> bool:
        return self._app is not None

    def open(self, app: ASGIApp) -> None:
        """From now on `app` answers."""
        self._app = app

    def close(self, why: str) -> None:
        """There will be no application: the 503 says `why`. No matter if there is one already."""
        self._why = why

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            status, body = spelling(scope["path"])(Problem(503, self._why))
            headers = {"Retry-After": str(RETRY_AFTER)}
            await RequestIds(Response(msgspec.json.encode(body), status, headers, "application/json"))(
                scope, receive, send
            )
        else:
            try:
                await self._app(scope, receive, send)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or not task.cancelling():  # a plugin has raised it
                    raise
                # else the server ends and has hung up: no fault that is to be logged
