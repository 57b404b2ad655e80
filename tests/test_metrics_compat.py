"""Metrics under vLLM's names, as its dashboards and gateways read them, of a server with a real engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from framework.plugins.telemetry import _prometheus
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from serving import Running, eventually, running
from test_prometheus import Client, record, served

from framework.settings import Settings

LABELS = {"engine": "0", "model_name": "tiny"}
TYPES = {
    "gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"],
    "counter": [
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "prompt_tokens_cached"),
        *("generation_tokens", "request_success"),
    ],
    "histogram": [
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_params_n", "request_params_max_tokens"),
        *("request_num_preemptions", "request_prefill_kv_computed_tokens"),
    ],
}


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(
        model=str(tiny_llama),
        served_model_name="tiny",
        metrics_compat="vllm",
        kv_blocks=128,
        dtype="float32",
        max_num_seqs=4,
    )
    with running(settings) as found:
        yield found


def families(server: Running) -> dict[str, Metric]:
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {family.name.removeprefix("vllm:"): family for family in parse(answer.text) if "vllm:" in family.name}


def values(server: Running) -> dict[str, float]:
    """Samples without labels of their own."""
    found = {}
    for family in families(server).values():
        for sample in family.samples:
            if sample.labels == LABELS:
                found[sample.name.removeprefix("vllm:")] = sample.value
    return found


def quiet(server: Running) -> dict[str, float]:
    """`values` once the engine is through with whatever was before."""
    eventually(lambda: not values(server)["num_requests_running"])
    return values(server)


def gained(server: Running, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in values(server).items()}


def test_names_types_and_labels(server: Running) -> None:
    server.post("/v1/completions", prompt="a", max_tokens=2)
    found = families(server)
    assert {name: family.type for name, family in found.items()} == {
        name: kind for kind, names in TYPES.items() for name in names
    }
    for name, family in found.items():
        assert family.samples and family.documentation
        for sample in family.samples:
            if name != "cache_config_info":
                assert sample.labels.items() >= LABELS.items(), sample
            if family.type == "counter":
                assert sample.name == f"vllm:{name}_total"


OPEN = "application/openmetrics-text"
PROMETHEUS_2 = f"{OPEN};version=1.0.0;q=0.5,{OPEN};version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
PROMETHEUS_3 = (
    f"{OPEN};version=1.0.0;escaping=allow-utf-8;q=0.5,{OPEN};version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (PROMETHEUS_2, f"{OPEN}; version=1.0.0; charset=utf-8; escaping=underscores"),
        (PROMETHEUS_3, f"{OPEN}; version=1.0.0; charset=utf-8; escaping=allow-utf-8"),
        (OPEN, f"{OPEN}; version=1.0.0; charset=utf-8"),
        (f"{OPEN}; version=0.0.1", "text/plain; version=0.0.4; charset=utf-8"),
        (f"{OPEN}; version=nonsense", "text/plain; version=0.0.4; charset=utf-8"),
        (f"{OPEN}; version=1.0.0; escaping=underscores", f"{OPEN}; version=1.0.0; charset=utf-8; escaping=underscores"),
        (f"{OPEN}; version=1.0.0; escaping=dots", f"{OPEN}; version=1.0.0; charset=utf-8; escaping=underscores"),
        (f"{OPEN}; version=1.0.0;escaping=values", f"{OPEN}; version=1.0.0; charset=utf-8; escaping=underscores"),
        ("text/plain", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain; version=1.0.0", "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"),
        (
            "text/plain; version=1.0.0; escaping=allow-utf-8",
            "text/plain; version=1.0.0; charset=utf-8; escaping=allow-utf-8",
        ),
        ("text/plain;version=1.0.0;escaping=dots", "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
    ],
)
def test_the_same_names_whatever_a_scraper_accepts(server: Running, accept: str, kind: str) -> None:
    """Families and samples: TYPE and HELP are of those that follow them."""
    quiet(server)
    answer = server.http.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == kind
    read = parse_openmetrics if kind.startswith(OPEN) else parse
    plain = parse(server.http.get("/metrics").text)
    found, expected = (
        {
            family.name: (family.type, family.documentation, {(s.name, *s.labels.items()) for s in family.samples})
            for family in every
            if "vllm" in family.name
        }
        for every in (read(answer.text), plain)
    )
    assert found == expected and set(found) == {f"vllm:{name}" for names in TYPES.values() for name in names}
    endings = {"counter": {"_total"}, "gauge": {""}, "histogram": {"_bucket", "_count", "_sum"}}
    for name, (type, _, samples) in found.items():
        assert {sample for sample, *_ in samples} == {name + ending for ending in endings[type]}


def test_what_a_gateway_reads(server: Running) -> None:
    """The pool as labels, the gauges without any that would need to be summed."""
    found = families(server)
    (config,) = found["cache_config_info"].samples
    assert config.value == 1 and config.labels["engine"] == "0"
    assert (config.labels["block_size"], config.labels["num_gpu_blocks"]) == ("16", "128")
    assert config.labels["cache_dtype"] == "float32" and int(config.labels["num_cpu_blocks"]) >= 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert [sample.labels for sample in found[name].samples] == [LABELS]


def test_counts_are_exact(server: Running) -> None:
    """Each of ten requests in all counters and histograms; a prompt that is known counts as looked up and found."""
    prompt = server.ids("A prompt of more than one block of tokens, so that some can be found again.")
    before = quiet(server)
    for _ in range(10):
        answer = server.post("/v1/completions", prompt=prompt, max_tokens=7, ignore_eos=True)
        assert answer.json()["usage"]["completion_tokens"] == 7
    eventually(lambda: gained(server, before)["e2e_request_latency_seconds_count"] == 10)
    gain = gained(server, before)
    cached = 9 * ((len(prompt) - 1) // 16 * 16)
    assert gain["prompt_tokens_total"] == gain["prefix_cache_queries_total"] == 10 * len(prompt)
    assert gain["prefix_cache_hits_total"] == gain["prompt_tokens_cached_total"] == cached
    assert gain["generation_tokens_total"] == 70
    for name in TYPES["histogram"]:
        expected = 60 if name in ("inter_token_latency_seconds", "time_per_output_token_seconds") else 10
        assert gain[f"{name}_count"] == expected, name
    assert gain["request_prompt_tokens_sum"] == 10 * len(prompt)
    assert gain["request_prefill_kv_computed_tokens_sum"] == 10 * len(prompt) - cached
    assert gain["request_generation_tokens_sum"] == gain["request_params_max_tokens_sum"] == 70
    assert gain["request_params_n_sum"] == 10 and gain["request_num_preemptions_sum"] == 0
    assert gain["num_preemptions_total"] == 0
    check_stages(gain)


def check_stages(gain: dict[str, float]) -> None:
    """The engine's stages lie within what clients see."""
    queue, prefill, decode, inference, e2e = (
        gain[f"{name}_seconds_sum"]
        for name in (
            *("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time"),
            "e2e_request_latency",
        )
    )
    assert queue > 0 and prefill > 0 and decode > 0
    assert inference == pytest.approx(prefill + decode)
    assert queue + inference <= e2e
    assert queue + prefill <= gain["time_to_first_token_seconds_sum"]


