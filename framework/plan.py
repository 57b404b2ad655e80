"""What a step does, as plain data: ids and integers, msgpack-able. The engine decides it, an executor obeys it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from .types import Mode, Request, SamplingParams


class _Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Records grow at the end, with defaults, and are read by name."""


class Delta(_Record, frozen=True):
    """`table[first:] = blocks`: append, prefix hit, fork, copy-on-write, swap-in and rollback in one form."""

    group: int
    first: int
    blocks: tuple[int, ...]


class Slice(_Record, frozen=True):
    """Compute tokens [start, start + tokens) of a request; `samples` if its last row yields a token."""

    request_id: str
    start: int
    tokens: int
    deltas: tuple[Delta, ...]
    samples: bool
    drafts: int = 0


class Copy(_Record, frozen=True):
    """Copy one block before the forward pass. Ticket 0 is synchronous; others are reported when done."""

    request_id: str
    group: int
    src_tier: str
    src: int
    dst_tier: str
    dst: int
    ticket: int = 0


class Preempted(_Record, frozen=True):
    request_id: str
    mode: Mode


class RequestData(_Record, frozen=True):
    """All an executor needs to know of a request that was admitted or resumed.

    `tokens` are prompt and output so far, of which the first `prompt_len` are the prompt's; `seed` is an unsigned
    64-bit integer, always set. `scored`: leading prompt tokens whose log-probabilities the engine has already, of a
    request that asks for them.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    adapter: str | None = None
    extra: dict[str, Any] = {}
    scored: int = 0

    @classmethod
    def of(cls, request: Request) -> RequestData:
        tokens = [*request.prompt, *request.output]
        told = request.id, tokens, len(request.prompt), request.params, request.seed, request.adapter
        return cls(*told, dict(request.extra), request.scored)


class Plan(_Record, frozen=True):
    """One step. `finished` names requests whose executor state is dropped: ended, aborted, or to be sent again.

    An executor applies `finished` and `preempted`, then `new`, then the slices' deltas, then `copies` in their order,
    then computes the slices.
    """

    step: int
    new: tuple[RequestData, ...] = ()
    slices: tuple[Slice, ...] = ()
    copies: tuple[Copy, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    finished: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(s.tokens for s in self.slices)

    def digest(self) -> str:
        """Equal plans have equal digests: what replay and multi-process executors compare."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()


class Logprobs(_Record, frozen=True):
    """Of one token of output or prompt, natural logarithms from the unmodified logits. `top` is sorted, likeliest
    first. A prompt may hold a token that the model rules out: its `logprob` is -inf then."""

    token: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[tuple[int, float], ...] = ()


class StepResult(_Record, frozen=True):
    """What an executor did. `tokens` holds zero or more tokens per request; `errors` fail single requests."""

    step: int
    tokens: Mapping[str, tuple[int, ...]] = {}
    logprobs: Mapping[str, tuple[Logprobs, ...]] = {}
    drafts: Mapping[str, int] = {}
    copied: tuple[int, ...] = ()
    errors: Mapping[str, str] = {}
    stages: tuple[tuple[str, int, int], ...] = ()
    """(stage, start, end) in nanoseconds of the executor's clock: batch_build, forward, sampling."""
    prompt_logprobs: Mapping[str, tuple[Logprobs, ...]] = {}
    """Of the prompt tokens that come behind those computed, up to the prompt's end, without the first
    `RequestData.scored` tokens: chunk by chunk they follow on each other."""
    refused: tuple[str, ...] = ()
    """Of `errors`, the requests that asked for what cannot be had: another try is of no use."""


class Timings(msgspec.Struct):
    """When each stage of a step started and ended, nanoseconds of the executor's clock.

    Stages: admission, kv_allocation (with any preemption inside it), batch_build, forward, sampling, commit.
    """

    start: int
    end: int = 0
    stages: list[tuple[str, int, int]] = []
