"""A message of the server as requests: one for each output that was asked for."""

from __future__ import annotations

from collections.abc import Iterator

from .messages import Add, seed_of
from .types import Request


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
            seed=seed_of(seed, order + k) if given is None else seed_of(given, k),
            limit=limit,
        )
