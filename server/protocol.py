"""How uvicorn serves: its settings, its answer to what is no HTTP, and its log lines."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any
from urllib.parse import unquote

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp
from structlog.contextvars import bound_contextvars
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

from framework.log import get_logger
from framework.settings import Settings

from .app import spelling
from .client import SHUTTING_DOWN
from .errors import Problem, problem
from .limits import INTERRUPT, KEEP_ALIVE, MAX_HEAD, MAX_PIPELINED, RECEIVE
from .proxy import outside

log = get_logger(__name__)

_ACCESS = '%s - "%s %s HTTP/%s" %d'
"""uvicorn's own line, for which `framework.log` and `_quieter` look."""
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
        timeout_graceful_shutdown=2 * INTERRUPT,  # only for what does not end when its client is gone
    )


class _Refused(Exception):
    """Ends the parsing of a request."""

    def __init__(self, status: int, message: str) -> None:
        self.problem = Problem(status, message)


class Protocol(HttpToolsProtocol):
    """Bounds what a connection can hold, in bytes and seconds. Who sends what is no HTTP, too much or too slowly gets
    the same envelope as for any other error, if nothing else is owed to him; otherwise the connection just ends.

    A request that is being received has a deadline; uvicorn has one for idle connections.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._active: RequestResponseCycle | None = None  # whose turn it is to be answered, or was at last
        self._declined = False  # an upgrade that the request offers
        self._begun = False  # the request that comes next
        self._in_head = True  # of that request
        self._kept = 0  # bytes of a head or of trailers, which the parser keeps until they are complete
        self._deadline: asyncio.TimerHandle | None = None
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        active = self._active
        if active is not None and not active.response_complete:  # not told where another is behind it
            if not active.response_started and not active.disconnected:
                self._log_gone(active.scope)
            active.disconnected = True
            active.message_event.set()
        super().connection_lost(exc)

    def _log_gone(self, scope: Any) -> None:
        """uvicorn has a line for an answer only."""
        with bound_contextvars(request_id=scope.get("state", {}).get("request_id")):
            path = get_path_with_query_string(scope)
            self.access_logger.info(_ACCESS, get_client_addr(scope), scope["method"], path, scope["http_version"], 499)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._deadline is None:
            self._expect()
        self._kept += len(data)
        try:
            self._feed(data)
            if self._kept > MAX_HEAD:
                raise _Refused(431, f"the request line and headers are larger than {MAX_HEAD} bytes")
        except _Refused as error:
            self._refuse(error.problem)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback raised
            self._refuse(
                cause.problem if isinstance(cause, _Refused) else Problem(400, "the request is not valid HTTP")
            )

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # To what we do not speak, so it is an ordinary request. The parser takes its body to be in the other
                # protocol already: it gets the head once more, without the offer.
                self._declined = False
                line = b" ".join((self.parser.get_method(), self.url, b"HTTP/1.1"))
                headers = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
                data = b"\r\n".join((line, *headers, b"", b"")) + data[upgrade.args[0] :]

    def on_message_begin(self) -> None:
        self._begun = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is no header: those have been looked at
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise _Refused(400, "CONNECT: this is no proxy")
        if self.parser.should_upgrade():
            self._declined = True
            return
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD:
            raise _Refused(431, f"the request line and headers are larger than {MAX_HEAD} bytes")
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            raise _Refused(429, f"more than {MAX_PIPELINED} requests wait for their turn on one connection")
        # uvicorn logs what an application raises, and that it has not answered, and then sends its own words for it.
        self.cycle.send_500_response = partial(_fail, self.cycle)  # type: ignore[method-assign]
        self._in_head = False

    def on_chunk_header(self) -> None:
        self._kept = 0

    def on_body(self, body: bytes) -> None:
        self._kept = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._declined:
            return
        super().on_message_complete()
        self._begun, self._in_head, self._kept = False, True, 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self.cycle.response_complete:  # ahead of the last of its body, which ended that the connection was idle
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def _expect(self) -> None:
        self._deadline = self.loop.call_later(RECEIVE, self._late)

    def _late(self) -> None:
        if self.flow.read_paused or self._owed:  # the client waits for us
            self._expect()
        elif not self._begun:  # a connection kept in reserve
            self.transport.close()
        else:
            self._refuse(Problem(408, f"the request is not complete after {RECEIVE} s"))

    @property
    def owes(self) -> bool:
        """Whether a request that is complete, or is being answered already, has not got all of its answer."""
        if self.transport.get_write_buffer_size():
            return True
        active = self._active
        return active is not None and not active.response_complete and (active.response_started or not active.more_body)

    def shutdown(self) -> None:
        """Requests that are not complete yet are not waited for."""
        if self._begun and not self.owes and not self.transport.is_closing():
            self._refuse(Problem(503, SHUTTING_DOWN))
        else:
            super().shutdown()

    @property
    def _owed(self) -> bool:
        """Whether an earlier request than the one that is being received has no complete answer yet."""
        active = self._active
        return active is not None and not active.response_complete and (self._in_head or active is not self.cycle)

    @property
    def _path(self) -> str:
        """Of the request that is being received; empty as long as it may go on."""
        if not self._in_head:
            return self.scope["path"]
        return unquote(self.url.partition(b"?")[0].decode("latin-1")) if self._begun and self.headers else ""

    def _refuse(self, problem: Problem) -> None:
        """Answer the request that is being received, if it can be, and end the connection."""
        client = ":".join(map(str, self.client or ("unix",)))
        log.info("request refused", client=client, status=problem.status, reason=problem.message)
        if not self._owed and (self._in_head or not self.cycle.response_started):
            status, error = spelling(self._path)(problem)
            body = msgspec.json.encode(error)
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        if self.cycle is not None:
            self.cycle.disconnected = True  # writes nothing more
        self.transport.close()
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(RECEIVE, self.transport.abort)  # if the answer is not taken


async def _fail(cycle: RequestResponseCycle) -> None:
    """Answer a request for which the application has failed to."""
    state = cycle.scope["state"]
    found = problem(RuntimeError())
    status, error = state.get("spell", spelling(cycle.scope["path"]))(found)
    headers = {"content-type": "application/json", **found.headers, "x-request-id": state.get("request_id", "")}
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    body = msgspec.json.encode(error)
    encoded.append((b"content-length", str(len(body)).encode()))
    await cycle.send({"type": "http.response.start", "status": status, "headers": encoded})
    await cycle.send({"type": "http.response.body", "body": body, "more_body": False})


def _quieter(record: logging.LogRecord) -> bool:
    match record.args:
        case (_, _, str(path), _, int(status)) if path.partition("?")[0] in PROBES and status < 400:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return record.levelno >= logging.getLogger().getEffectiveLevel()
