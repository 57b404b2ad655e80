"""The rules of a step (docs/step.md) that the planner keeps, one scenario each."""

from __future__ import annotations

import random

import msgspec
import pytest
from harness import Harness, Policy, ids, ranked, started, tokens

from framework import Budget, Mode, Plan, Victim, Want

# Policies rank; the core enforces


def test_unnamed_requests_rank_decodes_then_prefills_in_admission_order() -> None:
    policy = Policy()
    h = Harness(policy, tokens=8)
    h.add("long", 20)
    h.add("x", 2)
    h.add("y", 2)
    policy.rank = ranked(h, ("long", 2))
    h.step()
    policy.rank = ranked(h, ("long", 0), "x", "y")
    h.step()
    assert h.running == ["long", "x", "y"]
    policy.rank = lambda view: []
    plan = h.step()
    assert ids(plan) == ["x", "y", "long"]
    assert tokens(plan) == {"x": 1, "y": 1, "long": 6}


def test_a_named_request_has_its_place_after_all_unnamed_ones() -> None:
    h, policy = started("a", "b", "c")
    policy.rank = ranked(h, "c", "a")
    assert ids(h.step()) == ["b", "c", "a"]


def test_zero_tokens_hold_a_request_with_its_blocks() -> None:
    h, policy = started("a", "b")
    policy.rank = ranked(h, ("a", 0))
    for _ in range(3):
        assert ids(h.step()) == ["b"]
    assert h.running == ["a", "b"] and h["a"].computed == 4


def test_a_want_is_cut_to_the_request_and_to_the_budget() -> None:
    policy = Policy()
    h = Harness(policy, tokens=10)
    h.add("a", 6)
    h.add("b", 20)
    policy.rank = ranked(h, ("a", 100), ("b", 100))
    assert tokens(h.step()) == {"a": 6, "b": 4}
    policy.rank = ranked(h, ("b", 3), ("a", 5))
    assert tokens(h.step()) == {"b": 3, "a": 1}
    assert h["b"].computed == 7


def test_the_budget_shown_is_tokens_and_free_seats() -> None:
    h, policy = started("a", "b", tokens=50, seats=5)
    h.step()
    assert policy.budgets == [Budget(50, 3)]


def test_wants_for_requests_that_ended_are_skipped() -> None:
    h, policy = started("a", "b")
    h.abort("a")
    policy.rank = ranked(h, "a", "b")
    assert ids(h.step()) == ["b"]
    assert h.planner.policy.faults == {}


# Victims


def test_victims_come_from_requests_not_granted_in_this_step() -> None:
    h, policy = started("a", "b", "c", blocks=4)
    policy.rank = ranked(h, "b", "a", "c")  # b takes the last block; a is short of one
    plan = h.step()
    assert [asked[0] for asked in policy.asked] == ["a"] and policy.asked[0][2] == ["c"]
    assert plan is not None and ids(plan) == ["b", "a"]
    assert [p.request_id for p in plan.preempted] == ["c"]
    assert h.running == ["a", "b"] and h.waiting == ["c"]


def test_candidates_are_in_rank_order_those_passed_over_included() -> None:
    h, policy = started("a", "b", "c", "d", blocks=4)
    policy.rank = ranked(h, ("d", 0), "a", "c", ("b", 0))
    h.step()
    assert policy.asked[0][0] == "a" and policy.asked[0][2] == ["d", "c", "b"]


def test_nobody_is_asked_if_all_candidates_would_not_cover_the_shortage() -> None:
    h, policy = started("a", "b", blocks=4)
    h.add("urgent", 16, 1, priority=-1)
    policy.pick = lambda beneficiary, candidates: Victim(candidates[0])
    policy.rank = ranked(h, "a", "urgent", ("b", 0))  # it needs all four blocks, a holds two of them by then
    plan = h.step()
    assert plan is not None and ids(plan) == ["a"] and plan.preempted == ()
    assert policy.asked == []


def test_one_victim_per_call_and_they_fall_together() -> None:
    h, policy = started("a", "b", "c", blocks=4)
    h.add("urgent", 12, 1, priority=-1)
    policy.rank = ranked(h, "urgent", "a", "b", "c")
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1])
    plan = h.step()
    assert [(shortage.blocks, names) for _, shortage, names in policy.asked] == [
        (2, ["a", "b", "c"]),
        (1, ["a", "b"]),
    ]
    assert plan is not None and {p.request_id for p in plan.preempted} == {"b", "c"}
    assert ids(plan)[0] == "urgent"


