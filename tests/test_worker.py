"""Steps of the torch executor, driven by plans made by hand, against transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from driver import BLOCK, GREEDY, Driver, Spy, build, prompt
from transformers import AutoModelForCausalLM

from framework import Copy, Delta, Plan, PluginError, SampleBatch, SamplingParams, Slice
from framework.scoring import log_probabilities
from framework.worker import TorchExecutor

NEAR = 2e-4


@pytest.fixture(scope="module")
def spy() -> Spy:
    return Spy()


@pytest.fixture(scope="module")
def executor(tiny_llama: Path, spy: Spy) -> Iterator[TorchExecutor]:
    executor = build(tiny_llama, spy)
    executor.start()
    yield executor
    executor.stop()


@pytest.fixture
def driver(executor: TorchExecutor, spy: Spy) -> Iterator[Driver]:
    driver = Driver(executor)
    yield driver
    Spy.__init__(spy)
    executor.submit(Plan(-1, finished=tuple(driver.tokens))).result()
    executor._rows.settle()  # the next test's sampler is a new one, as it were


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Callable[[list[int], int], torch.Tensor]:
    """Logits of transformers for the last `count` tokens, and for what follows the last: float32 [count + 1, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(tokens: list[int], count: int) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0, -count - 1 :]
        return found

    return logits


Reference = Callable[[list[int], int], torch.Tensor]


def assert_greedy(driver: Driver, id: str, reference: Reference) -> None:
    """Every token of the output is the reference's best after what came before it (two may be best)."""
    output = driver.output(id)
    logits = reference(driver.tokens[id], len(output))[:-1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (chosen >= logits.amax(-1) - NEAR).all()


# Forward


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 1000])
def test_chunked_prefill_and_decode(driver: Driver, reference: Reference, chunk: int) -> None:
    driver.add("a", prompt(37))
    driver.run("a", 20, chunk)
    assert_greedy(driver, "a", reference)
    assert len(set(driver.output("a"))) > 3


def test_ragged_batch_whose_members_join_and_leave(driver: Driver, reference: Reference) -> None:
    """Random chunks, random members, requests that sit a step out, a row that is reused by a later request."""
    rng = random.Random(1)
    waiting = [f"r{i}" for i in range(12)]
    running: list[str] = []
    while waiting or running:
        if waiting and len(running) < 6 and rng.random() < 0.5:
            running.append(waiting.pop())
            driver.add(running[-1], prompt(rng.randint(1, 30), seed=len(waiting)))
        chosen = [id for id in running if rng.random() < 0.8]
        rng.shuffle(chosen)
        if chosen:
            driver.step({id: rng.choice([1, 2, 5, 100]) for id in chosen})
        for id in [id for id in running if len(driver.output(id)) >= 8]:
            running.remove(id)
            driver.release(id)
    for id in driver.tokens:
        assert_greedy(driver, id, reference)


def test_only_finished_chunks_yield_tokens(driver: Driver) -> None:
    driver.add("a", prompt(10))
    driver.add("b", prompt(3))
    result = driver.step({"a": 4, "b": 10})
    assert list(result.tokens) == ["b"] and len(result.tokens["b"]) == 1
    assert driver.step({"a": 5}).tokens == {}
    assert list(driver.step({"a": 1, "b": 1}).tokens) == ["a", "b"]


def test_stages_are_stamped_in_order(driver: Driver) -> None:
    driver.add("a", prompt(10))
    before = driver.executor.clock.ns()
    stages = driver.step({"a": 10}).stages
    assert [name for name, _, _ in stages] == ["batch_build", "forward", "sampling"]
    times = [before, *(t for _, *pair in stages for t in pair), driver.executor.clock.ns()]
    assert times == sorted(times)


def test_plan_that_does_not_fit_what_is_known_is_refused(driver: Driver) -> None:
    driver.add("a", prompt(5))
    plan = driver.plan({"a": 5})
    wrong = Plan(plan.step, plan.new, (Slice("a", 0, 6, plan.slices[0].deltas, True),))
    with pytest.raises(RuntimeError, match="5 tokens known"):
        driver.executor.submit(wrong).result()


# Preemption, failure, copies


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2)])
def test_preempted_and_resumed(driver: Driver, params: SamplingParams) -> None:
    driver.add("whole", prompt(11), params, seed=9)
    expected = driver.run("whole", 25)
    driver.add("cut", prompt(11), params, seed=9)
    driver.add("other", prompt(6, seed=3))
    for at in (3, 4, 17):
        driver.run("cut", at)
        driver.step({"other": 100})
        driver.release("cut", preempt=True)
        driver.step({"other": 1})
        driver.resume("cut")
    assert driver.run("cut", 25) == expected


