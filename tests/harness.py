"""An engine over the checking executor, with every invariant checked after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from framework.plugins.kv.paged import PagedCache
from framework.plugins.kv.pool import Lru

from framework import (
    Budget,
    CacheSpec,
    Capacity,
    KVCache,
    Mode,
    Plan,
    Request,
    RequestData,
    SamplingParams,
    Shortage,
    Victim,
    View,
    Want,
    hookimpl,
)
from framework.defaults import Defaults
from framework.engine import Engine
from framework.executor import Done
from framework.messages import Add, TokenOutput
from framework.preemption import Costs, Limits
from framework.registry import Plugins
from framework.testing import CheckingExecutor, VirtualClock


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


class _Recorder(CheckingExecutor):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plans: list[Plan] = []

    def submit(self, plan: Plan) -> Done:
        self.plans.append(plan)
        return super().submit(plan)


class Harness:
    """`add`, `step` and `abort`; after each, ownership, budget, seats, order and uniqueness of outputs are checked."""

    def __init__(
        self,
        policy: object | None = None,
        *,
        blocks: int = 8,
        block_size: int = 4,
        tokens: int = 64,
        seats: int = 8,
        watermark: int = 0,
        strict: bool = False,
        max_model_len: int = 1000,
        plugins: Sequence[object] = (),
        kv: Callable[[CacheSpec, Capacity], KVCache] | None = None,
        prefix_cache: bool = True,
        eviction: Callable[[], Any] = Lru,
        preemption: Mode | None = None,
        costs: Costs = Costs(),
        **executor: Any,
    ) -> None:
        self.done: Counter[str] = Counter()
        self.accepted: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.requests: dict[str, Request] = {}
        self.clock = VirtualClock()
        self.executor = _Recorder(
            blocks, block_size, token_budget=tokens, seats=seats, clock=self.clock, cost=lambda plan: 0.001, **executor
        )
        capacity = self.executor.start()
        self.windowed = None not in executor.get("windows", (None,))
        self.blocks, self.block_size, self.shares = blocks, block_size, prefix_cache
        self.kv: Any = kv and kv(self.executor.cache_spec, capacity)
        if kv is None:
            self.kv = PagedCache(
                self.executor.cache_spec, capacity, prefix_cache=prefix_cache, eviction=eviction, chunk=tokens
            )
        registry = Plugins()
        registry.add(Defaults(registry), "core")
        for i, plugin in enumerate(plugins):
            registry.add(plugin, f"plugin{i}")
        if policy is not None:
            registry.add(policy, "policy")
        registry.add(self, "observer")  # last, so called first: no other plugin can keep `accept` from it
        limits = Limits(tokens, seats, watermark, strict, preemption, costs)
        self.engine = Engine(registry, self.executor, self.kv, limits, max_model_len)
        self.planner = self.engine.planner
        self.view = self.planner.view

    @hookimpl
    def accept(self, request: Request) -> None:
        self.accepted.add(request.id)

    @hookimpl
    def request_done(self, request: Request) -> None:
        self.done[request.id] += 1
        assert self.done[request.id] == 1, f"request_done came twice for {request}"

    def add(
        self,
        id: str,
        prompt: int | Sequence[int] = 4,
        max_tokens: int | None = 4,
        priority: int = 0,
        tenant: str = "",
        n: int = 1,
        cache_salt: bytes = b"",
        **params: Any,
    ) -> TokenOutput | None:
        """Returns the refusal, or None if the request was taken in. A prompt's length stands for some prompt."""
        if isinstance(prompt, int):
            prompt = [(i * 7 + sum(id.encode())) % 97 for i in range(prompt)]
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        message = Add(id, list(prompt), sampling, self.clock.ns(), priority, tenant, cache_salt=cache_salt, n=n)
        refusals = self.engine.add(message)
        if refusals:
            assert len(refusals) == 1 and refusals[0].id == id and refusals[0].finish_reason == "error"
            return refusals[0]
        for each in message.ids:
            self.requests[each] = self.engine.requests[each]
            self.outputs[each] = []
        self.clock.advance(1e-6)
        return None

    def step(self) -> Plan | None:
        """One step; returns its plan, or None if nothing was submitted."""
        before = len(self.executor.plans)
        self._take(self.engine.step())
        self.check()
        plans = self.executor.plans[before:]
        return plans[0] if plans else None

    def steps(self, count: int) -> list[Plan]:
        return [plan for plan in (self.step() for _ in range(count)) if plan is not None]

    def run(self, most: int = 500) -> None:
        """Until nobody is left."""
        for _ in range(most):
            if not self.engine.has_work:
                break
            if self.step() is None:
                self.clock.advance(0.01)
        assert not self.engine.has_work, f"no end after {most} steps: {list(self.engine.requests.values())}"
        self.check()

    def abort(self, *ids: str, reason: str = "abort") -> None:
        self._take(self.engine.abort(ids, reason))
        self.check()

    @property
    def copies(self) -> Counter[tuple[str, str]]:
        """Copies so far by tiers, of the first group."""
        return Counter((c.src_tier, c.dst_tier) for plan in self.executor.plans for c in plan.copies if c.group == 0)

    def _take(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            assert output.id not in self.reasons, f"{output.id} had ended already: {output}"
            known = self.outputs[output.id]
            assert output.index == len(known), f"{output.id}: index {output.index} after {len(known)} tokens"
            known += output.tokens
            if output.finish_reason is not None:
                self.reasons[output.id] = output.finish_reason
                if output.error:
                    self.errors[output.id] = output.error

    def check(self) -> None:
        self.executor.check()
        self.kv.check_integrity()
        view = self.view
        shown = [*view.running, *view.waiting]
        alive = {r.id for r in shown} | {child.id for r in shown for child in r.children}
        assert len(alive) == len(view.running) + len(view.waiting) + view.hidden == view.total
        assert alive == set(self.engine.requests)
        assert set(self.done) == self.accepted - alive
        usage = self.kv.usage()
        swapped = sum(-(-r.computed // self.block_size) for r in view.waiting)
        if self.windowed:
            assert usage.swapped <= swapped
        else:
            assert usage.swapped == swapped, "only who was swapped out waits with computed tokens, and owns host blocks"
        assert usage.total == self.blocks and usage.free + usage.cached == self.kv.available
        held = sum(r.computed for r in view.running)
        forked = sum(r.parent is not None for r in view.running)  # each begins one token before its parent
        assert usage.tokens <= held + forked and usage.holding * self.block_size >= usage.tokens
        if not self.shares:
            assert usage.cached == 0
            assert usage.tokens == held or forked or self.windowed
        if not view.running:
            assert self.kv.available == usage.total and usage.tokens == 0

    # What tests ask

    def __getitem__(self, id: str) -> Request:
        return self.requests[id]

    @property
    def running(self) -> list[str]:
        return [r.id for r in self.view.running]

    @property
    def waiting(self) -> list[str]:
        return [r.id for r in self.view.waiting]

    def alone(self, id: str) -> list[int]:
        """All that the request's output can be: what it gives when nobody disturbs it."""
        request = self.requests[id]
        params, tokens = request.params, list(request.prompt)
        data = RequestData(id, list(request.prompt), len(request.prompt), params, request.seed)
        output: list[int] = []
        while len(output) < (params.max_tokens or 1000):
            output.append(self.executor.next_token(data, tokens))
            tokens.append(output[-1])
            if output[-1] in params.ends and len(output) > params.min_tokens:
                break
        return output


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
