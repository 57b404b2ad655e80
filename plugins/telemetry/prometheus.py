"""Metrics for Prometheus: the engine's state from its last message, latencies from what the server delivered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from framework import Delivery, ResponseRecord, __version__, hookimpl

from .vllm import VllmNames

if TYPE_CHECKING:
    from fastapi import APIRouter

    from framework.messages import EngineInfo, EngineStats, RequestTimes

# Supersets of the buckets that the OpenTelemetry conventions give for servers of generative models.
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160),
)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E = tuple(0.01 * 2**k for k in range(16))
_TOKENS = tuple(2**k for k in range(18))
_FEW = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
_RESPELT = re.compile(r";\s*escaping=(?:dots|values)")
"""Asks for names in which even underscores are written in another way."""


class EngineClient(Protocol):
    """What this plugin reads of the engine client."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def info(self) -> EngineInfo | None: ...
    @property
    def alive(self) -> bool: ...


class Prometheus:
    """Serves GET /metrics from a registry of its own. `vllm`: under vLLM's names, too."""

    def __init__(self, vllm: bool = False) -> None:
        self._vllm = vllm
        self.registry = CollectorRegistry(auto_describe=False)

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"framework_{name}", help, buckets=buckets, registry=self.registry)

        def counter(name: str, help: str, label: str) -> Counter:
            return Counter(f"framework_{name}", help, [label], registry=self.registry)

        self._ttft = histogram("time_to_first_token_seconds", "From receiving a request to its first token.", _TTFT)
        self._itl = histogram("inter_token_latency_seconds", "Between successive tokens of one output.", _ITL)
        self._e2e = histogram("e2e_request_latency_seconds", "From first to last byte of a served request.", _E2E)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a served request.", _TOKENS)
        self._output = histogram("request_generation_tokens", "Output tokens of a served request.", _TOKENS)
        self._fresh = histogram("request_computed_prompt_tokens", "Of them, not found in the prefix cache.", _TOKENS)
        self._queue = histogram("request_queue_time_seconds", "From arrival to admission.", _E2E)
        self._prefill = histogram("request_prefill_time_seconds", "From admission to the first token.", _E2E)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the end.", _E2E)
        self._inference = histogram("request_inference_time_seconds", "From admission to the end.", _E2E)
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean time of a token after the first.", _ITL)
        self._preempted = histogram("request_preemptions", "How often an output was preempted.", _FEW)
        self._n = histogram("request_params_n", "Choices asked for of each prompt.", _FEW)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens, where asked for.", _TOKENS)
        self._success = counter("request_success", "Outputs that ended without an error.", "finish_reason")
        self._failed = counter("requests_failed", "Requests that ended with an error.", "status")
        for reason in ("stop", "length", "abort"):
            self._success.labels(reason)

    @hookimpl
    def routes(self, client: EngineClient) -> Iterable[APIRouter]:
        from fastapi import APIRouter, Request, Response  # not in the engine process

        self.registry.register(_EngineCollector(client))
        exposed: Collector = VllmNames(self.registry, client) if self._vllm else self.registry
        router = APIRouter()

        async def metrics(request: Request) -> Response:
            """Metrics for Prometheus."""
            accept = _RESPELT.sub("", request.headers.get("accept", ""))
            try:
                content_type = choose_encoder(accept)[1]
            except TypeError:  # it asks for a version that is no number
                content_type = choose_encoder("")[1]
            # No name needs to be escaped. The library's other ways do so all the same with the colon of vLLM's, and in
            # OpenMetrics with those of samples only.
            encode = openmetrics.generate_latest if "openmetrics" in content_type else generate_latest
            return Response(encode(exposed, escaping=openmetrics.ALLOWUTF8), media_type=content_type)

        # `from __future__ import annotations` hides the local name Request from FastAPI: pass it as an object.
        metrics.__annotations__ = {"request": Request}
        kinds = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")}
        router.add_api_route(
            "/metrics",
            metrics,
            response_class=Response,
            response_model=None,
            responses={200: {"content": kinds}, 405: {"description": "Method Not Allowed"}},
            tags=["operations"],
        )
        return [router]

    @hookimpl
    def tokens_delivered(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if delivery.ttft is not None:
                self._ttft.observe(delivery.ttft)
            elif delivery.gap is not None and delivery.tokens:
                # Tokens of one step come together; to the reader they are evenly spread over the gap.
                for _ in range(delivery.tokens):
                    self._itl.observe(delivery.gap / delivery.tokens)

    @hookimpl
    def response_done(self, record: ResponseRecord) -> None:
        if record.error is not None:
            self._failed.labels(str(record.status)).inc()
            return
        for reason in record.finish_reasons:
            self._success.labels(reason).inc()
        if record.status >= 400:  # the client went away: when it did says nothing of how long serving takes
            return
        self._e2e.observe((record.end - record.start) / 1e9)
        self._prompt.observe(record.prompt_tokens)
        self._output.observe(record.output_tokens)
        self._n.observe(float(record.attributes.get("gen_ai.request.choice.count", 1)))
        if "gen_ai.request.max_tokens" in record.attributes:
            self._max_tokens.observe(float(record.attributes["gen_ai.request.max_tokens"]))
        self._observe(list(record.times.values()), record)

    def _observe(self, every: Sequence[RequestTimes], record: ResponseRecord) -> None:
        """What the engine says of each sequence that it has given a token."""
        for times in every:
            self._queue.observe((times.admitted - times.arrival) / 1e9)
            self._prefill.observe((times.first_token - times.admitted) / 1e9)
            self._decode.observe((times.finished - times.first_token) / 1e9)
            self._inference.observe((times.finished - times.admitted) / 1e9)
            self._preempted.observe(times.preemptions)
        if every:
            self._fresh.observe(record.prompt_tokens - sum(times.cached_tokens for times in every))
        if record.output_tokens > len(every):
            decoding = sum(times.finished - times.first_token for times in every)
            self._tpot.observe(decoding / 1e9 / (record.output_tokens - len(every)))


class _EngineCollector(Collector):
    """Reads the engine's last statistics when scraped."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        stats, info = self._client.stats, self._client.info
        used = stats.kv_holding + stats.kv_reserved

        def gauge(name: str, help: str, value: float) -> Metric:
            return GaugeMetricFamily(f"framework_{name}", help, value=value)

        def counter(name: str, help: str, value: float) -> Metric:
            return CounterMetricFamily(f"framework_{name}", help, value=value)

        yield gauge("engine_up", "1 while the engine process is alive.", float(self._client.alive))
        yield counter("engine_restarts", "Engine processes that took the place of one that ended.", stats.restarts)
        yield gauge("requests_running", "Sequences in the running batch.", stats.running)
        yield gauge("requests_waiting", "Sequences that the engine has and does not run.", stats.waiting)
        yield gauge(
            "kv_cache_usage",
            "Share of KV blocks in use by running requests, 0 to 1.",
            used / stats.kv_blocks if stats.kv_blocks else 0.0,
        )
        blocks = GaugeMetricFamily("framework_kv_blocks", "KV blocks by state.", labels=["state"])
        for state, count in (
            ("holding", stats.kv_holding),
            ("reserved", stats.kv_reserved),
            ("cached", stats.kv_cached),
            ("free", stats.kv_blocks - used - stats.kv_cached),
            ("swapped", stats.kv_swapped),
        ):
            blocks.add_metric([state], count)
        yield blocks
        allocated = used * info.block_size if info is not None else 0
        yield gauge(
            "kv_token_usage",
            "Share of the KV memory given to running requests that holds tokens, 0 to 1.",
            stats.kv_tokens / allocated if allocated else 0.0,
        )
        yield gauge("kv_host_blocks", "KV blocks that the swap space has room for.", info.host_blocks if info else 0)
        preemptions = CounterMetricFamily("framework_preemptions", "Preemptions by mode.", labels=["mode"])
        preemptions.add_metric(["swap"], stats.preemptions_swap)
        preemptions.add_metric(["recompute"], stats.preemptions_recompute)
        yield preemptions
        yield counter("prompt_tokens", "Prompt tokens computed, recomputation included.", stats.prompt_tokens)
        yield counter("recomputed_tokens", "Tokens computed, though not for the first time.", stats.recomputed_tokens)
        yield counter("prefix_cache_hits", "Admissions that found tokens in the prefix cache.", stats.prefix_hits)
        yield counter("prefix_cache_hit_tokens", "Tokens found in the prefix cache.", stats.prefix_hit_tokens)
        yield counter("swaps_exhausted", "Victims recomputed for want of swap space.", stats.swaps_exhausted)
        yield counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield counter("failed_steps", "Steps that raised.", stats.failed_steps)
        faults = CounterMetricFamily("framework_plugin_faults", "Exceptions of a plugin.", labels=["plugin"])
        for plugin, count in stats.plugin_faults.items():
            faults.add_metric([plugin], count)
        yield faults
        if info is not None:
            values = {
                "version": __version__,
                "model": info.model,
                "dtype": info.dtype,
                "device": info.device,
                "block_size": str(info.block_size),
                "kv_blocks": str(info.kv_blocks),
                "max_model_len": str(info.max_model_len),
            }
            yield InfoMetricFamily("framework_engine", "What is being served.", value=values)
