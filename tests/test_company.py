"""Requests whose tokens are chosen in different ways, side by side in one batch: each gets what it gets alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework import LLM, SamplingParams

COMMON: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
PROMPTS = [[40 + i, 50, 60 + i, 70] for i in range(4)]
SEEDED = SamplingParams(temperature=1.3, seed=42, **COMMON)
UNSEEDED = SamplingParams(temperature=1.3, **COMMON)
GREEDY = SamplingParams(temperature=0, **COMMON)
PENALISED = {
    name: SamplingParams(temperature=0, **{name: value}, **COMMON)
    for name, value in (("frequency_penalty", 2.0), ("presence_penalty", 2.0), ("repetition_penalty", 1.8))
}


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), dtype="float32", threads=1, kv_blocks=128, max_num_seqs=8) as found:
        yield found


def together(llm: LLM, *params: SamplingParams) -> list[list[int]]:
    """The tokens of each; the first has the first of the prompts."""
    return [out.token_ids for out in llm.generate(PROMPTS[: len(params)], list(params))]


def test_a_seeded_request_beside_an_unseeded_one_draws_what_it_draws_alone(llm: LLM) -> None:
    [alone] = together(llm, SEEDED)
    others = set()
    for _ in range(4):
        seeded, *rest = together(llm, SEEDED, UNSEEDED, UNSEEDED)
        assert seeded == alone
        others |= set(map(tuple, rest))
    assert len(others) == 8, "who brings no seed has another one each time"


@pytest.mark.parametrize("name", PENALISED)
def test_a_penalised_request_beside_one_without_penalties(llm: LLM, name: str) -> None:
    [free] = together(llm, GREEDY)
    [penalised] = together(llm, PENALISED[name])
    assert penalised != free, "the penalty changes nothing here"
    for first, second in ((GREEDY, PENALISED[name]), (PENALISED[name], GREEDY)):
        expected = [together(llm, first)[0], llm.generate([PROMPTS[1]], second)[0].token_ids]
        assert together(llm, first, second) == expected


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_an_extreme_temperature_or_top_p_is_near_greedy_and_finite(llm: LLM, name: str) -> None:
    extreme = SamplingParams(seed=1, logprobs=1, **{name: 1e-4}, **COMMON)
    [greedy] = together(llm, GREEDY)
    [out] = llm.generate(PROMPTS[:1], extreme)
    assert out.token_ids == greedy
    assert out.logprobs is not None and all(math.isfinite(entry.logprob) for entry in out.logprobs)
    assert together(llm, extreme, UNSEEDED, SEEDED, GREEDY)[0] == greedy
