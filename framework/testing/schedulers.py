"""What every scheduler must do, as tests."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from ..hookspecs import hookimpl
from ..registry import load_plugins
from ..settings import Settings
from ..types import Budget, Reject, Request, Shortage, Victim, View, Want
from .reach import reachable
from .simulation import Client, Simulation, failures, random_clients


class _Guard:
    """Compares what a policy was shown before and after it was asked. A lazy answer is read to its end."""

    def __init__(self) -> None:
        self.changes: list[str] = []

    @hookimpl(wrapper=True, tryfirst=True)
    def admit(self, view: View, budget: Budget) -> Any:
        before = _snapshot(view)
        answer: Iterable[Want] | None = yield
        answer = None if answer is None else list(answer)
        self._compare("admit", before, _snapshot(view))
        return answer

    @hookimpl(wrapper=True, tryfirst=True)
    def preempt(self, view: View, beneficiary: Request, shortage: Shortage, candidates: Sequence[Request]) -> Any:
        before = _snapshot(view)
        answer: Victim | None = yield
        self._compare("preempt", before, _snapshot(view))
        return answer

    def _compare(self, hook: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        self.changes += [
            f"{hook} changed {name} from {before.get(name)!r} to {value!r}"
            for name, value in after.items()
            if before.get(name) != value
        ]


class _Quota:
    """Refuses every fifth request, whose end is then told though it never arrived."""

    def __init__(self) -> None:
        self._asked = 0

    @hookimpl
    def accept(self, request: Request) -> Reject | None:
        self._asked += 1
        return Reject("too many") if self._asked % 5 == 0 else None


def _snapshot(view: View) -> dict[str, Any]:
    shown: dict[str, Any] = {"view.running": list(view.running), "view.waiting": list(view.waiting)}
    for request in (*view.running, *view.waiting):
        for slot in Request.__slots__:
            if slot != "state":
                value = getattr(request, slot)
                shown[f"{request.id}.{slot}"] = list(value) if isinstance(value, list) else value
    return shown


class SchedulerConformance:
    """Subclass it in a test module, and pytest runs the tests below on your scheduler::

        from framework.testing import SchedulerConformance

        class TestMine(SchedulerConformance):
            provider = "mine"
            options = {"aging": 30}

    For one that is not installed, override `scheduler`.
    """

    provider: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    kv: ClassVar[str] = "paged"
    """The cache it is tried with."""

    def scheduler(self) -> object:
        """A new one."""
        created: object = load_plugins().create("scheduler", self.provider, self.options, settings=Settings())
        return created

    def _runs(self, seeds: Iterable[int], aborts: bool = False) -> Iterable[tuple[Simulation, list[Client]]]:
        """Small pools, small budgets, few seats: everything that can be short is."""
        for seed in seeds:
            rng = Random(seed)
            blocks, block_size = rng.randint(8, 24), rng.choice((1, 4))
            clients = random_clients(rng, rng.randint(4, 20), blocks * block_size, aborts=aborts)
            tokens, seats, watermark = rng.choice((1, 7, 64)), rng.randint(1, 8), rng.choice((0, 2))
            limits: dict[str, Any] = {"tokens": tokens, "seats": seats, "watermark": watermark}
            if aborts:
                limits |= {"fail": failures(rng), "plugins": [_Quota()]}
            yield Simulation(self.scheduler(), self.kv, blocks=blocks, block_size=block_size, **limits), clients

    def test_progress(self) -> None:
        """While there is work, something runs: the core never has to rank a step itself (it does after eight)."""
        for simulation, clients in self._runs(range(12)):
            simulation.play(clients)
            assert not simulation.forced, (
                f"nothing ran for eight steps although there was work, {simulation.forced} times"
            )

    def test_no_starvation(self) -> None:
        """When requests stop coming, all end, in no more steps than one after the other would take: the largest one
        too, the one of the worst priority, and the one of a tenant who asks once."""
        for seed in range(4):
            rng = Random(seed)
            crowd = [
                Client(f"r{i}", (i % 90,) * rng.randint(1, 12), rng.randint(1, 9), i, tenant="crowd") for i in range(60)
            ]
            odd = [
                Client("largest", (1,) * 60, 40, 3, tenant="crowd"),
                Client("worst", (2,) * 5, 5, 3, priority=100, tenant="crowd"),
                Client("once", (3,) * 5, 5, 3, tenant="once"),
            ]
            simulation = Simulation(self.scheduler(), self.kv, tokens=16, seats=4, blocks=32)
            one_by_one = sum(-(-len(c.prompt) // 16) + (c.max_tokens or 0) for c in (*crowd, *odd))
            simulation.play([*crowd, *odd], most=60 + one_by_one)
            assert not simulation.forced, "a request was left alone, and ran only because the core forced it"

    def test_determinism(self) -> None:
        """The same arrivals give the same plans, whatever happens elsewhere in the process. Draw from `view.rng`."""
        digests: list[list[str]] = []
        for salt in (1, 2):
            digests.append([])
            for simulation, clients in self._runs(range(20, 26)):
                random.seed(salt)
                level = [client._replace(priority=0, tenant="", arrives=0) for client in clients]
                simulation.play(level)
                digests[-1] += [plan.digest() for plan in simulation.plans]
        assert digests[0] == digests[1], "two runs with the same arrivals differ"

    def test_leaves_what_it_is_shown_alone(self) -> None:
        """A policy writes `request.state`, and `request.level` in `arrived`; nothing else."""
        for seed in range(30, 34):
            guard = _Guard()
            rng = Random(seed)
            simulation = Simulation(self.scheduler(), self.kv, blocks=12, seats=4, plugins=[guard])
            simulation.play(random_clients(rng, 12, 40))
            assert not guard.changes, guard.changes[0]

    def test_answers_are_valid(self) -> None:
        """No request named twice, no negative or foreign ones, no victim that is no candidate, no exception; the budget
        and the seats are kept. The core survives all of it, and counts it as a fault."""
        for simulation, clients in self._runs(range(40, 52)):
            simulation.play(clients)
            faults = {name: count for name, count in simulation.faults.items() if count > simulation.forced}
            assert not faults, f"{faults} faults; the last: {simulation.fault}"

    def test_survives_aborts_and_failed_steps(self) -> None:
        """Clients leave at any moment, steps fail, and another plugin refuses some requests: whatever it remembers
        about requests has to keep up."""
        for simulation, clients in self._runs(range(60, 72), aborts=True):
            simulation.play(clients)
            faults = {name: count for name, count in simulation.faults.items() if count > simulation.forced}
            assert not faults and not simulation.forced, f"{faults} faults; the last: {simulation.fault}"

    def test_forgets_who_left(self) -> None:
        """Once all have ended, and others after them, nothing that it refers to is one of them or names one."""
        scheduler = self.scheduler()
        simulation = Simulation(scheduler, self.kv, blocks=16, seats=4, plugins=[_Quota()])
        clients = random_clients(Random(80), 30, 40, aborts=True)
        simulation.play([client._replace(id=f"gone {client.id}") for client in clients])
        simulation.play([Client(f"other {i}", (i,), 2) for i in range(3)])
        names = {
            one.id if isinstance(one, Request) else one
            for one in reachable(scheduler)
            if isinstance(one, Request | str)
        }
        kept = {name for name in names if name.startswith("gone ")}
        assert not kept, f"it still knows {sorted(kept)}"

    def test_cost_with_10_000_waiting(self) -> None:
        """A step makes about as many function calls with 10,000 requests waiting as with 100: read `view.queue(key)`,
        which the core keeps in order, and only as far as the core reads your answer; never sort or list who waits."""
        few, many = self._calls(100), self._calls(10_000)
        assert many <= 2 * few + 50, f"{few} calls in a step with 100 requests waiting, {many} with 10,000"

    def _calls(self, waiting: int) -> int:
        """Function calls in the costliest of some steps in which a few requests end and others start."""
        simulation = Simulation(self.scheduler(), self.kv, blocks=256, block_size=16, seats=8, tokens=512)
        rng = Random(0)
        for i in range(waiting + 8):
            prompt = (i % 90,) * rng.randint(1, 16)
            simulation.add(
                Client(f"r{i}", prompt, 5 + i % 7, priority=rng.randint(-3, 3), tenant=f"tenant {rng.randrange(3000)}")
            )
        engine, calls = simulation.engine, 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        for _ in range(4):  # what is kept in order is ordered once
            engine.step()
        found, before = [], sys.getprofile()
        for _ in range(12):
            calls = 0
            sys.setprofile(count)
            try:
                engine.step()
            finally:
                sys.setprofile(before)
            found.append(calls)
        return max(found)
