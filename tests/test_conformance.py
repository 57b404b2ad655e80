"""The bundled schedulers and caches pass the conformance kit, and the kit can fail: broken plugins do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import broken
import pytest

from framework import CacheSpec, Capacity, KVCache, PluginError
from framework.testing import Client, KVConformance, SchedulerConformance, Simulation


class TestFcfs(SchedulerConformance):
    provider = "fcfs"


class TestPriority(SchedulerConformance):
    provider = "priority"


class TestAging(SchedulerConformance):
    provider = "priority"
    options: ClassVar[Mapping[str, Any]] = {"aging": 0.02}


class TestFair(SchedulerConformance):
    provider = "fair"


class TestStatic(SchedulerConformance):
    provider = "static"


class TestFcfsContiguous(SchedulerConformance):
    provider = "fcfs"
    kv = "contiguous"


class TestPaged(KVConformance):
    provider = "paged"


class TestContiguous(KVConformance):
    provider = "contiguous"


# What both run in


def test_a_simulation_tells_what_happened() -> None:
    simulation = Simulation(kv="paged", seats=2, blocks=16)
    simulation.add(Client("a", (1, 2, 3), 5))
    plan = simulation.step()
    assert plan is not None and [part.request_id for part in plan.slices] == ["a"]
    simulation.play([Client("b", (1, 2), 4, n=2), Client("c", (9,), 9, arrives=3, leaves=5)])
    assert simulation.reasons == {"a": "length", "b": "length", "b/1": "length", "c": "abort"}
    assert simulation.faults == {} and simulation.forced == 0
    refusal = simulation.add(Client("large", (1,) * 60, 60))
    assert refusal is not None and "whole pool has 16" in str(refusal.error)


# The kit can fail


class TestRanked(SchedulerConformance):
    def scheduler(self) -> object:
        return broken.Ranked()


class TestSeated(SchedulerConformance):
    def scheduler(self) -> object:
        return broken.Seated()


class TestToy(KVConformance):
    def cache(self, cache_spec: CacheSpec, capacity: Capacity) -> KVCache:
        return broken.Toy(cache_spec, capacity)


SCHEDULERS = {
    broken.Idles: ["test_progress"],
    broken.ForgetsVictims: ["test_progress"],
    broken.Starves: ["test_no_starvation"],
    broken.BreaksTiesByChance: ["test_determinism"],
    broken.TurnsTheView: ["test_leaves_what_it_is_shown_alone"],
    broken.Promotes: ["test_leaves_what_it_is_shown_alone"],
    broken.NamesTwice: ["test_answers_are_valid"],
    broken.AsksForLessThanNothing: ["test_answers_are_valid"],
    broken.EvictsTheBeneficiary: ["test_answers_are_valid"],
    broken.SortsEveryStep: ["test_cost_with_10_000_waiting"],
    broken.CountsTheDead: ["test_survives_aborts_and_failed_steps"],
}
CACHES = {
    broken.LeaksABlock: ["test_everything_comes_back", "test_contents"],
    broken.GivesABlockTwice: ["test_nobody_owns_what_another_writes", "test_contents"],
    broken.WritesWhatIsShared: ["test_fork", "test_contents"],
    broken.ForgetsWhoElseGoes: ["test_missing_as_if_others_were_gone"],
    broken.TakesAndFails: ["test_missing_and_reserve_agree"],
    broken.Promises: ["test_missing_and_reserve_agree"],
    broken.HidesWhatIsEmpty: ["test_usage_tells_what_is_held_and_what_is_only_reserved"],
    broken.SwapsInBackwards: ["test_contents"],
    broken.KeepsHostBlocks: ["test_swap"],
    broken.PeaksTooLow: ["test_peak_is_enough_and_no_more"],
    broken.HitsWhatIsNotThere: ["test_contents"],
}


@pytest.mark.parametrize("plugin", SCHEDULERS, ids=lambda plugin: plugin.__name__)
def test_a_broken_scheduler_fails(plugin: type) -> None:
    class Suite(SchedulerConformance):
        def scheduler(self) -> object:
            return plugin()

    for check in SCHEDULERS[plugin]:
        with pytest.raises((AssertionError, PluginError)):
            getattr(Suite(), check)()


@pytest.mark.parametrize("plugin", CACHES, ids=lambda plugin: plugin.__name__)
def test_a_broken_cache_fails(plugin: type[broken.Toy]) -> None:
    class Suite(KVConformance):
        def cache(self, cache_spec: CacheSpec, capacity: Capacity) -> KVCache:
            return plugin(cache_spec, capacity)

    for check in CACHES[plugin]:
        with pytest.raises(AssertionError):
            getattr(Suite(), check)()
