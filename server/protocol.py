"""How uvicorn serves: its settings, its answer to what is no HTTP, and its log lines."""

from __future__ import annotations

import logging

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from framework.settings import Settings

from .errors import Problem
from .limits import DRAIN, KEEP_ALIVE
from .openai import spell
from .proxy import outside

PROBES = ("/health", "/ping", "/ready", "/load", "/metrics")
"""Machines ask for these every few seconds."""


def http_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """For all servers; with a certificate, of HTTPS.

    What was asked for by `PROBES` is logged at debug level only, unless the answer is an error.
    """
    logging.getLogger("uvicorn.access").addFilter(_quieter)
    return uvicorn.Config(
        outside(app, settings),
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        forwarded_allow_ips="*" if settings.uds else None,  # whoever may connect to a socket is the proxy
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=DRAIN,
    )


class Protocol(HttpToolsProtocol):
    """Answers what is no HTTP in the same envelope as any other error."""

    def send_400_response(self, msg: str) -> None:
        _, error = spell(Problem(400, "the request is not valid HTTP"))
        body = msgspec.json.encode(error)
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def _quieter(record: logging.LogRecord) -> bool:
    match record.args:
        case (_, _, str(path), _, int(status)) if path.partition("?")[0] in PROBES and status < 400:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return record.levelno >= logging.getLogger().getEffectiveLevel()
