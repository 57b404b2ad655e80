"""Spans, metrics and log lines of a real server and its engine process, as those who collect them get them."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families as parse

pytestmark = pytest.mark.slow

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
UNSAMPLED = "a" * 32
TOKENS = 64
STEP_STAGES = {"admission", "kv_allocation", "batch_build", "forward", "sampling", "commit"}
SERVER_STAGES = {"http.receive", "tokenize", "detokenize", "http.send"}
ENGINE_STAGES = {"queue", "prefill", "decode"}


class Collector(http.server.ThreadingHTTPServer):
    """A loopback OTLP/HTTP collector: keeps (process id, span)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[tuple[int, Span]] = []


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {a.key: a.value for a in resource.resource.attributes}
            assert attributes["service.name"].string_value == "framework"
            pid = attributes["process.pid"].int_value
            self.server.received += [(pid, span) for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Run(NamedTuple):
    """A run with three requests: one plain, one that continues a trace and streams, one that is not sampled."""

    collector: Collector
    metrics: dict[str, float]
    logs: str
    request_ids: list[str]


@pytest.fixture(scope="module")
def run(collector: Collector, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    port = free_port()
    command = [sys.executable, "-m", "framework", "serve", "--model", str(tiny_llama), "--port", str(port)]
    command += ["--kv-blocks", "256", "--served-model-name", "tiny", "--log-format", "json"]
    command += ["--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}"]
    command += ["--plugin-opt", "otel.step_sampling=1"]
    logs = tmp_path_factory.mktemp("logs") / "stderr"
    with logs.open("wb") as stderr:
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=stderr)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            wait_until_ready(process, client)
            body = {"model": "tiny", "prompt": "once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
            responses = [
                client.post("/v1/completions", json=body | extra, headers=headers)
                for extra, headers in (
                    ({}, {}),
                    ({"stream": True}, {"traceparent": f"00-{TRACE}-{CALLER}-01"}),
                    ({}, {"traceparent": f"00-{UNSAMPLED}-{CALLER}-00"}),
                )
            ]
            metrics = client.get("/metrics").text
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(15)
    assert [response.status_code for response in responses] == [200] * 3
    values = {sample.name: sample.value for family in parse(metrics) for sample in family.samples if not sample.labels}
    return Run(collector, values, logs.read_text(), [response.headers["x-request-id"] for response in responses])


@pytest.fixture(scope="module")
def spans(run: Run) -> list[tuple[int, Span]]:
    """(process id, span), once both processes have ended."""
    return run.collector.received


def wait_until_ready(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.ConnectError:
            time.sleep(0.1)
    raise AssertionError("the server did not get ready")


def children(spans: list[tuple[int, Span]]) -> dict[bytes, list[tuple[int, Span]]]:
    tree = defaultdict(list)
    for pid, span in spans:
        if span.parent_span_id:
            tree[span.parent_span_id].append((pid, span))
    return tree


def covered(parent: Span, inside: list[Span]) -> float:
    """Share of the parent's time during which a child ran."""
    total, last = 0, parent.start_time_unix_nano
    for span in sorted(inside, key=lambda s: s.start_time_unix_nano):
        start = max(span.start_time_unix_nano, last)
        end = min(span.end_time_unix_nano, parent.end_time_unix_nano)
        if end > start:
            total, last = total + end - start, end
    return total / (parent.end_time_unix_nano - parent.start_time_unix_nano)


def requests(spans: list[tuple[int, Span]]) -> list[tuple[int, Span]]:
    return [(pid, span) for pid, span in spans if span.kind == Span.SPAN_KIND_SERVER]


def test_one_request_span_per_sampled_request(spans: list[tuple[int, Span]]) -> None:
    (_, plain), (_, continued) = requests(spans)
    assert plain.name == continued.name == "text_completion tiny"
    assert plain.parent_span_id == b""
    assert (continued.trace_id.hex(), continued.parent_span_id.hex()) == (TRACE, CALLER)
    assert UNSAMPLED not in {span.trace_id.hex() for _, span in spans}
    for span in (plain, continued):
        attributes = {a.key: a.value for a in span.attributes}
        assert attributes["gen_ai.usage.output_tokens"].int_value == TOKENS
        assert attributes["gen_ai.usage.input_tokens"].int_value > 0
        assert [v.string_value for v in attributes["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
        assert attributes["gen_ai.request.max_tokens"].int_value == TOKENS


def test_request_has_every_stage_of_both_processes(spans: list[tuple[int, Span]]) -> None:
    tree = children(spans)
    for server, request in requests(spans):
        pids = defaultdict(set)
        for pid, span in tree[request.span_id]:
            assert span.trace_id == request.trace_id
            pids[span.name].add(pid)
        assert set(pids) == SERVER_STAGES | ENGINE_STAGES
        assert all(pids[name] == {server} for name in SERVER_STAGES)
        (engine,) = set.union(*(pids[name] for name in ENGINE_STAGES))
        assert engine != server


def test_engine_spans_carry_the_request_id(run: Run, spans: list[tuple[int, Span]]) -> None:
    """So do log lines of the engine: it is the id that plugins log."""
    ids = {a.value.string_value for _, span in spans for a in span.attributes if a.key == "framework.request.id"}
    sampled = run.request_ids[:2]
    assert len(ids) == 2 and all(any(id.startswith(f"{request}-") for id in ids) for request in sampled)


def test_stages_cover_the_request(spans: list[tuple[int, Span]]) -> None:
    tree = children(spans)
    for _, request in requests(spans):
        assert covered(request, [span for _, span in tree[request.span_id]]) >= 0.9


def test_engine_stages_alone_cover_most_of_the_request(spans: list[tuple[int, Span]]) -> None:
    """Both processes' clocks agree, or the engine's spans would lie beside the server's."""
    tree = children(spans)
    for _, request in requests(spans):
        engine = [span for _, span in tree[request.span_id] if span.name in ENGINE_STAGES]
        assert covered(request, engine) >= 0.5


def test_steps_are_spans_with_every_stage_that_cover_them(spans: list[tuple[int, Span]]) -> None:
    tree = children(spans)
    steps = [(pid, span) for pid, span in spans if span.name == "engine.step"]
    assert len(steps) >= 3 * TOKENS
    linked = set()
    shares = []
    for pid, step in steps:
        inside = tree[step.span_id]
        assert {span.name for _, span in inside} - {"preemption"} == STEP_STAGES
        assert {p for p, _ in inside} == {pid} and step.parent_span_id == b""
        shares.append(covered(step, [span for _, span in inside]))
        linked |= {link.span_id for link in step.links}
    # Of most steps, and of their time in all: one that the machine interrupted between two stamps may be less.
    assert statistics.median(shares) >= 0.9
    lengths = [step.end_time_unix_nano - step.start_time_unix_nano for _, step in steps]
    assert sum(share * length for share, length in zip(shares, lengths, strict=True)) >= 0.9 * sum(lengths)
    assert linked == {span.span_id for _, span in requests(spans)}


def test_metrics_count_what_was_served(run: Run) -> None:
    metrics = run.metrics
    assert metrics["framework_engine_up"] == 1
    assert metrics["framework_requests_running"] == metrics["framework_requests_waiting"] == 0
    assert metrics["framework_kv_cache_usage"] == 0
    assert metrics["framework_generation_tokens_total"] == 3 * TOKENS
    assert metrics["framework_prompt_tokens_total"] > 0
    assert metrics["framework_time_to_first_token_seconds_count"] == 3
    assert metrics["framework_inter_token_latency_seconds_count"] == 3 * (TOKENS - 1)
    assert metrics["framework_e2e_request_latency_seconds_count"] == 3
    assert metrics["framework_e2e_request_latency_seconds_sum"] > metrics["framework_time_to_first_token_seconds_sum"]


def test_one_access_line_per_request_with_its_id(run: Run) -> None:
    lines = [json.loads(line) for line in run.logs.splitlines() if line.startswith("{")]
    access = {line["request_id"]: line for line in lines if line["event"] == "http request"}
    for id in run.request_ids:
        assert (access[id]["method"], access[id]["path"], access[id]["status"]) == ("POST", "/v1/completions", 200)
        assert access[id]["process"] == "server"
    assert len([line for line in lines if line.get("path") == "/v1/completions"]) == 3
    assert not [line for line in lines if line["level"] in ("warning", "error")]
