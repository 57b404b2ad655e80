"""Spans of a real server and its engine process, as a collector receives them."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

pytestmark = pytest.mark.slow

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
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


@pytest.fixture(scope="module")
def spans(collector: Collector, tiny_llama: Path) -> list[tuple[int, Span]]:
    """All spans of a run with three requests: one plain, one that continues a trace and streams, one not sampled."""
    port = free_port()
    command = [sys.executable, "-m", "framework", "serve", "--model", str(tiny_llama), "--port", str(port)]
    command += ["--kv-blocks", "256", "--served-model-name", "tiny"]
    command += ["--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}"]
    command += ["--plugin-opt", "otel.step_sampling=1"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            wait_until_ready(process, client)
            body = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 64, "ignore_eos": True}
            traced = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
            unsampled = {"traceparent": f"00-{'a' * 32}-{CALLER}-00"}
            assert client.post("/v1/completions", json=body).status_code == 200
            streamed = client.post("/v1/completions", json=body | {"stream": True}, headers=traced)
            assert streamed.status_code == 200 and "[DONE]" in streamed.text
            assert client.post("/v1/completions", json=body, headers=unsampled).status_code == 200
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(15)
    return collector.received


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
    assert "a" * 32 not in {span.trace_id.hex() for _, span in spans}
    for span in (plain, continued):
        attributes = {a.key: a.value for a in span.attributes}
        assert attributes["gen_ai.usage.output_tokens"].int_value == 64
        assert attributes["gen_ai.usage.input_tokens"].int_value > 0
        assert [v.string_value for v in attributes["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
        assert attributes["gen_ai.request.max_tokens"].int_value == 64


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
    assert len(steps) >= 3 * 64
    linked = set()
    shares = []
    for pid, step in steps:
        inside = tree[step.span_id]
        assert {span.name for _, span in inside} - {"preemption"} == STEP_STAGES
        assert {p for p, _ in inside} == {pid} and step.parent_span_id == b""
        shares.append(covered(step, [span for _, span in inside]))
        linked |= {link.span_id for link in step.links}
    assert (
        sorted(shares)[len(shares) // 20] >= 0.9
    )  # a step that the machine interrupted between two stamps may be less
    assert linked == {span.span_id for _, span in requests(spans)}
