"""OpenTelemetry spans, made from stamps when a request or a step is over, with explicit times.

The server's instance makes the request span and its own stages, the engine's instance the engine's stages below the
span that `Request.trace` names, and sampled spans of steps. Neither knows of the other: ids travel in traceparents.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from framework import ConfigError, Plan, Request, ResponseRecord, StepResult, Timings, __version__, hookimpl
from framework.errors import brief

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from framework.settings import Settings

    from . import OtelOptions

FLUSH_SECONDS = 1.0
"""Longest wait at shutdown for what has not been exported."""

_MAX_LINKS = 128
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk._shared_internal",
)
"""Who tells, in one version of the SDK or another, that spans could not be exported."""

Attributes = dict[str, str | int | float | bool | Sequence[str]]


class Otel:
    """Turns records into spans and exports them from a thread of its own.

    `exporter` replaces the OTLP/HTTP one. With neither it nor `--otlp-endpoint`, the variables OTEL_EXPORTER_OTLP_*
    say where to.
    """

    def __init__(self, settings: Settings, options: OtelOptions, exporter: SpanExporter | None = None) -> None:
        self._server: Attributes = {"server.address": settings.host}
        if settings.port:
            self._server["server.port"] = settings.port
        self._every = options.step_sampling
        self._epoch = _epoch(time.monotonic_ns)
        self._engine_epoch = self._epoch  # of the executor's clock
        self._traces: dict[str, str] = {}  # traceparent by request id, for the links of steps
        self._ended: deque[str] = deque()  # requests that no step after the current one has
        self._ids = _PresetIds()
        resource: dict[str, AttributeValue] = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "framework"),
            "service.version": __version__,
            "process.pid": os.getpid(),
        }
        # Whether a trace is sampled was decided when the request came in: `ResponseRecord.sampled`.
        self._provider = TracerProvider(
            ALWAYS_ON, Resource.create(resource), shutdown_on_exit=False, id_generator=self._ids
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _otlp(settings.otlp_endpoint)))
        self._tracer = self._provider.get_tracer("framework", __version__)

    # Server process

    @hookimpl
    def response_done(self, record: ResponseRecord) -> None:
        if not record.sampled:
            return
        parent = Context()
        if record.parent_span_id:
            parent = _context(f"00-{record.trace_id}-{record.parent_span_id}-01")
        self._ids.preset(record.trace_id, record.span_id)
        span = self._span(
            f"{record.operation} {record.model}",
            parent,
            record.start + self._epoch,
            record.end + self._epoch,
            self._request_attributes(record),
            kind=trace.SpanKind.SERVER,
            error=record.error if record.status >= 500 else None,
        )
        inside = trace.set_span_in_context(span, Context())
        stages = record.stages
        if record.detokenize_ns and all(name != "detokenize" for name, _, _ in stages):
            # Many short calls: one span over them all, which says how much of it was spent.
            stages = [*stages, ("detokenize", record.first_token, record.last_token)]
        for name, start, end in stages:
            busy = {"framework.busy_seconds": record.detokenize_ns / 1e9} if name == "detokenize" else None
            self._span(name, inside, start + self._epoch, end + self._epoch, busy)

    def _request_attributes(self, record: ResponseRecord) -> Attributes:
        attributes: Attributes = {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": "framework",
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.response.id": record.id,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "http.response.status_code": record.status,
            **self._server,
            **record.attributes,
        }
        if record.stream:
            attributes["gen_ai.request.stream"] = True
        if record.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = record.finish_reasons
        if record.first_token:
            seconds = (record.first_token - record.start) / 1e9
            attributes["gen_ai.response.time_to_first_chunk"] = seconds
        if record.status >= 400:
            attributes["error.type"] = str(record.status)
        return attributes

    # Engine process

    @hookimpl
    def started(self, engine: Any) -> None:
        self._engine_epoch = _epoch(engine.executor.clock.ns)

    @hookimpl
    def arrived(self, request: Request) -> None:
        if request.trace:
            self._traces[request.id] = request.trace

    @hookimpl
    def request_done(self, request: Request) -> None:
        if request.id in self._traces:  # not if it was refused on arrival
            self._ended.append(request.id)
            if len(self._ended) > _MAX_LINKS:  # more than a step names, or none comes to its end
                self._traces.pop(self._ended.popleft(), None)
        parent = _context(request.trace)
        if not _sampled(parent):
            return
        end = request.finished_at
        stages = (
            ("queue", request.arrival, request.admitted_at or end, {"framework.priority": request.priority}),
            (
                "prefill",
                request.admitted_at,
                request.first_token_at or end,
                {"gen_ai.usage.input_tokens": len(request.prompt)},
            ),
            ("decode", request.first_token_at, end, {"gen_ai.usage.output_tokens": len(request.output)}),
        )
        common: Attributes = {
            "framework.request.id": request.id,
            "framework.preemptions": request.preemptions,
            "framework.computed_tokens": request.computed,
            "framework.finish_reason": request.finish_reason or "",
        }
        for name, start, stop, attributes in stages:
            if start is not None and stop is not None:
                self._span(name, parent, self._engine_time(start), self._engine_time(stop), common | attributes)

    @hookimpl
    def step_done(self, plan: Plan, result: StepResult, timings: Timings) -> None:
        if self._every and plan.step % self._every == 0:
            self._trace_step(plan, result, timings)
        for id in self._ended:
            self._traces.pop(id, None)
        self._ended.clear()

    def _trace_step(self, plan: Plan, result: StepResult, timings: Timings) -> None:
        traces = (_context(self._traces.get(s.request_id)) for s in plan.slices)
        links = [
            trace.Link(trace.get_current_span(context).get_span_context())
            for context in islice(filter(_sampled, traces), _MAX_LINKS)
        ]
        epoch = self._engine_epoch
        span = self._span(
            "engine.step",
            Context(),
            timings.start + epoch,
            timings.end + epoch,
            {
                "framework.step": plan.step,
                "framework.tokens": plan.tokens,
                "framework.requests": len(plan.slices),
                "framework.preempted": len(plan.preempted),
                "framework.errors": len(result.errors),
            },
            links=links,
        )
        inside = trace.set_span_in_context(span, Context())
        for name, start, end in timings.stages:
            self._span(name, inside, start + epoch, end + epoch)

    # Both

    @hookimpl
    def stopping(self) -> None:
        self.flush()

    def flush(self) -> bool:
        """Export what is queued; wait at most `FLUSH_SECONDS`. True if it came to an end."""
        thread = threading.Thread(target=self._provider.force_flush, name="otel-flush", daemon=True)
        thread.start()  # the exporter knows no time limit of ours and may be retrying
        thread.join(FLUSH_SECONDS)
        return not thread.is_alive()

    def _engine_time(self, seconds: float) -> int:
        return round(seconds * 1e9) + self._engine_epoch

    def _span(
        self,
        name: str,
        parent: Context,
        start: int,
        end: int,
        attributes: Mapping[str, Any] | None = None,
        *,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
        links: Sequence[trace.Link] = (),
        error: str | None = None,
    ) -> trace.Span:
        """One finished span; times are nanoseconds since 1970."""
        span = self._tracer.start_span(name, parent, kind, attributes, links, start)
        if error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        span.end(end)
        return span


class _PresetIds(RandomIdGenerator):
    """Gives the next root or child span of this thread the ids that a record already has."""

    def __init__(self) -> None:
        self._next = threading.local()

    def preset(self, trace_id: str, span_id: str) -> None:
        self._next.trace, self._next.span = int(trace_id, 16), int(span_id, 16)

    def generate_trace_id(self) -> int:
        return self._take("trace") or super().generate_trace_id()

    def generate_span_id(self) -> int:
        self._take("trace")  # not asked for below a parent
        return self._take("span") or super().generate_span_id()

    def _take(self, kind: str) -> int:
        return int(self._next.__dict__.pop(kind, 0))


class _OncePerMinute(logging.Filter):
    """A collector that is away costs one line a minute, not several per batch. It says what that means."""

    _last = -60.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._last < 60:
            return False
        self._last = now
        told = [record.getMessage()] + ([str(record.exc_info[1])] if record.exc_info else [])
        why = brief(" ".join(" ".join(told).split()), 300)
        record.msg = f"no traces reach --otlp-endpoint: only they are lost (told once a minute by each process): {why}"
        record.args, record.exc_info, record.exc_text = (), None, None
        return True


_once = _OncePerMinute()


def _otlp(endpoint: str | None) -> OTLPSpanExporter:
    """Raises `ConfigError` unless `endpoint` is None or a URL."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_once)
    if endpoint is None:
        return OTLPSpanExporter()
    url = urlsplit(endpoint)
    try:
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # the port is no number
        valid = False
    if not valid:
        raise ConfigError(f"--otlp-endpoint {endpoint}: expected a URL such as http://127.0.0.1:4318")
    path = url.path if url.path.strip("/") else "/v1/traces"
    return OTLPSpanExporter(endpoint=url._replace(path=path).geturl())


def _epoch(clock: Callable[[], int]) -> int:
    """What turns nanoseconds of `clock` into nanoseconds since 1970."""
    # The narrowest of a few readings: being interrupted between two clocks would shift one process's spans.
    readings = [(clock(), time.time_ns(), clock()) for _ in range(5)]
    before, now, after = min(readings, key=lambda r: r[2] - r[0])
    return now - (before + after) // 2


def _context(traceparent: str | None) -> Context:
    """The span that a W3C traceparent names, as a parent; empty if there is none or it is malformed."""
    if not traceparent:
        return Context()
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())


def _sampled(context: Context) -> bool:
    span = trace.get_current_span(context).get_span_context()
    return span.is_valid and span.trace_flags.sampled


__all__ = ["FLUSH_SECONDS", "Otel"]
