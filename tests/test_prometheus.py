import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from framework.plugins.telemetry.prometheus import Prometheus
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from framework import Delivery, ResponseRecord, __version__
from framework.messages import EngineInfo, EngineStats, RequestTimes

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Client:
    """What the plugin reads of an engine client."""

    stats: EngineStats = field(default_factory=EngineStats)
    info: EngineInfo | None = None
    alive: bool = True


def served(plugin: Prometheus, client: Client) -> TestClient:
    app = FastAPI()
    for router in plugin.routes(client):
        app.include_router(router)
    return TestClient(app)


def scrape(http: TestClient) -> Samples:
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(response.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"framework_{name}", frozenset(labels.items())]


def record(**changes: object) -> ResponseRecord:
    fields: dict[str, object] = {
        "id": "r",
        "operation": "chat",
        "model": "m",
        "trace_id": "1" * 32,
        "span_id": "2" * 16,
        "start": 1_000_000_000,
        "end": 3_000_000_000,
        "prompt_tokens": 5,
        "output_tokens": 9,
        "finish_reasons": ["stop"],
    }
    return ResponseRecord(**fields | changes)  # type: ignore[arg-type]


def test_engine_state_is_read_at_each_scrape() -> None:
    client = Client()
    http = served(Prometheus(), client)
    idle = scrape(http)
    assert value(idle, "requests_running") == 0
    assert value(idle, "kv_cache_usage") == 0  # before the pool is known

    client.stats = EngineStats(
        step=10,
        running=3,
        waiting=4,
        kv_blocks=100,
        kv_holding=20,
        kv_reserved=5,
        kv_cached=15,
        kv_swapped=7,
        preemptions_swap=1,
        preemptions_recompute=2,
        prompt_tokens=1000,
        generation_tokens=50,
        failed_steps=6,
        plugin_faults={"quota": 8},
        kv_tokens=300,
        swaps_exhausted=9,
        recomputed_tokens=10,
        prefix_hits=11,
        prefix_hit_tokens=12,
    )
    client.alive = False
    now = scrape(http)
    assert value(now, "engine_up") == 0 and value(idle, "engine_up") == 1
    assert value(now, "requests_running") == 3
    assert value(now, "requests_waiting") == 4
    assert value(now, "kv_cache_usage") == 0.25
    states = {s: value(now, "kv_blocks", state=s) for s in ("holding", "reserved", "cached", "free", "swapped")}
    assert states == {"holding": 20, "reserved": 5, "cached": 15, "free": 60, "swapped": 7}
    assert value(now, "preemptions_total", mode="swap") == 1
    assert value(now, "preemptions_total", mode="recompute") == 2
    assert value(now, "prompt_tokens_total") == 1000
    assert value(now, "swaps_exhausted_total") == 9
    assert value(now, "recomputed_tokens_total") == 10
    assert value(now, "prefix_cache_hits_total") == 11
    assert value(now, "prefix_cache_hit_tokens_total") == 12
    assert value(now, "generation_tokens_total") == 50
    assert value(now, "failed_steps_total") == 6
    assert value(now, "plugin_faults_total", plugin="quota") == 8


def test_engine_info_says_what_is_served() -> None:
    info = EngineInfo(
        model="demo",
        architecture="LlamaForCausalLM",
        dtype="float32",
        device="cpu",
        vocab_size=100,
        max_model_len=2048,
        max_model_len_reason="model",
        block_size=16,
        kv_blocks=512,
        block_bytes=4096,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        threads=2,
        providers={},
        manifest={},
    )
    client = Client(info=info)
    client.stats = EngineStats(kv_blocks=512, kv_holding=8, kv_reserved=2, kv_tokens=120)
    info.host_blocks = 128
    samples = scrape(served(Prometheus(), client))
    assert value(samples, "kv_token_usage") == 0.75 and value(samples, "kv_host_blocks") == 128
    (labels,) = [dict(labels) for name, labels in samples if name == "framework_engine_info"]
    assert labels == {
        "version": __version__,
        "model": "demo",
        "dtype": "float32",
        "device": "cpu",
        "block_size": "16",
        "kv_blocks": "512",
        "max_model_len": "2048",
    }