def test_outputs_that_end_at_a_stop_string_have_all_stages(server: Running) -> None:
    """The server ends these, ahead of the engine."""
    ids = server.ids("ab")
    text = server.post("/v1/completions", prompt=ids, max_tokens=40, ignore_eos=True, temperature=0).json()
    stop = text["choices"][0]["text"][10:12]
    before, ends = quiet(server), reasons(server)
    answer = server.post("/v1/completions", prompt=ids, max_tokens=40, ignore_eos=True, temperature=0, stop=stop)
    assert answer.json()["choices"][0]["stop_reason"] == stop
    eventually(lambda: gained(server, before)["request_decode_time_seconds_count"] == 1)
    check_stages(gained(server, before))
    assert reasons(server)["stop"] == ends["stop"] + 1
    times = server.record(answer.json()["id"]).times[0]
    assert 0 < times.arrival <= times.admitted <= times.first_token <= times.finished


def reasons(server: Running) -> dict[str, float]:
    samples = families(server)["request_success"].samples
    return {sample.labels["finished_reason"]: sample.value for sample in samples}


def test_several_choices_and_refusals(server: Running) -> None:
    before, ends = quiet(server), reasons(server)
    assert server.post("/v1/completions", prompt=[[5] * 3, [6] * 3], n=3, max_tokens=4, ignore_eos=True).is_success
    assert server.post("/v1/completions", prompt="a", max_tokens=0).status_code == 400
    eventually(lambda: gained(server, before)["request_params_n_count"] == 1)
    gain = gained(server, before)
    assert gain["request_params_n_sum"] == 3 and gain["request_decode_time_seconds_count"] == 6
    assert gain["generation_tokens_total"] == 24 and gain["e2e_request_latency_seconds_count"] == 1
    assert reasons(server) == {**ends, "length": ends["length"] + 6}
    assert set(ends) == {"stop", "length", "abort", "error"} and ends["error"] == 0


