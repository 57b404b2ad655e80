"""Logs: structlog over the standard library, one renderer for our lines and for those of other packages.

`get_logger` works before and without `configure`: lines are then ordinary records of the `logging` module, as
a program that embeds the framework expects, and read "event field=value". `configure` is for processes that the
framework owns.

Bind what every line of a request shall carry with `structlog.contextvars.bind_contextvars(request_id=...)`.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO, cast

import structlog
from structlog.contextvars import merge_contextvars
from structlog.typing import EventDict, Processor, WrappedLogger

_NOISY = ("httpcore", "httpx", "uvicorn.error")
"""Libraries whose INFO lines tell a user nothing: shown with --log-level debug only."""

_OWN_HANDLERS = ("huggingface_hub", "transformers")
"""Libraries that give their logger a handler when imported."""


class _Handler(logging.StreamHandler[TextIO]):
    """The one handler of `configure`: found again by its type when `configure` is called again."""


class _Event(dict[str, Any]):
    """What one call said, as the message of a `logging` record: our formatter renders fields, any other its text."""

    def __str__(self) -> str:
        fields = {key: value for key, value in self.items() if key not in ("event", "logger", "level", "exc_info")}
        lines = [" ".join([str(self["event"]), *(f"{key}={value!r}" for key, value in fields.items())])]
        if self.get("exc_info"):
            told = structlog.processors.format_exc_info(None, "", {"exc_info": self["exc_info"]})
            lines.append(str(told.get("exception", "")))
        return "\n".join(lines).rstrip()


def _as_event(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    return _Event(event)


class _Routed(logging.Logger):
    """A library's logger that takes no handler of its own: with one, each line would be printed twice."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        pass


def _access(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """Turn uvicorn's access line into fields; the values come as the arguments of its format string."""
    args = event.pop("positional_args", None)
    if event["logger"] == "uvicorn.access" and isinstance(args, tuple) and len(args) == 5:
        client, method, path, version, status = args
        event.update(event="http request", method=method, path=path, status=status)
        client = client.removesuffix(":0") or "unix"  # a proxy tells no port, a Unix socket nothing
        event.update(client=client, http_version=version)
    return event


_SHARED: tuple[Processor, ...] = (
    merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
)
_OURS: tuple[Processor, ...] = (
    structlog.stdlib.filter_by_level,
    *_SHARED,
    structlog.stdlib.PositionalArgumentsFormatter(),
    _as_event,
    structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose methods take an event and fields: `log.info("step failed", step=7)`."""
    bound = structlog.wrap_logger(logging.getLogger(name), processors=_OURS, wrapper_class=structlog.stdlib.BoundLogger)
    return cast(structlog.stdlib.BoundLogger, bound)


def configure(level: str = "info", format: str = "auto", stream: TextIO | None = None, process: str = "server") -> None:
    """Send all logs of this process to `stream` (default: stderr). May be called again.

    `level`: debug, info, warning, error. `format`: "json", one object per line, or "text" ("auto" is text),
    coloured on a terminal only. `process` ("server", "engine", "generate") names the process on each line when `format`
    is json or `level` is debug. Start uvicorn with `log_config=None`, or it replaces what is set up here.
    """
    stream = stream if stream is not None else sys.stderr
    debug = level == "debug"

    def fields(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        if debug or format == "json":
            event["process"] = process
        else:
            del event["logger"]
        return event

    render: tuple[Processor, ...]
    if format == "json":
        render = (
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        )
    else:
        render = (
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty() and "NO_COLOR" not in os.environ,
                exception_formatter=structlog.dev.plain_traceback,
            ),
        )

    handler = _Handler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=(*_SHARED, _access),
            processors=(structlog.stdlib.ProcessorFormatter.remove_processors_meta, fields, *render),
            pass_foreign_args=True,
        )
    )
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.NOTSET if debug else max(root.level, logging.WARNING))
    for name in _OWN_HANDLERS:
        library: Any = logging.getLogger(name)
        library.handlers.clear()
        library.__class__ = _Routed
        library.propagate = True
    logging.captureWarnings(True)
