"""The rules of a step, one scenario each. The numbers in the headings are those of the rules in docs/step.md."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from harness import Harness, Policy, ids, tokens

from framework import Budget, Mode, Plan, PluginError, Request, RequestData, SamplingParams, Status, Victim, View, Want
from framework.testing import CheckingExecutor, RequestFailed


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


# 1: policies rank; the core enforces


def test_1_unnamed_requests_rank_decodes_then_prefills_in_admission_order() -> None:
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


def test_1_a_named_request_has_its_place_after_all_unnamed_ones() -> None:
    h, policy = started("a", "b", "c")
    policy.rank = ranked(h, "c", "a")
    assert ids(h.step()) == ["b", "c", "a"]


def test_1_zero_tokens_hold_a_request_with_its_blocks() -> None:
    h, policy = started("a", "b")
    policy.rank = ranked(h, ("a", 0))
    for _ in range(3):
        assert ids(h.step()) == ["b"]
    assert h.running == ["a", "b"] and h["a"].computed == 4


def test_1_a_want_is_cut_to_the_request_and_to_the_budget() -> None:
    policy = Policy()
    h = Harness(policy, tokens=10)
    h.add("a", 6)
    h.add("b", 20)
    policy.rank = ranked(h, ("a", 100), ("b", 100))
    assert tokens(h.step()) == {"a": 6, "b": 4}
    policy.rank = ranked(h, ("b", 3), ("a", 5))
    assert tokens(h.step()) == {"b": 3, "a": 1}
    assert h["b"].computed == 7


def test_1_the_budget_shown_is_tokens_and_free_seats() -> None:
    h, policy = started("a", "b", tokens=50, seats=5)
    h.step()
    assert policy.budgets == [Budget(50, 3)]


def test_1_wants_for_requests_that_ended_are_skipped() -> None:
    h, policy = started("a", "b")
    h.abort("a")
    policy.rank = ranked(h, "a", "b")
    assert ids(h.step()) == ["b"]
    assert h.planner.policy.faults == {}


# 2: victims


def test_2_victims_come_from_requests_not_granted_in_this_step() -> None:
    h, policy = started("a", "b", "c", blocks=4)
    policy.rank = ranked(h, "b", "a", "c")  # b takes the last block; a is short of one
    plan = h.step()
    assert [asked[0] for asked in policy.asked] == ["a"] and policy.asked[0][2] == ["c"]
    assert plan is not None and ids(plan) == ["b", "a"]
    assert [p.request_id for p in plan.preempted] == ["c"]
    assert h.running == ["a", "b"] and h.waiting == ["c"]


def test_2_candidates_are_in_rank_order_those_passed_over_included() -> None:
    h, policy = started("a", "b", "c", "d", blocks=4)
    policy.rank = ranked(h, ("d", 0), "a", "c", ("b", 0))
    h.step()
    assert policy.asked[0][0] == "a" and policy.asked[0][2] == ["d", "c", "b"]


def test_2_nobody_is_asked_if_all_candidates_would_not_cover_the_shortage() -> None:
    h, policy = started("a", "b", blocks=4)
    h.add("urgent", 16, 1, priority=-1)
    policy.pick = lambda beneficiary, candidates: Victim(candidates[0])
    policy.rank = ranked(h, "a", "urgent", ("b", 0))  # it needs all four blocks, a holds two of them by then
    plan = h.step()
    assert plan is not None and ids(plan) == ["a"] and plan.preempted == ()
    assert policy.asked == []


def test_2_one_victim_per_call_and_they_fall_together() -> None:
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


def test_2_none_before_the_shortage_is_covered_preempts_nobody() -> None:
    h, policy = started("a", "b", "c", blocks=4)
    h.add("urgent", 12, 1, priority=-1)
    policy.rank = ranked(h, "urgent", "a", ("b", 0), ("c", 0))
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1]) if len(candidates) == 3 else None
    plan = h.step()
    assert [len(asked[2]) for asked in policy.asked] == [3, 2]
    assert plan is not None and plan.preempted == () and "urgent" not in ids(plan)
    assert h.running == ["a", "b", "c"]


def test_2_victims_free_seats_and_blocks_both() -> None:
    h, policy = started("a", "b", blocks=4, seats=2)
    h.add("urgent", 16, 1, priority=-1)
    policy.rank = ranked(h, "urgent", "a", "b")
    policy.pick = lambda beneficiary, candidates: Victim(candidates[0])
    plan = h.step()
    assert [asked[1] for asked in policy.asked] == [(2, 1), (1, 0)]
    assert ids(plan) == ["urgent"] and h.waiting == ["a", "b"]


# 3 and 4: when admission closes


def test_3_a_waiting_request_that_does_not_fit_closes_admission_but_not_the_walk() -> None:
    h, policy = started("a", "b", blocks=6)
    h.add("big", 20, 1)
    h.add("small", 4, 1)
    policy.rank = ranked(h, "a", "big", "small", "b")
    assert ids(h.step()) == ["a", "b"]
    assert h.waiting == ["big", "small"]


def test_4_nothing_is_admitted_after_a_preemption() -> None:
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


def test_4_a_waiting_beneficiary_starts_at_once_at_its_place() -> None:
    h, policy = started("a", "b", "c", blocks=4, tokens=12)
    h.add("urgent", 8, 1, priority=-1)
    h.add("next", 1, 1, priority=-1)
    policy.rank = ranked(h, "a", "urgent", "next", "b", "c")
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1])
    plan = h.step()
    assert tokens(plan) == {"a": 1, "urgent": 8}
    assert plan is not None and {p.request_id for p in plan.preempted} == {"b", "c"}
    assert h.waiting == ["b", "c", "next"]


def test_4_nothing_is_admitted_after_a_waiting_beneficiary_either() -> None:
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


# 5: admission


def test_5_admission_reserves_the_whole_known_length() -> None:
    h = Harness(tokens=4, blocks=4)
    h.add("a", 12)
    plan = h.step()
    assert plan is not None and tokens(plan) == {"a": 4}
    assert len(plan.slices[0].deltas[0].blocks) == 3
    assert h.kv.available == 1
    assert [s.deltas for s in (*h.steps(2)[0].slices,)] == [()]


def test_5_the_watermark_applies_to_admission_only() -> None:
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


def test_5_the_watermark_is_waived_when_nobody_else_would_run() -> None:
    h = Harness(blocks=4, watermark=4)
    h.add("a", 16, 1)
    h.add("b", 1, 1)
    assert ids(h.step()) == ["a"]
    assert ids(h.step()) == ["b"]


def test_5_seats_are_kept() -> None:
    h = Harness(seats=2)
    for id in "abc":
        h.add(id, 2, 3)
    h.step()
    assert (h.running, h.waiting) == (["a", "b"], ["c"])
    h.run()
    assert h.reasons == dict.fromkeys("abc", "length")


@pytest.mark.parametrize(("prompt", "max_tokens", "fits"), [(10, 7, True), (10, 8, False), (17, 1, False)])
def test_5_what_could_never_fit_an_empty_pool_is_refused_with_both_numbers(
    prompt: int, max_tokens: int, fits: bool
) -> None:
    h = Harness(blocks=4, block_size=4)
    refusal = h.add("a", prompt, max_tokens)
    if fits:
        assert refusal is None
        h.run()
        assert len(h.outputs["a"]) == max_tokens
    else:
        assert refusal is not None and refusal.error is not None and refusal.status == 400
        assert "5" in refusal.error and "4" in refusal.error
        assert not h.engine.has_work


def test_5_an_unset_max_tokens_is_no_reason_to_refuse() -> None:
    h = Harness(blocks=4, block_size=4, max_model_len=1000)
    assert h.add("a", 10, None) is None
    refusal = h.add("b", 17, None)
    assert refusal is not None and refusal.error is not None and "5" in refusal.error


# 6: who may preempt whom


def test_6_a_waiting_request_evicts_only_strictly_worse_levels() -> None:
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


def test_6_a_waiting_request_may_preempt_for_a_seat_alone() -> None:
    h, policy = started("a", "b", blocks=8, seats=2)
    h.add("urgent", 4, 1, priority=-1)
    policy.rank = ranked(h, "urgent", "a", "b")
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1])
    plan = h.step()
    assert policy.asked == [("urgent", (0, 1), ["a", "b"])]
    assert ids(plan) == ["urgent", "a"]


def test_6_the_default_takes_the_last_candidate_for_a_running_one_and_none_for_a_waiting_one() -> None:
    h, policy = started("a", "b", "c", blocks=3)
    h.add("urgent", 4, 1, priority=-1)
    policy.rank = ranked(h, "urgent", "b", "a", "c")
    plan = h.step()
    assert plan is not None and [p.request_id for p in plan.preempted] == ["c"]
    assert "urgent" in h.waiting and ids(plan)[0] == "b"


def test_6_the_level_set_on_arrival_orders_queues_and_victims() -> None:
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


# 7: order of waiting, and resuming


def test_7_waiting_lists_preempted_requests_first_then_by_arrival() -> None:
    h, policy = started("a", "b", "c", "d", blocks=4)
    h.add("e", 4)
    policy.rank = ranked(h, "a", "b", "c", "d")
    h.step()
    assert h.waiting == ["c", "d", "e"]
    seen: list[list[str]] = []
    policy.rank = lambda view: seen.append([r.id for r in view.queue(key=lambda r: r.priority)])
    h.step()
    assert seen == [["c", "d", "e"]]


def test_7_a_preempted_request_resumes_with_its_tokens() -> None:
    h, _ = started("a", "b", blocks=2)
    h.run()
    assert h["b"].preemptions == 1
    assert h.outputs == {id: h.alone(id) for id in "ab"}
    resumed = [data for plan in h.executor.plans for data in plan.new if data.id == "b"][1:]
    assert len(resumed) == 1
    assert resumed[0].tokens == [*h["b"].prompt, h.outputs["b"][0]]
    assert (resumed[0].prompt_len, resumed[0].seed) == (4, h["b"].seed)


def test_7_seeds_are_recorded_and_unsigned() -> None:
    h = Harness()
    h.add("unseeded", 4)
    h.add("negative", 4, seed=-1)
    h.add("other", 4)
    plan = h.step()
    assert plan is not None
    seeds = {data.id: data.seed for data in plan.new}
    assert seeds["negative"] == 2**64 - 1
    assert len(set(seeds.values())) == 3 and all(0 <= seed < 2**64 for seed in seeds.values())


# 8 and 9: what the plan says


@pytest.mark.parametrize("mode", [None, *Mode])
def test_8_without_room_to_swap_a_victim_is_recomputed_and_the_plan_says_so(mode: Mode | None) -> None:
    h, policy = started("a", "b", blocks=2)
    policy.pick = lambda beneficiary, candidates: Victim(candidates[0], mode)
    plan = h.step()
    assert plan is not None and [(p.request_id, p.mode) for p in plan.preempted] == [("b", Mode.RECOMPUTE)]


def test_9_plans_are_plain_data_and_equal_runs_have_equal_digests() -> None:
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


def test_9_tables_travel_as_deltas() -> None:
    h = Harness(block_size=4)
    h.add("a", 4, 10)
    found = [[(d.first, len(d.blocks)) for d in plan.slices[0].deltas] for plan in h.steps(10)]
    assert found == [[(0, 1)], [(1, 1)], [], [], [], [(2, 1)], [], [], [], [(3, 1)]]


# 11: progress


def test_11_the_first_by_level_and_arrival_is_no_victim_of_a_running_one() -> None:
    h, policy = started("a", "b", blocks=2)
    policy.rank = ranked(h, "b", "a")
    plan = h.step()
    assert plan is not None and ids(plan) == ["a"]
    assert [p.request_id for p in plan.preempted] == ["b"]
    assert [asked[0] for asked in policy.asked] == ["a"]


def test_11_the_level_counts_before_the_arrival() -> None:
    policy = Policy()
    policy.level = lambda request: {"a": 1.0, "b": 0.0}[request.id]
    h, _ = started("a", "b", blocks=2, policy=policy)
    policy.rank = ranked(h, "a", "b")
    plan = h.step()
    assert plan is not None and ids(plan) == ["b"] and [p.request_id for p in plan.preempted] == ["a"]


def test_11_what_gets_no_victim_waits_in_place_with_its_blocks() -> None:
    h, policy = started("a", "b", blocks=3)
    policy.rank = ranked(h, "b", "a")
    plan = h.step()
    assert plan is not None and ids(plan) == ["b"] and plan.preempted == ()
    assert h.running == ["a", "b"] and h["a"].computed == 4
    assert policy.asked == []


def test_11_a_lone_request_that_cannot_grow_ends_with_length() -> None:
    h = Harness(blocks=2, block_size=4)
    h.add("a", 4, None)
    h.add("b", 4, 2)
    h.run()
    assert h.reasons == {"a": "length", "b": "length"}
    # Eight tokens have a place in the cache; the ninth known one is the last output, which nobody reads.
    assert h.outputs["a"] == h.alone("a")[:5]
    assert h.outputs["b"] == h.alone("b")


def test_11_a_preempted_request_that_outgrew_the_pool_ends_with_length() -> None:
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


def test_11_after_eight_steps_without_a_slice_the_core_ranks_one_itself() -> None:
    h, policy = started("a", "b")
    h.add("c", 4)
    policy.rank = ranked(h, ("a", 0), ("b", 0))
    for _ in range(8):
        assert h.step() is None
    assert h.planner.forced == 0
    assert ids(h.step()) == ["a", "b", "c"]
    assert h.planner.forced == 1
    assert h.planner.policy.faults == {"policy": 1}
    policy.rank = lambda view: [Want(r, 0) for r in view.running]
    assert h.step() is None


def test_11_the_forced_step_counts_only_while_work_exists() -> None:
    h = Harness(Policy())
    for _ in range(20):
        assert h.step() is None
    h.add("a", 4, 2)
    h.run()
    assert h.planner.forced == 0 and h.planner.policy.faults == {}


# 12: aborts


def test_12_abort_in_every_state_frees_everything() -> None:
    policy = Policy()
    h = Harness(policy, blocks=6, tokens=6)
    h.abort("unknown")
    h.add("waiting", 4)
    h.abort("waiting")
    assert h.reasons == {"waiting": "abort"}

    h.add("prefill", 20, 1)
    h.step()
    assert 0 < h["prefill"].computed < 20
    h.abort("prefill")
    assert h.kv.available == 6

    h.add("decode", 4, 8)
    h.steps(2)
    h.abort("decode", reason="stop")
    assert h.reasons["decode"] == "stop" and len(h.outputs["decode"]) == 2
    assert h.kv.available == 6

    h.add("stays", 12, 12)
    h.add("falls", 8, 8)
    while not h["falls"].preemptions:
        h.step()
    assert h.waiting == ["falls"]
    h.abort("falls")
    h.abort("falls")
    h.run()
    assert h.outputs["stays"] == h.alone("stays")
    assert h.done == dict.fromkeys(h.requests, 1)
    named = [id for plan in h.executor.plans for id in plan.finished]
    assert {"prefill", "decode", "falls"} <= set(named)  # so that the executor may forget them


def test_12_abort_of_a_request_in_the_submitted_plan_is_honoured_by_commit() -> None:
    h = Harness()
    h.add("a", 4)
    h.add("b", 4)
    plan = h.planner.plan(0.0)
    assert plan is not None
    result = h.executor.submit(plan).result()
    h.planner.remove(h["a"])
    produced = h.planner.commit(plan, result)
    assert [(request.id, index) for request, index, _ in produced] == [("b", 0)]
    assert h["a"].output == [] and h["b"].output == list(result.tokens["b"])
    h.kv.check_integrity()
    assert h.kv.usage().tokens == 4


def test_12_an_id_in_use_is_refused_and_the_first_is_untouched() -> None:
    h, _ = started("a")
    refusal = h.add("a", 7)
    assert refusal is not None and refusal.error is not None and refusal.status == 409
    h.run()
    assert h.outputs["a"] == h.alone("a")


# 13: failing steps


@pytest.mark.parametrize("when", ["before", "after"])
def test_13_a_failed_step_is_computed_again(when: Any) -> None:
    h = Harness(fail=lambda plan: when if plan.step in (2, 4) else None)
    for id in "abc":
        h.add(id, 5, 8)
    h.run()
    assert h.outputs == {id: h.alone(id) for id in "abc"}
    assert h.engine.stats().failed_steps == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_13_a_request_that_fails_its_third_step_is_ended_with_an_error(when: Any) -> None:
    h = Harness(fail=lambda plan: when if any(s.request_id == "bad" for s in plan.slices) else None)
    h.add("bad", 4)
    h.run(10)
    assert h.reasons == {"bad": "error"}
    assert "made to fail" in h.errors["bad"]
    assert len(h.executor.plans) == 3


def test_13_a_request_that_fails_in_its_second_chunk_ends_too() -> None:
    """Its first chunk, computed again and again, must not make it look healthy."""
    h = Harness(tokens=4, fail=lambda plan: "after" if any(s.start for s in plan.slices) else None)
    h.add("bad", 8, 1)
    h.run(20)
    assert h.reasons == {"bad": "error"}


def test_13_who_waits_is_not_touched_by_a_failed_step() -> None:
    h = Harness(seats=1, fail=lambda plan: "before" if any(s.request_id == "bad" for s in plan.slices) else None)
    h.add("bad", 4)
    h.add("good", 4)
    h.run()
    assert h.reasons == {"bad": "error", "good": "length"}
    assert h["good"].failures == 0 and h.outputs["good"] == h.alone("good")


def test_13_an_error_of_one_request_ends_it_alone() -> None:
    h, _ = started("a", "b")
    original = CheckingExecutor.next_token

    def next_token(data: RequestData, tokens: Sequence[int]) -> int:
        if data.id == "b":
            raise RequestFailed("logits are NaN")
        return original(h.executor, data, tokens)

    h.executor.next_token = next_token  # type: ignore[method-assign]
    h.step()
    assert h.reasons == {"b": "error"} and h.errors == {"b": "logits are NaN"}
    h.run()
    assert h.outputs["a"] == h.alone("a")


# 16: faulty policies


def raises(view: View) -> list[Want]:
    raise RuntimeError("out of ideas")


def breaks_off(view: View) -> Iterator[Want]:
    yield from (Want(r) for r in view.waiting)
    raise RuntimeError("out of ideas")


def foreign(status: Status) -> Request:
    request = Request("foreign", [1, 2], SamplingParams())
    request.status = status
    return request


NONSENSE: dict[str, Callable[[View], Any]] = {
    "raises": raises,
    "breaks off": breaks_off,
    "duplicates": lambda view: [Want(view.waiting[0]), Want(view.waiting[0], 1)],
    "a running one twice": lambda view: [Want(view.running[0]), Want(view.running[0])],
    "negative": lambda view: [Want(view.waiting[0], -1)],
    "a foreign waiting request": lambda view: [Want(foreign(Status.WAITING))],
    "a foreign running request": lambda view: [Want(foreign(Status.RUNNING))],
    "no wants": lambda view: [view.waiting[0]],
    "no requests": lambda view: [Want("a")],  # type: ignore[arg-type]
    "no tokens": lambda view: [Want(view.waiting[0], "all")],  # type: ignore[arg-type]
    "half a token": lambda view: [Want(view.waiting[0], 1.5)],  # type: ignore[arg-type]
    "no list": lambda view: 7,
}


@pytest.mark.parametrize("name", NONSENSE)
def test_16_nonsense_gives_the_default_order_admits_nobody_and_is_counted(name: str) -> None:
    h, policy = started("b", "a")
    h.add("waiting", 4)
    policy.rank = NONSENSE[name]
    assert ids(h.step()) == ["b", "a"]
    assert h.waiting == ["waiting"]
    assert h.planner.policy.faults == {"policy": 1}
    policy.rank = lambda view: None
    h.run()
    assert h.planner.policy.faults == {"policy": 1}
    assert h.outputs == {id: h.alone(id) for id in h.requests}


@pytest.mark.parametrize("name", NONSENSE)
def test_16_strict_stops_at_once_and_names_the_plugin(name: str) -> None:
    h, policy = started("a", strict=True)
    h.add("waiting", 4)
    policy.rank = NONSENSE[name]
    with pytest.raises(PluginError, match="'policy'"):
        h.step()


def test_16_ten_faulty_steps_in_a_row_stop_the_engine() -> None:
    policy = Policy()
    h = Harness(policy, blocks=16)
    h.add("a", 4, 60)
    h.step()
    policy.rank = raises
    h.steps(9)
    policy.rank = lambda view: None
    h.step()  # one good step, and the count begins anew
    policy.rank = raises
    h.steps(9)
    with pytest.raises(PluginError, match=r"'policy'.*out of ideas.*10 steps in a row"):
        h.step()


@pytest.mark.parametrize(
    "pick",
    [
        lambda beneficiary, candidates: 1 / 0,
        lambda beneficiary, candidates: Victim(beneficiary),
        lambda beneficiary, candidates: Victim(foreign(Status.RUNNING)),
        lambda beneficiary, candidates: candidates[0],
        lambda beneficiary, candidates: Victim(candidates[0], "burn"),
    ],
    ids=["raises", "beneficiary", "foreign", "no victim", "no mode"],
)
def test_16_a_faulty_preempt_is_counted_and_admits_nobody(pick: Any) -> None:
    h, policy = started("a", "b", blocks=2)
    policy.pick = pick
    h.step()
    assert h.planner.policy.faults.keys() == {"policy"}
    policy.pick = lambda beneficiary, candidates: None
    h.run()
    assert h.outputs == {id: h.alone(id) for id in h.requests}


def test_16_a_fault_in_preempt_for_a_waiting_one_admits_nobody_in_that_step() -> None:
    h, policy = started("a", "b", blocks=8, seats=3)
    h.add("big", 32 - 4, 1, priority=-1)
    h.add("small", 1, 1)
    policy.pick = lambda beneficiary, candidates: 1 / 0  # type: ignore[assignment, return-value]
    policy.rank = ranked(h, "big", "small", "a", "b")
    assert ids(h.step()) == ["a", "b"]
    assert h.waiting == ["big", "small"]


@pytest.mark.parametrize("level", [None, "high", float("nan")])
def test_16_a_level_that_is_no_number_is_a_fault_and_the_priority_stays(level: Any) -> None:
    policy = Policy()
    policy.level = lambda request: level
    h = Harness(policy, blocks=4)
    h.add("a", 4, 8, priority=1)
    h.add("b", 4, 8, priority=2)
    assert (h["a"].level, h["b"].level) == (1, 2)
    assert h.planner.policy.faults == {"policy": 2}
    h.run()


def test_16_a_key_that_cannot_rank_a_new_request_is_a_fault_of_the_policy() -> None:
    policy = Policy()
    policy.rank = lambda view: (Want(r) for r in view.queue(key=lambda r: {97: None, 98: 0, 99: 1}[ord(r.id)]))
    h = Harness(policy, seats=1)
    h.add("b", 4)
    h.add("c", 4)
    h.step()
    for odd in ("x", "a"):  # a KeyError; None, which does not compare with 1
        h.add(odd, 4)
        assert ids(h.step()) == ["b"]
        assert h.waiting == ["c", odd]
        h.abort(odd)
    assert h.planner.policy.faults == {"policy": 2}
    h.run()
    assert list(h.reasons) == ["x", "a", "b", "c"]


def test_16_keys_without_an_order_lose_nobody() -> None:
    policy = Policy()
    policy.rank = lambda view: (Want(r) for r in view.queue(key=lambda r: float("nan") if len(r.prompt) % 2 else 1.0))
    h = Harness(policy, blocks=64, seats=2)
    for i in range(20):
        h.add(f"r{i}", 1 + i % 7, 2)
    h.abort("r3", "r8", "r12")
    h.run()
    assert h.planner.forced == 0 and len(h.reasons) == 20


# Costs


def test_an_iterator_is_read_no_further_than_admission_goes() -> None:
    read: list[str] = []

    def lazily(view: View) -> Iterator[Want]:
        for r in view.waiting:
            read.append(r.id)
            yield Want(r)

    policy = Policy()
    policy.rank = lazily
    h = Harness(policy, blocks=4, seats=4)
    for i in range(10_000):
        h.add(f"r{i}", 4, 4)
    h.step()
    assert len(read) <= 6
    read.clear()
    h.step()
    assert len(read) <= 3


def test_a_key_is_asked_once_per_request() -> None:
    calls: list[str] = []

    def key(r: Request) -> int:
        calls.append(r.id)
        return len(r.prompt)

    policy = Policy()
    policy.rank = lambda view: (Want(r) for r in view.queue(key))
    h = Harness(policy, blocks=32, seats=2)
    for i in range(100):
        h.add(f"r{i}", 1 + i % 9, 2)
    h.run()
    assert sorted(calls) == sorted(h.requests)
    assert [len(h[id].prompt) for id in h.reasons] == sorted(len(r.prompt) for r in h.requests.values())


def test_the_planner_imports_no_torch() -> None:
    code = (
        "import sys, framework.planner, framework.engine, framework.view, framework.plugins.kv.paged,"
        "framework.plugins.schedulers.fcfs; assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_fcfs_admits_in_order_of_arrival() -> None:
    from framework.plugins.schedulers.fcfs import Fcfs

    h = Harness(Fcfs(), seats=1, blocks=64)
    for id, priority in (("a", 5), ("b", -5), ("c", 0)):
        h.add(id, 4, 3, priority=priority)
    h.run()
    assert list(h.reasons) == ["a", "b", "c"]
