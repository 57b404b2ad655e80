"""What becomes of victims: swap or recompute, by wish, by cost and by room; and requests that share a prompt."""

from __future__ import annotations

import pytest
from framework.plugins.kv.paged import PagedCache
from harness import Harness, Policy, ids, ranked, started, tokens

from framework import Mode, Victim
from framework.preemption import Costs


def modes(h: Harness) -> list[Mode]:
    return [fallen.mode for plan in h.executor.plans for fallen in plan.preempted]


# Swap or recompute


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("limit", Mode)
def test_the_policy_is_asked_before_the_setting(mode: Mode, limit: Mode) -> None:
    policy = Policy()
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1], mode)
    h, _ = started("a", "b", blocks=2, host_blocks=8, policy=policy, preemption=limit)
    h.run()
    assert set(modes(h)) == {mode}
    assert h.outputs == {id: h.alone(id) for id in "ab"}


@pytest.mark.parametrize("limit", Mode)
def test_the_setting_decides_where_the_policy_does_not(limit: Mode) -> None:
    h, _ = started("a", "b", blocks=2, host_blocks=8, preemption=limit)
    h.run()
    assert set(modes(h)) == {limit}
    stats = h.engine.stats()
    assert (stats.recomputed_tokens == 0) == (limit is Mode.SWAP)


@pytest.mark.parametrize(
    ("costs", "mode"),
    [
        (Costs(copy=1e9, compute=100, block_bytes=10**6), Mode.SWAP),
        (Costs(copy=1e6, compute=10**6, block_bytes=10**6), Mode.RECOMPUTE),
        (Costs(), Mode.SWAP),
    ],
)
def test_auto_takes_what_is_cheaper(costs: Costs, mode: Mode) -> None:
    h, _ = started("a", "b", blocks=2, host_blocks=8, costs=costs)
    h.run()
    assert set(modes(h)) == {mode}


def test_costs_count_both_ways() -> None:
    costs = Costs(copy=1000, compute=10, block_bytes=100)  # a block out and back: 0.2 s; a token: 0.1 s
    assert costs.choose(blocks=4, tokens=9) is Mode.SWAP
    assert costs.choose(blocks=4, tokens=8) is Mode.RECOMPUTE


def test_a_swapped_request_resumes_before_a_new_one_and_computes_nothing_twice() -> None:
    h, _ = started("a", "b", blocks=2, host_blocks=8, preemption=Mode.SWAP)
    plan = h.step()
    assert plan is not None and [p.request_id for p in plan.preempted] == ["b"]
    assert [(c.src_tier, c.dst_tier) for c in plan.copies] == [("device", "host")]
    assert h["b"].computed == 4 and h.kv.usage().swapped == 1
    h.add("new", 4, 1)
    while "b" in h.waiting:
        plan = h.step()
    assert h.waiting == ["new"]
    assert plan is not None and tokens(plan) == {"b": 1} and plan.slices[0].start == 4
    assert ("host", "device") in {(c.src_tier, c.dst_tier) for c in plan.copies}


def test_abort_while_swapped_frees_once() -> None:
    h, _ = started("a", "b", blocks=2, host_blocks=8, preemption=Mode.SWAP)
    h.step()
    assert h.kv.usage().swapped == 1
    h.abort("b", "b")
    assert h.kv.usage().swapped == 0 and h.kv.available == 0
    h.run()
    assert h.reasons == {"a": "length", "b": "abort"}


def test_abort_while_the_copies_of_a_swap_are_submitted() -> None:
    h, _ = started("a", "b", blocks=2, host_blocks=8, preemption=Mode.SWAP)
    plan = h.planner.plan(0.0)
    assert plan is not None and plan.copies
    pending = h.executor.submit(plan)
    h.engine.abort(["b"])
    h.planner.commit(plan, pending.result())
    h.kv.check_integrity()
    assert h.kv.usage().swapped == 0


