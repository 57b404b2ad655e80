"""Log-probabilities of prompts: those of transformers' forward pass over the whole of each, whatever happens to the
request meanwhile; told once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import tiny_checkpoint
from driver import Driver, build
from driver import prompt as made
from harness import Harness
from msgspec.structs import replace
from oracle import CLOSE

from framework import LLM, InvalidRequest, Logprobs, Mode, SamplingParams, scoring
from framework.messages import Add
from framework.testing import Client
from framework.testing.simulation import random_clients

WINDOW = 24
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral-window": {"architecture": "MistralForCausalLM", "sliding_window": WINDOW, "tie": False},
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
}
SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scored")


@cache
def _checkpoint(folder: Path, name: str) -> Path:
    return tiny_checkpoint(folder / name, **MODELS[name])


@cache
def _oracle(folder: Path, name: str, prompt: tuple[int, ...]) -> torch.Tensor:
    """float32 [tokens - 1, vocab]: log-probabilities of what follows each token but the last."""
    with torch.inference_mode():
        logits: torch.Tensor = _transformers(folder, name)(torch.tensor([prompt])).logits
    return logits[0, :-1].log_softmax(-1)


@cache
def _transformers(folder: Path, name: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(_checkpoint(folder, name), dtype=torch.float32).eval()


def assert_scored(found: Sequence[Logprobs | None] | None, prompt: Sequence[int], expected: torch.Tensor) -> None:
    """Every position: the token that is there, and the likeliest in its place."""
    assert found is not None and len(found) == len(prompt) and found[0] is None
    for token, entry, row in zip(prompt[1:], found[1:], expected, strict=True):
        assert entry is not None and entry.token == token
        assert abs(entry.logprob - float(row[token])) < CLOSE
        ahead = int((row > row[token] + CLOSE).sum())
        assert ahead < entry.rank <= int((row > row[token] - CLOSE).sum()) + 1
        best = row.topk(len(entry.top)).values.tolist()
        assert len(entry.top) == 3 and entry.top == tuple(sorted(entry.top, key=lambda pair: (-pair[1], pair[0])))
        for (other, value), at_least in zip(entry.top, best, strict=True):
            assert abs(value - float(row[other])) < CLOSE and value > at_least - CLOSE


def _prompts(count: int, longest: int = 70, seed: int = 5) -> list[list[int]]:
    """Half of them begin like another one."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 200) for _ in range(longest)]
    own = [[rng.randrange(3, 200) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [[*shared[: rng.randrange(len(p))], *p][: len(p)] if i % 2 else p for i, p in enumerate(own)]


class Served(NamedTuple):
    """told: by id. fell: who was preempted in the middle of a prompt that is scored."""

    told: dict[str, list[Logprobs | None]]
    fell: set[str]


def serve(llm: LLM, prompts: Sequence[list[int]], n: int = 1) -> Served:
    """Those with an even number ask for log-probabilities; all join at random steps."""
    rng, waiting, urgent = random.Random(2), list(enumerate(prompts)), "priority" in llm.info.uses
    told, fell = dict[str, list[Logprobs | None]](), set[str]()
    while waiting or llm.engine.has_work:
        while waiting and (rng.random() < 0.5 or not llm.engine.has_work):
            i, prompt = waiting.pop(0)
            params = SCORED if i % 2 == 0 else SamplingParams(max_tokens=6, ignore_eos=True)
            assert not llm.engine.add(Add(str(i), prompt, params, 0, -i * urgent, n=n))
        for output in llm.engine.step():
            assert output.error is None
            if output.prompt_logprobs is not None:
                assert output.index == 0 and output.tokens and output.cached_tokens == 0 and output.id not in told
                told[output.id] = output.prompt_logprobs
        fell |= {r.id for r in llm.engine.planner.view.waiting if r.scoring and r.scored > 1}
    usage = llm.engine.kv.usage()
    assert (usage.holding, usage.reserved, usage.swapped) == (0, 0, 0)
    return Served(told, fell)


CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 9},
    "torch": {"kernel": "torch", "max_num_batched_tokens": 33},
    "overlap": {"max_num_batched_tokens": 9, "overlap": "on"},
    **{
        f"{mode}, overlap {overlap}": {
            "kv_blocks": 11,
            "swap_space": "1.0",
            "preemption": mode,
            "scheduler": "priority",
            "max_num_batched_tokens": 12,
            "overlap": overlap,
        }
        for mode in Mode
        for overlap in ("off", "on")
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name: str, case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "ROWS", 5)  # several slices of every step
    prompts = _prompts(24)
    flags = {"dtype": "float32", "threads": 1, "kv_blocks": 512, "max_num_seqs": 16, **CASES[case]}
    with LLM(str(_checkpoint(folder, name)), **flags) as llm:
        told, fell = serve(llm, prompts)
    assert set(told) == {str(i) for i in range(0, len(prompts), 2)}
    for id, found in told.items():
        prompt = prompts[int(id)]
        assert_scored(found, prompt, _oracle(folder, name, tuple(prompt)))
    assert "scheduler" not in flags or len(fell) >= 2


def test_several_outputs_of_one_prompt(folder: Path) -> None:
    """Through the Python API all of them have the list; the engine tells it under one of their ids."""
    prompts = _prompts(6)
    with LLM(str(_checkpoint(folder, "llama")), dtype="float32", threads=1, kv_blocks=512) as llm:
        told, _ = serve(llm, prompts, n=3)
        assert set(told) == {"0", "2", "4"}
        outputs = llm.generate(prompts[:3], [SCORED, None, SCORED], n=2)
    assert [len(output.prompt_logprobs) for output in outputs] == [len(prompts[0])] * 2 + [0, 0] + [len(prompts[2])] * 2
    for output, prompt in ((outputs[0], prompts[0]), (outputs[1], prompts[0]), (outputs[5], prompts[2])):
        assert_scored(output.prompt_logprobs, prompt, _oracle(folder, "llama", tuple(prompt)))


def test_a_scored_prompt_is_computed_whole_and_may_be_reused(folder: Path) -> None:
    prompt = made(64)
    plain = SamplingParams(temperature=0, max_tokens=2)
    with LLM(str(_checkpoint(folder, "llama")), dtype="float32", threads=1, kv_blocks=64, block_size=16) as llm:
        cached = []
        for params in (SCORED, SCORED, plain):
            [output] = llm.generate([prompt], params)
            assert output.times is not None
            cached.append(output.times.cached_tokens)
    assert cached == [0, 0, 48]


def test_limits(folder: Path) -> None:
    with LLM(str(_checkpoint(folder, "llama")), threads=1, kv_blocks=16) as llm:
        for field in ("prompt_logprobs", "logprobs"):
            for value in (-1, 21):
                with pytest.raises(InvalidRequest, match=f"{field} must be between 0 and 20, got {value}"):
                    llm.generate("a", {field: value})
        [output] = llm.generate([[5]], {"prompt_logprobs": 0, "max_tokens": 1})
        assert output.prompt_logprobs == [None]
        [output] = llm.generate([[5, 6, 7]], {"prompt_logprobs": 20, "max_tokens": 1})
        assert [entry and len(entry.top) for entry in output.prompt_logprobs] == [None, 20, 20]
        [output] = llm.generate([[5, 6, 7]], {"prompt_logprobs": 0, "max_tokens": 1})
        assert [entry and len(entry.top) for entry in output.prompt_logprobs] == [None, 0, 0]


def test_in_parts_where_memory_is_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is halved until what it holds at once fits: each position is told by one of the parts."""
    prompt = made(40)
    executor = build(_checkpoint(folder, "llama"))
    executor.start()
    driver = Driver(executor)
    driver.add("r", prompt, SCORED)
    driver.add("s", prompt[:9], SCORED)
    alone = executor.submit(driver.plan({"r": 40, "s": 9})).result().prompt_logprobs
    head, most = executor.model.logits, 7  # type: ignore[union-attr]

    def small(states: torch.Tensor) -> torch.Tensor:
        if len(states) > most:
            raise torch.OutOfMemoryError("too many rows")
        return head(states)

    monkeypatch.setattr(executor.model, "logits", small)
    again = Driver(executor, seed=1)
    again.gone = ["r", "s"]
    again.add("r", prompt, SCORED)
    again.add("s", prompt[:9], SCORED)
    found = executor.submit(again.plan({"r": 40, "s": 9})).result()
    assert not found.errors and set(found.tokens) == {"r", "s"}
    for id, expected in alone.items():
        assert [entry.token for entry in found.prompt_logprobs[id]] == [entry.token for entry in expected]
        assert all(abs(a.logprob - b.logprob) < CLOSE for a, b in zip(found.prompt_logprobs[id], expected, strict=True))


def test_few_rows_of_logits_are_held_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = build(_checkpoint(folder, "llama"))
    executor.start()
    assert executor.model is not None
    head, asked = executor.model.logits, list[int]()
    monkeypatch.setattr(executor.model, "logits", lambda states: asked.append(len(states)) or head(states))
    driver = Driver(executor)
    driver.add("r", made(300), SCORED)
    driver.step({"r": 300})
    assert sorted(asked) == [1, 43, 128, 128]


def test_only_what_is_not_known_is_told(folder: Path) -> None:
    """Chunks follow on each other; who comes back begins where it was."""
    executor = build(_checkpoint(folder, "llama"))
    executor.start()
    driver = Driver(executor)
    driver.add("r", made(20), SCORED)
    lens = []
    for size in (1, 6, 8, 5):
        found = driver.step({"r": size}).prompt_logprobs
        lens.append(len(found["r"]))
    assert lens == [1, 6, 8, 4] and not driver.step({"r": 1}).prompt_logprobs
    driver.release("r", preempt=True)
    driver.resume("r")
    plan = driver.plan({"r": 30})
    [data] = plan.new
    result = executor.submit(replace(plan, new=(replace(data, scored=12),))).result()
    assert [entry.token for entry in result.prompt_logprobs["r"]] == made(20)[12:]


def test_a_prompt_that_makes_no_numbers_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chunk that samples nothing, too."""
    executor = build(_checkpoint(folder, "llama"))
    executor.start()
    driver = Driver(executor)
    head = executor.model.logits  # type: ignore[union-attr]

    def broken(states: torch.Tensor) -> torch.Tensor:
        logits = head(states)
        if len(logits) > 3:
            logits[3] = torch.nan
        return logits

    monkeypatch.setattr(executor.model, "logits", broken)
    driver.add("bad", made(20), SCORED)
    driver.add("good", made(9, seed=1))
    result = executor.submit(driver.plan({"bad": 10, "good": 9})).result()
    assert set(result.errors) == {"bad"} and "not finite" in result.errors["bad"] and set(result.tokens) == {"good"}


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("mode", [None, *Mode])
def test_whatever_the_schedule(mode: Mode | None, in_flight: int) -> None:
    """Requests that come, go, fall, fork and fail, on a small pool: each prompt is told once, as it is alone."""
    for seed in range(8):
        rng = random.Random(seed)
        failing = {rng.randint(1, 60): rng.choice(("before", "after")) for _ in range(3)}
        h = Harness(
            blocks=20,
            tokens=16,
            host_blocks=10,
            preemption=mode,
            max_in_flight=in_flight,
            fail=lambda plan, failing=failing: failing.get(plan.step),
        )
        clients = [client._replace(scores=(None, 2)[i % 2]) for i, client in enumerate(random_clients(rng, 30, 60))]
        h.play(clients)
        assert len(h.scores) >= 12


def test_preempted_in_the_middle_of_the_prompt() -> None:
    """What was told is not asked for again: the executor hears how much that is, and the rest is computed whole."""
    for mode in Mode:
        h = Harness(blocks=8, tokens=8, host_blocks=8, preemption=mode, block_size=4)
        h.add("long", 24, 4, prompt_logprobs=1)
        h.steps(2)
        assert h["long"].scored == 17
        h.preempt = None
        h.add("first", 20, 4, priority=-1, prompt_logprobs=0)
        h.run()
        assert len(h.scores["long"]) == 24 and len(h.scores["first"]) == 20


def test_client_of_a_simulation_may_ask() -> None:
    h = Harness()
    h.play([Client("a", (1, 2, 3), 5, scores=2), Client("b", (1, 2, 3), 5)])
    assert list(accumulate(len(h.scores.get(id, ())) for id in "ab")) == [3, 3]
