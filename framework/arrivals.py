"""A message of the server as requests: one for each output that was asked for."""

from __future__ import annotations

from collections.abc import Iterator

from .messages import Add
from .types import Request

_MASK64 = 2**64 - 1


def requests_of(message: Add, order: int, limit: int, now: int, seed: int) -> Iterator[Request]:
    """order: the first one's place among all that were ever accepted. limit: the most tokens each may come to have.
    now: nanoseconds, where the message does not say when it arrived. seed: of the seeds of those that bring none."""
    given = message.params.seed
    for k, id in enumerate(message.ids):
        yield Request(
            id,
            message.prompt,
            message.params,
            arrival=(message.arrival or now) / 1e9,
            order=order + k,
            priority=message.priority,
            tenant=message.tenant,
            adapter=message.adapter,
            cache_salt=message.cache_salt,
            parent=message.id if k else None,
            extra=message.extra,
            trace=message.trace,
            seed=_mix(seed, order + k) if given is None else _mix(given, k) if k else given & _MASK64,
            limit=limit,
        )


def _mix(seed: int, n: int) -> int:
    """A 64-bit seed for the n-th request (finaliser of splitmix64, Steele et al. 2014)."""
    z = (seed * 0xD1342543DE82EF95 + n * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK64
    return z ^ z >> 31