def test_failed_step_is_repeated(driver: Driver, spy: Spy, reference: Reference) -> None:
    """A plugin that raises: the error names it; what ran is sent again; neighbours and later steps are right."""
    driver.add("a", prompt(9))
    driver.add("b", prompt(14, seed=2))
    driver.step({"a": 100})

    def fail(logits: torch.Tensor, batch: SampleBatch) -> None:
        raise ValueError("no such grammar")

    spy.change = fail
    with pytest.raises(PluginError, match=r"plugin 'spy': process_logits: ValueError: no such grammar") as caught:
        driver.executor.submit(driver.plan({"a": 1, "b": 100})).result()
    assert caught.value.plugin == "spy"
    spy.change = lambda logits, batch: None
    for id in ("a", "b"):
        driver.free += driver.blocks[id]
        driver.resume(id)
    driver.step({"b": 5})
    driver.step({"b": 100, "a": 100})
    for id in ("a", "b"):
        driver.run(id, 8)
        assert_greedy(driver, id, reference)


def test_sampler_that_breaks_its_contract_is_named(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    biased = SamplingParams(temperature=0, logit_bias={1: 0.5})
    driver.add("a", prompt(9), biased)  # so that it has to look for the likeliest token itself
    for answer, complaint in (
        (torch.zeros(2, dtype=torch.int64), "not Sampled"),
        (torch.zeros(1), "not Sampled"),
        (torch.tensor([10**6]), "outside"),
        (torch.tensor([-1]), "outside"),
    ):
        monkeypatch.setattr("framework.plugins.samplers.default.argmax", lambda logits, answer=answer: answer)
        with pytest.raises(PluginError, match=f"plugin 'default': sample: .*{complaint}"):
            driver.executor.submit(driver.plan({"a": 100})).result()
        driver.free += driver.blocks["a"]
        driver.resume("a")
    monkeypatch.undo()
    driver.step({"a": 100})
    assert len(driver.output("a")) == 1


def test_blocks_are_copied_in_order_before_the_forward_pass(driver: Driver, reference: Reference) -> None:
    """A chain of copies through shared blocks: x to y, then z to x; the table then names the copies."""
    driver.add("a", prompt(2 * BLOCK))
    driver.run("a", 2)
    x, z, _ = driver.blocks["a"]
    y, w = driver.free.pop(), driver.free.pop()
    copies = [
        Copy("a", 0, "device", x, "device", y),
        Copy("a", 0, "device", z, "device", w),
        Copy("a", 0, "device", w, "device", x, 7),
        Copy("a", 0, "device", w, "device", z),
    ]
    plan = driver.plan({"a": 1}, copies)
    [only] = plan.slices
    moved = Slice("a", only.start, only.tokens, (*only.deltas, Delta(0, 0, (y, x))), only.samples)
    plan = Plan(plan.step, slices=(moved,), copies=plan.copies)
    result = driver.executor.submit(plan).result()
    driver.commit(plan, result)
    assert result.copied == (7,)
    driver.run("a", 10)
    assert_greedy(driver, "a", reference)


def test_copies_without_slices(driver: Driver) -> None:
    assert driver.step({}, [Copy("a", 0, "device", 1, "device", 2, 5)]).copied == (5,)


def test_blocks_come_back_from_the_host(driver: Driver, reference: Reference) -> None:
    """Out, overwritten by somebody else, and back into other blocks."""
    driver.add("a", prompt(2 * BLOCK + 1))
    driver.run("a", 2)
    old = list(driver.blocks["a"])
    out = [Copy("a", 0, "device", block, "host", slot) for slot, block in enumerate(old, 3)]
    driver.add("b", prompt(3 * BLOCK, seed=1))
    driver.blocks["b"], driver.free = [], [*driver.free, *old]
    driver.step({"b": 100}, out)
    assert set(driver.blocks["b"]) == set(old)
    new = [driver.free.pop() for _ in old]
    back = [Copy("a", 0, "host", slot, "device", block) for slot, block in enumerate(new, 3)]
    plan = driver.plan({"a": 1}, back)
    [only] = plan.slices
    moved = Slice("a", only.start, only.tokens, (Delta(0, 0, tuple(new)),), only.samples)
    plan = Plan(plan.step, slices=(moved,), copies=plan.copies)
    driver.commit(plan, driver.executor.submit(plan).result())
    driver.blocks["a"] = new
    driver.run("a", 10)
    assert_greedy(driver, "a", reference)


def test_an_unknown_tier_is_refused(driver: Driver) -> None:
    driver.add("a", prompt(4))
    with pytest.raises(RuntimeError, match="from device to disk: there is no such pool"):
        driver.step({"a": 4}, [Copy("a", 0, "device", 1, "disk", 2)])


# Sampling


def test_samplers_see_the_batch(driver: Driver, spy: Spy) -> None:
    a, b = prompt(6), prompt(9, seed=1)
    driver.add("a", a)
    driver.add("b", b)
    driver.step({"a": 100, "b": 4})
    assert spy.seen[-1] == {"a": (a, [], 0)}
    assert (spy.added[-1], spy.removed[-1]) == (("a", "b"), ())
    driver.step({"b": 2})
    assert len(spy.seen) == 1
    driver.step({"b": 100, "a": 1})
    assert spy.seen[-1] == {"b": (b, [], 0), "a": (a, driver.output("a")[:1], 1)}
    assert (spy.added[-1], spy.removed[-1]) == ((), ())
    driver.release("a", preempt=True)
    driver.add("c", a)
    driver.step({"c": 2})  # nobody is sampled: kept for the next call
    driver.release("c")
    driver.resume("a")
    driver.step({"a": 100, "b": 1})
    assert spy.seen[-1]["a"] == (a, driver.output("a")[:-1], 2)
    assert (spy.added[-1], set(spy.removed[-1])) == (("a",), {"a", "c"})
    driver.step({"a": 1})
    assert (spy.added[-1], spy.removed[-1]) == ((), ())


def test_membership_is_told_again_after_a_failure(driver: Driver, spy: Spy) -> None:
    def fail(logits: torch.Tensor, batch: SampleBatch) -> None:
        raise ValueError

    driver.add("a", prompt(6))
    spy.change = fail
    with pytest.raises(PluginError):
        driver.step({"a": 100})
    spy.change = lambda logits, batch: None
    driver.resume("a")
    driver.step({"a": 100})
    assert spy.added == [("a",), ("a",)]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, logprobs=2)])
