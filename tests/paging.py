"""Paged caches and requests for their tests."""

from __future__ import annotations

from framework.plugins.kv.paged import PagedCache

from framework import CacheGroup, CacheSpec, Capacity, Request, SamplingParams


def cache(
    blocks: int, block_size: int, groups: int = 1, host: int = 0, window: int | None = None, **options
) -> PagedCache:
    group = CacheGroup(layers=1, kv_heads=1, head_dim=1, window=window)
    spec = CacheSpec(block_size, "float32", (group,) * groups)
    return PagedCache(spec, Capacity({"device": blocks, "host": host}), **options)


def request(id: str = "r", tokens: int = 1, **fields) -> Request:
    return Request(id, list(range(tokens)), SamplingParams(), **fields)


def computed(kv: PagedCache, r: Request, upto: int) -> list[int]:
    """Reserve for `upto` tokens, as if a step computed them; the request's blocks."""
    reservation = kv.reserve(r, upto)
    assert reservation is not None
    r.computed = upto
    kv.publish(r)
    return kv._tables[r].blocks
