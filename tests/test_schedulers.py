"""The bundled schedulers, with the planner alone: what each promises, one scenario at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from framework.plugins.kv.contiguous import ContiguousCache
from framework.plugins.schedulers import FairOptions, PriorityOptions
from framework.plugins.schedulers.fair import Fair
from framework.plugins.schedulers.fcfs import Fcfs
from framework.plugins.schedulers.priority import Priority
from framework.plugins.schedulers.static import Static
from harness import Harness, ids
from pydantic import ValidationError

from framework import Request, Status, hookimpl
from framework.kv import CacheGroup, CacheSpec, Capacity
from framework.registry import load_plugins
from framework.types import SamplingParams
from framework.view import LiveView, Waiting


def priority(**options: Any) -> Priority:
    return Priority(PriorityOptions(**options))


def fair(**options: Any) -> Fair:
    return Fair(FairOptions(**options))


def preemptions(h: Harness) -> int:
    stats = h.engine.stats()
    return stats.preemptions_swap + stats.preemptions_recompute


# priority: order


def test_smaller_numbers_start_first_then_by_arrival() -> None:
    h = Harness(priority(), seats=1, blocks=64)
    for id, level in (("c", 1), ("a", 0), ("d", 1), ("b", 0), ("first", -7)):
        h.add(id, 4, 2, priority=level)
    h.run()
    assert list(h.reasons) == ["first", "a", "b", "c", "d"]


def test_the_order_is_total() -> None:
    """Equal priorities and equal times: the order of acceptance decides, whatever the order of the queues."""
    cache = ContiguousCache(CacheSpec(4, "float32", (CacheGroup(1, 1, 1),)), Capacity({"device": 8}))
    view = LiveView(cache, 0)
    requests = [Request(f"r{i}", [1], SamplingParams(), arrival=1.0, order=i) for i in range(8)]
    for request in reversed(requests):
        if request.order % 2:
            request.status = Status.RUNNING
            view.running.append(request)
        else:
            view.queued.add(request)
    running, waiting = requests[1::2], requests[::2]
    assert [want.request for want in priority().admit(view)] == running + waiting
    aged = [want.request for want in priority(aging=5).admit(view)]
    assert aged == running + waiting


# priority: who is preempted


def test_an_urgent_request_short_of_blocks_takes_no_more_than_it_needs() -> None:
    h = Harness(priority(), seats=8, blocks=8)
    for id in "abcd":
        h.add(id, 7, 10)  # two blocks each: the pool is full
    h.step()
    h.add("urgent", 12, 2, priority=-1)
    plan = h.step()
    assert plan is not None and ids(plan)[0] == "urgent"
    assert {p.request_id for p in plan.preempted} == {"c", "d"}
    h.run()
    assert h.outputs == {id: h.alone(id) for id in h.requests}


def test_nobody_is_preempted_in_vain() -> None:
    """All whose level is worse would not make enough room: they stay."""
    h = Harness(priority(), seats=8, blocks=8)
    h.add("equal", 17, 8, priority=-1)  # six blocks in the end
    h.add("worse", 7, 9)
    h.step()
    h.add("urgent", 16, 1, priority=-1)
    for _ in range(3):
        plan = h.step()
        assert plan is not None and plan.preempted == () and "urgent" in h.waiting
    h.run()


def test_the_level_may_be_another_than_the_priority() -> None:
    class Deadline:
        @hookimpl
        def arrived(self, request: Request) -> None:
            request.level = {"soon": 1.5, "late": 9.0}[request.id]

    h = Harness(priority(), seats=1, plugins=[Deadline()])
    h.add("late", 4, 20, priority=-5)
    h.step()
    h.add("soon", 4, 2, priority=5)
    assert ids(h.step()) == ["soon"]
    h.run()


# priority: ageing


def test_who_has_aged_ranks_first_but_preempts_nobody() -> None:
    h = Harness(priority(aging=0.01), seats=1, blocks=64)
    h.add("running", 4, 30)
    h.step()
    h.add("low", 4, 2, priority=3)
    h.clock.advance(1.0)
    h.add("new", 4, 2)
    assert ids(h.step()) == ["running"]
    h.run()
    assert list(h.reasons) == ["running", "low", "new"]
    assert preemptions(h) == 0


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "soon"])
def test_ageing_takes_a_positive_number(value: Any) -> None:
    with pytest.raises(ValidationError):
        PriorityOptions(aging=value)


# fair


def service(h: Harness, tenant: str) -> float:
    """What a tenant got, by the costs of the paper: prompts once admitted, output tokens double."""
    mine = [r for r in h.requests.values() if r.tenant == tenant]
    return sum((len(r.prompt) if r.admitted_at is not None else 0) + 2 * len(r.output) for r in mine)


def backlog(scheduler: object, steps: int, **options: Any) -> Iterable[Harness]:
    """One tenant with many long requests, then one with as many short ones; both always have some waiting."""
    h = Harness(scheduler, seats=4, blocks=64, **options)
    for i in range(60):
        h.add(f"heavy{i}", 16, 12, tenant="heavy")
    for i in range(240):
        h.add(f"light{i}", 4, 3, tenant="light")
    for _ in range(steps):
        h.step()
        assert {r.tenant for r in h.view.waiting} == {"heavy", "light"}
        yield h


def gaps(scheduler: object, steps: int = 150) -> list[float]:
    return [abs(service(h, "heavy") - service(h, "light")) for h in backlog(scheduler, steps)]


def test_unfairness_between_two_backlogged_tenants_is_bounded() -> None:
    """Theorem 4.4 of the paper: no more than 2 max(prompt cost, output cost of a full batch), however long it lasts."""
    bound = 2 * max(16, 2 * 4 * 12)
    assert max(gaps(fair())) <= bound
    assert max(gaps(Fcfs())) > 4 * bound


def test_weights_are_shares() -> None:
    *_, h = backlog(fair(weights={"light": 3}), 150)
    assert service(h, "light") / service(h, "heavy") == pytest.approx(3, rel=0.1)


def test_nothing_is_left_idle() -> None:
    """Alone, a tenant has everything, as under fcfs; among many, a step is left short only when nobody waits."""
    plans = []
    for scheduler in (fair(), Fcfs()):
        h = Harness(scheduler, seats=4, blocks=64)
        for i in range(30):
            h.add(f"r{i}", 4 + i % 9, 1 + i % 7, tenant="only")
        h.run()
        plans.append([ids(plan) for plan in h.executor.plans])
    assert plans[0] == plans[1]
    for h in backlog(fair(), 100):
        assert len(h.running) + len([r for r in h.reasons if h[r].finished_at == h.clock.ns() / 1e9]) >= 4


def test_nobody_saves_service_up_while_idle() -> None:
    h = Harness(fair(), seats=1, blocks=64)
    for i in range(40):
        h.add(f"busy{i}", 4, 2, tenant="busy")
    for _ in range(60):
        h.step()
    for i in range(20):
        h.add(f"back{i}", 4, 2, tenant="back")
    ended = len(h.reasons)
    for _ in range(20):
        h.step()
    news = [id.rstrip("0123456789") for id in list(h.reasons)[ended:]]
    assert abs(news.count("busy") - news.count("back")) <= 1


def test_nor_while_nobody_waits() -> None:
    """Everybody who came found a seat; then two tenants compete, and the one without a past has no advantage."""
    h = Harness(fair(), seats=2, blocks=64)
    for i in range(10):
        h.add(f"old{i}", 4, 4, tenant="old")
        h.steps(2)
    h.run()
    for i in range(10):
        h.add(f"new{i}", 4, 2, tenant="new")
        h.add(f"old-again{i}", 4, 2, tenant="old")
    ended = len(h.reasons)
    h.steps(6)
    started = [id for id in list(h.reasons)[ended:] if id.startswith("new")]
    assert len(started) <= (len(h.reasons) - ended) / 2 + 1


def test_recomputed_tokens_are_charged_once() -> None:
    scheduler = fair()
    h = Harness(scheduler, seats=4, blocks=6)
    for i in range(9):
        h.add(f"r{i}", 4 + i % 5, 9, tenant=f"t{i % 2}")
    h.abort("r4")
    h.run()
    assert preemptions(h) > 0
    for tenant in ("t0", "t1"):
        lifted = scheduler._service.of[tenant] - service(h, tenant)
        assert 0 <= lifted <= 20 and lifted == int(lifted)
    assert scheduler._service._charged == {}


def test_the_order_of_running_requests_does_not_depend_on_service() -> None:
    h = Harness(fair(), seats=4, blocks=64)
    h.add("b", 4, 20, tenant="b")
    h.steps(6)
    h.add("a", 4, 20, tenant="a")
    h.step()
    assert ids(h.step()) == ["b", "a"]


def test_many_tenants_take_turns_in_order_of_arrival() -> None:
    h = Harness(fair(), seats=1, blocks=64)
    names = [f"r{i * 7 % 30}" for i in range(30)]
    for name in names:
        h.add(name, 4, 1, tenant=name)
    h.run()
    assert list(h.reasons) == names


def test_tenants_without_requests_are_forgotten() -> None:
    scheduler = fair()
    h = Harness(scheduler, seats=4, blocks=64)
    for i in range(5000):
        h.add(f"r{i}", 1, 1, tenant=f"tenant {i}")
        if i % 4 == 3:
            h._take(h.engine.step())
    h.run()
    assert len(scheduler._service.of) < 2500


def test_who_comes_back_after_a_preemption_is_not_lost() -> None:
    """The only request of its tenant is preempted: nothing arrives that would bring the tenant back into the order."""
    h = Harness(fair(), seats=4, blocks=4)
    h.add("a", 4, 12, tenant="a")
    h.add("b", 4, 8, tenant="b")
    h.run(80)
    assert h["b"].preemptions > 0 and h.planner.forced == 0
    assert h.outputs == {id: h.alone(id) for id in "ab"}


def test_nor_is_an_output_that_waited_for_one_that_was_aborted() -> None:
    """Several outputs share a prompt; the first is aborted before it is computed, and the next takes its place."""
    h = Harness(fair(), seats=8, blocks=32, tokens=4)
    h.add("several", 12, 5, tenant="a", n=3)
    h.add("other", 4, 30, tenant="b")
    h.step()
    h.abort("several")
    h.run(120)
    assert h.planner.forced == 0
    assert h.outputs["several/1"] == h.alone("several/1") and h.outputs["several/2"] == h.alone("several/2")


def test_the_prompt_of_several_is_charged_once_whoever_computes_it() -> None:
    scheduler = fair()
    h = Harness(scheduler, seats=4, blocks=32)
    h.add("several", 20, 5, tenant="a", n=3)
    h.abort("several")
    h.run()
    assert scheduler._service.of == {"a": 20 + 2 * 2 * 5}


@pytest.mark.parametrize("options", [{"weights": {"a": 0}}, {"weights": {"a": -1}}, {"input_cost": 0}, {"weight": {}}])
def test_shares_and_costs_are_positive(options: Any) -> None:
    with pytest.raises(ValidationError):
        FairOptions(**options)


# static


def test_a_batch_runs_until_its_longest_member_ends() -> None:
    h = Harness(Static(), seats=2, blocks=64)
    for id, output in (("a", 2), ("b", 6), ("c", 3), ("d", 1)):
        h.add(id, 4, output)
    batches = [ids(plan) for plan in h.steps(6)]
    assert batches == [["a", "b"], ["a", "b"], ["b"], ["b"], ["b"], ["b"]]
    assert ids(h.step()) == ["c", "d"]
    h.run()


def test_a_batch_forms_until_someone_has_sampled() -> None:
    h = Harness(Static(), seats=3, blocks=64, tokens=4)
    h.add("a", 10, 4)
    h.add("b", 6, 4)
    h.add("c", 2, 4)
    assert [ids(plan) for plan in h.steps(3)] == [["a"], ["a"], ["a", "b"]]
    h.steps(2)
    assert h.running == ["a", "b"] and h.waiting == ["c"]
    h.run()
    assert h.outputs == {id: h.alone(id) for id in h.requests}


def test_a_preempted_member_returns_with_the_next_batch() -> None:
    h = Harness(Static(), seats=2, blocks=3)
    h.add("a", 4, 7)
    h.add("b", 4, 7)
    h.add("c", 4, 2)
    h.run()
    assert h["b"].preemptions == 1 and h["a"].preemptions == 0
    assert list(h.reasons) == ["a", "c", "b"] or list(h.reasons) == ["a", "b", "c"]
    assert h.outputs == {id: h.alone(id) for id in h.requests}


def test_static_needs_more_steps_than_continuous_batching() -> None:
    steps = []
    for scheduler in (Static(), Fcfs()):
        h = Harness(scheduler, seats=8, blocks=200, tokens=200)
        for i in range(64):
            h.add(f"r{i}", 8, 2 + (i * 13) % 40)
        h.run(2000)
        steps.append(len(h.executor.plans))
    assert steps[0] >= 1.5 * steps[1]


# What all have in common


def test_queues_by_key_follow_the_waiting() -> None:
    waiting = Waiting()
    requests = [
        Request(f"r{i}", [1], SamplingParams(), order=i, arrival=float(i), tenant="ab"[i % 2]) for i in range(6)
    ]
    for request in requests[:3]:
        waiting.add(request)
    queues = waiting.grouped(_tenant).orders
    for request in requests[3:]:
        waiting.add(request)
    assert {key: [r.id for r in queue] for key, queue in queues.items()} == {
        "a": ["r0", "r2", "r4"],
        "b": ["r1", "r3", "r5"],
    }
    for request in requests[1::2]:
        waiting.remove(request)
    requests[5].status = Status.PREEMPTED
    assert list(queues) == ["a"] and waiting.grouped(_tenant).orders is queues
    waiting.add(requests[5])
    waiting.add(requests[1])
    assert [r.id for r in queues["b"]] == ["r5", "r1"]


def _tenant(request: Request) -> str:
    return request.tenant


@pytest.mark.parametrize("name", ["fcfs", "priority", "fair", "static"])
def test_each_can_be_selected_and_works_with_each_cache(name: str) -> None:
    for cache in ("paged", "contiguous"):
        plugins = load_plugins()
        h = Harness(
            plugins.create("scheduler", name),
            blocks=12,
            seats=4,
            kv=lambda spec, capacity, cache=cache, plugins=plugins: plugins.create(
                "kv", cache, cache_spec=spec, capacity=capacity
            ),
        )
        for i in range(20):
            h.add(f"r{i}", 3 + i % 11, 2 + i % 5, priority=i % 3, tenant=f"t{i % 4}")
        h.run()
        assert h.outputs == {id: h.alone(id) for id in h.requests}
        assert h.planner.forced == 0 and h.planner.policy.faults == {}


def test_only_priority_says_that_it_uses_priorities() -> None:
    uses = {p.name: p.uses for p in load_plugins().providers("scheduler")}
    assert {name for name, fields in uses.items() if "priority" in fields} == {"priority"}