def test_logits_that_are_not_finite_fail_one_request(
    driver: Driver, spy: Spy, params: SamplingParams, value: float
) -> None:
    for id, seed in (("a", 1), ("bad", 2), ("c", 3)):
        driver.add(id, prompt(8, seed), params, seed)

    def spoil(logits: torch.Tensor, batch: SampleBatch) -> None:
        for row, owner in enumerate(batch.owner):
            if batch.ids[owner] == "bad" and batch.output_len[owner] == 2:
                logits[row, slice(None) if value == float("-inf") else 3] = value

    spy.change = spoil
    failed = [driver.step({"a": 100, "bad": 100, "c": 100}) for _ in range(3)][-1]
    why = "no token is left to choose from" if value == float("-inf") else "the model's logits are not finite"
    assert list(failed.errors) == ["bad"] and why in failed.errors["bad"]
    assert list(failed.tokens) == ["a", "c"] and "bad" not in failed.logprobs
    driver.release("bad")
    for _ in range(3):
        assert driver.step({"a": 1, "c": 1}).errors == {}
    spy.change = lambda logits, batch: None
    for id, seed in (("a", 1), ("c", 3)):
        driver.add("alone", prompt(8, seed), params, seed)
        assert driver.run("alone", 6) == driver.output(id)
        driver.release("alone")


def test_logits_processors_change_what_is_sampled_and_not_the_logprobs(
    driver: Driver, spy: Spy, reference: Reference
) -> None:
    driver.add("a", prompt(8), SamplingParams(temperature=0, logprobs=1))
    best = int(reference(prompt(8), 0)[0].argmax())

    def ban(logits: torch.Tensor, batch: SampleBatch) -> None:
        logits[:, best] = float("-inf")

    spy.change = ban
    driver.step({"a": 100})
    [entry] = driver.logprobs["a"]
    assert entry.token == driver.output("a")[0] != best
    assert entry.rank == 2 and entry.top[0][0] == best


def test_logprobs(driver: Driver, reference: Reference) -> None:
    """Of the unmodified logits, whatever the penalties and filters; None for who asked for none."""
    hot = {"temperature": 1.7, "top_k": 30, "presence_penalty": 1.0}
    for i, count in enumerate((None, 0, 1, 5, 20)):
        driver.add(f"r{i}", prompt(6 + i, i), SamplingParams(**hot, logprobs=count), seed=i)
    for _ in range(12):
        driver.step({f"r{i}": 7 for i in range(5)})
    assert driver.logprobs["r0"] == []
    for i, count in enumerate((0, 1, 5, 20), 1):
        output = driver.output(f"r{i}")
        logits = reference(driver.tokens[f"r{i}"], len(output))[:-1]
        expected = logits.double().log_softmax(-1)
        entries = driver.logprobs[f"r{i}"]
        assert [entry.token for entry in entries] == output
        for entry, row in zip(entries, expected, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            assert abs(entry.rank - 1 - int((row > row[entry.token]).sum())) <= 1
            assert len(entry.top) == count
            for (token, value), best in zip(entry.top, row.topk(count).values.tolist(), strict=True):
                assert value == pytest.approx(float(row[token]), abs=1e-4)
                assert value == pytest.approx(best, abs=1e-4)
    assert any(entry.rank > 1 for entry in driver.logprobs["r1"])


def test_equal_log_probabilities_are_listed_by_token() -> None:
    """More ties than places, cut alike whatever the neighbours ask for."""
    row = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, -1.0])
    logprobs = torch.stack([row, row, row, row])
    top = [entry.top for entry in log_probabilities(logprobs, torch.tensor([1, 4, 0, 5]), [3, 1, 0, 6])]
    assert [[token for token, _ in entries] for entries in top] == [[1, 2, 3], [1], [], [1, 2, 3, 4, 0, 5]]
    ranks = [entry.rank for entry in log_probabilities(logprobs, torch.tensor([1, 4, 0, 5]), [0, 0, 0, 0])]
    assert ranks == [1, 2, 5, 6]
