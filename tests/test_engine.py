"""The step loop: requests come, leave and fail."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
from harness import Harness, Policy, started
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import PluginError, Reject, RequestData, Timings, hookimpl
from framework.testing import CheckingExecutor, RequestFailed

# Arrivals


@pytest.mark.parametrize(("prompt", "max_tokens", "fits"), [(10, 7, True), (10, 8, False), (17, 1, False)])
def test_what_could_never_fit_an_empty_pool_is_refused_with_both_numbers(
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


def test_an_unset_max_tokens_is_no_reason_to_refuse() -> None:
    h = Harness(blocks=4, block_size=4, max_model_len=1000)
    assert h.add("a", 10, None) is None
    refusal = h.add("b", 17, None)
    assert refusal is not None and refusal.error is not None and "5" in refusal.error


def test_seeds_are_recorded_and_unsigned() -> None:
    h = Harness()
    h.add("unseeded", 4)
    h.add("negative", 4, seed=-1)
    h.add("other", 4)
    plan = h.step()
    assert plan is not None
    seeds = {data.id: data.seed for data in plan.new}
    assert seeds["negative"] == 2**64 - 1
    assert len(set(seeds.values())) == 3 and all(0 <= seed < 2**64 for seed in seeds.values())


# Aborts


def test_abort_in_every_state_frees_everything() -> None:
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


def test_abort_of_a_request_in_the_submitted_plan_is_honoured_by_commit() -> None:
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


def test_an_id_in_use_is_refused_and_the_first_is_untouched() -> None:
    h, _ = started("a")
    refusal = h.add("a", 7)
    assert refusal is not None and refusal.error is not None and refusal.status == 409
    h.run()
    assert h.outputs["a"] == h.alone("a")


# Failing steps


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_step_is_computed_again(when: Any) -> None:
    h = Harness(fail=lambda plan: when if plan.step in (2, 4) else None)
    for id in "abc":
        h.add(id, 5, 8)
    h.run()
    assert h.outputs == {id: h.alone(id) for id in "abc"}
    assert h.engine.stats().failed_steps == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_that_fails_its_third_step_is_ended_with_an_error(when: Any) -> None:
    h = Harness(fail=lambda plan: when if any(s.request_id == "bad" for s in plan.slices) else None)
    h.add("bad", 4)
    h.run(10)
    assert h.reasons == {"bad": "error"}
    assert "made to fail" in h.errors["bad"]
    assert len(h.executor.plans) == 3


def test_a_request_that_fails_in_its_second_chunk_ends_too() -> None:
    """Its first chunk, computed again and again, must not make it look healthy."""
    h = Harness(tokens=4, fail=lambda plan: "after" if any(s.start for s in plan.slices) else None)
    h.add("bad", 8, 1)
    h.run(20)
    assert h.reasons == {"bad": "error"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_that_fails_every_step_takes_nobody_along(when: Any) -> None:
    """After two failing steps each of their requests runs alone: only the one at fault fails a third time."""
    h = Harness(fail=lambda plan: when if any(s.request_id == "bad" for s in plan.slices) else None)
    for id in ("a", "bad", "c", "d"):
        h.add(id, 6)
    h.run(40)
    assert h.reasons == {"a": "length", "bad": "error", "c": "length", "d": "length"}
    assert all(h.outputs[id] == h.alone(id) for id in "acd")
    assert h.engine.stats().failed_steps == 3


@settings(max_examples=60, deadline=None)
@given(bad=st.sets(st.integers(0, 7), max_size=5), seats=st.integers(1, 8), tokens=st.sampled_from((3, 8, 64)))
def test_exactly_those_at_fault_end_with_an_error(bad: set[int], seats: int, tokens: int) -> None:
    names = {f"r{i}" for i in bad}
    h = Harness(
        blocks=40,
        seats=seats,
        tokens=tokens,
        fail=lambda plan: next(("after" for s in plan.slices if s.request_id in names), None),
    )
    for i in range(8):
        h.add(f"r{i}", 6)
    h.run(400)
    assert {id for id, reason in h.reasons.items() if reason == "error"} == names
    assert all(h.outputs[id] == h.alone(id) for id in h.reasons if id not in names)


def test_who_waits_is_not_touched_by_a_failed_step() -> None:
    h = Harness(seats=1, fail=lambda plan: "before" if any(s.request_id == "bad" for s in plan.slices) else None)
    h.add("bad", 4)
    h.add("good", 4)
    h.run()
    assert h.reasons == {"bad": "error", "good": "length"}
    assert h["good"].failures == 0 and h.outputs["good"] == h.alone("good")


def test_an_error_of_one_request_ends_it_alone() -> None:
    h, _ = started("a", "b")
    original = CheckingExecutor.next_token

    def next_token(data: RequestData, tokens: Sequence[int]) -> int:
        if data.id == "b" and len(tokens) > 4:
            raise RequestFailed("logits are NaN")
        return original(h.executor, data, tokens)

    h.executor.next_token = next_token  # type: ignore[method-assign]
    h.step()
    assert h.reasons == {"b": "error"} and h.errors == {"b": "logits are NaN"}
    h.run()
    assert h.outputs["a"] == h.alone("a")


class Meddler:
    """An augmenting plugin that does what a test says in one hook."""

    def __init__(self, **hooks: Any) -> None:
        for name, function in hooks.items():
            setattr(self, name, hookimpl(function))


def boom() -> Any:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    "answer",
    [
        boom,
        sys.exit,
        lambda: True,
        lambda: "no",
        lambda: Reject(123),  # type: ignore[arg-type]
        lambda: Reject("x", status="429"),  # type: ignore[arg-type]
        lambda: Reject("x", status=200),
        lambda: Reject("x", "5"),  # type: ignore[arg-type]
        lambda: Reject("x", float("nan")),
    ],
)
def test_a_faulty_accept_fails_its_request_alone(answer: Any) -> None:
    h = Harness(plugins=[Meddler(accept=lambda request: answer() if request.id == "bad" else None)])
    h.add("a")
    refusal = h.add("bad")
    assert refusal is not None and refusal.status == 500 and "plugin0" in (refusal.error or "")
    h.run()
    assert h.outputs["a"] == h.alone("a") and h.done == {"a": 1, "bad": 1}
    (plugin, count), *others = h.engine.stats().plugin_faults.items()
    assert "plugin0" in plugin and count == 1 and not others


@pytest.mark.parametrize("hook", ["arrived", "step_done", "request_done"])
def test_a_faulty_event_is_counted_and_harms_nobody(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    h = Harness(plugins=[Meddler(**{hook: lambda: boom()})])
    for id in "abc":
        h.add(id, 4, 10)
    h.run()
    assert h.outputs == {id: h.alone(id) for id in "abc"} and h.done == {"a": 1, "b": 1, "c": 1}
    assert h.engine.stats().plugin_faults == {"plugin0": h.engine.steps if hook == "step_done" else 3}
    assert len(caplog.records) <= 4, "a plugin that fails every step floods the log"


@pytest.mark.parametrize("hook", ["arrived", "request_done"])
def test_a_strict_engine_stops_with_the_plugins_name(hook: str) -> None:
    h = Harness(strict=True, plugins=[Meddler(**{hook: lambda: boom()})])
    with pytest.raises(PluginError, match=f"'plugin0' failed in {hook}: RuntimeError: boom"):
        h.add("a")
        h.run()
    h.engine.close()  # what it raised here would hide the cause


def test_every_stage_of_a_step_is_stamped() -> None:
    seen: list[Timings] = []
    h = Harness(blocks=4, block_size=4, plugins=[Meddler(step_done=lambda timings: seen.append(timings))])
    for id in "abc":
        h.add(id, 4, 8)
    h.run()
    preempting = 0
    for timings in seen:
        names = [name for name, _, _ in timings.stages]
        assert names[:2] == ["admission", "kv_allocation"] and names[-1] == "commit"
        assert all(timings.start <= begin <= end <= timings.end for _, begin, end in timings.stages)
        preempting += "preemption" in names
    assert 0 < preempting <= h.engine.stats().preemptions_recompute
