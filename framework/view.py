"""What policies read of the engine: live, without copies, in orders that are kept as requests come and go."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from random import Random
from typing import Any, TypeVar, overload

from .kv import KVCache, Usage
from .types import Request, Status

Key = Callable[[Request], Any]
# (key, preempted first, arrival, order of acceptance, request): `order` is unique, so requests are never compared.
Entry = tuple[Any, bool, float, int, Request]

_arrived, _order = attrgetter("arrival"), attrgetter("order")

MAX_ORDERS = 8
"""Orders kept at once. A policy whose key is a new closure over new values each time makes a new one each time."""


class Order:
    """Waiting requests sorted by one key."""

    def __init__(self, key: Key, requests: Iterator[Request]) -> None:
        self.key = key
        self.entries: list[Entry] = sorted(self._entry(r) for r in requests)
        self._of = {entry[4]: entry for entry in self.entries}

    def _entry(self, r: Request) -> Entry:
        return (self.key(r), r.status is not Status.PREEMPTED, r.arrival, r.order, r)

    def __contains__(self, request: Request) -> bool:
        return request in self._of

    def add(self, request: Request) -> None:
        entry = self._of[request] = self._entry(request)
        insort(self.entries, entry)

    def remove(self, request: Request) -> None:
        entry = self._of.pop(request)  # as it was sorted in, whatever the key says now
        index = bisect_left(self.entries, entry)
        if index == len(self.entries) or self.entries[index] is not entry:  # keys without an order, such as NaN
            index = next(i for i, other in enumerate(self.entries) if other is entry)
        del self.entries[index]

    def __iter__(self) -> Iterator[Request]:
        return (entry[4] for entry in self.entries)


class Groups:
    """Waiting requests in queues of their own, by one key: each preempted first, then by arrival. None is empty."""

    def __init__(self, key: Key, requests: Iterator[Request]) -> None:
        self.key = key
        self.orders: dict[Hashable, Order] = {}
        self._of: dict[Request, Hashable] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        group = self.key(request)
        order = self.orders.get(group)
        if order is None:
            order = self.orders[group] = Order(_arrival, iter(()))
        order.add(request)
        self._of[request] = group

    def remove(self, request: Request) -> None:
        group = self._of.pop(request)
        order = self.orders[group]
        order.remove(request)
        if not order.entries:
            del self.orders[group]


class _Requests(Sequence[Request]):
    """The requests of an order, as a sequence."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        if isinstance(index, slice):
            return list(self._of(self._entries[index]))
        return self._entries[index][4]

    def __iter__(self) -> Iterator[Request]:
        return self._of(self._entries)

    @staticmethod
    def _of(entries: list[Entry]) -> Iterator[Request]:
        """A generator even for a slice: the conformance kit counts its calls, and so what a policy reads."""
        return (entry[4] for entry in entries)


def _arrival(request: Request) -> int:
    return 0


def _identity(key: Key) -> Any:
    """The same lambda, written once and evaluated every step, is the same key: by its code and what it closes over."""
    function = getattr(key, "__func__", key)
    code = getattr(function, "__code__", None)
    if code is None:
        return key
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    plain = tuple(c if isinstance(c, (int, float, str, bytes, type(None))) else id(c) for c in cells)
    defaults = id(function.__defaults__), tuple(map(id, (function.__kwdefaults__ or {}).values()))
    return code, id(getattr(key, "__self__", None)), plain, defaults


Kept = TypeVar("Kept", Order, Groups)


class Waiting:
    """Waiting requests in as many orders as policies ask for."""

    def __init__(self) -> None:
        self._default = Order(_arrival, iter(()))
        self._orders: dict[Any, Order | Groups] = {}
        self.sequence = _Requests(self._default.entries)

    def __len__(self) -> int:
        return len(self._default.entries)

    def __contains__(self, request: Request) -> bool:
        return request in self._default

    def add(self, request: Request) -> None:
        self._default.add(request)
        for identity, order in list(self._orders.items()):
            try:
                order.add(request)
            except Exception:  # noqa: BLE001 - a policy's key may raise anything: it does so again, and is
                del self._orders[identity]  # blamed for it, when the policy next asks for this order

    def remove(self, request: Request) -> None:
        self._default.remove(request)
        for order in self._orders.values():
            order.remove(request)

    def by(self, key: Key) -> Order:
        return self._kept(Order, key)

    def grouped(self, key: Key) -> Groups:
        return self._kept(Groups, key)

    def _kept(self, kind: type[Kept], key: Key) -> Kept:
        identity = kind, _identity(key)
        order = self._orders.get(identity)
        if order is None:
            if len(self._orders) >= MAX_ORDERS:
                del self._orders[next(iter(self._orders))]
            order = self._orders[identity] = kind(key, iter(self.sequence))
        assert isinstance(order, kind)
        return order


def _merge(running: list[Entry], waiting: list[Entry]) -> Iterator[Request]:
    """Two sorted lists as one. (`heapq.merge` takes three times as long, and this is asked of every step.)"""
    position = 0
    for entry in running:
        while position < len(waiting) and waiting[position] < entry:
            yield waiting[position][4]
            position += 1
        yield entry[4]
    for rest in range(position, len(waiting)):
        yield waiting[rest][4]


class LiveView:
    """The `View` that the planner hands to policies: one object for the engine's life."""

    def __init__(self, kv: KVCache, seed: int) -> None:
        self.now = 0.0
        self.step = 0
        self.running: list[Request] = []
        self.queued = Waiting()
        self.hidden = 0
        self.ranked_by: Key | None = None  # set by `ranked`, read by the planner
        self._kv = kv
        self._seed = seed
        self._rng = Random()
        self._rng_step = -1
        self._cached: dict[Request, int] = {}

    def begin(self, step: int, now: float) -> None:
        """A new step: what was memoised for the last one is stale."""
        self.step, self.now = step, now
        self.ranked_by = None
        self._cached.clear()

    @property
    def rng(self) -> Random:
        if self._rng_step != self.step:
            self._rng_step = self.step
            self._rng.seed(self._seed * 0x9E3779B97F4A7C15 + self.step)
        return self._rng

    @property
    def waiting(self) -> Sequence[Request]:
        return self.queued.sequence

    @property
    def total(self) -> int:
        return len(self.running) + len(self.queued) + self.hidden

    @property
    def usage(self) -> Usage:
        return self._kv.usage()

    def queue(self, key: Key) -> Iterator[Request]:
        return iter(self.queued.by(key))

    def queues(self, key: Key) -> Mapping[Any, Order]:
        return self.queued.grouped(key).orders

    def ranked(self, key: Key) -> Iterator[Request]:
        self.ranked_by = key
        some = self.running
        running: list[Entry] = sorted(zip(map(key, some), repeat(False), map(_arrived, some), map(_order, some), some))
        return _merge(running, self.queued.by(key).entries)

    def cached(self, request: Request) -> int:
        if request.status is Status.RUNNING:
            return 0
        known = self._cached.get(request)
        if known is None:
            known = self._cached[request] = max(0, self._kv.lookup(request) - request.computed)
        return known

    def missing(self, request: Request, tokens: int, keep: int = 0) -> int:
        start = request.computed + self.cached(request)
        return self._kv.missing(request, min(start + tokens, request.num_tokens + request.drafts), keep)
