import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
from framework.plugins.telemetry import OtelOptions
from framework.plugins.telemetry import otel as module
from framework.plugins.telemetry.otel import Otel
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from framework import (
    ConfigError,
    Delta,
    Plan,
    Request,
    ResponseRecord,
    SamplingParams,
    Slice,
    StepResult,
    Timings,
)
from framework.settings import Settings

TRACE, SPAN, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"
MS = 1_000_000


class Rig:
    """A plugin and what it exported."""

    def __init__(self, **options: int) -> None:
        self.exporter = InMemorySpanExporter()
        self.plugin = Otel(Settings(host="127.0.0.1", port=8123), OtelOptions(**options), self.exporter)

    def spans(self) -> list[ReadableSpan]:
        assert self.plugin.flush()
        return list(self.exporter.get_finished_spans())

    def by_name(self) -> dict[str, ReadableSpan]:
        spans = self.spans()
        named = {span.name: span for span in spans}
        assert len(named) == len(spans)
        return named


def record(**changes: object) -> ResponseRecord:
    fields: dict[str, object] = {
        "id": "cmpl-1",
        "operation": "chat",
        "model": "demo",
        "trace_id": TRACE,
        "span_id": SPAN,
        "start": 100 * MS,
        "end": 200 * MS,
        "stages": [
            ("http.receive", 100 * MS, 101 * MS),
            ("tokenize", 101 * MS, 103 * MS),
            ("http.send", 130 * MS, 200 * MS),
        ],
        "detokenize_ns": 2 * MS,
        "first_token": 130 * MS,
        "last_token": 199 * MS,
        "prompt_tokens": 11,
        "output_tokens": 7,
        "finish_reasons": ["length"],
        "attributes": {"gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 7},
    }
    return ResponseRecord(**fields | changes)  # type: ignore[arg-type]


def request(id: str = "cmpl-1", trace: str | None = f"00-{TRACE}-{SPAN}-01") -> Request:
    made = Request(id, list(range(11)), SamplingParams(), arrival=10.0, trace=trace)
    made.admitted_at, made.first_token_at, made.finished_at = 10.25, 10.75, 12.0
    made.output += [1, 2, 3]
    made.preemptions, made.finish_reason = 2, "length"
    return made


def ids(span: ReadableSpan) -> tuple[str, str, str | None]:
    """Trace, span and parent, in hex."""
    context = span.get_span_context()
    assert context is not None
    parent = f"{span.parent.span_id:016x}" if span.parent else None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}", parent


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


def test_request_span_has_the_ids_of_the_record_and_gen_ai_attributes() -> None:
    rig = Rig()
    rig.plugin.response_done(record())
    span = rig.by_name()["chat demo"]
    assert ids(span) == (TRACE, SPAN, None)
    assert span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "framework",
        "gen_ai.request.model": "demo",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.response.model": "demo",
        "gen_ai.response.id": "cmpl-1",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": 0.03,
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 7,
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": 8123,
    }
    assert span.resource.attributes["service.name"] == "framework"


def test_server_stages_are_children_with_explicit_times() -> None:
    rig = Rig()
    rig.plugin.response_done(record())
    spans = rig.by_name()
    start, end = times(spans["chat demo"])
    assert end - start == 100 * MS
    now = time.time_ns() - time.monotonic_ns()
    assert abs(start - 100 * MS - now) < 10**9  # a stamp of the monotonic clock became a time of day
    for name, begins, ends in (
        ("http.receive", 0, 1),
        ("tokenize", 1, 3),
        ("http.send", 30, 100),
        ("detokenize", 30, 99),
    ):
        child = spans[name]
        assert ids(child)[0] == TRACE and ids(child)[2] == SPAN
        assert times(child) == (start + begins * MS, start + ends * MS)
    assert spans["detokenize"].attributes == {"framework.busy_seconds": 0.002}


def test_detokenize_stages_that_are_there_are_not_summed_up() -> None:
    rig = Rig()
    rig.plugin.response_done(record(stages=[("detokenize", 150 * MS, 160 * MS)]))
    start, end = times(rig.by_name()["detokenize"])
    assert end - start == 10 * MS


def test_incoming_trace_is_continued() -> None:
    rig = Rig()
    rig.plugin.response_done(record(parent_span_id=CALLER))
    assert ids(rig.by_name()["chat demo"]) == (TRACE, SPAN, CALLER)


def test_ids_of_a_record_are_used_once() -> None:
    rig = Rig()
    rig.plugin.response_done(record(parent_span_id=CALLER, stages=[], detokenize_ns=0))
    rig.plugin.step_done(Plan(0), StepResult(0), Timings(1, 2, []))
    step = rig.by_name()["engine.step"]
    assert ids(step)[0] != TRACE and ids(step)[1] != SPAN