def test_calls_of_tools_are_stops(server: Running) -> None:
    """Of the reasons that clients are told only this one is unknown there."""
    plugin = _prometheus(Settings(metrics_compat="vllm"))
    plugin.response_done(record(finish_reasons=["tool_calls", "stop", "length", "tool_calls"]))
    plugin.response_done(record(finish_reasons=["abort"], status=499))
    plugin.response_done(record(finish_reasons=[], error="gone", status=503))
    text = served(plugin, Client(info=server.engine.info)).get("/metrics").text
    (family,) = (family for family in parse(text) if family.name == "vllm:request_success")
    found = [(sample.labels["finished_reason"], sample.value) for sample in family.samples]
    assert sorted(found) == [("abort", 1), ("error", 1), ("length", 1), ("stop", 3)]


def test_what_waits_is_counted_as_the_queue_does(server: Running) -> None:
    """Each sequence, whether it has forked off already or not; those that run are in the other gauge. It is seen as
    long as none of them has ended, which on a busy machine may be missed."""

    def gauges() -> tuple[float, float]:
        now = values(server)
        return now["num_requests_running"], now["num_requests_waiting"]

    def ask(name: str, n: int) -> None:
        body = {"prompt": "The", "max_tokens": 400, "ignore_eos": True, "n": n}
        server.http.post("/v1/completions", json=body, headers={"X-Request-Id": name})

    def seen() -> bool:
        quiet(server)
        threads = [threading.Thread(target=ask, args=pair) for pair in (("first", 6), ("second", 8))]
        for thread, expected in zip(threads, ((4, 2), (4, 10)), strict=True):
            thread.start()
            while gauges() != expected:
                if not threads[0].is_alive():
                    return False
        text = server.http.get("/metrics").text
        found = "framework_requests_running 4.0\n" in text and "framework_requests_waiting 10.0\n" in text
        found = found and len(server.engine.waiting) == 10
        server.post("/abort_requests", request_ids=["first", "second"])
        for thread in threads:
            thread.join(30)
        return found

    eventually(seen, 60)
    eventually(lambda: gauges() == (0, 0))


def test_an_aborted_load_leaves_nothing_behind(server: Running) -> None:
    """More requests than seats, of which some lose their client and others are ended by name."""
    body = {"prompt": "The", "max_tokens": 400, "ignore_eos": True, "stream": True}
    leave = threading.Event()

    def ask(number: int) -> None:
        headers = {"X-Request-Id": f"load-{number}"}
        with suppress(httpx.ReadTimeout):
            timeout = httpx.Timeout(30, read=0.5 if number % 2 else 30)
            url = f"{server.url}/v1/completions"
            with httpx.stream("POST", url, json=body, headers=headers, timeout=timeout) as response:
                for _ in response.iter_raw():
                    if number % 2 and leave.is_set():
                        break

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    eventually(lambda: all(values(server)[name] > 0 for name in gauges))
    assert values(server)["num_requests_running"] <= 4 and values(server)["kv_cache_usage_perc"] <= 1
    leave.set()
    server.post("/abort_requests", request_ids=[f"load-{number}" for number in range(0, 8, 2)])
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    eventually(lambda: not any(values(server)[name] for name in gauges))
    text = server.http.get("/metrics").text
    assert "framework_requests_running 0.0\n" in text and "framework_kv_cache_usage 0.0\n" in text


def test_the_same_figures_by_both_names(server: Running) -> None:
    """Bucket by bucket."""
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in parse(server.http.get("/metrics").text)
        for sample in family.samples
    }
    theirs = {key: value for key, value in samples.items() if key[0].startswith("vllm:e2e_request_latency_seconds")}
    assert len(theirs) > 10
    for (name, le), value in theirs.items():
        assert samples[name.replace("vllm:", "framework_"), le] == value


def test_only_where_asked_for(tiny_llama: Path) -> None:
    assert "vllm:" not in served(_prometheus(Settings()), Client()).get("/metrics").text