def test_a_failed_step_drops_what_it_swapped_out_and_older_swaps_survive() -> None:
    armed: list[bool] = []
    options = {"host_blocks": 8, "preemption": Mode.SWAP, "max_tokens": 9}
    h, _ = started(*"abc", blocks=3, fail=lambda plan: "before" if armed and plan.preempted else None, **options)
    h.step()
    assert h.waiting == ["c"] and h["c"].computed == 4
    armed.append(True)
    while not h.engine.stats().failed_steps:
        h.step()
    assert [p.request_id for p in h.executor.plans[-1].preempted] == ["b"]
    assert (h["a"].computed, h["b"].computed, h["c"].computed) == (0, 0, 4)
    assert h.kv.usage().swapped == 1
    armed.clear()
    h.run()
    assert h.outputs == {id: h.alone(id) for id in "abc"}


# Requests that share a prompt


def test_n_share_their_prompt() -> None:
    h = Harness(blocks=16, block_size=4)
    h.add("a", 10, 6, n=4)
    plan = h.step()
    assert tokens(plan) == {"a": 10}
    plan = h.step()
    assert tokens(plan) == {"a": 1, "a/1": 1, "a/2": 1, "a/3": 1}
    assert plan is not None and {s.start for s in plan.slices} == {10, 9}
    assert h.copies["device", "device"] == 3  # the last of the four writes in place
    assert h.kv.usage().holding == 2 + 4
    h.run()
    assert h.outputs == {id: h.alone(id) for id in ("a", "a/1", "a/2", "a/3")}
    assert len({tuple(output) for output in h.outputs.values()}) == 4
    assert h.engine.stats().prompt_tokens == 10 + 3


def test_children_have_the_seeds_of_the_set() -> None:
    outputs = []
    for seats in (8, 2):
        h = Harness(seats=seats, blocks=40)
        h.add("a", 6, 5, n=3, seed=7)
        h.run()
        outputs.append(h.outputs)
    assert outputs[0] == outputs[1]
    h = Harness()
    h.add("a", 6, 5, seed=7)
    h.run()
    assert h.outputs["a"] == outputs[0]["a"]


def test_n_takes_n_seats_until_the_fork() -> None:
    h = Harness(seats=4, tokens=4, blocks=40)
    h.add("first", 2, 9)
    h.step()
    h.add("four", 6, 4, n=4)
    h.add("one", 2, 2)
    h.step()
    assert h.running == ["first"]  # three seats are free; and nobody overtakes
    h.abort("first")
    h.step()
    assert h.running == ["four"] and h.view.waiting[0].id == "one"
    h.step()
    assert h.running == ["four", "four/1", "four/2", "four/3"]
    h.run()
    assert h.outputs["four/3"] == h.alone("four/3")


def test_n_beyond_the_seats_runs_where_nobody_else_does() -> None:
    h = Harness(seats=4, blocks=60)
    h.add("a", 6, 5, n=9)
    h.step()
    assert h.running == ["a", "a/1", "a/2", "a/3"]
    assert h.waiting == [f"a/{k}" for k in range(4, 9)]
    h.add("b", 6, 1)
    h.run()
    first = {data.id: plan.step for plan in reversed(h.executor.plans) for data in plan.new}
    assert first["b"] >= first["a/8"] > first["a/4"] >= first["a/3"]  # those without a seat were here before
    assert h.outputs == {id: h.alone(id) for id in h.outputs}


def test_the_fork_comes_before_the_parent_ends_on_its_first_token() -> None:
    h = Harness()
    h.add("a", 6, 1, n=3)
    h.run()
    assert h.reasons == dict.fromkeys(["a", "a/1", "a/2"], "length")


@pytest.mark.parametrize("gone", ["a", "a/1", "a/2"])
@pytest.mark.parametrize("steps", range(4))
def test_any_of_n_may_leave_at_any_time(gone: str, steps: int) -> None:
    h = Harness(tokens=4)
    h.add("a", 6, 5, n=3)
    h.steps(steps)
    h.abort(gone)
    assert h.view.total == 2
    h.run()
    for id, reason in h.reasons.items():
        assert reason == ("abort" if id == gone else "length")
        assert h.outputs[id] == h.alone(id)[: len(h.outputs[id])]


def test_an_id_of_a_child_is_in_use_too() -> None:
    h = Harness()
    h.add("a", 4, 4, n=2)
    refusal = h.add("a/1", 4, 4)
    assert refusal is not None and refusal.status == 409