def test_errors_are_on_the_request_span() -> None:
    rig = Rig()
    rig.plugin.response_done(record(error="engine died", status=503, stages=[], detokenize_ns=0))
    rig.plugin.response_done(record(error="too long", status=400, stages=[], detokenize_ns=0))
    died, refused = rig.spans()
    assert died.status.status_code is StatusCode.ERROR and died.status.description == "engine died"
    assert (died.attributes or {})["error.type"] == "503"
    assert refused.status.status_code is StatusCode.UNSET  # the client's fault, as the conventions have it
    assert (refused.attributes or {})["error.type"] == "400"


def test_engine_stages_are_children_of_the_span_in_the_traceparent() -> None:
    rig = Rig()
    rig.plugin.request_done(request())
    spans = rig.by_name()
    assert list(spans) == ["queue", "prefill", "decode"]
    durations = [times(span)[1] - times(span)[0] for span in spans.values()]
    assert durations == [250 * MS, 500 * MS, 1250 * MS]
    assert times(spans["queue"])[1] == times(spans["prefill"])[0]
    assert times(spans["prefill"])[1] == times(spans["decode"])[0]
    for span in spans.values():
        assert ids(span)[0] == TRACE and ids(span)[2] == SPAN
        attributes = span.attributes or {}
        assert attributes["framework.request.id"] == "cmpl-1"
        assert attributes["framework.preemptions"] == 2
    assert (spans["prefill"].attributes or {})["gen_ai.usage.input_tokens"] == 11
    assert (spans["decode"].attributes or {})["gen_ai.usage.output_tokens"] == 3


@pytest.mark.parametrize(
    ("missing", "stages"),
    [
        ((), ["queue", "prefill", "decode"]),
        (("first_token_at",), ["queue", "prefill"]),
        (("first_token_at", "admitted_at"), ["queue"]),
        (("first_token_at", "admitted_at", "finished_at"), []),
    ],
)
def test_stages_that_a_request_did_not_reach_have_no_span(missing: tuple[str, ...], stages: list[str]) -> None:
    rig = Rig()
    ended = request()
    for stamp in missing:
        setattr(ended, stamp, None)
    rig.plugin.request_done(ended)
    spans = rig.spans()
    assert [span.name for span in spans] == stages
    if stages and missing:  # the last one lasts until the end
        assert times(spans[-1])[1] - times(spans[0])[0] == 2000 * MS


def test_engine_times_are_those_of_the_executors_clock() -> None:
    class Virtual:
        def ns(self) -> int:
            return 10 * 10**9

    rig = Rig()
    rig.plugin.started(SimpleNamespace(executor=SimpleNamespace(clock=Virtual())))
    before = time.time_ns()
    rig.plugin.request_done(request())
    assert abs(times(rig.by_name()["queue"])[0] - before) < 10**9


@pytest.mark.parametrize("traceparent", [None, f"00-{TRACE}-{SPAN}-00", "nonsense", f"00-{'0' * 32}-{SPAN}-01"])
def test_unsampled_untraced_and_malformed_give_no_span(traceparent: str | None) -> None:
    rig = Rig()
    rig.plugin.response_done(record(sampled=False))
    rig.plugin.request_done(request(trace=traceparent))
    assert rig.spans() == []


STAGES = [
    (name, (10 + i) * MS, (11 + i) * MS)
    for i, name in enumerate(
        ("admission", "kv_allocation", "preemption", "batch_build", "forward", "sampling", "commit")
    )
]


def test_step_span_has_a_child_per_stage_and_links_to_its_requests() -> None:
    rig = Rig(step_sampling=1)
    other = f"00-{TRACE}-{CALLER}-01"
    for id, trace in (("a", f"00-{TRACE}-{SPAN}-01"), ("b", other), ("c", f"00-{TRACE}-{CALLER}-00"), ("d", None)):
        rig.plugin.arrived(request(id, trace))
    plan = Plan(7, slices=tuple(Slice(id, 0, 4, (Delta(0, 0, (1,)),), True) for id in "abcd"))
    rig.plugin.step_done(plan, StepResult(7), Timings(10 * MS, 17 * MS, list(STAGES)))
    spans = rig.by_name()
    step = spans.pop("engine.step")
    trace_id, span_id, parent = ids(step)
    assert parent is None and trace_id != TRACE
    assert times(step)[1] - times(step)[0] == 7 * MS
    assert [f"{link.context.span_id:016x}" for link in step.links] == [SPAN, CALLER]
    assert (step.attributes or {})["framework.step"] == 7
    assert (step.attributes or {})["framework.tokens"] == 16
    assert (step.attributes or {})["framework.requests"] == 4
    assert list(spans) == [name for name, _, _ in STAGES]
    for i, child in enumerate(spans.values()):
        assert ids(child)[0] == trace_id and ids(child)[2] == span_id
        assert times(child) == (times(step)[0] + i * MS, times(step)[0] + (i + 1) * MS)


