"""What the core survives of scheduling policies, and what it costs to ask them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from itertools import repeat
from typing import Any

import pytest
from framework.plugins.kv.contiguous import ContiguousCache
from harness import Harness, Policy, ids, ranked, started

from framework import PluginError, Request, SamplingParams, Status, Victim, View, Want

# Faulty policies


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
    "holds one back for ever": lambda view: repeat(Want(view.waiting[0], 0)),
    "names one that ended for ever": lambda view: repeat(Want(foreign(Status.FINISHED))),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_gives_the_default_order_admits_nobody_and_is_counted(name: str) -> None:
    h, policy = started("b", "a")
    h.add("waiting", 4)
    policy.rank = NONSENSE[name]
    assert ids(h.step()) == ["b", "a"]
    assert h.waiting == ["waiting"]
    assert h.planner.policy.faults == {"scheduler": 1}
    policy.rank = lambda view: None
    h.run()
    assert h.planner.policy.faults == {"scheduler": 1}
    assert h.outputs == {id: h.alone(id) for id in h.requests}


@pytest.mark.parametrize("name", NONSENSE)
def test_strict_stops_at_once_and_names_the_plugin(name: str) -> None:
    h, policy = started("a", strict=True)
    h.add("waiting", 4)
    policy.rank = NONSENSE[name]
    with pytest.raises(PluginError, match="'scheduler'"):
        h.step()


def test_ten_faulty_steps_in_a_row_stop_the_engine() -> None:
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
    with pytest.raises(PluginError, match=r"'scheduler'.*out of ideas.*10 steps in a row"):
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
def test_a_faulty_preempt_is_counted_and_admits_nobody(pick: Any) -> None:
    h, policy = started("a", "b", blocks=2)
    policy.pick = pick
    h.step()
    assert h.planner.policy.faults.keys() == {"scheduler"}
    policy.pick = lambda beneficiary, candidates: None
    h.run()
    assert h.outputs == {id: h.alone(id) for id in h.requests}


def test_a_fault_in_preempt_for_a_waiting_one_admits_nobody_in_that_step() -> None:
    h, policy = started("a", "b", blocks=8, seats=3)
    h.add("big", 32 - 4, 1, priority=-1)
    h.add("small", 1, 1)
    policy.pick = lambda beneficiary, candidates: 1 / 0  # type: ignore[assignment, return-value]
    policy.rank = ranked(h, "big", "small", "a", "b")
    assert ids(h.step()) == ["a", "b"]
    assert h.waiting == ["big", "small"]


@pytest.mark.parametrize("level", [None, "high", float("nan")])
def test_a_level_that_is_no_number_is_a_fault_and_the_priority_stays(level: Any) -> None:
    policy = Policy()
    policy.level = lambda request: level
    h = Harness(policy, blocks=4)
    h.add("a", 4, 8, priority=1)
    h.add("b", 4, 8, priority=2)
    assert (h["a"].level, h["b"].level) == (1, 2)
    assert h.planner.policy.faults == {"scheduler": 2}
    h.run()


def test_a_key_that_cannot_rank_a_new_request_is_a_fault_of_the_policy() -> None:
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
    assert h.planner.policy.faults == {"scheduler": 2}
    h.run()
    assert list(h.reasons) == ["x", "a", "b", "c"]


def test_keys_without_an_order_lose_nobody() -> None:
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


def test_faults_are_logged_with_their_traceback_and_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy()
    h = Harness(policy)
    h.add("a", 4, 20)
    h.step()
    policy.rank = lambda view: 1 / 0  # type: ignore[assignment, return-value]
    h.steps(9)
    assert h.planner.policy.faults == {"scheduler": 9}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert all("plugin 'scheduler' failed in admit: ZeroDivisionError" in line for line in lines)
    assert all("Traceback" in line for line in lines)


def test_keys_with_other_keyword_defaults_are_other_keys() -> None:
    h = Harness(Policy(), seats=1)
    for id, prompt in (("a", 3), ("b", 1), ("c", 2)):
        h.add(id, prompt)
    for sign, expected in ((1, "bca"), (-1, "acb")):

        def key(r: Request, *, sign: int = sign) -> int:
            return sign * len(r.prompt)

        assert "".join(r.id for r in h.view.queue(key)) == expected


def test_the_scheduler_is_not_blamed_for_a_cache_that_gives_nothing() -> None:
    class Miser(ContiguousCache):
        def reserve(self, request: Request, upto: int, keep: int = 0) -> None:
            return None

        def missing(self, request: Request, upto: int, keep: int = 0, without: Collection[Request] = ()) -> int:
            return 0

    h = Harness(Policy(), kv=Miser)
    h.add("a", 4)
    with pytest.raises(PluginError, match="KV cache 'Miser' gives nobody blocks"):
        for _ in range(20):
            h.engine.step()
    assert h.requests["a"].finish_reason is None, "it is the cache that is at fault, not what the pool holds"
