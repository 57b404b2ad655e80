"""The simulation that tests of the core run in, and policies that do as a test says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from framework.plugins.kv.paged import PagedCache
from framework.plugins.kv.pool import Lru
from framework.plugins.schedulers import PriorityOptions
from framework.plugins.schedulers.priority import Priority

from framework import (
    Budget,
    CacheSpec,
    Capacity,
    KVCache,
    Plan,
    Request,
    SamplingParams,
    Shortage,
    Status,
    Victim,
    View,
    Want,
    hookimpl,
)
from framework.messages import Add, TokenOutput
from framework.testing import Client, Simulation
from framework.testing.simulation import MakeCache


class Policy:
    """Ranks and picks as a test says; by default as the core does. Remembers what it was asked."""

    def __init__(self) -> None:
        self.rank: Callable[[View], Iterable[Want] | None] = lambda view: None
        self.pick: Callable[[Request, Sequence[Request]], Victim | None] = lambda beneficiary, candidates: None
        self.level: Callable[[Request], float] = lambda request: request.priority
        self.budgets: list[Budget] = []
        self.asked: list[tuple[str, Shortage, list[str]]] = []

    @hookimpl
    def arrived(self, request: Request) -> None:
        request.level = self.level(request)

    @hookimpl
    def admit(self, view: View, budget: Budget) -> Iterable[Want] | None:
        self.budgets.append(budget)
        return self.rank(view)

    @hookimpl
    def preempt(self, beneficiary: Request, shortage: Shortage, candidates: Sequence[Request]) -> Victim | None:
        self.asked.append((beneficiary.id, shortage, [r.id for r in candidates]))
        return self.pick(beneficiary, candidates)


class Harness(Simulation):
    """A `Simulation` on a small pool, with short ways to say what tests say often."""

    def __init__(
        self,
        policy: object | None = None,
        *,
        blocks: int = 8,
        tokens: int = 64,
        kv: MakeCache | None = None,
        prefix_cache: bool = True,
        eviction: Callable[[], Any] = Lru,
        **options: Any,
    ) -> None:
        def paged(spec: CacheSpec, capacity: Capacity) -> KVCache:
            return PagedCache(spec, capacity, prefix_cache=prefix_cache, eviction=eviction, chunk=tokens)

        super().__init__(policy, kv or paged, blocks=blocks, tokens=tokens, prefix_cache=prefix_cache, **options)
        self.planner = self.engine.planner

    def add(
        self,
        client: Client | str,
        prompt: int | Sequence[int] = 4,
        max_tokens: int | None = 4,
        priority: int = 0,
        tenant: str = "",
        n: int = 1,
        cache_salt: bytes = b"",
        **params: Any,
    ) -> TokenOutput | None:
        """Returns the refusal, or None if the request was taken in. A prompt's length stands for some prompt. No two
        requests arrive at the same time, unless they are given as `Client`."""
        if isinstance(client, Client):
            return super().add(client)
        if isinstance(prompt, int):
            prompt = [(i * 7 + sum(client.encode())) % 97 for i in range(prompt)]
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        now = self.clock.ns()
        refusal = self.send(Add(client, list(prompt), sampling, now, priority, tenant, cache_salt=cache_salt, n=n))
        self.clock.advance(1e-6)
        return refusal

    def steps(self, count: int) -> list[Plan]:
        return [plan for plan in (self.step() for _ in range(count)) if plan is not None]

    def run(self, most: int = 500) -> None:
        super().run(most)

    @property
    def copies(self) -> Counter[tuple[str, str]]:
        """Copies so far by tiers, of the first group."""
        return Counter((c.src_tier, c.dst_tier) for plan in self.plans for c in plan.copies if c.group == 0)

    def __getitem__(self, id: str) -> Request:
        return self.requests[id]


def ids(plan: Plan | None) -> list[str]:
    return [] if plan is None else [s.request_id for s in plan.slices]


def tokens(plan: Plan | None) -> dict[str, int]:
    return {} if plan is None else {s.request_id: s.tokens for s in plan.slices}


def ranked(h: Harness, *wants: str | tuple[str, int]) -> Callable[[View], list[Want]]:
    """A ranking of requests by id, or (id, tokens)."""
    pairs = [(want, None) if isinstance(want, str) else want for want in wants]
    return lambda view: [Want(h[id], count) for id, count in pairs]


def started(
    *requests: str, policy: Policy | None = None, max_tokens: int = 5, **options: Any
) -> tuple[Harness, Policy]:
    """Requests that run and have sampled one token each. By default each owns one full block of four tokens, so that
    each needs a second block to go on, and no third."""
    policy = policy or Policy()
    h = Harness(policy, **options)
    for id in requests:
        h.add(id, 4, max_tokens)
    h.step()
    assert h.running == list(requests)
    policy.budgets.clear()
    return h, policy


class Asked(Priority):
    """Remembers for whom it gave up whom."""

    def __init__(self) -> None:
        super().__init__(PriorityOptions())
        self.victims: list[tuple[str, Status, str]] = []

    @hookimpl
    def preempt(self, beneficiary: Request, candidates: Sequence[Request]) -> Victim:
        victim = Priority.preempt(self, candidates)
        self.victims.append((beneficiary.id, beneficiary.status, victim.request.id))
        return victim
