"""Schedulers and KV caches with one fault each, and the unbroken ones that they are made from."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

from framework.plugins.kv.paged import PagedCache

from framework import (
    CacheSpec,
    Capacity,
    Copy,
    Delta,
    KVCache,
    Request,
    Reservation,
    Usage,
    Victim,
    View,
    Want,
    hookimpl,
)

# Schedulers


class Ranked:
    """Unbroken: running and waiting together by priority, evicting the last."""

    @hookimpl
    def admit(self, view: View) -> Iterable[Want] | None:
        return (Want(r) for r in view.ranked(key=lambda r: r.priority))

    @hookimpl
    def preempt(self, beneficiary: Request, candidates: Sequence[Request]) -> Victim | None:
        return Victim(candidates[-1])


class Seated:
    """Unbroken: counts who runs by itself, and admits three at most."""

    def __init__(self) -> None:
        self.running: set[str] = set()

    @hookimpl
    def admit(self, view: View) -> Iterable[Want]:
        self.running = {r.id for r in view.running}
        room = 3 - len(self.running)
        return [Want(r) for r, _ in zip(view.waiting, range(max(0, room)), strict=False)]


class Idles(Ranked):
    """Holds everybody while more than two wait."""

    @hookimpl
    def admit(self, view: View) -> Iterable[Want] | None:
        if len(view.waiting) > 2:
            return [Want(r, 0) for r in view.running]
        return Ranked.admit(self, view)


class ForgetsVictims(Ranked):
    """Has a queue of its own, which a preempted request does not come back to."""

    def __init__(self) -> None:
        self.queue: list[Request] = []

    @hookimpl
    def arrived(self, request: Request) -> None:
        self.queue.append(request)

    @hookimpl
    def admit(self, view: View) -> Iterable[Want] | None:
        self.queue = [r for r in self.queue if r.status == "waiting"]
        return [Want(r) for r in self.queue]


class Starves(Ranked):
    """Has no room for large requests."""

    @hookimpl
    def admit(self, view: View) -> Iterable[Want] | None:
        return (Want(r) for r in view.queue(key=lambda r: r.priority) if len(r.prompt) < 60)


class BreaksTiesByChance(Ranked):
    @hookimpl
    def admit(self, view: View) -> Iterable[Want] | None:
        return (Want(r) for r in view.ranked(key=lambda r: (r.priority, random.random())))


class TurnsTheView(Ranked):
    @hookimpl
    def admit(self, view: View) -> Iterable[Want] | None:
        view.running.reverse()  # type: ignore[attr-defined]
        return Ranked.admit(self, view)


class Promotes(Ranked):
    """Writes what is not its own."""

    @hookimpl
    def admit(self, view: View) -> Iterable[Want] | None:
        for request in view.waiting:
            request.level -= 1
        return Ranked.admit(self, view)


class NamesTwice(Ranked):
    @hookimpl
    def admit(self, view: View) -> Iterable[Want] | None:
        return [*(Want(r) for r in view.waiting), *(Want(r, 1) for r in view.waiting[:1])]


class AsksForLessThanNothing(Ranked):
    """What is left of a budget of its own, which it overdraws."""

    @hookimpl
    def admit(self, view: View) -> Iterable[Want] | None:
        left, wants = 16, []
        for request in view.waiting:
            wants.append(Want(request, min(left, request.remaining)))
            left -= request.remaining
        return wants


class EvictsTheBeneficiary(Ranked):
    @hookimpl
    def preempt(self, beneficiary: Request, candidates: Sequence[Request]) -> Victim | None:
        return Victim(beneficiary)


class SortsEveryStep(Ranked):
    @hookimpl
    def admit(self, view: View) -> Iterable[Want] | None:
        return [Want(r) for r in sorted(view.waiting, key=lambda r: r.priority)]


class SortsACopy(Ranked):
    """In C, so that it calls nothing."""

    @hookimpl
    def admit(self, view: View) -> Iterable[Want] | None:
        return (Want(r) for r in sorted(view.waiting[:], key=attrgetter("priority")))


class KeepsWhoLeft(Ranked):
    """A list that only grows."""

    def __init__(self) -> None:
        self.seen: list[Request] = []

    @hookimpl
    def arrived(self, request: Request) -> None:
        self.seen.append(request)


class ExpectsWhoCame(Ranked):
    """Whose end is told may have been refused by another plugin, and never have arrived."""

    def __init__(self) -> None:
        self.known: set[str] = set()

    @hookimpl
    def arrived(self, request: Request) -> None:
        self.known.add(request.id)

    @hookimpl
    def request_done(self, request: Request) -> None:
        self.known.remove(request.id)


class CountsTheDead(Seated):
    """A request that its client left is counted as running for ever."""

    @hookimpl
    def request_done(self, request: Request) -> None:
        if request.finish_reason != "abort":
            self.running.discard(request.id)

    @hookimpl
    def admit(self, view: View) -> Iterable[Want]:
        self.running |= {r.id for r in view.running}
        room = 3 - len(self.running)
        return [Want(r) for r, _ in zip(view.waiting, range(max(0, room)), strict=False)]


# KV caches


class Toy(KVCache):
    """Unbroken: blocks on demand, forks that copy on write, swap. No prefix cache."""

    def __init__(self, cache_spec: CacheSpec, capacity: Capacity) -> None:
        self.size, self.host_size = capacity.blocks["device"], capacity.blocks["host"]
        self.block_size = cache_spec.block_size
        self.groups = range(len(cache_spec.groups))
        self.reset()

    def reset(self) -> None:
        self.free, self.host_free = list(range(self.size)), list(range(self.host_size))
        self.refs: Counter[int] = Counter()
        self.tables: dict[Request, list[int]] = {}
        self.host: dict[Request, list[int]] = {}
        self.log: list[Copy] = []
        self.forked: set[Request] = set()

    @property
    def available(self) -> int:
        return len(self.free)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def peak(self, request: Request, length: int) -> int:
        return self.blocks(length)

    def lookup(self, request: Request) -> int:
        return request.computed if request in self.host else 0

    def shared(self, request: Request, upto: int, without: Collection[Request] = ()) -> int | None:
        """Which entry of its table it is going to write, if others hold that block."""
        table, entry = self.tables.get(request, []), request.computed // self.block_size
        if entry >= len(table) or upto <= request.computed:
            return None
        others = sum(table[entry] in t for r, t in self.tables.items() if r is not request and r not in without)
        return entry if others else None

    def missing(self, request: Request, upto: int, keep: int = 0, without: Collection[Request] = ()) -> int:
        fresh = max(0, self.blocks(upto) - len(self.tables.get(request, ())))
        fresh += self.shared(request, upto, without) is not None
        held = Counter(block for r in set(without) for block in self.tables.get(r, ()))
        freed = sum(self.refs[block] == count for block, count in held.items())
        return max(0, fresh + keep - len(self.free) - freed) if fresh else 0

    def take(self) -> int:
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def give(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            self.free.append(block)

    def copy(self, request: Request, source: tuple[str, int], target: tuple[str, int]) -> None:
        self.log += [Copy(request.id, group, *source, *target) for group in self.groups]

    def reserve(self, request: Request, upto: int, keep: int = 0) -> Reservation | None:
        if self.missing(request, upto, keep):
            return None
        entry = self.shared(request, upto)
        new = request not in self.tables
        table = self.tables.setdefault(request, [])
        first = 0 if request in self.forked else len(table)
        self.forked.discard(request)
        if entry is not None:
            block = self.take()
            self.copy(request, ("device", table[entry]), ("device", block))
            self.give(table[entry])
            table[entry] = block
            first = 0
        while len(table) < self.blocks(upto):
            table.append(self.take())
        if request in self.host:
            self.swap_in(request, table)
        start = 0 if new and not request.computed else request.computed
        deltas = tuple(Delta(g, first, tuple(table[first:])) for g in self.groups if table[first:])
        return Reservation(start, len(table) * self.block_size, deltas)

    def swap_in(self, request: Request, table: list[int]) -> None:
        slots = self.host.pop(request)
        for slot, block in zip(slots, table, strict=False):
            self.copy(request, ("host", slot), ("device", block))
        self.host_free += slots

    def publish(self, request: Request) -> None:
        pass

    def fork(self, parent: Request, child: Request) -> bool:
        table = self.tables[child] = self.tables[parent][: self.blocks(child.computed)]
        self.refs.update(table)
        self.forked.add(child)
        return True

    def swap_out(self, request: Request) -> bool:
        table = self.tables[request][: self.blocks(request.computed)]
        if len(table) > len(self.host_free):
            return False
        self.host[request] = [self.host_free.pop() for _ in table]
        for block, slot in zip(table, self.host[request], strict=True):
            self.copy(request, ("device", block), ("host", slot))
        for block in self.tables.pop(request):
            self.give(block)
        return True

    def release(self, request: Request) -> None:
        for block in self.tables.pop(request, ()):
            self.give(block)
        self.host_free += self.host.pop(request, [])

    def drain(self) -> tuple[Copy, ...]:
        log, self.log = tuple(self.log), []
        return log

    def usage(self) -> Usage:
        tokens: Counter[int] = Counter()
        for request, table in self.tables.items():
            for entry, block in enumerate(table):
                filled = min(self.block_size, request.computed - entry * self.block_size)
                tokens[block] = max(tokens[block], filled, 0)
        holding = sum(count > 0 for count in tokens.values())
        reserved = len(tokens) - holding
        swapped = sum(map(len, self.host.values()))
        return Usage(holding, reserved, 0, len(self.free), swapped, sum(tokens.values()))

    def check_integrity(self) -> None:
        """Nothing: the kit has to notice by itself."""


class LeaksABlock(Toy):
    def release(self, request: Request) -> None:
        for block in self.tables.pop(request, [])[: -1 if request.computed > 5 else None]:
            self.give(block)
        self.host_free += self.host.pop(request, [])


class GivesABlockTwice(Toy):
    def take(self) -> int:
        block = super().take()
        if block % 5 == 4:
            self.free.insert(0, block)
        return block


class WritesWhatIsShared(Toy):
    """Forks, and does not copy on write."""

    def shared(self, request: Request, upto: int, without: Collection[Request] = ()) -> int | None:
        return None


class ForgetsWhoElseGoes(Toy):
    """Counts the blocks that victims share as if each would be freed by each."""

    def missing(self, request: Request, upto: int, keep: int = 0, without: Collection[Request] = ()) -> int:
        return super().missing(request, upto, keep)


class TakesAndFails(Toy):
    """A failed reserve keeps what it found."""

    def reserve(self, request: Request, upto: int, keep: int = 0) -> Reservation | None:
        found = super().reserve(request, upto, keep)
        if found is None and self.free and request in self.tables:
            self.tables[request].append(self.take())
        return found


class Promises(Toy):
    """Says that there is room for one block that is not there."""

    def missing(self, request: Request, upto: int, keep: int = 0, without: Collection[Request] = ()) -> int:
        return max(0, super().missing(request, upto, keep, without) - 1)

    def reserve(self, request: Request, upto: int, keep: int = 0) -> Reservation | None:
        return None if super().missing(request, upto, keep) else super().reserve(request, upto, keep)


class HidesWhatIsEmpty(Toy):
    """Tells reserved blocks as holding."""

    def usage(self) -> Usage:
        usage = super().usage()
        return usage._replace(holding=usage.holding + usage.reserved, reserved=0)


class SwapsInBackwards(Toy):
    def swap_in(self, request: Request, table: list[int]) -> None:
        self.host[request].reverse()
        super().swap_in(request, table)


class KeepsHostBlocks(Toy):
    def release(self, request: Request) -> None:
        for block in self.tables.pop(request, ()):
            self.give(block)


class PeaksTooLow(Toy):
    def peak(self, request: Request, length: int) -> int:
        return max(1, length // self.block_size)


class HitsWhatIsNotThere(Toy):
    """Takes a prompt for known by its first token alone."""

    def __init__(self, cache_spec: CacheSpec, capacity: Capacity) -> None:
        super().__init__(cache_spec, capacity)
        self.seen: set[int] = set()

    def reserve(self, request: Request, upto: int, keep: int = 0) -> Reservation | None:
        new = request not in self.tables
        found = super().reserve(request, upto, keep)
        if found is not None and new and not found.start:
            if request.prompt[0] in self.seen and request.num_tokens > self.block_size:
                found = Reservation(self.block_size, found.length, found.deltas)
            self.seen.add(request.prompt[0])
        return found


class ForgetsWhatToKeep(Toy):
    """Leaves nothing over where it answers as if others were gone."""

    def missing(self, request: Request, upto: int, keep: int = 0, without: Collection[Request] = ()) -> int:
        return super().missing(request, upto, 0 if without else keep, without)


class PublishesWhatIsPlanned(PagedCache):
    """Whose step may fail."""

    def __init__(self, cache_spec: CacheSpec, capacity: Capacity) -> None:
        super().__init__(cache_spec, capacity)
        self.planned: list[tuple[Request, int]] = []

    def reserve(self, request: Request, upto: int, keep: int = 0) -> Reservation | None:
        found = super().reserve(request, upto, keep)
        if found is not None and self._window is None:
            self.planned.append((request, min(upto, found.start + 7)))
        return found

    def drain(self) -> tuple[Copy, ...]:
        for request, upto in self.planned:
            before, request.computed = request.computed, upto
            self.publish(request)
            request.computed = before
        self.planned.clear()
        return super().drain()


class SharesWithEverybody(PagedCache):
    """Whatever their salts."""

    def __init__(self, cache_spec: CacheSpec, capacity: Capacity) -> None:
        super().__init__(cache_spec, capacity)
        assert self._prefixes is not None
        self._prefixes._root = lambda request: b""  # type: ignore[method-assign]


class LooksUpLess(PagedCache):
    def lookup(self, request: Request) -> int:
        return max(0, super().lookup(request) - self._block_size)


class TakesOverWhatIsScored(PagedCache):
    def _start(self, request: Request) -> Any:
        scores, request.prompt_logprobs = request.prompt_logprobs, None
        try:
            return super()._start(request)
        finally:
            request.prompt_logprobs = scores


class RemembersAfterReset(PagedCache):
    def reset(self) -> None:
        before = getattr(self, "_pool", None)
        super().reset()
        if before is not None:
            self._pool._block_of = before._block_of