def test_none_before_the_shortage_is_covered_preempts_nobody() -> None:
    h, policy = started("a", "b", "c", blocks=4)
    h.add("urgent", 12, 1, priority=-1)
    policy.rank = ranked(h, "urgent", "a", ("b", 0), ("c", 0))
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1]) if len(candidates) == 3 else None
    plan = h.step()
    assert [len(asked[2]) for asked in policy.asked] == [3, 2]
    assert plan is not None and plan.preempted == () and "urgent" not in ids(plan)
    assert h.running == ["a", "b", "c"]


def test_victims_free_seats_and_blocks_both() -> None:
    h, policy = started("a", "b", blocks=4, seats=2)
    h.add("urgent", 16, 1, priority=-1)
    policy.rank = ranked(h, "urgent", "a", "b")
    policy.pick = lambda beneficiary, candidates: Victim(candidates[0])
    plan = h.step()
    assert [asked[1] for asked in policy.asked] == [(2, 1), (1, 0)]
    assert ids(plan) == ["urgent"] and h.waiting == ["a", "b"]


# When admission closes


def test_a_waiting_request_that_does_not_fit_closes_admission_but_not_the_walk() -> None:
    h, policy = started("a", "b", blocks=6)
    h.add("big", 20, 1)
    h.add("small", 4, 1)
    policy.rank = ranked(h, "a", "big", "small", "b")
    assert ids(h.step()) == ["a", "b"]
    assert h.waiting == ["big", "small"]


def test_nothing_is_admitted_after_a_preemption() -> None:
    policy = Policy()
    h = Harness(policy, blocks=5)
    h.add("a", 4, 8)
    h.add("b", 8, 8)
    h.add("c", 8, 8)
    h.step()
    h.add("small", 1, 1)
    policy.rank = ranked(h, "a", "small", ("b", 0))  # c falls for a, and leaves one block over
    policy.pick = lambda beneficiary, candidates: Victim(h["c"])
    plan = h.step()
    assert plan is not None and [p.request_id for p in plan.preempted] == ["c"]
    assert ids(plan) == ["a"]
    assert h.kv.available == 1
    policy.rank = ranked(h, "small", ("a", 0), ("b", 0))
    assert "small" in ids(h.step())


def test_a_waiting_beneficiary_starts_at_once_at_its_place() -> None:
    h, policy = started("a", "b", "c", blocks=4, tokens=12)
    h.add("urgent", 8, 1, priority=-1)
    h.add("next", 1, 1, priority=-1)
    policy.rank = ranked(h, "a", "urgent", "next", "b", "c")
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1])
    plan = h.step()
    assert tokens(plan) == {"a": 1, "urgent": 8}
    assert plan is not None and {p.request_id for p in plan.preempted} == {"b", "c"}
    assert h.waiting == ["b", "c", "next"]


def test_nothing_is_admitted_after_a_waiting_beneficiary_either() -> None:
    policy = Policy()
    h = Harness(policy, blocks=4)
    h.add("a", 11, 2)
    h.step()
    h.add("urgent", 8, 1, priority=-1)
    h.add("next", 1, 1, priority=-1)
    policy.rank = ranked(h, "urgent", "next", "a")
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1])
    assert ids(h.step()) == ["urgent"]
    assert h.waiting == ["a", "next"]


# Admission


def test_admission_reserves_the_whole_known_length() -> None:
    h = Harness(tokens=4, blocks=4)
    h.add("a", 12)
    plan = h.step()
    assert plan is not None and tokens(plan) == {"a": 4}
    assert len(plan.slices[0].deltas[0].blocks) == 3
    assert h.kv.available == 1
    assert [s.deltas for s in (*h.steps(2)[0].slices,)] == [()]


def test_the_watermark_applies_to_admission_only() -> None:
    h, _ = started("a", blocks=4, watermark=1, max_tokens=12)
    h.add("two", 8, 1)
    h.step()
    assert h.waiting == ["two"]  # two blocks are free, and one has to stay
    h.abort("two")
    h.add("one", 3, 1)
    h.step()
    assert h.outputs["one"] and h.kv.available == 2
    for _ in range(5):
        h.step()  # what runs may take the last block
    assert h["a"].num_tokens > 8 and h.kv.available <= 1


def test_the_watermark_is_waived_when_nobody_else_would_run() -> None:
    h = Harness(blocks=4, watermark=4)
    h.add("a", 16, 1)
    h.add("b", 1, 1)
    assert ids(h.step()) == ["a"]
    assert ids(h.step()) == ["b"]


