"""The bundled schedulers and caches pass the conformance kit, and the kit can fail: broken plugins do not."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
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
    broken.SortsACopy: ["test_cost_with_10_000_waiting"],
    broken.KeepsWhoLeft: ["test_forgets_who_left"],
    broken.ExpectsWhoCame: ["test_survives_aborts_and_failed_steps"],
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
    broken.ForgetsWhatToKeep: ["test_missing_as_if_others_were_gone"],
    broken.PublishesWhatIsPlanned: ["test_contents"],
    broken.SharesWithEverybody: ["test_salts_and_adapters_part"],
    broken.LooksUpLess: ["test_missing_and_reserve_agree"],
    broken.TakesOverWhatIsScored: ["test_contents"],
    broken.RemembersAfterReset: ["test_everything_comes_back"],
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
def test_a_broken_cache_fails(plugin: type[broken.Toy] | type[broken.PagedCache]) -> None:
    class Suite(KVConformance):
        def cache(self, cache_spec: CacheSpec, capacity: Capacity) -> KVCache:
            return plugin(cache_spec, capacity)

    for check in CACHES[plugin]:
        with pytest.raises(AssertionError):
            getattr(Suite(), check)()


# In somebody else's tests

AUTHORS = """
import random

from framework import Want, hookimpl
from framework.testing import SchedulerConformance


class Chance:
    @hookimpl
    def admit(self, view):
        return (Want(r) for r in view.ranked(key=lambda r: random.random()))


class TestChance(SchedulerConformance):
    def scheduler(self):
        return Chance()
"""


def pytest_in(folder: Path, *arguments: str) -> str:
    """What a run of its own prints, with this plugin alone of those installed and none of this project's settings."""
    (name,) = (e.value for e in importlib.metadata.entry_points(group="pytest11", name="framework"))
    assert name == "framework.testing.pytest_plugin", "an old installation: run `make setup`"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", name, *arguments]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, timeout=240).stdout


def test_a_failure_shows_the_values_compared(tmp_path: Path) -> None:
    (tmp_path / "test_chance.py").write_text(AUTHORS)
    printed = pytest_in(tmp_path, "-k", "determinism or progress")
    assert "1 failed, 1 passed, 6 deselected" in printed, printed
    assert "AssertionError: two runs with the same arrivals differ\n" in printed
    assert "\nE         At index 0 diff: '" in printed, "asserts of the kit are rewritten"


def test_who_tests_something_else_imports_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "test_else.py").write_text(
        "import sys\n\n\ndef test_nothing():\n"
        "    ours = {name for name in sys.modules if name.startswith('framework')}\n"
        "    assert ours == {'framework', 'framework.testing', 'framework.testing.pytest_plugin'}\n"
        "    assert not {'torch', 'numpy', 'pydantic', 'msgspec'} & set(sys.modules)\n"
    )
    assert "1 passed" in (printed := pytest_in(tmp_path)), printed
