"""Thousands of requests on a pool of 64 blocks, everything at once: priorities, shared prefixes, n, a tiny swap space,
and in half of the runs clients that leave. What each run has to have met is asserted: none passes by luck."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from harness import Harness, Policy

from framework import Mode, Request, Victim, View, Want

REQUESTS = 2000


class Priority(Policy):
    """Lower priority values first, running and waiting together; the mode of each victim by chance."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.rank = self.together
        self.pick = lambda beneficiary, candidates: self.last(candidates)
        self.modes = rng

    def together(self, view: View) -> list[Want] | None:
        return [Want(r) for r in view.ranked(key=lambda r: r.level)]

    def last(self, candidates: Sequence[Request]) -> Victim:
        return Victim(candidates[-1], self.modes.choice((None, None, *Mode)))


@pytest.mark.slow
@pytest.mark.parametrize("aborts", [False, True], ids=["nobody leaves", "some leave"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_soak(block_size: int, aborts: bool) -> None:
    rng = Random(block_size + aborts)
    h = Harness(
        Priority(rng),
        blocks=64,
        block_size=block_size,
        tokens=128,
        seats=24,
        watermark=1,
        host_blocks=12,
        preemption=Mode.SWAP,
        max_model_len=20 * block_size,
    )
    systems = [[rng.randrange(97) for _ in range(4 * block_size)] for _ in range(3)]
    count = 0
    while count < REQUESTS or h.engine.has_work:
        while count < REQUESTS and h.view.total < 40:
            own = [rng.randrange(97) for _ in range(rng.randint(1, 6 * block_size))]
            prompt = rng.choice((own, [*rng.choice(systems)[: rng.randint(1, 4 * block_size)], *own]))
            n = rng.choice((1, 1, 1, 1, 2, 3))
            longest = 20 * block_size - len(prompt)
            max_tokens = rng.choice((1, rng.randint(1, 2 * block_size), rng.randint(1, longest)))
            assert h.add(f"r{count}", prompt, max_tokens, rng.randint(-3, 3), n=n) is None
            count += n
        if aborts and rng.random() < 0.1:
            h.abort(rng.choice(list(h.engine.requests)))
        assert h.step() is not None or not h.engine.has_work, "a step did nothing although work exists"

    assert len(h.outputs) >= REQUESTS and h.done == dict.fromkeys(h.outputs, 1)
    for id, reason in h.reasons.items():
        assert reason == "length" or (aborts and reason == "abort")
        whole = h.alone(id)
        assert h.outputs[id] == whole[: len(h.outputs[id])]
        assert reason == "abort" or len(h.outputs[id]) == len(whole)
    assert aborts == ("abort" in h.reasons.values())
    stats = h.engine.stats()
    assert (stats.running, stats.waiting, h.view.total) == (0, 0, 0)
    assert (stats.kv_holding, stats.kv_reserved, stats.kv_swapped, stats.kv_tokens) == (0, 0, 0, 0)
    assert h.kv.available == stats.kv_blocks == 64
    assert stats.preemptions_swap >= 100
    assert stats.preemptions_recompute >= 100
    assert stats.prefix_hits >= 100
    assert h.copies["device", "device"] >= 50
    assert stats.swaps_exhausted >= 20
    assert h.planner.forced == 0 and stats.plugin_faults == {} and stats.failed_steps == 0
