"""Two plans in flight: the same tokens as one at a time, and nothing of a request that had ended already.

The device is a CPU that pretends to be late: what a step sampled is not on the host before its result is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from harness import Harness, Policy, ids

from framework import LLM, Logprobs, Plan, SampleBatch, SamplingParams, StepResult, Victim, hookimpl
from framework.device import Device, Fetched
from framework.errors import EngineDead
from framework.executor import Done, Pending
from framework.messages import Add, Outputs, TokenOutput
from framework.process import CHECK_MS
from framework.process import run as run_engine


class Late(Device):
    """Counts how often somebody waited for something."""

    asynchronous = True
    waits = 0

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        device = self

        class Copies(Fetched):
            def wait(self) -> Sequence[torch.Tensor]:
                device.waits += 1
                return super().wait()

        return Copies([tensor.clone() for tensor in tensors])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("overlap") / "model")


Make = Callable[..., LLM]


@pytest.fixture
def make(path: Path) -> Iterator[Make]:
    made: list[LLM] = []

    def one(overlap: str = "on", late: bool = True, **flags: Any) -> LLM:
        llm = LLM(str(path), **{"dtype": "float32", "kv_blocks": 256, "threads": 1, "overlap": overlap, **flags})
        made.append(llm)
        if late:
            llm.engine.executor.device = Late(torch.device("cpu"))  # type: ignore[attr-defined]
        return llm

    yield one
    for llm in made:
        llm.close()


def run(
    llm: LLM, params: dict[str, SamplingParams], prompts: dict[str, list[int]] | None = None
) -> dict[str, tuple[list[int], str, str | None]]:
    """(tokens, finish reason, error) by id; checks that everything is free afterwards."""
    for order, (id, wanted) in enumerate(params.items()):
        prompt = (prompts or {}).get(id) or [(7 * i + order) % 200 + 3 for i in range(5 + 9 * order)]
        assert not llm.engine.add(Add(id, prompt, wanted, 0))
    tokens: dict[str, list[int]] = {id: [] for id in params}
    ends: dict[str, tuple[str, str | None]] = {}
    while llm.engine.has_work:
        for output in llm.engine.step():
            assert output.id not in ends and output.index == len(tokens[output.id])
            tokens[output.id] += output.tokens
            if output.finish_reason:
                ends[output.id] = output.finish_reason, output.error
    assert llm.engine.in_flight == []
    usage = llm.engine.kv.usage()
    assert (usage.holding, usage.reserved, usage.swapped) == (0, 0, 0)
    return {id: (tokens[id], *ends[id]) for id in params}


def kinds(count: int) -> dict[str, SamplingParams]:
    return {
        "greedy": SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
        "drawn": SamplingParams(temperature=0.8, max_tokens=count, ignore_eos=True, seed=5),
        "filtered": SamplingParams(top_k=20, top_p=0.8, max_tokens=count - 3, ignore_eos=True, seed=6),
        "biased": SamplingParams(temperature=0, logit_bias={9: 1.0}, max_tokens=count + 5, ignore_eos=True),
        "one": SamplingParams(temperature=0, max_tokens=1),
    }


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}


def test_a_plan_is_submitted_before_what_came_of_the_last_is_known(make: Make) -> None:
    expected = run(make("off", late=False), kinds(20))
    llm = make()
    device: Any = llm.engine.executor.device  # type: ignore[attr-defined]
    submit, behind = llm.engine.executor.submit, 0

    def watched(plan: Plan) -> Pending:
        nonlocal behind
        before, behind = device.waits, behind + len(llm.engine.in_flight)
        pending = submit(plan)
        assert device.waits == before, "a step waited for the one before"
        return pending

    llm.engine.executor.submit = watched  # type: ignore[method-assign]
    assert run(llm, kinds(20)) == expected
    assert behind >= 20


def test_who_reads_the_output_gets_it_whole(make: Make) -> None:
    """Penalties, and a logits processor that looks at every token so far."""

    class Reader:
        def __init__(self) -> None:
            self.seen: list[tuple[str, list[int]]] = []

        @hookimpl
        def process_logits(self, logits: torch.Tensor, batch: SampleBatch) -> None:
            for at, id in enumerate(batch.ids):
                output = batch.output_tokens(id).tolist()
                assert len(output) == batch.output_len[at]
                self.seen.append((id, output))
                logits[batch.owner.index(at), sum(output) % 50] += 2.0

    params = {
        **kinds(16),
        "penalised": SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, **PENALTIES),
        "both": SamplingParams(temperature=1, seed=8, max_tokens=12, ignore_eos=True, **PENALTIES),
    }
    one, two = Reader(), Reader()
    expected = run(make("off", late=False, plugins=[("reader", one)]), params)
    assert run(make(plugins=[("reader", two)]), params) == expected
    last = {id: output for id, output in two.seen}
    assert last == {id: output for id, output in one.seen} and len(last) == 7


def test_log_probabilities(make: Make) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=3, ignore_eos=True)
    found = []
    for llm in (make("off", late=False), make()):
        assert not llm.engine.add(Add("a", [5, 6, 7], params, 0))
        outputs: list[TokenOutput] = []
        while llm.engine.has_work:
            outputs += llm.engine.step()
        found.append([entry for output in outputs for entry in output.logprobs or ()])
    assert len(found[0]) == 9 and found[0] == found[1]


def test_a_stop_is_seen_one_step_late_and_nothing_of_that_step(make: Make) -> None:
    """By a token that ends it: its slice in the step in flight is discarded. Its length is known beforehand."""
    whole = run(make("off", late=False), kinds(20))
    token = whole["greedy"][0][7]
    stopped = {id: SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(token,)) for id in ("greedy", "other")}
    llm = make()
    planned: list[str] = []
    submit = llm.engine.executor.submit

    def watched(plan: Plan) -> Pending:
        planned.extend(ids(plan))
        return submit(plan)

    llm.engine.executor.submit = watched  # type: ignore[method-assign]
    found = run(llm, stopped)
    first = whole["greedy"][0].index(token)
    assert found["greedy"] == (whole["greedy"][0][: first + 1], "stop", None)
    assert planned.count("greedy") == first + 2
    planned.clear()
    assert run(llm, {"long": kinds(20)["greedy"]})["long"][1] == "length"
    assert planned.count("long") == 20


def test_an_id_may_be_used_again_while_a_step_of_its_last_owner_is_in_flight(make: Make) -> None:
    whole = run(make("off", late=False), kinds(20))
    ends = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(whole["greedy"][0][7],))
    llm = make()
    prompt = [(7 * i) % 200 + 3 for i in range(5)]
    assert not llm.engine.add(Add("a", prompt, ends, 0))
    while "a" in llm.engine.requests:
        llm.engine.step()
    assert len(llm.engine.in_flight) == 1  # the discarded one
    other = [(7 * i + 1) % 200 + 3 for i in range(14)]
    alone = run(make("off", late=False), {"a": kinds(12)["greedy"]}, {"a": other})
    assert run(llm, {"a": kinds(12)["greedy"]}, {"a": other}) == alone


def test_what_may_not_follow_is_found_in_tokens_that_were_not_here_yet(make: Make) -> None:
    few = tuple(range(40, 46))
    pairs = tuple((a, b) for a in few for b in few if (a + b) % 3)
    params = {
        **kinds(16),
        "few": SamplingParams(max_tokens=16, ignore_eos=True, seed=7, allowed_token_ids=few, bad_token_ids=pairs),
        "some": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_token_ids=pairs, logit_bias={41: 90}),
    }
    expected = run(make("off", late=False), params)
    assert run(make(), params) == expected
    for tokens in (expected["few"][0], expected["some"][0]):
        assert not set(pairwise(tokens)) & set(pairs)


def test_prompts_are_scored_beside_others(make: Make) -> None:
    """Chunk by chunk, while decodes of others are in flight."""
    prompts = {f"s{i}": [(5 * i + 3 * at) % 200 + 3 for at in range(20 + 7 * i)] for i in range(4)}
    found = []
    for llm in (make("off", late=False, max_num_batched_tokens=16), make(max_num_batched_tokens=16)):
        params = {**kinds(20), **{id: SamplingParams(max_tokens=3, seed=1, prompt_logprobs=2) for id in prompts}}
        told: dict[str, list[Logprobs | None]] = {}
        step = llm.engine.step

        def watched(step: Any = step, told: Any = told) -> list[TokenOutput]:
            outputs: list[TokenOutput] = step()
            told |= {output.id: output.prompt_logprobs for output in outputs if output.prompt_logprobs}
            return outputs

        llm.engine.step = watched  # type: ignore[method-assign]
        found.append((run(llm, params, prompts), told))
    assert found[0] == found[1]
    assert {id: [one and one.token for one in some] for id, some in found[0][1].items()} == {
        id: [None, *prompt[1:]] for id, prompt in prompts.items()
    }


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_logits_that_are_not_finite_fail_their_request_alone(make: Make, value: float) -> None:
    class Spoils:
        @hookimpl
        def process_logits(self, logits: torch.Tensor, batch: SampleBatch) -> None:
            for row, owner in enumerate(batch.owner):
                if batch.ids[owner] == "bad" and batch.output_len[owner] == 3:
                    logits[row] = value

    params = kinds(12)
    expected = run(make("off", late=False), {**params, "bad": params["greedy"]})
    found = run(make(plugins=[("spoils", Spoils())]), {**params, "bad": params["greedy"]})
    tokens, reason, error = found.pop("bad")
    assert reason == "error" and error is not None
    assert ("not finite" if math.isnan(value) else "no token is left to choose from") in error
    assert tokens == expected.pop("bad")[0][:3] and found == expected


def test_a_sampler_that_chooses_what_is_not_there_fails_its_steps_and_no_more(make: Make) -> None:
    """What comes behind it on the device reads no embedding that does not exist."""
    params = kinds(10)
    expected = run(make("off", late=False), params)

    class Wild:
        left = 2

        @hookimpl(wrapper=True)
        def sample(self, batch: SampleBatch) -> Any:
            sampled = yield
            if self.left and max(batch.output_len) == 4:
                self.left -= 1
                sampled.tokens[0] = 10**9
            return sampled

    llm = make(plugins=[("wild", Wild())])
    assert run(llm, params) == expected
    assert llm.engine.stats().failed_steps == 2


def test_a_step_that_fails_takes_the_one_behind_it_along(make: Make) -> None:
    params = kinds(14)
    expected = run(make("off", late=False), params)
    for where in ("at once", "late"):
        llm = make()
        submit, count = llm.engine.executor.submit, 0

        def failing(plan: Plan, submit: Any = submit, where: str = where) -> Pending:
            nonlocal count
            count += 1
            if count not in (4, 9):
                return submit(plan)  # type: ignore[no-any-return]
            if where == "late":
                submit(plan)
            return Done(RuntimeError("the device is upset"))

        llm.engine.executor.submit = failing  # type: ignore[method-assign, assignment]
        assert run(llm, params) == expected
        assert llm.engine.stats().failed_steps == 2


def test_an_abort_waits_for_what_is_in_flight() -> None:
    h = Harness(max_in_flight=2)
    for id in "ab":
        h.add(id, 4, 9)
    for _ in range(3):
        h.step()
    assert len(h.engine.in_flight) == 1 and len(h.outputs["a"]) == 2
    h.abort("a")
    assert h.engine.in_flight == [] and len(h.outputs["a"]) == 3 and h.reasons == {"a": "abort"}
    h.abort("nobody")
    h.run()
    assert len(h.outputs["b"]) == 9


def test_nobody_falls_while_a_step_is_in_flight() -> None:
    """A running request outgrows the pool: the step in flight is waited for, and then there is a victim."""
    policy = Policy()
    policy.pick = lambda beneficiary, candidates: Victim(candidates[-1])
    h = Harness(policy, blocks=4, max_in_flight=2)
    h.add("first", 8, 8)
    h.add("last", 5, 9)
    waited = 0
    while not policy.asked:
        before = h.engine.in_flight
        h.step()
        waited += bool(before and h.engine.planner.preemption.postponed)
    assert waited == 1 and policy.asked[0][0] == "first"
    h.run()
    assert (h.engine.stats().preemptions_recompute, len(h.outputs["last"])) == (1, 9)


def test_a_prompt_of_several_outputs_forks_when_its_result_is_there() -> None:
    h = Harness(max_in_flight=2, blocks=16)
    h.add("a", 6, 5, n=3)
    h.add("b", 6, 12)
    h.step()
    assert ids(h.step()) == ["b"]  # for "a", it has to be known that the prompt is computed
    h.run()
    assert {id: len(output) for id, output in h.outputs.items()} == {"a": 5, "a/1": 5, "a/2": 5, "b": 12}


def test_a_dead_executor_is_closed(make: Make) -> None:
    llm = make()
    for id, params in kinds(9).items():
        llm.engine.add(Add(id, [5, 6, 7], params, 0))
    llm.engine.step()
    llm.engine.step()

    class Dead:
        def done(self) -> bool:
            return True

        def result(self) -> StepResult:
            raise EngineDead("gone")

    llm.engine.executor.submit = lambda plan: Dead()  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineDead):
        for _ in range(3):
            llm.engine.step()
    llm.close()
    assert llm.engine.in_flight == [] and not llm.engine.requests


def test_nobody_waits_once_the_last_tokens_are_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step commits and submits nothing."""
    llm = make(late=False)
    monkeypatch.setattr("framework.llm.time.sleep", lambda seconds: pytest.fail(f"slept for {seconds} s"))
    [output] = llm.generate([[5, 6, 7]], kinds(8)["greedy"])
    assert len(output.token_ids) == 8


