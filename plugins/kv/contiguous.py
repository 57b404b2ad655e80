"""One contiguous region per request, as large as the request may ever become: how servers did it before paging.

    block    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |    A may become 12 tokens long (block size 4), B 8
    region     A   A   A   -   B   B   -   -      A third one that needs three blocks waits, though three are free
    state      h   r   r   f   h   h   f   f      holding, reserved (A computed 4 tokens so far), free

A baseline to measure paging against: most of what it reserves stays empty, and gaps are lost to whoever does not fit
into one of them. `usage` shows the former as `reserved`.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Collection, Iterable, Iterator

from framework import CacheSpec, Capacity, ConfigError, Delta, KVCache, Request, Reservation, Usage

Region = tuple[int, int]
"""First block, and the one after the last."""


class ContiguousCache(KVCache):
    """The first gap that is large enough. No sharing, no swap, no growth: every call costs O(requests with blocks)."""

    def __init__(self, cache_spec: CacheSpec, capacity: Capacity) -> None:
        """Raises `ConfigError` if the pool has no block."""
        self._size = capacity.blocks["device"]
        if self._size < 1:
            raise ConfigError("the KV pool has no block: raise kv_memory or kv_blocks")
        self._block_size = cache_spec.block_size
        self._groups = range(len(cache_spec.groups))
        self.reset()

    def reset(self) -> None:
        self._regions: dict[Request, Region] = {}
        self._sorted: list[Region] = []
        self._available = self._size

    @property
    def available(self) -> int:
        return self._available

    def peak(self, request: Request, length: int) -> int:
        return -(-length // self._block_size)

    def _whole(self, request: Request) -> int:
        """Blocks for all that `request` may become: the last token is never read again and needs no place. Without
        max_tokens that is the longest context, and the pool at most."""
        return min(-(-(request.limit - 1) // self._block_size), self._size)

    def _gaps(self, regions: Iterable[Region]) -> Iterator[Region]:
        end = 0
        for first, after in regions:
            if first > end:
                yield end, first
            end = after
        if self._size > end:
            yield end, self._size

    def missing(self, request: Request, upto: int, keep: int = 0, without: Collection[Request] = ()) -> int:
        """May be more than the blocks that are short in all: no gap need be large enough."""
        region = self._regions.get(request)
        if region is not None:
            return max(0, self.peak(request, upto) - (region[1] - region[0]))
        gone = {self._regions[r] for r in without if r in self._regions}
        available = self._available + sum(after - first for first, after in gone)
        longest = max(
            (after - first for first, after in self._gaps(r for r in self._sorted if r not in gone)), default=0
        )
        need = max(self._whole(request), self.peak(request, upto))
        return max(0, need - longest, need + keep - available)

    def reserve(self, request: Request, upto: int, keep: int = 0) -> Reservation | None:
        region = self._regions.get(request)
        if region is not None:
            length = (region[1] - region[0]) * self._block_size
            return Reservation(request.computed, length, ()) if upto <= length else None
        if self.missing(request, upto, keep):
            return None
        need = max(self._whole(request), self.peak(request, upto))
        first = next(first for first, after in self._gaps(self._sorted) if after - first >= need)
        region = self._regions[request] = first, first + need
        insort(self._sorted, region)
        self._available -= need
        blocks = tuple(range(*region))
        deltas = tuple(Delta(group, 0, blocks) for group in self._groups)
        return Reservation(0, need * self._block_size, deltas)

    def publish(self, request: Request) -> None:
        """Nothing is shared: there is nothing to index."""

    def release(self, request: Request) -> None:
        region = self._regions.pop(request, None)
        if region is not None:
            del self._sorted[bisect(self._sorted, region) - 1]
            self._available += region[1] - region[0]

    def usage(self) -> Usage:
        tokens = holding = 0
        for request in self._regions:
            tokens += request.computed
            holding += -(-request.computed // self._block_size)
        reserved = self._size - self._available - holding
        return Usage(holding, reserved, cached=0, free=self._available, tokens=tokens)

    def check_integrity(self) -> None:
        assert self._sorted == sorted(self._regions.values()), "the regions of requests and those taken differ"
        end = used = 0
        for first, after in self._sorted:
            assert end <= first < after <= self._size, f"region {first}..{after} overlaps another or leaves the pool"
            end = after
            used += after - first
        assert self._available == self._size - used, f"{self._available} blocks count as free, {used} are taken"
        for request, (first, after) in self._regions.items():
            assert request.computed <= (after - first) * self._block_size, f"{request} has outgrown its region"
