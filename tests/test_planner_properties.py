"""Random runs of the whole loop: any mix of arrivals, aborts and failing steps, tiny pools and all kinds of policies.

After every step `Harness` checks ownership, budget, seats and the order of outputs, and the checking executor every
slot that was read. Here, what holds over a whole run: each request's output is what it gives alone, it ends exactly
once, and everything is free at the end. Half of the runs have no aborts: those hide requests that would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import pytest
from framework.plugins.kv.contiguous import ContiguousCache
from framework.plugins.kv.pool import Lfu, Lru
from framework.plugins.schedulers import FairOptions, PriorityOptions
from framework.plugins.schedulers.fair import Fair
from framework.plugins.schedulers.fcfs import Fcfs
from framework.plugins.schedulers.priority import Priority
from framework.plugins.schedulers.static import Static
from harness import Harness, Policy
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Mode, Plan, Request, Victim, View, Want


@dataclass
class Client:
    """A request, when it comes, and when its client leaves (None: never)."""

    prompt: int
    max_tokens: int | None
    arrives: int = 0
    leaves: int | None = None
    priority: int = 0
    min_tokens: int = 0
    ends: int = 0  # how many of the 256 tokens are EOS
    n: int = 1
    family: int | None = None  # those of one family begin alike
    leaves_whole: bool = True  # or only one of the n does


def _prompt(client: Client, id: str) -> list[int]:
    if client.family is None:
        return [(i * 7 + sum(id.encode())) % 97 for i in range(client.prompt)]
    shared = [(i * 5 + client.family) % 89 for i in range(client.prompt)]
    return [*shared[:-1], sum(id.encode()) % 97] if len(shared) % 3 else shared


@dataclass
class Scenario:
    policy: str
    blocks: int
    block_size: int
    tokens: int
    seats: int
    watermark: int
    windows: tuple[int | None, ...]
    clients: list[Client]
    failures: dict[int, Literal["before", "after"]] = field(default_factory=dict)
    seed: int = 0
    host: int = 0
    prefix_cache: bool = True
    eviction: type = Lru
    preemption: Mode | None = None
    kv: str = "paged"
    in_flight: int = 1


class _Random(Policy):
    """Ranks at random; picks victims and modes at random. May also hold, name few, answer late and be lazy."""

    def __init__(self, seed: int, holds: float = 0.0, faults: float = 0.0) -> None:
        super().__init__()
        self.rng = Random(seed)
        self.holds, self.faults = holds, faults
        self.rank = self.at_random
        self.pick = self.anyone
        self.level = lambda request: self.rng.choice((request.priority, self.rng.random()))

    def at_random(self, view: View) -> Iterable[Want] | None:
        rng = self.rng
        if rng.random() < self.faults:
            raise RuntimeError("no idea")
        everybody = [*view.running, *view.waiting]
        rng.shuffle(everybody)
        wants = [Want(r, rng.choice((None, None, None, 1, 2, 7, 1000))) for r in everybody]
        if self.holds:
            wants = [Want(w.request, 0) if rng.random() < self.holds else w for w in wants]
            wants = [w for w in wants if rng.random() > self.holds]
        if rng.random() < self.faults:
            wants += wants[:1]
        return rng.choice((None, wants, iter(wants), tuple(wants)))

    def anyone(self, beneficiary: Request, candidates: Sequence[Request]) -> Victim | None:
        if self.rng.random() < self.faults:
            return Victim(beneficiary)
        if self.rng.random() < 0.2:
            return None
        return Victim(self.rng.choice(candidates), self.rng.choice((None, *Mode)))


class _Ranked(Policy):
    """Running and waiting together by level, evicting the last: what a preempting scheduler does."""

    def __init__(self, level: Any) -> None:
        super().__init__()
        self.level = level
        self.rank = lambda view: (Want(r) for r in view.ranked(key=lambda r: r.level))
        self.pick = lambda beneficiary, candidates: Victim(candidates[-1])


class _Shortest(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.rank = lambda view: (Want(r) for r in view.queue(key=lambda r: len(r.prompt)))


class _Newest(Policy):
    """The last come first, few tokens at a time; waiting requests before those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = self.newest

    def newest(self, view: View) -> Iterator[Want]:
        yield from (Want(r, 3) for r in reversed(view.waiting))
        yield from (Want(r) for r in view.running)


