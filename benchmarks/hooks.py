"""What a hook call and a span cost: medians in microseconds.

    python benchmarks/hooks.py

A hook is called with one implementation that does nothing. Spans are those of one served request, made from its record
as the server does; exporting them is left out, as a thread of its own does it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from common import header
from framework.plugins.telemetry import OtelOptions
from framework.plugins.telemetry.otel import Otel
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from framework import Plan, Request, ResponseRecord, SamplingParams, StepResult, Timings, hookimpl
from framework.registry import load_plugins
from framework.settings import Settings


class Idle:
    """Implements a first-result hook and an event, and does nothing."""

    @hookimpl
    def accept(self, request: Request) -> None: ...

    @hookimpl
    def step_done(self, plan: Plan, timings: Timings) -> None: ...


class Nowhere(SpanExporter):
    """Counts spans."""

    count = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.count += len(spans)
        return SpanExportResult.SUCCESS


def microseconds(call: Callable[[], object], calls: int, between: Callable[[], object] = lambda: None) -> float:
    """Of one call: the median of 30 rounds."""
    rounds = []
    for _ in range(30):
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter_ns() - start) / calls / 1e3)
        between()
    return statistics.median(rounds)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    header()
    plugins = load_plugins([("idle", Idle())])
    request, plan, result = Request("r", [1], SamplingParams()), Plan(1), StepResult(1)
    first = microseconds(lambda: plugins.hook.accept(request=request, view=None), 1000)
    fault, timings = (lambda *_: None), Timings(0)
    event = microseconds(lambda: plugins.notify("step_done", fault, plan=plan, result=result, timings=timings), 1000)
    exporter = Nowhere()
    otel = Otel(Settings(), OtelOptions(), exporter)
    stages = [("http.receive", 1, 2), ("tokenize", 2, 3), ("http.send", 4, 9)]
    record = ResponseRecord(
        id="cmpl-1", operation="chat", model="demo", trace_id="a" * 32, span_id="b" * 16, start=1, end=9,
        stages=stages, detokenize_ns=1, first_token=4, last_token=8, finish_reasons=["length"],
        attributes={"gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 7},
    )  # fmt: skip
    request_spans = microseconds(lambda: otel.response_done(record), 50, otel.flush)
    spans = exporter.count / (30 * 50)
    print(f"  first-result hook {first:6.2f}")
    print(f"  event             {event:6.2f}")
    print(f"  span              {request_spans / spans:6.2f}   ({spans:.0f} spans of a request: {request_spans:.0f})")


if __name__ == "__main__":
    main()