def test_seats_are_kept() -> None:
    h = Harness(seats=2)
    for id in "abc":
        h.add(id, 2, 3)
    h.step()
    assert (h.running, h.waiting) == (["a", "b"], ["c"])
    h.run()
    assert h.reasons == dict.fromkeys("abc", "length")


# Who may preempt whom


def test_a_waiting_request_evicts_only_strictly_worse_levels() -> None:
    h, policy = started("a", "b", blocks=2, seats=2)
    h["b"].level = 5
    h.add("equal", 4, 1)
    policy.rank = ranked(h, "equal", "a", "b")
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1])
    plan = h.step()
    assert policy.asked[0][0] == "equal" and policy.asked[0][2] == ["b"]
    assert plan is not None and [p.request_id for p in plan.preempted] == ["b"]

    h, policy = started("a", "b", blocks=2, seats=2)
    h.add("equal", 4, 1)
    policy.rank = ranked(h, "equal", ("a", 0), ("b", 0))
    assert h.step() is None
    assert policy.asked == []


def test_a_waiting_request_may_preempt_for_a_seat_alone() -> None:
    h, policy = started("a", "b", blocks=8, seats=2)
    h.add("urgent", 4, 1, priority=-1)
    policy.rank = ranked(h, "urgent", "a", "b")
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1])
    plan = h.step()
    assert policy.asked == [("urgent", (0, 1), ["a", "b"])]
    assert ids(plan) == ["urgent", "a"]


def test_the_default_takes_the_last_candidate_for_a_running_one_and_none_for_a_waiting_one() -> None:
    h, policy = started("a", "b", "c", blocks=3)
    h.add("urgent", 4, 1, priority=-1)
    policy.rank = ranked(h, "urgent", "b", "a", "c")
    plan = h.step()
    assert plan is not None and [p.request_id for p in plan.preempted] == ["c"]
    assert "urgent" in h.waiting and ids(plan)[0] == "b"


def test_the_level_set_on_arrival_orders_queues_and_victims() -> None:
    policy = Policy()
    policy.level = lambda request: -len(request.prompt)
    policy.rank = lambda view: (Want(r) for r in view.ranked(key=lambda r: r.level))
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1])
    h = Harness(policy, seats=1)
    for id, prompt in (("short", 2), ("long", 9), ("middle", 5)):
        h.add(id, prompt, 2)
    assert ids(h.step()) == ["long"]
    h.add("longest", 12, 2)
    assert ids(h.step()) == ["longest"]  # takes the only seat
    assert h.waiting == ["long", "short", "middle"]
    h.run()
    assert list(h.reasons) == ["longest", "long", "middle", "short"]


# Order of waiting, and resuming


def test_waiting_lists_preempted_requests_first_then_by_arrival() -> None:
    h, policy = started("a", "b", "c", "d", blocks=4)
    h.add("e", 4)
    policy.rank = ranked(h, "a", "b", "c", "d")
    h.step()
    assert h.waiting == ["c", "d", "e"]
    seen: list[list[str]] = []
    policy.rank = lambda view: seen.append([r.id for r in view.queue(key=lambda r: r.priority)])
    h.step()
    assert seen == [["c", "d", "e"]]


def test_a_preempted_request_resumes_with_its_tokens() -> None:
    h, _ = started("a", "b", blocks=2)
    h.run()
    assert h["b"].preemptions == 1
    assert h.outputs == {id: h.alone(id) for id in "ab"}
    resumed = [data for plan in h.executor.plans for data in plan.new if data.id == "b"][1:]
    assert len(resumed) == 1
    assert resumed[0].tokens == [*h["b"].prompt, h.outputs["b"][0]]
    assert (resumed[0].prompt_len, resumed[0].seed) == (4, h["b"].seed)


# What the plan says


@pytest.mark.parametrize("mode", [None, *Mode])
def test_without_room_to_swap_a_victim_is_recomputed_and_the_plan_says_so(mode: Mode | None) -> None:
    h, policy = started("a", "b", blocks=2)
    policy.pick = lambda beneficiary, candidates: Victim(candidates[0], mode)
    plan = h.step()
    assert plan is not None and [(p.request_id, p.mode) for p in plan.preempted] == [("b", Mode.RECOMPUTE)]