def test_forks_that_hold_the_whole_pool_do_not_wait_for_each_other() -> None:
    """The parent fills the pool; its child's blocks are all the parent's: evicting it would free none."""
    h = Harness(blocks=6, block_size=1, tokens=1)
    h.add("a", 2, None, n=2)
    h.run(60)
    assert h.reasons == {"a": "length", "a/1": "length"}


# The prefix cache


def test_a_prefix_is_computed_once() -> None:
    h = Harness(blocks=16, block_size=4)
    prompt = list(range(10))
    h.add("a", prompt, 2)
    h.run()
    h.add("b", [*prompt, 1, 2], 2)
    seen: list[tuple[int, int]] = []
    policy_view = h.view
    seen.append((policy_view.cached(h["b"]), policy_view.missing(h["b"], 4)))
    plan = h.step()
    assert seen == [(8, 0)]
    assert plan is not None and plan.slices[0].start == 8
    h.run()
    assert h["b"].cached_tokens == 8
    stats = h.engine.stats()
    assert (stats.prefix_hits, stats.prefix_hit_tokens, stats.prompt_tokens) == (1, 8, 10 + 4)
    assert h.outputs["b"] == h.alone("b")


def test_salts_keep_prompts_apart() -> None:
    h = Harness(blocks=16)
    for i, salt in enumerate((b"x", b"y", b"x")):
        h.add(f"r{i}", list(range(9)), 1, cache_salt=salt)
        h.run()
    assert [h[f"r{i}"].cached_tokens for i in range(3)] == [0, 0, 8]


def test_what_was_computed_survives_a_recompute() -> None:
    h, _ = started("a", "b", blocks=4, max_tokens=9, preemption=Mode.RECOMPUTE)
    h.run()
    assert Mode.RECOMPUTE in modes(h)
    assert h.engine.stats().prefix_hits > 0
    assert h.outputs == {id: h.alone(id) for id in "ab"}


def test_without_a_prefix_cache_nothing_stays() -> None:
    h = Harness(prefix_cache=False)
    for id in "ab":
        h.add(id, list(range(9)), 2)
        h.run()
    assert h.engine.stats().prefix_hits == 0 and h.kv.usage().free == 8


def test_preparing_a_request_is_part_of_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(PagedCache, "prepare", lambda self, request: prepared.append(request.id))
    h = Harness()
    h.add("a", 9, 3)
    assert prepared == ["a"]
    h.run()
    assert prepared == ["a"] and ids(h.executor.plans[0]) == ["a"]


def test_a_chunk_that_the_pool_cannot_hold_is_cut_to_the_blocks_that_there_are() -> None:
    """With a window the pool may be smaller than a request: it resumes 20 tokens long, in 17 blocks."""
    policy = Policy()
    h = Harness(
        policy,
        blocks=17,
        block_size=1,
        tokens=16,
        windows=(9,),
        prefix_cache=False,
        max_model_len=40,
        fail=lambda plan: "before" if plan.step == 5 else None,
    )
    h.add("a", 16, None)
    for _ in range(5):
        h.step()
    assert h["a"].num_tokens > 17 and not h.running
    policy.rank = ranked(h, ("a", 2))
    h.step()
    policy.rank = lambda view: None
    plan = h.step()
    assert plan is not None and [s.tokens for s in plan.slices] == [14]
    h.run()
    assert h.planner.forced == 0
    assert h.outputs["a"] == h.alone("a")[: len(h.outputs["a"])]


def test_forks_that_fail_run_alone_until_it_is_known_who_is_at_fault() -> None:
    """Failing steps, n and preemption together: only who fails alone is ended, the others end as they would have."""
    culprit = "a/1"
    h = Harness(
        blocks=64, seats=6, fail=lambda plan: "after" if any(s.request_id == culprit for s in plan.slices) else None
    )
    h.add("a", 6, 4, n=3)
    h.add("b", 5, 4)
    h.run()
    assert h.reasons[culprit] == "error"
    assert {id for id, reason in h.reasons.items() if reason == "error"} == {culprit}
    assert {id: h.outputs[id] for id in ("a", "a/2", "b")} == {id: h.alone(id) for id in ("a", "a/2", "b")}