def test_links_end_after_the_step_that_ended_the_request() -> None:
    rig = Rig(step_sampling=1)
    rig.plugin.arrived(request("a"))
    rig.plugin.request_done(request("a", trace=None))
    for step in (1, 2):
        plan = Plan(step, slices=(Slice("a", 0, 4, (), True),))
        rig.plugin.step_done(plan, StepResult(step), Timings(1, 2, []))
    assert [len(span.links) for span in rig.spans()] == [1, 0]


def test_requests_of_no_step_are_not_kept() -> None:
    """Those that were refused on arrival, and those that end while no step does."""
    rig = Rig()
    for number in range(1000):
        rig.plugin.request_done(request(f"refused {number}"))
    assert not rig.plugin._ended and not rig.plugin._traces
    rig.plugin.arrived(request("lives"))
    for number in range(1000):
        rig.plugin.arrived(request(f"{number}"))
        rig.plugin.request_done(request(f"{number}"))
    assert len(rig.plugin._ended) <= 128 and len(rig.plugin._traces) <= 129
    rig.plugin.step_done(Plan(1), StepResult(1), Timings(1, 2, []))
    assert not rig.plugin._ended and list(rig.plugin._traces) == ["lives"]


@pytest.mark.parametrize(("every", "traced"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (0, []), (100, [])])
def test_every_nth_step_is_traced(every: int, traced: list[int]) -> None:
    rig = Rig(step_sampling=every)
    for step in range(1, 7):
        rig.plugin.step_done(Plan(step), StepResult(step), Timings(1, 2, []))
    assert [(span.attributes or {})["framework.step"] for span in rig.spans()] == traced


def test_flush_exports_what_is_queued() -> None:
    rig = Rig()
    rig.plugin.response_done(record())
    assert not rig.exporter.get_finished_spans()
    rig.plugin.stopping()
    assert rig.exporter.get_finished_spans()


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/otlp/traces", "https://collector/otlp/traces"),
    ],
)
def test_endpoint_without_a_path_gets_the_usual_one(given: str, used: str) -> None:
    assert module._otlp(given)._endpoint == used


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://", "", "http://h:port"])
def test_endpoint_that_is_no_url_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        module._otlp(endpoint)


@pytest.fixture
def exporter_logs() -> Iterator[list[logging.LogRecord]]:
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_collector_that_is_away_harms_nobody_and_costs_one_log_line(
    exporter_logs: list[logging.LogRecord], closed_port: int
) -> None:
    plugin = Otel(Settings(otlp_endpoint=f"http://127.0.0.1:{closed_port}"), OtelOptions())
    for _ in range(20):
        plugin.response_done(record())
    plugin.stopping()
    plugin.response_done(record())
    [line] = exporter_logs
    assert "--otlp-endpoint" in line.getMessage() and "only they are lost" in line.getMessage()
    assert line.exc_info is None


def test_shutdown_does_not_wait_for_a_collector_that_hangs() -> None:
    class Hangs(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            answered.wait()
            return super().export(spans)

    answered, exporter = threading.Event(), Hangs()
    plugin = Otel(Settings(), OtelOptions(), exporter)
    plugin.response_done(record())
    plugin.stopping()
    assert not exporter.get_finished_spans()
    answered.set()
    assert plugin.flush() and exporter.get_finished_spans()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_one_log_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    line = logging.LogRecord("x", logging.ERROR, "x", 1, "x", (), None)
    once = module._OncePerMinute()
    passed: Callable[[], bool] = lambda: once.filter(line)  # noqa: E731
    assert passed() and not passed()
    now += 59
    assert not passed()
    now += 2
    assert passed() and not passed()


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys; from framework.registry import load_plugins; from framework.settings import Settings;"
        "settings = Settings(); plugins = load_plugins(); plugins.activate(settings, engine=False);"
        "print(sorted(m for m in sys.modules if m.startswith('opentelemetry')),"
        "sorted(p.name for p in plugins.providers('plugin')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}
    )
    assert done.stdout.strip() == "[] ['grammar', 'otel', 'prometheus']"
