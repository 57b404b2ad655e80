"""KV caches: who owns which block of the pool."""

from __future__ import annotations

from collections.abc import Iterable

from framework import CacheSpec, Capacity, KVCache, Provider, hookimpl


def _paged(cache_spec: CacheSpec, capacity: Capacity) -> KVCache:
    from .paged import PagedCache

    return PagedCache(cache_spec, capacity)


def _contiguous(cache_spec: CacheSpec, capacity: Capacity) -> KVCache:
    from .contiguous import ContiguousCache

    return ContiguousCache(cache_spec, capacity)


@hookimpl
def providers() -> Iterable[Provider]:
    return [
        Provider("kv", "paged", _paged, summary="blocks on demand from one pool"),
        Provider("kv", "contiguous", _contiguous, summary="one maximal region per request: a baseline"),
    ]