def test_plans_are_plain_data_and_equal_runs_have_equal_digests() -> None:
    def digests() -> list[str]:
        policy = Policy()
        policy.rank = lambda view: sorted(map(Want, view.waiting), key=lambda want: view.rng.random())
        h = Harness(policy, blocks=6)
        for i in range(6):
            h.add(f"r{i}", 3 + i, 6)
        h.run()
        for plan in h.executor.plans:
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan
        return [plan.digest() for plan in h.executor.plans]

    assert digests() == digests()
    assert len(set(digests())) == len(digests())


def test_tables_travel_as_deltas() -> None:
    h = Harness(block_size=4)
    h.add("a", 4, 10)
    found = [[(d.first, len(d.blocks)) for d in plan.slices[0].deltas] for plan in h.steps(10)]
    assert found == [[(0, 1)], [(1, 1)], [], [], [], [(2, 1)], [], [], [], [(3, 1)]]


# Progress


def test_the_first_by_level_and_arrival_is_no_victim_of_a_running_one() -> None:
    h, policy = started("a", "b", blocks=2)
    policy.rank = ranked(h, "b", "a")
    plan = h.step()
    assert plan is not None and ids(plan) == ["a"]
    assert [p.request_id for p in plan.preempted] == ["b"]
    assert [asked[0] for asked in policy.asked] == ["a"]


def test_the_level_counts_before_the_arrival() -> None:
    policy = Policy()
    policy.level = lambda request: {"a": 1.0, "b": 0.0}[request.id]
    h, _ = started("a", "b", blocks=2, policy=policy)
    policy.rank = ranked(h, "a", "b")
    plan = h.step()
    assert plan is not None and ids(plan) == ["b"] and [p.request_id for p in plan.preempted] == ["a"]


def test_what_gets_no_victim_waits_in_place_with_its_blocks() -> None:
    h, policy = started("a", "b", blocks=3)
    policy.rank = ranked(h, "b", "a")
    plan = h.step()
    assert plan is not None and ids(plan) == ["b"] and plan.preempted == ()
    assert h.running == ["a", "b"] and h["a"].computed == 4
    assert policy.asked == []


def test_a_preempted_request_that_outgrew_the_pool_ends_with_length() -> None:
    policy = Policy()
    policy.rank = lambda view: (Want(r) for r in view.ranked(key=lambda r: r.priority))
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1])
    h = Harness(policy, blocks=2, block_size=4, seats=1)
    h.add("a", 4, None)
    h.steps(5)
    assert h["a"].num_tokens == 9  # one more than the pool holds
    h.add("urgent", 4, 2, priority=-1)
    h.add("b", 4, 2)
    h.run(10)
    assert list(h.reasons) == ["urgent", "a", "b"] and h.reasons["a"] == "length"
    assert h.outputs["a"] == h.alone("a")[:5]


def test_after_eight_steps_without_a_slice_the_core_ranks_one_itself() -> None:
    h, policy = started("a", "b")
    h.add("c", 4)
    policy.rank = ranked(h, ("a", 0), ("b", 0))
    for _ in range(8):
        assert h.step() is None
    assert h.planner.forced == 0
    assert ids(h.step()) == ["a", "b", "c"]
    assert h.planner.forced == 1
    assert h.planner.policy.faults == {"scheduler": 1}
    policy.rank = lambda view: [Want(r, 0) for r in view.running]
    assert h.step() is None


def test_the_forced_step_counts_only_while_work_exists() -> None:
    h = Harness(Policy())
    for _ in range(20):
        assert h.step() is None
    h.add("a", 4, 2)
    h.run()
    assert h.planner.forced == 0 and h.planner.policy.faults == {}


@pytest.mark.parametrize("preemption", [None, Mode.RECOMPUTE])
def test_an_idle_start_is_fine_and_while_requests_wait_and_blocks_are_free_every_step_progresses(
    preemption: Mode | None,
) -> None:
    rng = random.Random(5)
    h = Harness(blocks=12, tokens=16, seats=3, preemption=preemption)
    assert [h.step() for _ in range(20)] == [None] * 20 and not h.engine.has_work
    for i in range(30):
        h.add(f"r{i}", rng.randrange(1, 24), rng.randrange(1, 24))
    starved = 0
    while h.engine.has_work:
        waiting, free = len(h.waiting), h.engine.kv.usage().free
        plan = h.step()
        assert plan is not None and sum(one.tokens for one in plan.slices) > 0, (waiting, free)
        starved += waiting > 0 and free > 0
    assert starved > 20 and len(h.reasons) == 30 and set(h.reasons.values()) == {"length"}
