"""KV caches: who owns which block of the pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from framework import CacheSpec, Capacity, KVCache, Provider, hookimpl

if TYPE_CHECKING:
    from framework.registry import Plugins
    from framework.settings import Settings

    from .pool import Eviction


class PagedOptions(BaseModel, extra="forbid"):
    """Options of the paged KV cache."""

    eviction: str = Field("lru", description="Which cached block is given up first: a provider of kind eviction.")


def _paged(
    cache_spec: CacheSpec,
    capacity: Capacity,
    options: PagedOptions | None = None,
    settings: Settings | None = None,
    plugins: Plugins | None = None,
) -> KVCache:
    from .paged import PagedCache
    from .pool import Lru

    name = options.eviction if options is not None else "lru"

    def eviction() -> Eviction:
        made: Eviction = plugins.create("eviction", name) if plugins is not None else Lru()
        return made

    if settings is None:
        return PagedCache(cache_spec, capacity, eviction=eviction)
    return PagedCache(
        cache_spec,
        capacity,
        prefix_cache=settings.prefix_cache,
        model=settings.model or "",
        eviction=eviction,
        chunk=settings.max_num_batched_tokens,
    )


def _lru() -> Eviction:
    from .pool import Lru

    return Lru()


def _lfu() -> Eviction:
    from .pool import Lfu

    return Lfu()


def _contiguous(cache_spec: CacheSpec, capacity: Capacity) -> KVCache:
    from .contiguous import ContiguousCache

    return ContiguousCache(cache_spec, capacity)


@hookimpl
def providers() -> Iterable[Provider]:
    return [
        Provider(
            "kv",
            "paged",
            _paged,
            PagedOptions,
            summary="blocks on demand from one pool, with prefix cache, copy-on-write and swap",
        ),
        Provider(
            "eviction", "lru", _lru, summary="gives up the cached block unused for longest (--kv-opt eviction=lru)"
        ),
        Provider(
            "eviction", "lfu", _lfu, summary="gives up the cached block found least often (--kv-opt eviction=lfu)"
        ),
        Provider("kv", "contiguous", _contiguous, summary="one maximal region per request: a baseline"),
    ]
