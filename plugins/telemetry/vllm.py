"""Our metrics once more by vLLM's names and labels: its dashboards and those who balance load by them read these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from framework.messages import EngineInfo

_SAME = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "kv_cache_usage_perc": "kv_cache_usage",
    "prefix_cache_hits": "prefix_cache_hit_tokens",
    "prompt_tokens_cached": "prefix_cache_hit_tokens",
    "generation_tokens": "generation_tokens",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",  # as versions before called it
    "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "request_queue_time_seconds",
    "request_prefill_time_seconds": "request_prefill_time_seconds",
    "request_decode_time_seconds": "request_decode_time_seconds",
    "request_inference_time_seconds": "request_inference_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_prefill_kv_computed_tokens": "request_computed_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "request_num_preemptions": "request_preemptions",
    "request_params_n": "request_params_n",
    "request_params_max_tokens": "request_params_max_tokens",
}
"""Theirs: ours, of the same type. Of preempted requests ours also count what was found in the prefix cache when they
came back. `_derived` has those that are put together here."""


class _Client(Protocol):
    @property
    def info(self) -> EngineInfo | None: ...


class VllmNames(Collector):
    """Everything that `source` collects, and behind it what vLLM has a name for."""

    def __init__(self, source: Collector, client: _Client) -> None:
        self._source = source
        self._client = client

    def collect(self) -> Iterable[Metric]:
        ours = {metric.name.removeprefix("framework_"): metric for metric in self._source.collect()}
        yield from ours.values()
        info = self._client.info
        if info is not None:
            labels = {"engine": "0", "model_name": info.model}
            yield from (_renamed(ours[name], theirs, labels) for theirs, name in _SAME.items())
            yield from _derived(ours, labels)
            blocks = {
                "block_size": info.block_size,
                "num_gpu_blocks": info.kv_blocks,
                "num_cpu_blocks": info.host_blocks,
            }
            config = {"engine": "0", "cache_dtype": info.kv_dtype or info.dtype, **blocks}
            family = GaugeMetricFamily("vllm:cache_config_info", "The KV pool, in labels.", labels=list(config))
            family.add_metric([str(value) for value in config.values()], 1)
            yield family


def _renamed(metric: Metric, name: str, labels: dict[str, str]) -> Metric:
    same = Metric(f"vllm:{name}", metric.documentation, metric.type)
    for sample in metric.samples:
        ending = sample.name.removeprefix(metric.name)
        if ending == "_created":  # in the text format a family of its own
            continue
        same.samples.append(Sample(f"vllm:{name}{ending}", {**labels, **sample.labels}, sample.value, None, None))
    return same


def _derived(ours: dict[str, Metric], labels: dict[str, str]) -> Iterator[Metric]:
    def total(name: str) -> float:
        return sum(sample.value for sample in ours[name].samples if sample.name.endswith("_total"))

    def counter(name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    prompts = total("prompt_tokens") + total("prefix_cache_hit_tokens")
    yield counter("num_preemptions", "Preemptions.", total("preemptions"))
    yield counter("prompt_tokens", "Prompt tokens computed, again or not, or found in the prefix cache.", prompts)
    yield counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", prompts)
    ends = CounterMetricFamily("vllm:request_success", "Outputs that ended.", labels=[*labels, "finished_reason"])
    reasons = defaultdict[str, float](float, error=0.0)
    for sample in ours["request_success"].samples:
        if sample.name.endswith("_total"):
            reason = sample.labels["finish_reason"]
            reasons["stop" if reason == "tool_calls" else reason] += sample.value
    for sample in ours["requests_failed"].samples:
        if sample.name.endswith("_total") and sample.labels["status"] >= "500":
            reasons["error"] += sample.value
    for reason, value in reasons.items():
        ends.add_metric([*labels.values(), reason], value)
    yield ends
