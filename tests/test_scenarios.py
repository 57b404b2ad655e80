"""Seven scenarios that a serving engine must get right, with the planner alone: nothing here imports torch.

The same over HTTP, with an engine process, are in test_server_scenarios.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from framework.plugins.schedulers import FairOptions, PriorityOptions
from framework.plugins.schedulers.fair import Fair
from framework.plugins.schedulers.fcfs import Fcfs
from framework.plugins.schedulers.priority import Priority
from framework.plugins.schedulers.static import Static
from harness import Asked, Harness, ids, started, tokens

from framework import Mode, Request, Status, Victim, View, Want, hookimpl


class LeastServed:
    """Ranks by what each has had so far: an order that turns round whenever somebody was served."""

    @hookimpl
    def admit(self, view: View) -> list[Want]:
        return [Want(r) for r in sorted([*view.running, *view.waiting], key=lambda r: (len(r.output), r.arrival))]

    @hookimpl
    def preempt(self, candidates: Sequence[Request]) -> Victim:
        return Victim(candidates[-1])


SCHEDULERS = {
    "fcfs": Fcfs,
    "priority": lambda: Priority(PriorityOptions()),
    "fair": lambda: Fair(FairOptions()),
    "static": Static,
    "least served": LeastServed,
}


def assert_right(h: Harness) -> None:
    """All have ended, once each and with the tokens that they give alone, and everything is free."""
    assert not h.engine.has_work and h.done == dict.fromkeys(h.requests, 1)
    assert h.outputs == {id: h.alone(id) for id in h.requests}
    assert_free(h)


def assert_free(h: Harness) -> None:
    stats = h.engine.stats()
    assert (stats.running, stats.waiting, h.view.total) == (0, 0, 0)
    assert (stats.kv_holding, stats.kv_reserved, stats.kv_swapped, stats.kv_tokens) == (0, 0, 0, 0)
    assert h.kv.available == stats.kv_blocks
    assert h.planner.forced == 0 and stats.plugin_faults == {}


# Starvation: a request among better ones that keep coming, on one seat. Steps take a millisecond.


def starve(aging: float | None) -> Harness:
    h = Harness(Priority(PriorityOptions(aging=aging)), seats=1, blocks=64)
    h.add("running", 4, 5)
    h.add("low", 4, 2, priority=1)
    for i in range(200):
        h.add(f"r{i}", 4, 2)
        h.step()
    return h


def test_starvation_without_ageing_ends_when_the_stream_ends() -> None:
    h = starve(None)
    assert "low" in h.waiting and len(h.reasons) >= 90
    h.run()
    assert list(h.reasons)[-1] == "low"
    assert_right(h)


def test_starvation_ends_with_ageing_after_the_seconds_it_says() -> None:
    h = starve(0.05)
    assert "low" in h.reasons and "r99" in h.waiting
    assert h["low"].admitted_at is not None
    # Those who came 50 ms later are behind it; it waits until those who came before then have run.
    assert 0.05 <= h["low"].admitted_at - h["low"].arrival <= 0.15
    before = [
        r for r in h.requests.values() if r.id != "low" and r.finished_at and r.finished_at < h["low"].admitted_at
    ]
    assert all(r.arrival < h["low"].arrival + 0.05 for r in before)
    h.run()
    assert_right(h)


# Ping-pong: requests that fit alone, and not together


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_ping_pong_ends(name: str, mode: Mode) -> None:
    h = Harness(SCHEDULERS[name](), seats=4, blocks=3, host_blocks=3, preemption=mode)
    h.add("a", 4, 8)
    h.add("b", 4, 8)
    h.run(60)
    assert h["a"].preemptions == 0 and 1 <= h["b"].preemptions <= 2
    assert h.engine.planner.preemption.counts[mode] == h["b"].preemptions
    assert list(h.reasons) == ["a", "b"]
    assert_right(h)


# An urgent request at the full sequence limit


def test_urgent_at_the_full_sequence_limit_starts_at_once() -> None:
    """By preemption of the one worse request, although memory is plentiful."""
    scheduler = Asked()
    h = Harness(scheduler, seats=3, blocks=64)
    for id, level in (("a", 0), ("worse", 1), ("c", 0)):
        h.add(id, 4, 50, priority=level)
    h.steps(3)
    h.add("urgent", 4, 3, priority=0)
    h.steps(2)
    assert h.running == ["a", "c", "urgent"] and h.waiting == ["worse"]
    h.add("more urgent", 4, 3, priority=-1)
    assert "more urgent" in ids(h.step())
    assert h.kv.available > 32
    assert scheduler.victims == [("urgent", Status.WAITING, "worse"), ("more urgent", Status.WAITING, "urgent")]
    h.run()
    assert list(h.reasons)[:2] == ["more urgent", "urgent"]
    assert {id: r.preemptions for id, r in h.requests.items() if r.preemptions} == {"worse": 1, "urgent": 1}
    assert_right(h)


# Swap space exhausted


def test_swap_exhausted_means_recompute() -> None:
    h, _ = started(*"abcd", blocks=4, host_blocks=1, preemption=Mode.SWAP)
    plan = h.step()
    assert plan is not None and [fallen.mode for fallen in plan.preempted] == [Mode.SWAP, Mode.RECOMPUTE]
    stats = h.engine.stats()
    assert (stats.preemptions_swap, stats.preemptions_recompute, stats.swaps_exhausted) == (1, 1, 1)
    h.run()
    stats = h.engine.stats()
    assert stats.preemptions_recompute == stats.swaps_exhausted
    assert_right(h)


# A pool smaller than one request


def test_pool_smaller_than_one_request_refuses_it_with_both_numbers() -> None:
    h = Harness(Priority(PriorityOptions()), blocks=4)
    refusal = h.add("big", 12, 10, priority=-1)
    assert refusal is not None and refusal.status == 400
    assert "need 6 KV blocks" in str(refusal.error) and "pool has 4" in str(refusal.error)
    h.add("small", 4, 4)
    h.run()
    assert h.reasons == {"small": "length"}
    assert_right(h)


def test_pool_smaller_than_what_a_request_grows_to_ends_it_with_length() -> None:
    h = Harness(blocks=2, block_size=4)
    h.add("a", 4, None)
    h.add("b", 4, 2)
    h.run()
    assert h.reasons == {"a": "length", "b": "length"}
    # Eight tokens have a place in the cache; the ninth known one is the last output, which nobody reads.
    assert h.outputs["a"] == h.alone("a")[:5]
    assert h.outputs["b"] == h.alone("b")
    assert_free(h)


# Equal priorities


def test_equal_priorities_never_preempt_one_another() -> None:
    """Neither for a seat nor for blocks: who waits takes nothing from who runs, and nobody is sent to and fro."""
    scheduler = Asked()
    h = Harness(scheduler, seats=3, blocks=6)
    for i in range(12):
        h.add(f"r{i}", 4 + i % 5, 9)
    h.run()
    assert [entry for entry in scheduler.victims if entry[1] is not Status.RUNNING] == []
    assert max(r.preemptions for r in h.requests.values()) <= 3
    assert_right(h)


def test_equal_priorities_start_in_order_of_arrival() -> None:
    scheduler = Asked()
    h = Harness(scheduler, seats=3, blocks=64)
    for i in range(12):
        h.add(f"r{i}", 4 + i % 5, 9)
    h.run()
    assert scheduler.victims == []
    assert [data.id for plan in h.executor.plans for data in plan.new] == [f"r{i}" for i in range(12)]
    assert list(h.reasons) == [f"r{i}" for i in range(12)]
    assert_right(h)


# One huge prompt


@pytest.mark.parametrize("name", ["fcfs", "priority", "fair"])
def test_a_short_prompt_does_not_wait_for_a_long_one(name: str) -> None:
    """Nor does who decodes. Nothing of a step's budget is left unused for it, and it is over as soon as it would be."""
    h = Harness(SCHEDULERS[name](), seats=8, blocks=512, tokens=32)
    h.add("decodes", 4, 40)
    h.step()
    h.add("long", 640, 2)
    assert tokens(h.step()) == {"decodes": 1, "long": 31}
    h.add("short", 10, 5)
    assert tokens(h.step()) == {"decodes": 1, "long": 21, "short": 10}
    assert len(h["short"].output) == 1
    for id, length in (("a", 6), ("b", 9), ("as long as can be", 16)):
        h.add(id, length, 5)
    assert tokens(h.step()) == {"decodes": 1, "short": 1, "long": 15, "a": 6, "b": 9}
    assert tokens(h.step()) == {"decodes": 1, "short": 1, "a": 1, "b": 1, "long": 28}  # 14 are half of what is left
    h.steps(4)
    assert set(h.reasons) == {"short", "a", "b"}
    assert {sum(tokens(plan).values()) for plan in h.plans[1:]} == {32}
    h.run()
    assert_right(h)