POLICIES = {
    "default": lambda seed: None,
    "fcfs": lambda seed: Fcfs(),
    "priority": lambda seed: Priority(PriorityOptions()),
    "aging": lambda seed: Priority(PriorityOptions(aging=0.02)),
    "fair": lambda seed: Fair(FairOptions(weights={"tenant 1": 3.0})),
    "static": lambda seed: Static(),
    "deadline": lambda seed: _Ranked(lambda request: request.arrival + len(request.prompt)),
    "shortest": lambda seed: _Shortest(),
    "newest": lambda seed: _Newest(),
    "random": lambda seed: _Random(seed),
    "holding": lambda seed: _Random(seed, holds=0.2),
    "faulty": lambda seed: _Random(seed, faults=0.15),
}
CACHES = {"paged": None, "contiguous": ContiguousCache}
MAY_IDLE = ("holding", "faulty")


def play(scenario: Scenario) -> Harness:
    """Run a scenario to its end and check what has to hold."""

    def fail(plan: Plan) -> Literal["before", "after"] | None:
        return scenario.failures.get(plan.step)

    h = Harness(
        POLICIES[scenario.policy](scenario.seed),
        blocks=scenario.blocks,
        block_size=scenario.block_size,
        tokens=scenario.tokens,
        seats=scenario.seats,
        watermark=scenario.watermark,
        max_model_len=120,
        windows=scenario.windows,
        fail=fail,
        host_blocks=scenario.host,
        prefix_cache=scenario.prefix_cache,
        eviction=scenario.eviction,
        preemption=scenario.preemption,
        kv=CACHES[scenario.kv],
        max_in_flight=scenario.in_flight,
    )
    clients = {f"r{i}": client for i, client in enumerate(scenario.clients)}
    refused: set[str] = set()
    last = max([c.arrives for c in scenario.clients] + [c.leaves or 0 for c in scenario.clients], default=0)
    step = 0
    while h.engine.has_work or step <= last:
        assert step < 5000, f"no end: {h.view.running} run, {list(h.view.waiting)} wait"
        for id, client in clients.items():
            if client.arrives == step:
                params = {"min_tokens": client.min_tokens, "eos_token_ids": tuple(range(client.ends))}
                tenant = f"tenant {client.priority}"
                prompt = _prompt(client, id)
                if h.add(id, prompt, client.max_tokens, client.priority, tenant, client.n, **params):
                    refused.add(id)
            if client.leaves == step:
                every = [id, *(f"{id}/{k}" for k in range(1, client.n))]
                h.abort(*(every if client.leaves_whole else every[step % client.n :][:1]))
        had_work, ended = bool(h.engine.requests), len(h.reasons)
        plan = h.step()
        if had_work and scenario.policy not in MAY_IDLE:
            assert (plan and plan.slices) or len(h.reasons) > ended, "a step did nothing although work exists"
        step += 1

    for id in h.requests:
        client, output, reason = clients[id.partition("/")[0]], h.outputs[id], h.reasons[id]
        complete = h.alone(id)
        if reason in ("abort", "error") or client.max_tokens is None:
            assert output == complete[: len(output)]
        else:
            assert output == complete
            stopped = output[-1] < client.ends and len(output) > client.min_tokens
            assert reason == ("stop" if stopped else "length")
        assert reason != "abort" or client.leaves is not None
        assert reason != "error" or len(scenario.failures) >= 3
    for id in refused:
        client = clients[id]
        most = client.prompt + (client.max_tokens or 1) - 1
        assert most > scenario.blocks * scenario.block_size or None not in scenario.windows
    assert h.done == dict.fromkeys(h.requests, 1)
    usage = h.kv.usage()
    assert usage.free + usage.cached == h.kv.available == scenario.blocks
    assert (usage.holding, usage.reserved, usage.swapped, usage.tokens) == (0, 0, 0, 0)
    if scenario.policy not in MAY_IDLE:
        assert h.planner.forced == 0
    if scenario.policy != "faulty":
        assert h.planner.policy.faults == {} or h.planner.forced
    # The executor is told of everybody who left, at the latest with the next plan.
    h.add("one more", 1, 1)
    scenario.failures.clear()
    h.run()
    assert h.executor.known <= {"one more"}
    return h


