"""Steps that do not fit in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import GREEDY, Driver, Spy, build, prompt
from framework.plugins.kernels.torch_backend import TorchBackend
from hypothesis import given
from hypothesis import strategies as st

from framework import Delta, Plan, SampleBatch, SamplingParams, Slice, StepResult
from framework.checkpoint import open_checkpoint
from framework.engine import Engine
from framework.halving import PATIENCE, Halving, Launched, halved
from framework.messages import Add
from framework.registry import load_plugins
from framework.settings import Settings
from framework.startup import build_engine

SEEDED = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, logprobs=2)


class Room:
    """Memory for so many tokens at once. `poison`: a token that takes all of it."""

    def __init__(self) -> None:
        self.tokens = 10**9
        self.poison = -1
        self.sizes: list[int] = []
        self.failed = 0
        self.error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def take(self, tokens: torch.Tensor) -> None:
        if len(tokens) > self.tokens or bool((tokens == self.poison).any()):
            self.failed += 1
            raise self.error
        self.sizes.append(len(tokens))


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    room, embed = Room(), TorchBackend.embed

    def limited(self: TorchBackend, tokens: torch.Tensor, weight: Any) -> torch.Tensor:
        room.take(tokens)
        return embed(self, tokens, weight)

    monkeypatch.setattr(TorchBackend, "embed", limited)
    return room


@pytest.fixture
def driver(tiny_llama: Path, room: Room) -> Iterator[Driver]:
    executor = build(tiny_llama, Spy())
    executor.start()
    yield Driver(executor)
    executor.stop()


def play(driver: Driver) -> dict[str, tuple[list[int], list[Any]]]:
    """Chunks, whole prompts and decodes in one step, and decodes alone."""
    for i, (id, length) in enumerate((("a", 23), ("b", 9), ("c", 14), ("d", 1))):
        driver.add(id, prompt(length, i), SEEDED if id in "bc" else GREEDY, seed=i)
    for most in (5, 100, 1, 1, 1, 1):
        driver.step({id: most if id == "a" else 100 for id in "abcd"})
    return {id: (driver.output(id), driver.logprobs[id]) for id in "abcd"}


@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 28])
def test_a_step_in_parts_gives_the_same(driver: Driver, room: Room, most: int, tiny_llama: Path) -> None:
    """The same tokens, greedy or drawn; each request is sampled once for each, whatever the parts."""
    whole = build(tiny_llama)
    whole.start()
    expected = play(Driver(whole))
    room.sizes.clear()
    room.tokens = most
    found = play(driver)
    for id in "abcd":
        assert found[id][0] == expected[id][0]
        for ours, theirs in zip(found[id][1], expected[id][1], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert room.failed > 0 and max(room.sizes) <= most
    spy = driver.executor.plugins.active(Spy)[0]
    counts = Counter((id, length) for seen in spy.seen for id, (_, _, length) in seen.items())
    assert set(counts.values()) == {1} and len(counts) == sum(len(output) for output, _ in found.values())


def test_what_did_fit_is_remembered(driver: Driver, room: Room) -> None:
    room.tokens = 16
    driver.add("a", prompt(100))
    driver.step({"a": 100})
    failed, room.sizes = room.failed, []
    driver.add("b", prompt(100, 1))
    driver.step({"b": 100, "a": 1})
    assert failed and room.failed == failed and max(room.sizes) <= 16 < len(room.sizes) * 16


def test_memory_may_run_out_while_sampling(driver: Driver, room: Room) -> None:
    """In a plugin, too: the error it causes is not the plugin's."""
    spy = driver.executor.plugins.active(Spy)[0]

    def limited(logits: torch.Tensor, batch: SampleBatch) -> None:
        if len(batch.ids) > 1:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
            )

    for id in "abc":
        driver.add(id, prompt(8, 3), SEEDED, seed=5)
    spy.change = limited
    for _ in range(3):
        driver.step(dict.fromkeys("abc", 100))
    assert driver.output("a") == driver.output("b") == driver.output("c")
    assert len(driver.output("a")) == 3


def test_another_error_is_raised(driver: Driver, room: Room) -> None:
    room.tokens, room.error = 2, RuntimeError("CUDA error: an illegal memory access was encountered")
    driver.add("a", prompt(8))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        driver.step({"a": 100})
    assert room.failed == 1


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("alone", [True, False])
def test_only_who_does_not_fit_alone_fails(tiny_llama: Path, room: Room, alone: bool, overlap: str) -> None:
    """In the step loop: it ends with an error, the others with what they get without it; nothing is left behind, in
    the prefix cache neither: what was not computed is not shared."""
    engine = start(tiny_llama, max_num_batched_tokens=24, overlap=overlap)
    expected = run(engine, {"a": prompt(12, 1), "b": prompt(30, 2)})
    bad, poisoned = prompt(21, 3), 99
    bad[10] = poisoned
    right = run(engine, {"good": bad})["good"]
    engine.kv.reset()
    room.poison, room.failed = poisoned, 0
    found = run(engine, {"bad": bad} if alone else {"a": prompt(12, 1), "bad": bad, "b": prompt(30, 2)})
    assert isinstance(found["bad"], str) and found["bad"].startswith("out of memory: not even one token")
    assert alone or {id: found[id] for id in "ab"} == expected
    assert engine.stats().failed_steps == 0 and room.failed > 3
    room.poison = -1
    assert run(engine, {"again": bad})["again"] == right
    engine.close()


def start(model: Path, **options: Any) -> Engine:
    given = {"model": str(model), "device": "cpu", "dtype": "float32", "kernel": "torch", "threads": 1, "block_size": 4}
    settings = Settings(**{**given, "kv_blocks": 64, **options})
    plugins = load_plugins()
    plugins.activate(settings, engine=True)
    return build_engine(settings, plugins, open_checkpoint(settings, plugins))[0]


