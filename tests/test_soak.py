"""Thousands of requests on a pool of 64 blocks, everything at once: priorities, shared prefixes, n, a tiny swap space,
log-probabilities of prompts, and in half of the runs clients that leave. What each run has to have met is asserted:
none passes by luck.

Without a model by the thousands; and hundreds with one, whose executor runs every plan beside the one that checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import tiny_checkpoint
from driver import build
from harness import Harness, Policy
from msgspec.structs import replace
from oracle import CLOSE, TOP, assert_drawn

from framework import Batch, Logprobs, Mode, Plan, Request, StepResult, Victim, View, Want
from framework.executor import Later, Pending
from framework.messages import EngineStats
from framework.plan import RequestData
from framework.testing import CheckingExecutor
from framework.worker import TorchExecutor

BLOCKS, HOST, SEATS, TOKENS = 64, 12, 24, 128


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


def harness(rng: Random, block_size: int, **options: Any) -> Harness:
    return Harness(
        Priority(rng),
        blocks=BLOCKS,
        block_size=block_size,
        tokens=TOKENS,
        seats=SEATS,
        watermark=1,
        host_blocks=HOST,
        preemption=Mode.SWAP,
        max_model_len=20 * block_size,
        **options,
    )


def soak(h: Harness, rng: Random, requests: int, aborts: bool, **params: Any) -> EngineStats:
    """Let them come and go; all that can be said of any of them, whatever its tokens are, is checked."""
    block_size = h.executor.cache_spec.block_size
    systems = [[rng.randrange(97) for _ in range(4 * block_size)] for _ in range(3)]
    count = 0
    while count < requests or h.engine.has_work:
        while count < requests and h.view.total < 40:
            own = [rng.randrange(97) for _ in range(rng.randint(1, 6 * block_size))]
            prompt = rng.choice((own, [*rng.choice(systems)[: rng.randint(1, 4 * block_size)], *own]))
            n = rng.choice((1, 1, 1, 1, 2, 3))
            longest = 20 * block_size - len(prompt)
            max_tokens = rng.choice((1, rng.randint(1, 2 * block_size), rng.randint(1, longest)))
            scores = {"prompt_logprobs": TOP} if count % 9 == 0 else {}
            assert h.add(f"r{count}", prompt, max_tokens, rng.randint(-3, 3), n=n, **params, **scores) is None
            count += n
        if aborts and rng.random() < 0.1:
            h.abort(rng.choice(list(h.engine.requests)))
        assert h.step() is not None or not h.engine.has_work, "a step did nothing although work exists"

    assert len(h.outputs) >= requests and h.done == dict.fromkeys(h.outputs, 1)
    for id, reason in h.reasons.items():
        assert reason == "length" or (aborts and reason == "abort")
        assert reason == "abort" or len(h.outputs[id]) == h.requests[id].params.max_tokens
    assert aborts == ("abort" in h.reasons.values())
    stats = h.engine.stats()
    assert (stats.running, stats.waiting, h.view.total) == (0, 0, 0)
    assert (stats.kv_holding, stats.kv_reserved, stats.kv_swapped, stats.kv_tokens) == (0, 0, 0, 0)
    assert h.kv.available == stats.kv_blocks
    assert h.planner.forced == 0 and stats.plugin_faults == {} and stats.failed_steps == 0
    return stats


@pytest.mark.slow
@pytest.mark.parametrize("aborts", [False, True], ids=["nobody leaves", "some leave"])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("in_flight", [1, 2], ids=["alone", "overlap"])
def test_soak(in_flight: int, block_size: int, aborts: bool) -> None:
    rng = Random(block_size + aborts)
    h = harness(rng, block_size, max_in_flight=in_flight)
    stats = soak(h, rng, 2000, aborts)
    for id, output in h.outputs.items():
        assert output == h.alone(id)[: len(output)]
        h.check_scores(id)
    assert stats.preemptions_swap >= 100
    assert stats.preemptions_recompute >= 100
    assert stats.prefix_hits >= 100
    assert h.copies["device", "device"] >= 50
    assert stats.swaps_exhausted >= 20


class Modelled:
    """Has every plan checked and run by a model, whose tokens it takes: with two in flight, when its result is asked
    for."""

    def __init__(self, h: Harness, model: TorchExecutor) -> None:
        self._plans, self._checking, self._model = h.plans, h.executor, model
        self.max_in_flight = model.max_in_flight
        self._result = StepResult(-1)
        self.logprobs: dict[str, list[Logprobs]] = {}
        h.executor.next_token = self._next_token  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checking, name)

    def _next_token(self, data: RequestData, tokens: Sequence[int]) -> int:
        return self._result.tokens[data.id][0]

    def submit(self, plan: Plan) -> Pending:
        self._plans.append(plan)
        pending = self._model.submit(plan)

        def finish() -> StepResult:
            self._result = pending.result()
            for id, some in self._result.logprobs.items():
                self.logprobs.setdefault(id, []).extend(some)
            checked = CheckingExecutor.submit(self._checking, plan).result()
            assert {id: len(some) for id, some in checked.prompt_logprobs.items()} == {
                id: len(some) for id, some in self._result.prompt_logprobs.items()
            }
            return replace(checked, logprobs=self._result.logprobs, prompt_logprobs=self._result.prompt_logprobs)

        later = Later(finish, pending.done)
        return later if self.max_in_flight > 1 else later.wait()


WINDOW = 40
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": WINDOW},
    "qwen2": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
}
ROUNDED = 0.03
"""A key or value on the border between two bytes falls to one side or the other, depending on who shares the batch:
log-probabilities differ by less, and by up to half a nat from what they are in float32."""
LISTED = TOP + 2
"""Rounded to bytes, several may be equal, and those that equal the last of the TOP may be drawn."""
PARAMS = {"temperature": 0.9, "top_k": TOP, "logprobs": LISTED}


@pytest.mark.slow
@pytest.mark.parametrize("aborts", [False, True], ids=["nobody leaves", "some leave"])
@pytest.mark.parametrize(
    ("name", "kernel", "kv_dtype", "overlap"),
    [
        *((name, kernel, "auto", "off") for name in MODELS for kernel in ("cpu", "torch")),
        *((name, "cpu", "auto", "on") for name in MODELS),
        ("llama", "cpu", "int8", "off"),
    ],
)
def test_soak_of_a_model(name: str, kernel: str, kv_dtype: str, overlap: str, aborts: bool, tmp_path: Path) -> None:
    """Each token is the one that its seed draws from what transformers predicts after those before it; with a cache of
    bytes, from what the same executor predicts when nobody else is there."""
    rng = Random(aborts)
    path = tiny_checkpoint(tmp_path / "model", **MODELS[name])
    flags = {"block_size": 16, "max_num_seqs": SEATS, "max_num_batched_tokens": TOKENS}
    flags |= {"kernel": kernel, "kv_dtype": kv_dtype, "kv_blocks": BLOCKS, "swap_space": str(HOST / BLOCKS)}
    flags["overlap"] = overlap
    model = build(path, **flags)
    assert model.start().blocks == {"device": BLOCKS, "host": HOST} and model.backend_name == kernel
    h = harness(rng, 16, windows=[group.window for group in model.cache_spec.groups])
    h.engine.executor = both = Modelled(h, model)  # type: ignore[assignment]
    stats = soak(h, rng, 500, aborts, **PARAMS)
    assert stats.preemptions_swap >= 50
    assert stats.preemptions_recompute >= 25 and stats.recomputed_tokens >= 1000
    # With overlap fewer come back to a prefix: nobody is admitted beside one who waits for the step in flight.
    assert stats.prefix_hits >= (10 if overlap == "on" else 25)
    assert h.copies["device", "device"] >= 50 and h.copies["host", "device"] >= 100
    assert sum(part.start > WINDOW for plan in h.plans for part in plan.slices) >= 1000

    predict, close = (_transformers(path), CLOSE) if kv_dtype == "auto" else (_alone(model), ROUNDED)
    far = 0.0
    for id, scores in h.scores.items():
        prompt = h.requests[id].prompt
        assert len(scores) == len(prompt) and scores[0] is None
        if len(prompt) > 1:
            rows = predict(torch.tensor(prompt))[:-1].log_softmax(-1)
            listed = [[(one.token, one.logprob), *one.top] for one in scores if one is not None]
            tokens, values = (torch.tensor(x) for x in zip(*(zip(*some, strict=True) for some in listed), strict=True))
            assert tokens[:, 0].tolist() == prompt[1:]
            far = max(far, float((rows.gather(1, tokens) - values).abs().max()))
            assert (values[:, 1:].amin(-1) > rows.topk(TOP).values[:, -1] - close).all(), "a likelier token is missing"
    assert len(h.scores) >= 30
    for id, output in h.outputs.items():
        found = both.logprobs.get(id, [])
        assert [entry.token for entry in found][: len(output)] == output  # one more was in flight when it left
        found = found[: len(output)]
        if output:
            rows = predict(torch.tensor([*h.requests[id].prompt, *output[:-1]]))[-len(output) :].log_softmax(-1)
            listed = [[(entry.token, entry.logprob), *entry.top] for entry in found]
            tokens, values = (torch.tensor(x) for x in zip(*(zip(*some, strict=True) for some in listed), strict=True))
            far = max(far, float((rows.gather(1, tokens) - values).abs().max()))
            assert (values[:, 1:].amin(-1) > rows.topk(LISTED).values[:, -1] - close).all(), (
                "a likelier token is missing"
            )
    assert far < close
    assert_drawn(
        [both.logprobs.get(id, [])[: len(h.outputs[id])] for id in h.outputs],
        [h.requests[id].seed for id in h.outputs],
        0.9,
    )


Predict = Callable[[torch.Tensor], torch.Tensor]
"""Logits [tokens, vocab] of tokens [tokens]."""


def _transformers(path: Path) -> Predict:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return torch.inference_mode()(lambda tokens: model(tokens[None]).logits[0])


def _alone(executor: TorchExecutor) -> Predict:
    """All in one step, in blocks that others have left."""

    @torch.inference_mode()
    def predict(tokens: torch.Tensor) -> torch.Tensor:
        count = len(tokens)
        table = np.arange(-(-count // 16), dtype=np.int32)[None]
        one = Batch(np.zeros(1, np.int32), np.array([count], np.int32), (table,), np.ones(1, np.bool_), 16)
        meta = executor.backend.prepare(one, executor.device.torch)
        meta.logits_rows = torch.arange(count)
        assert executor.model is not None
        return executor.model.forward(tokens, torch.arange(count), executor._caches, meta).float()

    return predict