def _beside_a_long_prompt(*waiting: tuple[str, int, dict[str, int]], **options: int) -> dict[str, int]:
    """What a step computes that has 16 tokens for a long prompt and for those who wait: (id, length, options)."""
    h = Harness(SCHEDULERS["fcfs"](), block_size=4, tokens=16, **{"seats": 8, "blocks": 64, **options})
    h.add("long", 60, 4)
    h.step()
    for id, length, given in waiting:
        h.add(id, length, 4, **given)
    return tokens(h.step())


def test_nothing_is_kept_for_who_cannot_start() -> None:
    """For want of blocks, above the watermark too, or of seats, or because those before it have them."""
    assert _beside_a_long_prompt(("no room", 6, {}), blocks=16) == {"long": 16}
    assert _beside_a_long_prompt(("no room", 6, {}), blocks=20, watermark=4) == {"long": 16}
    assert _beside_a_long_prompt(("room", 6, {}), blocks=21, watermark=4) == {"long": 10, "room": 6}
    assert _beside_a_long_prompt(("no seat", 4, {}), seats=1) == {"long": 16}
    assert _beside_a_long_prompt(("no seats", 4, {"n": 3}), seats=3) == {"long": 16}
    assert _beside_a_long_prompt(("seats", 4, {"n": 3}), seats=4) == {"long": 12, "seats": 4}
    assert _beside_a_long_prompt(("a", 3, {}), ("b", 3, {}), seats=2) == {"long": 13, "a": 3}
    assert _beside_a_long_prompt(("a", 3, {}), ("b", 3, {}), blocks=16) == {"long": 13, "a": 3}
    assert _beside_a_long_prompt(("a", 3, {}), ("b", 3, {}), blocks=17) == {"long": 10, "a": 3, "b": 3}


