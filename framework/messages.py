"""What the server process and the engine process say to each other: msgpack (never pickle) over ZeroMQ.

The server sends `Add` and `Abort`, and ends the engine with SIGTERM, which works while it loads too. The engine sends
`Progress` while it loads, then `Ready`, then one `Outputs` per step that has any, and `Fatal` before it dies for a
reason that it knows. Times are nanoseconds of the monotonic clock, which both processes share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .plan import Logprobs
from .types import Mode, Request, SamplingParams

if TYPE_CHECKING:
    from .kv import Usage
    from .planner import Planner

_MASK64 = 2**64 - 1


def seed_of(seed: int, k: int) -> int:
    """Of the k-th of several outputs that were asked for with one seed: unsigned 64 bits. The first has the seed itself
    (finaliser of splitmix64, Steele et al. 2014)."""
    if not k:
        return seed & _MASK64
    z = (seed * 0xD1342543DE82EF95 + k * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK64
    return z ^ z >> 31


class Add(msgspec.Struct, tag="add", array_like=True):
    """A new request, or `n` that share one prompt. `arrival` is when the server received it; `trace` is the traceparent
    of its span.

    The k-th of several, from 1 on, has an id and a seed of its own: see `ids`. Each is generated, told and aborted as
    a request by itself; a refusal comes once, under `id`.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    arrival: int
    priority: int = 0
    tenant: str = ""
    adapter: str | None = None
    cache_salt: bytes = b""
    extra: dict[str, Any] = {}
    trace: str | None = None
    n: int = 1

    @property
    def ids(self) -> list[str]:
        """The ids under which outputs come."""
        return [self.id, *(f"{self.id}/{k}" for k in range(1, self.n))]


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """End these requests now. `reason` becomes their finish reason: "abort", or "stop" after a stop string."""

    ids: list[str]
    reason: str = "abort"


class RequestTimes(msgspec.Struct, array_like=True):
    """Nanoseconds. 0: did not happen."""

    arrival: int
    admitted: int = 0
    first_token: int = 0
    finished: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""

    @classmethod
    def of(cls, request: Request) -> RequestTimes:
        def ns(seconds: float | None) -> int:
            return round((seconds or 0.0) * 1e9)

        return cls(
            ns(request.arrival),
            ns(request.admitted_at),
            ns(request.first_token_at),
            ns(request.finished_at),
            request.preemptions,
            request.cached_tokens,
        )


class TokenOutput(msgspec.Struct, array_like=True):
    """New tokens of one request. `index` is the position of the first in the output: each is sent exactly once.

    `finish_reason`: None, "stop", "length", "abort" or "error"; set, this is the last message of the request. `times`
    is there with the first tokens, and in the last message (not if it was refused on arrival).
    `stop_reason` is the stop token id, None for EOS. `error` says what went wrong; `status` is its HTTP status.
    """

    id: str
    index: int
    tokens: list[int]
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    status: int = 500
    retry_after: float | None = None
    times: RequestTimes | None = None
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache; told with the first tokens."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """Of each prompt token, if asked for; told with the first tokens. None for the first: nothing is before it. Of
    several that share a prompt the first of which tokens come tells it, once for all."""

    def begin(self, request: Request) -> None:
        """These are the request's first tokens: what is told once goes with them."""
        self.times, self.cached_tokens = RequestTimes.of(request), request.cached_tokens
        self.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges and counters since start-up."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    """All others that are unfinished: sequences, as `running`; those of one prompt each by itself."""
    kv_blocks: int = 0
    kv_holding: int = 0
    kv_reserved: int = 0
    kv_cached: int = 0
    kv_swapped: int = 0
    kv_tokens: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed, recomputation included."""
    generation_tokens: int = 0
    failed_steps: int = 0
    plugin_faults: dict[str, int] = {}
    """By plugin name."""
    swaps_exhausted: int = 0
    """Victims computed again because the host pool was full."""
    recomputed_tokens: int = 0
    """Tokens computed, though not for the first time."""
    prefix_hits: int = 0
    """Admissions that found a part of their tokens in the prefix cache."""
    prefix_hit_tokens: int = 0
    restarts: int = 0
    """Of the engine process. Counted by the server, which adds up the counters of all of them."""

    @classmethod
    def of(cls, planner: Planner, usage: Usage, steps: int, failed_steps: int, generated: int) -> EngineStats:
        return cls(
            step=steps,
            running=len(planner.view.running),
            waiting=planner.view.total - len(planner.view.running),
            kv_blocks=usage.total,
            kv_holding=usage.holding,
            kv_reserved=usage.reserved,
            kv_cached=usage.cached,
            kv_swapped=usage.swapped,
            kv_tokens=usage.tokens,
            preemptions_swap=planner.preemption.counts[Mode.SWAP],
            preemptions_recompute=planner.preemption.counts[Mode.RECOMPUTE],
            swaps_exhausted=planner.preemption.exhausted,
            prompt_tokens=planner.prompt_tokens,
            recomputed_tokens=planner.recomputed_tokens,
            prefix_hits=planner.hits,
            prefix_hit_tokens=planner.hit_tokens,
            generation_tokens=generated,
            failed_steps=failed_steps,
            plugin_faults=dict(planner.policy.faults),
        )


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """`share` of the stage is done: 0..1."""

    stage: str
    share: float


class EngineInfo(msgspec.Struct):
    """What the engine turned out to be: for the banner, /v1/models and validation."""

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    max_model_len_reason: str
    """Why it is this: "set", "model" or "pool"."""
    block_size: int
    kv_blocks: int
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    threads: int
    providers: dict[str, str]
    """Selected name by kind."""
    manifest: dict[str, str]
    """Distribution name and version of every loaded plugin: engine and server refuse to differ."""
    load_seconds: float = 0.0
    notes: list[str] = []
    """Sentences worth a line in the banner."""
    uses: list[str] = []
    """Request fields that the selected plugins go by (`Provider.uses`)."""
    host_blocks: int = 0
    """Blocks of the host tier, for swapped requests."""
    preemption: str = "auto"
    copy_rate: float = 0.0
    """Bytes per second between device and host; 0: not measured."""
    compute_rate: float = 0.0
    """Prompt tokens per second; 0: not measured."""
    quantization: str = "none"
    kv_dtype: str = ""
    """Of keys and values: a torch dtype's name."""
    cpus: list[int] = []
    """Those that the engine's threads keep to, ascending."""
    overlap: bool = False
    """Whether a step is planned while the one before runs."""
    device_type: str = "cpu"
    """A torch device's; `device` is its readable name."""
    logits: bool = True
    """Whether the executor computes any: without them nothing keeps an output to a grammar."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    info: EngineInfo


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    outputs: list[TokenOutput]
    stats: EngineStats
    time: int = 0
    """When the step was committed."""


class Fatal(msgspec.Struct, tag="fatal", array_like=True):
    """The engine ends. `user` errors are shown as they are; others are bugs and come with a traceback."""

    message: str
    user: bool = False
    traceback: str = ""


ToEngine = Add | Abort
FromEngine = Progress | Ready | Outputs | Fatal
