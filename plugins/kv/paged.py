"""Paged KV cache: a pool of equal blocks, handed out on demand and returned whole.

    block    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |    capacity.blocks["device"] blocks of `block_size` tokens
    table of   A   A   B   A   -   B   -   -      A: [0, 1, 3], B: [2, 5]
    state      h   h   h   r   f   h   f   f      holding, reserved (promised, still empty), free

    A's tokens | 0 . . . | 1 . . . | 3 . . . |    block size 4: positions 0-3, 4-7, 8-11
               <-- computed 7 -->  <reserved->

Free blocks are a stack: the last returned is the first handed out. A block's reference count is the number of
tables that hold it; at 0 it is free. The groups of a model have their own memory but one geometry: block b of
every group covers the same tokens, so one table serves them all and each delta is repeated per group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from framework import CacheSpec, Capacity, ConfigError, Delta, KVCache, Request, Reservation, Usage


class PagedCache(KVCache):
    """Blocks on demand. Every call costs O(blocks concerned); `usage` O(requests that hold blocks)."""

    def __init__(self, cache_spec: CacheSpec, capacity: Capacity) -> None:
        """Raises `ConfigError` if the pool has no block."""
        self._size = capacity.blocks["device"]
        if self._size < 1:
            raise ConfigError("the KV pool has no block: raise kv_memory or kv_blocks")
        self._block_size = cache_spec.block_size
        self._groups = range(len(cache_spec.groups))
        self.reset()

    def reset(self) -> None:
        self._free = list(range(self._size - 1, -1, -1))
        self._refs = [0] * self._size
        self._tables: dict[Request, list[int]] = {}

    @property
    def available(self) -> int:
        return len(self._free)

    def peak(self, request: Request, length: int) -> int:
        return -(-length // self._block_size)

    def missing(self, request: Request, upto: int, keep: int = 0, without: Collection[Request] = ()) -> int:
        need = -(-upto // self._block_size) - len(self._tables.get(request, ()))
        if need <= 0:
            return 0
        return max(0, need + keep - len(self._free) - (self._freed(without) if without else 0))

    def _freed(self, requests: Collection[Request]) -> int:
        """Blocks that become free if all `requests` let go: those with no other reference left."""
        held = Counter(block for r in set(requests) for block in self._tables.get(r, ()))
        return sum(self._refs[block] == count for block, count in held.items())

    def reserve(self, request: Request, upto: int, keep: int = 0) -> Reservation | None:
        table = self._tables.get(request)
        if table is None:
            start, first = 0, 0
        else:
            start, first = request.computed, len(table)
            covered = first * self._block_size
            if upto <= covered:  # the common case: a decode inside its last block
                return Reservation(start, covered, ())
        need = -(-upto // self._block_size) - first
        free = self._free
        if need + keep > len(free):
            return None
        if table is None:
            table = self._tables[request] = []
        blocks = free[: -need - 1 : -1]
        del free[-need:]
        for block in blocks:
            self._refs[block] = 1
        table += blocks
        taken = tuple(blocks)
        deltas = tuple(Delta(group, first, taken) for group in self._groups)
        return Reservation(start, len(table) * self._block_size, deltas)

    def publish(self, request: Request) -> None:
        """Nothing is shared: there is nothing to index."""

    def release(self, request: Request) -> None:
        for block in reversed(self._tables.pop(request, ())):  # back to front: tails are reused before heads
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)

    def usage(self) -> Usage:
        size = self._block_size
        tokens = holding = 0
        for request in self._tables:
            tokens += request.computed
            holding += -(-request.computed // size)
        free = len(self._free)
        return Usage(holding, self._size - free - holding, cached=0, free=free, tokens=tokens)

    def check_integrity(self) -> None:
        held = Counter(block for table in self._tables.values() for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice on the free list"
        assert free.isdisjoint(held), f"free and owned: blocks {sorted(free & held.keys())}"
        lost = set(range(self._size)) - free - held.keys()
        assert not lost, f"neither free nor owned: blocks {sorted(lost)}"
        for block, count in enumerate(self._refs):
            assert held[block] == count, f"block {block} is in {held[block]} tables but counts {count}"
        for request, table in self._tables.items():
            assert len(set(table)) == len(table), f"a block is twice in the table of {request}: {table}"
            assert request.computed <= len(table) * self._block_size, f"{request} has computed beyond {table}"