def run(engine: Engine, prompts: dict[str, list[int]]) -> dict[str, list[int] | str]:
    """Greedy outputs, or errors. The pool is empty then."""
    found: dict[str, Any] = {}
    for id, tokens in prompts.items():
        assert not engine.add(Add(id, tokens, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), 1))
    while engine.has_work:
        for output in engine.step():
            found[output.id] = output.error or [*found.get(output.id, []), *output.tokens]
    usage = engine.kv.usage()
    assert (usage.holding, usage.reserved, usage.swapped, usage.tokens) == (0, 0, 0, 0)
    engine.kv.check_integrity()
    return found


@pytest.mark.parametrize("most", [1, 3, 7])
def test_parts_of_a_step_whose_tokens_are_on_the_device(tiny_llama: Path, room: Room, most: int) -> None:
    """With two plans in flight, too, each part gets what the step before sampled for it."""
    prompts = {f"r{i}": prompt(9 + i, i) for i in range(4)}
    expected = run(start(tiny_llama), prompts)
    engine = start(tiny_llama, overlap="on")
    room.tokens = most
    assert run(engine, prompts) == expected and room.failed > 0
    room.tokens = 10**9
    assert run(engine, prompts) == expected
    room.poison = expected["r1"][4]  # a decode fails whose next step is in flight
    found = run(engine, prompts)
    for id, tokens in expected.items():
        assert isinstance(found[id], str) == (room.poison in tokens[:-1])
        assert isinstance(found[id], str) or found[id] == tokens
    assert isinstance(found["r1"], str) and engine.stats().failed_steps == 0


# Halving by itself


def make(counts: list[int], sampled: list[bool]) -> Plan:
    slices = [
        Slice(f"r{i}", i, count, (Delta(0, 0, (i,)),), yes)
        for i, (count, yes) in enumerate(zip(counts, sampled, strict=False))
    ]
    return Plan(3, slices=tuple(slices))


class Memory:
    """Computes parts of at most `most` tokens; whoever is in `poisoned` never."""

    def __init__(self, most: int, poisoned: tuple[str, ...] = ()) -> None:
        self.most, self.poisoned = most, poisoned
        self.parts: list[Plan] = []
        self.failed = self.released = 0

    def __call__(self, plan: Plan) -> Launched:
        if plan.tokens > self.most or any(s.request_id in self.poisoned for s in plan.slices):
            self.failed += 1
            raise torch.OutOfMemoryError
        assert self.failed == self.released, "memory of the failed part was not given back"
        self.parts.append(plan)
        result = StepResult(plan.step, {s.request_id: (s.start + s.tokens,) for s in plan.slices if s.samples})
        return lambda: result, lambda: True

    def release(self) -> None:
        self.released += 1


PLANS = st.builds(make, st.lists(st.integers(1, 40), min_size=1, max_size=9), st.lists(st.booleans(), min_size=9))


@given(PLANS, st.integers(1, 60), st.sets(st.integers(0, 8), max_size=3))
def test_parts_make_up_the_whole(plan: Plan, most: int, poisoned: set[int]) -> None:
    """In order, each token once; who fails gets one error and nothing else, and all others what is theirs."""
    memory = Memory(most, tuple(f"r{i}" for i in poisoned))
    result = Halving(memory.release).run(plan, memory)[0]()
    bad = {s.request_id for s in plan.slices} & set(memory.poisoned)
    assert set(result.errors) == bad and result.step == 3
    good = [s for s in plan.slices if s.request_id not in bad]
    assert result.tokens == {s.request_id: (s.start + s.tokens,) for s in good if s.samples}
    pieces: dict[str, list[Slice]] = {}
    for part in memory.parts:
        for s in part.slices:
            pieces.setdefault(s.request_id, []).append(s)
    assert set(pieces) == {s.request_id for s in good}
    for s in good:
        own = pieces[s.request_id]
        covered = [at for one in own for at in range(one.start, one.start + one.tokens)]
        assert covered == list(range(s.start, s.start + s.tokens))
        assert [one.samples for one in own] == [False] * (len(own) - 1) + [s.samples]
        assert own[0].deltas == s.deltas


@given(PLANS)
def test_halves_are_alike(plan: Plan) -> None:
    halves = halved(plan)
    assert bool(halves) == (plan.tokens > 1)
    if halves:
        a, b = (half.tokens for half in halves)
        assert a + b == plan.tokens and abs(a - b) <= max(
            1, *(s.tokens for s in plan.slices if len(plan.slices) > 1), 1
        )


def test_larger_parts_are_tried_again_after_a_while() -> None:
    memory = Memory(8)
    halving = Halving(memory.release)
    plan = make([32], [True])

    def steps(count: int) -> None:
        for _ in range(count):
            halving.run(plan, memory)

    steps(1)
    assert halving.most == 8 and memory.failed == 3
    steps(PATIENCE)
    assert halving.most == 16 and memory.failed == 3
    steps(1)
    assert halving.most == 8 and memory.failed == 5
    memory.most = 100
    steps(2 * PATIENCE + 1)
    memory.parts.clear()
    steps(1)
    assert memory.parts == [plan] and memory.failed == 5


def test_one_who_does_not_fit_does_not_slow_the_others_down() -> None:
    memory = Memory(100, ("r2",))
    halving = Halving(memory.release)
    assert list(halving.run(make([1] * 8, [True] * 8), memory)[0]().errors) == ["r2"]
    assert halving.most == 4
    alone = Plan(3, slices=(Slice("r2", 0, 1, (), True),))
    assert list(halving.run(alone, memory)[0]().errors) == ["r2"] and halving.most == 4
