"""The blocks of a tier: who holds them, and which still hold what somebody may ask for again.

block      | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
references   2   1   1   0   0   0   0   0    tables that hold the block
name         a   b   -   c   d   -   -   -    hash of all tokens up to its last one, once it is full and published
state        held    |   idle  |   free       idle: given up by all, kept until the memory is needed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, Protocol

from framework import PluginError


class Eviction(Protocol):
    """Which idle block is given up when memory is needed. A provider of kind "eviction" makes one.

    Blocks become idle tail first, so that of equals a prefix's tail should go before its head.
    """

    def add(self, block: int, uses: int) -> None:
        """`block` became idle. `uses`: how often a request found it here since it was filled."""

    def remove(self, block: int) -> None:
        """`block` is idle no longer: a request holds it again."""

    def pop(self) -> int:
        """Take out the block to give up. Called only if there is one."""


class Lru:
    """The block that has been idle for longest goes first."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def add(self, block: int, uses: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        block = next(iter(self._blocks))
        del self._blocks[block]
        return block


class Lfu:
    """The block that was found least often goes first; of equals, the one that has been idle for longest."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []  # uses, n-th to become idle, block; old entries stay till popped
        self._entry: dict[int, int] = {}
        self._count = 0

    def add(self, block: int, uses: int) -> None:
        self._count += 1
        self._entry[block] = self._count
        heappush(self._heap, (uses, self._count, block))
        if len(self._heap) > 2 * len(self._entry) + 64:
            self._heap = sorted(entry for entry in self._heap if self._entry.get(entry[2]) == entry[1])

    def remove(self, block: int) -> None:
        del self._entry[block]

    def pop(self) -> int:
        while True:
            _, count, block = heappop(self._heap)
            if self._entry.get(block) == count:
                del self._entry[block]
                return block


class Pool:
    """Reference-counted blocks. A published block can be found by its name until it is given up or written again."""

    def __init__(self, size: int, eviction: Eviction) -> None:
        self.size = size
        self.refs = [0] * size
        self.free = list(range(size - 1, -1, -1))  # a stack: the last returned is the first handed out
        self.idle = 0
        self._eviction = eviction
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._uses = [0] * size

    @property
    def available(self) -> int:
        return len(self.free) + self.idle

    def take(self, count: int) -> list[int]:
        """`count` <= `available` blocks for one table. Idle ones are given up only once no block is free."""
        if not count:
            return []
        free = self.free
        blocks = free[: -count - 1 : -1]
        del free[-count:]
        while len(blocks) < count:
            block = self._evict("pop")
            if type(block) is not int or block not in self._name_of or self.refs[block]:
                name = type(self._eviction).__name__
                raise PluginError(f"eviction {name!r}: pop answered {block!r}, which is no idle block", name)
            self.idle -= 1
            del self._block_of[self._name_of.pop(block)]
            blocks.append(block)
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def _evict(self, method: str, *arguments: int) -> Any:
        """Ask the eviction policy, which may be anybody's."""
        try:
            return getattr(self._eviction, method)(*arguments)
        except Exception as exc:
            name = type(self._eviction).__name__
            raise PluginError(f"eviction {name!r}: {method}: {type(exc).__name__}: {exc}", name) from exc

    def hold(self, block: int) -> None:
        """One more table holds `block`."""
        if not self.refs[block]:
            self._evict("remove", block)
            self.idle -= 1
        self.refs[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """A table lets go of `blocks`: back to front, so that the tail is given up, or reused, before the head."""
        refs, names = self.refs, self._name_of
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                if block in names:
                    self._evict("add", block, self._uses[block])
                    self.idle += 1
                else:
                    self.free.append(block)

    def publish(self, block: int, name: bytes) -> None:
        """A name that is taken stays with the block that has it: this one remains its table's own."""
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name
            self._uses[block] = 0

    def unpublish(self, block: int) -> None:
        """`block`, held by one table, is about to be written again."""
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]

    def find(self, name: bytes) -> int | None:
        return self._block_of.get(name)

    def found(self, block: int) -> None:
        """A request is served from `block`."""
        self._uses[block] += 1
        self.hold(block)

    def name(self, block: int) -> bytes | None:
        return self._name_of.get(block)

    def check(self, held: Counter[int], unwritten: Iterable[int]) -> None:
        """Raise AssertionError unless every block is held (as often as `held` says), idle or free, and names agree."""
        free = set(self.free)
        assert len(free) == len(self.free), "a block is twice on the free list"
        assert free.isdisjoint(held), f"free and owned: blocks {sorted(free & held.keys())}"
        assert free.isdisjoint(self._name_of), f"free and published: blocks {sorted(free & self._name_of.keys())}"
        idle = self._name_of.keys() - held.keys()
        assert len(idle) == self.idle, f"{len(idle)} blocks are idle but {self.idle} were counted"
        lost = set(range(self.size)) - free - idle - held.keys()
        assert not lost, f"neither free nor owned: blocks {sorted(lost)}"
        for block, count in enumerate(self.refs):
            assert held[block] == count, f"block {block} is in {held[block]} tables but counts {count}"
        assert {block: name for name, block in self._block_of.items()} == self._name_of, "names and blocks disagree"
        for block in unwritten:
            assert held[block] == 1, f"block {block} is still empty and in {held[block]} tables"
            assert block not in self._name_of, f"block {block} is still empty and published"