def random_scenario(rng: Random, aborts: bool, in_flight: int = 1) -> Scenario:
    block_size = rng.choice((1, 4, 16))
    blocks = rng.randint(8, 64)
    most = blocks * block_size
    clients = []
    for _ in range(rng.randint(1, 25)):
        prompt = rng.randint(1, max(1, min(60, most // rng.choice((1, 2, 4)))))
        arrives = rng.choice((0, rng.randint(0, 60)))
        max_tokens = rng.choice((None, 1, rng.randint(1, 60), rng.randint(1, 60)))
        clients.append(
            Client(
                prompt,
                max_tokens,
                arrives,
                arrives + rng.randint(0, 40) if aborts and rng.random() < 0.5 else None,
                rng.randint(-2, 2),
                rng.randint(0, max_tokens or 9) if rng.random() < 0.3 else 0,
                rng.choice((0, 0, 8, 40)),
                rng.choice((1, 1, 1, 2, 4)),
                rng.choice((None, 1, 1, 2)),
                rng.random() < 0.5,
            )
        )
    failures: dict[int, Literal["before", "after"]] = {}
    if rng.random() < 0.4:
        failures = {rng.randint(1, 120): rng.choice(("before", "after")) for _ in range(rng.randint(1, 8))}
    return Scenario(
        rng.choice(list(POLICIES)),
        blocks,
        block_size,
        rng.choice((1, 3, 16, 64, 500)),
        rng.randint(1, 12),
        rng.choice((0, 0, 1, 3)),
        rng.choice(((None,), (None,), (None, None), (9,), (5, 20), (None, 6))),
        clients,
        failures,
        rng.randrange(2**32),
        rng.choice((0, 4, 16, 200)),
        rng.random() < 0.7,
        rng.choice((Lru, Lfu)),
        rng.choice((None, *Mode)),
        rng.choice(("paged", "paged", "contiguous")),
        in_flight,
    )


@pytest.mark.parametrize("in_flight", [1, 2], ids=["alone", "overlap"])
@pytest.mark.parametrize("aborts", [False, True], ids=["nobody leaves", "some leave"])
def test_seeded_runs(aborts: bool, in_flight: int) -> None:
    for seed in range(60):
        play(random_scenario(Random(seed), aborts, in_flight))


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 2], ids=["alone", "overlap"])
@pytest.mark.parametrize("aborts", [False, True], ids=["nobody leaves", "some leave"])
def test_many_seeded_runs(aborts: bool, in_flight: int) -> None:
    preemptions = 0
    for seed in range(1000, 1400):
        preemptions += sum(play(random_scenario(Random(seed), aborts, in_flight)).planner.preemption.counts.values())
    assert preemptions > 300  # the pools are small enough to matter


def test_who_knows_more_than_the_pool_holds_evicts_for_one_token() -> None:
    """Found by `test_any_small_run`: 7 known tokens, 6 blocks, and somebody else in the last of them."""
    clients = [*(Client(1, None) for _ in range(7)), Client(1, None, priority=1)]
    play(Scenario("fair", 6, 1, 4, 2, 0, (6,), clients, {7: "before"}, prefix_cache=False))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small ones, which hypothesis can shrink to the few numbers that matter."""
    block_size = draw(st.sampled_from((1, 4)))
    blocks = draw(st.integers(2, 12))
    aborts = draw(st.booleans())
    steps = st.integers(0, 20)
    clients = st.builds(
        Client,
        prompt=st.integers(1, blocks * block_size),
        max_tokens=st.none() | st.integers(1, 20),
        arrives=steps,
        leaves=st.none() | steps if aborts else st.none(),
        priority=st.integers(-1, 1),
        ends=st.sampled_from((0, 30)),
        n=st.integers(1, 3),
        family=st.none() | st.just(1),
        leaves_whole=st.booleans(),
    )
    return Scenario(
        draw(st.sampled_from(list(POLICIES))),
        blocks,
        block_size,
        draw(st.integers(1, 40)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 2)),
        draw(st.sampled_from(((None,), (6,)))),
        draw(st.lists(clients, min_size=1, max_size=8)),
        draw(st.dictionaries(st.integers(1, 40), st.sampled_from(("before", "after")), max_size=4)),
        draw(st.integers(0, 1000)),
        draw(st.integers(0, 12)),
        draw(st.booleans()),
        draw(st.sampled_from((Lru, Lfu))),
        draw(st.sampled_from((None, *Mode))),
        draw(st.sampled_from(list(CACHES))),
        draw(st.integers(1, 2)),
    )


@given(scenarios())
@settings(max_examples=150, deadline=None)
def test_any_small_run(scenario: Scenario) -> None:
    play(scenario)
