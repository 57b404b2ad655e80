"""Who gets a trial, and when it ends: the queue of grammars beside what it promises, over a process that is told when
to answer. What the real process does is in test_server_structured.py."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from framework.server import grammars
from framework.server.grammars import Grammars
from framework.server.limits import MAX_TRIALS
from hypothesis import given
from hypothesis import strategies as st

from framework import EngineDead, InvalidRequest, Rejected, StructuredOutputs
from framework.trials import Verdict


class Trials:
    """In place of the process: a trial goes on until a test ends it."""

    ended = False

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[Verdict]] = {}
        self.order: list[str] = []

    async def ask(self, wanted: StructuredOutputs, seconds: float) -> Verdict:
        name = str(wanted.regex)
        assert name not in self.running, "tried twice at once"
        self.order.append(name)
        self.running[name] = asyncio.get_running_loop().create_future()
        try:
            return await self.running[name]
        finally:
            del self.running[name]

    def finish(self, name: str, refusal: str = "", code: int = 0) -> None:
        self.running[name].set_result(Verdict(0, refusal, code))


@pytest.fixture(autouse=True)
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    found = Trials()

    async def begun(inputs: Any) -> Trials:
        return found

    monkeypatch.setattr(grammars, "_begun", begun)
    return found


class Clients:
    """Those who ask, and the grammars that they ask for."""

    def __init__(self) -> None:
        self.grammars = Grammars(1.0)
        self.waiting: list[tuple[str, str, asyncio.Task[None]]] = []

    async def ask(self, tenant: str, name: str) -> asyncio.Task[None]:
        check = self.grammars.check(StructuredOutputs(regex=name), None, tenant)  # type: ignore[arg-type]
        task = asyncio.ensure_future(check)
        self.waiting.append((tenant, name, task))
        await settled()
        return task

    @property
    def wanted(self) -> set[str]:
        return {name for _, name, task in self.waiting if not task.done()}

    async def leave(self) -> None:
        """All of them; then nothing is left."""
        for *_, task in self.waiting:
            task.cancel()
        await asyncio.gather(*(task for *_, task in self.waiting), return_exceptions=True)
        await settled()
        held = self.grammars
        assert not (held._trying or held._queue or held._placed)


async def settled() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


ACTION = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from("aaab"), st.integers(0, 11)),
    st.tuples(st.just("leave"), st.integers(0, 30), st.none()),
    st.tuples(st.just("finish"), st.integers(0, 30), st.booleans()),
    st.tuples(st.just("fail"), st.none(), st.none()),
)


@given(st.lists(ACTION, max_size=40))
def test_only_what_somebody_waits_for_has_a_place(actions: list[tuple[str, Any, Any]]) -> None:
    async def run() -> None:
        clients, process = Clients(), Trials()
        with pytest.MonkeyPatch.context() as patch:

            async def begun(inputs: Any) -> Trials:
                return process

            patch.setattr(grammars, "_begun", begun)
            for what, one, two in actions:
                open = [task for *_, task in clients.waiting if not task.done()]
                if what == "ask":
                    await clients.ask(one, f"{one if two < 8 else 'shared'}{two}")
                elif what == "leave" and open:
                    open[one % len(open)].cancel()
                elif what == "finish" and process.running:
                    process.finish(list(process.running)[one % len(process.running)], code=-14 if two else 0)
                elif what == "fail":
                    clients.grammars.fail(EngineDead("gone"))
                await settled()
                # Whatever is tried is waited for, whatever is waited for is tried or has no place, and none is idle.
                assert set(process.running) <= clients.wanted
                assert len(process.running) == min(MAX_TRIALS, len(clients.wanted))
            await clients.leave()
            assert not process.running

    asyncio.run(run())


async def test_tenants_take_turns(trials: Trials) -> None:
    clients = Clients()
    for i in range(20):
        await clients.ask("a", f"a{i}")
    for tenant in "bcdefg":
        await clients.ask(tenant, tenant)
    await clients.ask("b", "b2")
    for _ in range(7):  # places become free one by one, as the trials of others end that came first
        trials.finish(next(iter(trials.running)))
        await settled()
    assert trials.order[:4] == ["a0", "a1", "a2", "a3"]
    assert trials.order[4:7] == ["b", "c", "d"], "who has four places got a fifth"
    assert sorted(trials.order[7:11]) == ["a4", "e", "f", "g"], "who came first with many had more than his turn"
    await clients.leave()
    assert not trials.running


async def test_who_joins_another_s_trial_brings_his_own_turn(trials: Trials) -> None:
    clients = Clients()
    for i in range(20):
        await clients.ask("a", f"a{i}")
    task = await clients.ask("b", "a19")
    trials.finish("a0")
    await settled()
    assert trials.order[4:] == ["a19"]
    trials.finish("a19", "no such thing")
    with pytest.raises(InvalidRequest, match="no such thing"):
        await task
    await clients.leave()
    assert not trials.running


async def test_a_full_queue_makes_room_for_who_has_less(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_TRIALS_WAITING", 10)
    clients = Clients()
    of_a = [await clients.ask("a", f"a{i}") for i in range(10)]
    with pytest.raises(Rejected, match="10 grammars wait") as refused:
        await (await clients.ask("a", "one too many"))
    assert refused.value.status == 429 and refused.value.retry_after
    of_b = [await clients.ask("b", f"b{i}") for i in range(5)]
    ended = Counter(type(task.exception()) for task in (*of_a, *of_b) if task.done())
    assert ended == {Rejected: 5}, "no room, or more room than was needed"
    assert [i for i, task in enumerate(of_a) if task.done()] == [7, 8, 9] and sum(t.done() for t in of_b) == 2
    await clients.leave()
    assert not trials.running


async def test_a_verdict_that_is_none_is_not_kept(trials: Trials) -> None:
    """A trial that its time or a signal ended says nothing of the grammar."""
    clients = Clients()
    for code in (-14, -6, 1):
        task = await clients.ask("a", "x")
        trials.finish("x", code=code)
        with pytest.raises(InvalidRequest):
            await task
    assert trials.order == ["x"] * 3 and not clients.grammars._known
    await clients.leave()