class Mailbox:
    """The engine's side of a socket, which brings `message` and then nothing."""

    def __init__(self, message: Add) -> None:
        self.messages, self.sent = [message], list[Outputs]()

    def receive(self, wait: int | None) -> list[Add]:
        if wait == CHECK_MS:
            raise StopIteration
        found, self.messages = self.messages, []
        return found

    def send(self, outputs: Outputs) -> None:
        self.sent.append(outputs)


def test_the_last_figures_say_that_all_is_free(make: Make) -> None:
    """Those of the step that only discards what was in flight are sent, too."""
    [whole] = make("off", late=False).generate([[5, 6, 7]], kinds(12)["greedy"])
    stop = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(whole.token_ids[4],))
    llm, box = make(), Mailbox(Add("a", [5, 6, 7], stop, 0))
    with pytest.raises(StopIteration):
        run_engine(llm.engine, box)  # type: ignore[arg-type]
    assert box.sent[-1].stats == llm.engine.stats() and box.sent[-1].stats.kv_holding == 0


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("where", ["submit", "result"])
def test_an_interrupted_step_is_computed_again(
    make: Make, overlap: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By Ctrl-C, while others go on: nothing that it had stays behind, and there may be victims again."""
    caplog.set_level("DEBUG")
    expected = run(make("off", late=False), kinds(14))
    llm = make(overlap, late=False, kv_blocks=16)
    submit, count = llm.engine.executor.submit, 0

    class Interrupted:
        def done(self) -> bool:
            return True

        def result(self) -> StepResult:
            raise KeyboardInterrupt

    def interrupted(plan: Plan) -> Pending:
        nonlocal count
        count += 1
        if count != 5:
            return submit(plan)
        if where == "submit":
            raise KeyboardInterrupt
        submit(plan)
        return Interrupted()

    llm.engine.executor.submit = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7], [8, 9]], kinds(14)["greedy"])
    usage = llm.engine.kv.usage()
    assert (usage.holding, usage.reserved, llm.engine.has_work) == (0, 0, False)
    assert run(llm, kinds(14)) == expected
    count = 0
    for order, id in enumerate(("a", "b", "c")):
        llm.engine.add(Add(id, [(7 * i + order) % 200 + 3 for i in range(40)], kinds(60)["greedy"], 0))
    left, steps = {"a", "b", "c"}, 0
    while llm.engine.has_work:
        assert (steps := steps + 1) < 500
        try:
            left -= {output.id for output in llm.engine.step() if output.finish_reason}
        except KeyboardInterrupt:
            continue
    assert not left and llm.engine.stats().preemptions_swap + llm.engine.stats().preemptions_recompute > 0
    assert "step failed; its" not in caplog.text


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_lost_device_ends_the_engine(make: Make, overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is asked again would get the same answer."""
    llm = make(overlap)
    llm.engine.add(Add("a", [5, 6, 7], kinds(9)["greedy"], 0))
    llm.engine.step()

    def failing(inputs: Any) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(llm.engine.executor, "_eager", failing)
    with pytest.raises(EngineDead, match=r"does nothing more in this process: CUDA error: an illegal"):
        for _ in range(2):
            llm.engine.step()


def test_overlap_that_an_executor_does_not_take_is_told(path: Path) -> None:
    with LLM(str(path), dtype="float32", kv_blocks=16, executor="checking", overlap="on") as llm:
        assert llm.info.notes[-1] == "--overlap on has no effect: --executor checking takes one plan at a time"
        assert not llm.info.overlap
