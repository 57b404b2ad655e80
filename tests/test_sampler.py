"""The default sampler against transformers' logits processors, and what only it does. All that any sampler must do:
tests/test_conformance_samplers.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from framework.plugins.samplers.default import DefaultSampler, uniforms
from transformers.generation import logits_process as hf

from framework import SamplingParams
from framework.testing.sampling import Sampling, random_logits


def sampling() -> Sampling:
    return Sampling(DefaultSampler())


def expected(logits: torch.Tensor, *processors: Any, prompt: Sequence[int] = (1,)) -> torch.Tensor:
    """Probabilities after transformers' processors, float64 [vocab]."""
    ids = torch.tensor([list(prompt)])
    logits = logits.double()
    for processor in processors:
        logits = processor(ids, logits.clone())
    return logits[0].softmax(-1)


def drawn(logits: torch.Tensor, params: SamplingParams, uniform: np.ndarray[Any, Any], **known: Any) -> list[int]:
    """The tokens that the given uniform numbers lead to."""
    batch = sampling()
    for i in range(len(uniform)):
        batch.add(str(i), params, i, **known)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("framework.plugins.samplers.default.uniforms", lambda seeds, index: uniform)
        return batch.sample(logits.expand(len(uniform), -1))


CASES = {
    "plain": (SamplingParams(), []),
    "temperature": (SamplingParams(temperature=0.5), [hf.TemperatureLogitsWarper(0.5)]),
    "hot": (SamplingParams(temperature=2.0), [hf.TemperatureLogitsWarper(2.0)]),
    "hotter": (SamplingParams(temperature=5.0), [hf.TemperatureLogitsWarper(5.0)]),
    "hottest": (SamplingParams(temperature=1e6), [hf.TemperatureLogitsWarper(1e6)]),
    "top_k of one when hottest": (SamplingParams(temperature=1e6, top_k=1), [hf.TopKLogitsWarper(1)]),
    "top_k when hottest": (
        SamplingParams(temperature=1e6, top_k=50),
        [hf.TemperatureLogitsWarper(1e6), hf.TopKLogitsWarper(50)],
    ),
    "top_p when hottest": (
        SamplingParams(temperature=1e6, top_p=0.4),
        [hf.TemperatureLogitsWarper(1e6), hf.TopPLogitsWarper(0.4)],
    ),
    "top_k": (SamplingParams(top_k=7), [hf.TopKLogitsWarper(7)]),
    "top_k of one": (SamplingParams(top_k=1), [hf.TopKLogitsWarper(1)]),
    "top_k off": (SamplingParams(top_k=-1), []),
    "top_k above the vocabulary": (SamplingParams(top_k=10**7), []),
    "top_p": (SamplingParams(top_p=0.8), [hf.TopPLogitsWarper(0.8)]),
    "top_p near 1": (SamplingParams(top_p=0.999), [hf.TopPLogitsWarper(0.999)]),
    "min_p": (SamplingParams(min_p=0.05), [hf.MinPLogitsWarper(0.05)]),
    "all": (
        SamplingParams(temperature=1.3, min_p=0.001, top_k=50, top_p=0.9, repetition_penalty=1.4),
        [
            hf.RepetitionPenaltyLogitsProcessor(1.4),
            hf.TemperatureLogitsWarper(1.3),
            hf.MinPLogitsWarper(0.001),
            hf.TopKLogitsWarper(50),
            hf.TopPLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.parametrize("vocab", [200, 512, 1001])
@pytest.mark.parametrize("case", CASES)
def test_draw_inverts_the_distribution_of_transformers(case: str, vocab: int) -> None:
    """Where each token's share of [0, 1) begins and ends, the draw changes from its neighbour to it and on."""
    params, processors = CASES[case]
    logits = random_logits(vocab=vocab)
    prompt = [3, 5, 5, 8, 13]
    probs = expected(logits, *processors, prompt=prompt).numpy()
    edges = np.cumsum(probs)
    wide = np.flatnonzero(probs > 1e-5)
    middle = edges[wide] - probs[wide] / 2
    assert drawn(logits, params, middle, prompt=prompt) == wide.tolist()
    inside = [edges[wide] - probs[wide] * 0.98, edges[wide] - probs[wide] * 0.02]
    big = probs[wide] > 5e-4
    for uniform in inside:
        assert drawn(logits, params, uniform[big], prompt=prompt) == wide[big].tolist()


@pytest.mark.parametrize("case", CASES)
def test_only_tokens_that_the_filters_keep_are_drawn(case: str) -> None:
    params, processors = CASES[case]
    logits = random_logits(scale=1.0)
    probs = expected(logits, *processors, prompt=[4, 4, 9]).numpy()
    uniform = np.concatenate([np.linspace(0, 1, 2001)[:-1], [1 - 2**-53]])
    tokens = drawn(logits, params, uniform, prompt=[4, 4, 9])
    assert (probs[tokens] > 0).all()


def test_uniform_numbers() -> None:
    """In [0, 1), equidistributed for neighbouring seeds and indices, unrelated, and the same for ever."""
    seeds, index = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    u = uniforms(seeds.ravel(), index.ravel()).reshape(300, 300)
    assert u.min() >= 0 and u.max() < 1
    ordered = np.sort(u.ravel())
    distance = np.abs(ordered - (np.arange(u.size) + 0.5) / u.size).max()
    assert distance * u.size**0.5 < 2.2  # Kolmogorov and Smirnov: chance exceeds it once in 8,000 runs
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015
    top = np.array([2**64 - 1], np.uint64)
    assert uniforms(top, top).shape == (1,)

    def plain(seed: int, at: int) -> float:  # the same in Python's integers
        def mix(z: int) -> int:
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            return z ^ (z >> 31)

        return (mix((mix(seed) + (at + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53

    for seed, at in ((0, 0), (42, 7), (2**64 - 1, 123456)):
        assert uniforms(np.array([seed], np.uint64), np.array([at], np.uint64))[0] == plain(seed, at)


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_penalties_follow_the_output(penalty: float) -> None:
    """Greedy decoding with a repetition penalty equals transformers' processor, over hundreds of tokens."""
    processor, prompt = hf.RepetitionPenaltyLogitsProcessor(penalty), [5, 6, 5]
    batch, known = sampling(), list(prompt)
    batch.add("r", SamplingParams(temperature=0, repetition_penalty=penalty), prompt=prompt)
    for step in range(300):
        logits = random_logits(seed=step)
        reference = int(processor(torch.tensor([known]), logits.clone()).argmax())
        assert batch.sample(logits) == [reference]
        known.append(reference)


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=2), SamplingParams(top_p=0.3), SamplingParams(top_k=3, top_p=0.1)]
)
def test_filters_keep_all_equals(params: SamplingParams) -> None:
    """Whatever their order."""
    logits, ties = torch.zeros(1, 600), [20, 40, 60, 80]
    logits[0, ties] = 9.0
    tokens = drawn(logits, params, np.linspace(0, 1, 200, endpoint=False))
    assert set(tokens) == set(ties)


def test_greedy_batch_is_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody draws, sorts or takes a softmax when all rows are greedy."""
    for name in ("softmax", "searchsorted", "topk"):
        monkeypatch.delattr(torch, name, raising=False)
    logits = random_logits(3)
    batch = sampling()
    for id in "abc":
        batch.add(id, SamplingParams(temperature=0))
    assert batch.sample(logits) == logits.argmax(-1).tolist()