def test_what_is_cached_needs_no_room() -> None:
    h = Harness(SCHEDULERS["fcfs"](), seats=8, blocks=128, block_size=4, tokens=16)
    prompt = list(range(50))
    h.add("first", prompt, 1)
    h.run()
    h.add("long", 60, 4)
    h.step()
    h.add("again", [*prompt[:48], 90, 91], 4)
    assert tokens(h.step()) == {"long": 14, "again": 2}


# n = 4, aborted half way


def test_n_4_aborted_half_way_frees_everything_once() -> None:
    """Whatever the four hold when their client leaves: after every number of steps until they end. Who runs beside
    them gets its own tokens, so no block of theirs came back twice."""
    several = ["a", "a/1", "a/2", "a/3"]
    met: set[str] = set()
    for steps in range(14):
        h = Harness(blocks=12, block_size=4, tokens=6, host_blocks=4)
        h.add("beside", 4, 30)
        h.add("a", 10, 12, n=4)
        h.steps(steps)
        assert not h.reasons
        met |= {h[id].status for id in several}
        met |= {"in the prompt"} if 0 < h["a"].computed < 10 else set()
        met |= {"swapped out"} if h.kv.usage().swapped else set()
        h.abort(*several, *several)
        assert h.running + h.waiting == ["beside"] and h.done == dict.fromkeys(several, 1)
        h.add("next", 20, 8)
        h.run()
        assert h.reasons == {**dict.fromkeys(several, "abort"), "beside": "length", "next": "length"}
        for id, output in h.outputs.items():
            assert output == h.alone(id)[: len(output) if id in several else None]
        assert_free(h)
    assert met == {Status.HIDDEN, Status.WAITING, Status.RUNNING, Status.PREEMPTED, "in the prompt", "swapped out"}
