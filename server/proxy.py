"""What a proxy or a browser in front makes of requests: a prefix of their paths, and calls from other origins."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from framework.settings import Settings


def outside(app: ASGIApp, settings: Settings) -> ASGIApp:
    """`app` for requests as they come in: it finds its own paths in them, and the prefix in `root_path`.

    Preflights of the origins that are allowed are answered here: browsers send no key with them.
    """
    if settings.cors_origin:
        # No cookies: who calls from a page brings the API key in a header of its own, as anybody else.
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origin,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("*",),
        )
    return _Unprefixed(app, settings.root_path) if settings.root_path else app


class _Unprefixed:
    """Takes the prefix away, where the proxy has left it there: keys, probes and log lines go by our own paths."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, prefix = scope["path"], self._prefix
            # In place, so that the access log has it too.
            scope["root_path"] = prefix
            if path == prefix or path.startswith(f"{prefix}/"):
                scope["path"] = path[len(prefix) :] or "/"
        await self._app(scope, receive, send)


class Prefixed:
    """Puts the prefix back, for a web framework that writes links and redirects: it takes paths to be whole."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("root_path"):
            scope = {**scope, "path": scope["root_path"] + scope["path"]}
        await self._app(scope, receive, send)