def test_latencies_come_from_deliveries() -> None:
    plugin, r = Prometheus(), record()
    plugin.tokens_delivered([Delivery(r, 1, None, 0.03), Delivery(r, 1, 0.02, None)])
    plugin.tokens_delivered([Delivery(r, 4, 0.4, None)])
    samples = scrape(served(plugin, Client()))
    assert value(samples, "time_to_first_token_seconds_count") == 1
    assert value(samples, "time_to_first_token_seconds_sum") == pytest.approx(0.03)
    assert value(samples, "time_to_first_token_seconds_bucket", le="0.02") == 0
    assert value(samples, "time_to_first_token_seconds_bucket", le="0.04") == 1
    assert value(samples, "inter_token_latency_seconds_count") == 5  # four of them 0.1 s apart
    assert value(samples, "inter_token_latency_seconds_sum") == pytest.approx(0.42)
    assert value(samples, "inter_token_latency_seconds_bucket", le="0.075") == 1


def test_finished_and_failed_requests_are_told_apart() -> None:
    plugin = Prometheus()
    plugin.response_done(record())
    plugin.response_done(record(finish_reasons=["length", "stop"]))
    plugin.response_done(record(finish_reasons=[], error="engine died", status=503))
    plugin.response_done(record(finish_reasons=["abort"], status=499))
    samples = scrape(served(plugin, Client()))
    assert value(samples, "request_success_total", finish_reason="stop") == 2
    assert value(samples, "request_success_total", finish_reason="length") == 1
    assert value(samples, "request_success_total", finish_reason="abort") == 1
    assert value(samples, "requests_failed_total", status="503") == 1
    assert value(samples, "e2e_request_latency_seconds_count") == 2
    assert value(samples, "e2e_request_latency_seconds_sum") == pytest.approx(4)
    assert value(samples, "request_prompt_tokens_sum") == 10
    assert value(samples, "request_generation_tokens_sum") == 18


def test_stages_are_those_of_each_sequence_that_got_a_token() -> None:
    plugin, second = Prometheus(), 1_000_000_000
    times = {
        0: RequestTimes(second, 2 * second, 4 * second, 8 * second, preemptions=3, cached_tokens=2),
        1: RequestTimes(second, second, 2 * second, 3 * second),
    }
    asked: dict[str, object] = {"gen_ai.request.choice.count": 2, "gen_ai.request.max_tokens": 64}
    plugin.response_done(record(times=times, attributes=asked))
    plugin.response_done(record(output_tokens=0))  # neither does one that got none divide by it
    plugin.response_done(record(times=times, status=499))
    samples = scrape(served(plugin, Client()))
    for name, total, count in (
        ("request_queue_time_seconds", 1, 2),
        ("request_prefill_time_seconds", 3, 2),
        ("request_decode_time_seconds", 5, 2),
        ("request_inference_time_seconds", 8, 2),
        ("request_time_per_output_token_seconds", 5 / 7, 1),
        ("request_preemptions", 3, 2),
        ("request_computed_prompt_tokens", 3, 1),
        ("request_params_n", 3, 2),
        ("request_params_max_tokens", 64, 1),
    ):
        assert value(samples, f"{name}_sum") == pytest.approx(total), name
        assert value(samples, f"{name}_count") == count, name


def test_openmetrics_when_asked_for() -> None:
    response = served(Prometheus(), Client()).get(
        "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert "framework_requests_running" in {family.name for family in parse_openmetrics(response.text)}


def test_two_instances_share_nothing() -> None:
    first, second = Prometheus(), Prometheus()
    first.response_done(record())
    assert value(scrape(served(first, Client())), "request_success_total", finish_reason="stop") == 1
    assert value(scrape(served(second, Client())), "request_success_total", finish_reason="stop") == 0


def test_the_engine_process_does_not_import_the_web_framework() -> None:
    code = (
        "import sys; from framework.plugins.telemetry.prometheus import Prometheus; Prometheus();"
        "print([m for m in ('fastapi', 'starlette', 'opentelemetry', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
