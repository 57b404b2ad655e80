"""The default sampler against transformers' logits processors, exact probabilities and hand computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from framework.plugins.samplers.default import DefaultSampler, uniforms
from transformers.generation import logits_process as hf

from framework import Plan, RequestData, SamplingParams
from framework.batch import RowBatch, Rows

VOCAB = 1000


class Batch:
    """Requests known to an executor, as the sampler sees them step after step."""

    def __init__(self) -> None:
        self.rows = Rows(0, 1, rows=4)
        self.sampler = DefaultSampler()

    def add(
        self, id: str, params: SamplingParams, seed: int = 0, prompt: Sequence[int] = (1,), output: Sequence[int] = ()
    ) -> None:
        data = RequestData(id, [*prompt, *output], len(prompt), params, seed)
        self.rows.update(Plan(0, new=(data,)))

    def remove(self, *ids: str) -> None:
        self.rows.update(Plan(0, finished=ids))

    def sample(self, logits: torch.Tensor, *ids: str) -> list[int]:
        """One step for `ids` (all, if none are named); the tokens join their outputs."""
        names = list(ids or self.rows.index)
        index = np.array([self.rows.index[id] for id in names])
        tokens = self.sampler.sample(logits=logits.clone(), batch=RowBatch(self.rows, names, index)).tokens
        self.rows.append(index, tokens.numpy())
        self.rows.settle()
        return tokens.tolist()


def sample_many(logits: torch.Tensor, params: SamplingParams, count: int, **known: Any) -> np.ndarray[Any, Any]:
    """How often each token is drawn from one row of logits by `count` requests with different seeds."""
    batch = Batch()
    for seed in range(count):
        batch.add(str(seed), params, seed, **known)
    tokens = batch.sample(logits.expand(count, -1))
    return np.bincount(tokens, minlength=logits.shape[-1])


def random_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def expected(logits: torch.Tensor, *processors: Any, prompt: Sequence[int] = (1,)) -> torch.Tensor:
    """Probabilities after transformers' processors, float64 [vocab]."""
    ids = torch.tensor([list(prompt)])
    for processor in processors:
        logits = processor(ids, logits.clone())
    return logits[0].double().softmax(-1)


def drawn(logits: torch.Tensor, params: SamplingParams, uniform: np.ndarray[Any, Any], **known: Any) -> list[int]:
    """The tokens that the given uniform numbers lead to."""
    batch = Batch()
    for i in range(len(uniform)):
        batch.add(str(i), params, i, **known)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("framework.plugins.samplers.default.uniforms", lambda seeds, index: uniform)
        return batch.sample(logits.expand(len(uniform), -1))


CASES = {
    "plain": (SamplingParams(), []),
    "temperature": (SamplingParams(temperature=0.5), [hf.TemperatureLogitsWarper(0.5)]),
    "hot": (SamplingParams(temperature=2.0), [hf.TemperatureLogitsWarper(2.0)]),
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
    big = probs[wide] > 1e-3
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


@pytest.mark.parametrize("case", ["plain", "top_k", "all"])
def test_frequencies_match_probabilities(case: str) -> None:
    params, processors = CASES[case]
    logits = random_logits(vocab=60, scale=1.0)
    probs = expected(logits, *processors).numpy()
    counts = sample_many(logits, params, 20_000)
    often = probs * counts.sum() >= 5
    seen = np.append(counts[often], counts[~often].sum())
    due = np.append(probs[often], probs[~often].sum()) * counts.sum()
    seen, due = seen[due > 0], due[due > 0]
    assert counts[probs == 0].sum() == 0
    chi2, free = ((seen - due) ** 2 / due).sum(), len(due) - 1
    # Wilson and Hilferty: the quantile of chi-square that chance exceeds once in 30,000 runs (4 sigma).
    assert chi2 < free * (1 - 2 / (9 * free) + 4 * (2 / (9 * free)) ** 0.5) ** 3


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


KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.7),
    SamplingParams(top_k=900, top_p=0.99),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0, repetition_penalty=1.8),
    SamplingParams(presence_penalty=1.5, frequency_penalty=-0.5),
    SamplingParams(logit_bias={1: 5.0, 2: -100.0}),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=0.7, frequency_penalty=2.0),
    SamplingParams(min_tokens=3, stop_token_ids=(1, 2, 3), eos_token_ids=(4,)),
]


def test_company_changes_nothing() -> None:
    """Alone, together, and with others that come, go, sit out and are resumed: each gets the same tokens.

    Logits are rounded to bfloat16: full of ties.
    """
    steps, names = 12, [str(i) for i in range(len(KINDS))]
    rounded = [random_logits(len(KINDS), seed=s).bfloat16().float() for s in range(steps)]
    alone: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        batch = Batch()
        batch.add(name, KINDS[i], seed=1000 + i, prompt=[i, 7])
        alone[name] = [batch.sample(rounded[step][i : i + 1])[0] for step in range(steps)]

    rng = np.random.default_rng(5)
    for _ in range(4):
        batch, got = Batch(), {name: list[int]() for name in names}
        while any(len(tokens) < steps for tokens in got.values()):
            for i, name in enumerate(names):
                known = name in batch.rows.index
                if not known and len(got[name]) < steps and rng.random() < 0.5:
                    batch.add(name, KINDS[i], seed=1000 + i, prompt=[i, 7], output=got[name])
                elif known and (len(got[name]) == steps or rng.random() < 0.1):
                    batch.remove(name)
            running = [name for name in names if name in batch.rows.index and rng.random() < 0.8]
            rng.shuffle(running)
            if running:
                logits = torch.stack([rounded[len(got[name])][int(name)] for name in running])
                for name, token in zip(running, batch.sample(logits, *running), strict=True):
                    got[name].append(token)
        assert got == alone


def test_seed_and_index_decide() -> None:
    logits = random_logits()
    batch = Batch()
    for id, seed in (("a", 1), ("b", 1), ("c", 2)):
        batch.add(id, SamplingParams(), seed)
    draws = [batch.sample(logits.expand(3, -1)) for _ in range(20)]
    a, b, c = (list(x) for x in zip(*draws, strict=True))
    assert a == b != c
    assert len(set(a)) > 1
    resumed = Batch()
    resumed.add("a", SamplingParams(), 1, output=a[:10])
    assert [resumed.sample(logits)[0] for _ in range(10)] == a[10:]


def test_penalties_by_hand() -> None:
    """Greedy choices from logits whose order the penalties change by a known amount."""
    logits = torch.full((1, 8), -10.0)
    logits[0, :4] = torch.tensor([4.0, 3.0, 2.5, -1.0])
    prompt, output = [0, 0, 5], [1, 1, 2]
    history = {"prompt": prompt, "output": output}

    def after(**penalty: float) -> torch.Tensor:
        batch = Batch()
        batch.add("r", SamplingParams(temperature=0, **penalty), **history)
        changed = logits.clone()
        index = np.array([batch.rows.index["r"]])
        batch.sampler.sample(logits=changed, batch=RowBatch(batch.rows, ["r"], index))
        return changed[0] - logits[0]

    # Repetition: over prompt and output; positive logits divided, negative multiplied.
    change = after(repetition_penalty=2.0)
    assert change.tolist() == [-2.0, -1.5, -1.25, 0, 0, -10.0, 0, 0]
    assert after(presence_penalty=1.5).tolist() == [0, -1.5, -1.5, 0, 0, 0, 0, 0]
    assert after(frequency_penalty=0.5).tolist() == [0, -1.0, -0.5, 0, 0, 0, 0, 0]
    assert after(presence_penalty=1.0, frequency_penalty=0.5).tolist() == [0, -2.0, -1.5, 0, 0, 0, 0, 0]
    assert after(presence_penalty=-1.0).tolist() == [0, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_penalties_follow_the_output(penalty: float) -> None:
    """Greedy decoding with a repetition penalty equals transformers' processor, over hundreds of tokens."""
    processor, prompt = hf.RepetitionPenaltyLogitsProcessor(penalty), [5, 6, 5]
    batch, known = Batch(), list(prompt)
    batch.add("r", SamplingParams(temperature=0, repetition_penalty=penalty), prompt=prompt)
    for step in range(300):
        logits = random_logits(seed=step)
        reference = int(processor(torch.tensor([known]), logits.clone()).argmax())
        assert batch.sample(logits) == [reference]
        known.append(reference)


def test_history_is_rebuilt_when_the_output_is_not_the_known_one() -> None:
    """A request that comes back with another output (or a shorter one) is counted afresh."""
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    logits = torch.tensor([[3.0, 2.0, 0.0, 0.0]])
    batch = Batch()
    batch.add("r", params, prompt=[3], output=[0, 0])
    assert batch.sample(logits) == [1]
    batch.add("r", params, prompt=[3], output=[1, 1, 1])  # replaced, without having been removed
    assert batch.sample(logits) == [0]
    batch.remove("r")
    batch.add("r", params, prompt=[3])
    assert [batch.sample(logits)[0] for _ in range(3)] == [0, 1, 0]
    batch.remove("r")
    batch.add("other", SamplingParams())
    batch.sample(logits)
    assert batch.sampler._histories == {}


def test_id_that_comes_back_with_other_parameters() -> None:
    logits = random_logits()
    batch = Batch()
    batch.add("r", SamplingParams(temperature=0))
    batch.sample(logits)
    batch.remove("r")
    batch.add("r", SamplingParams(temperature=0, logit_bias={17: 100.0}))
    assert batch.sample(logits) == [17]


def test_logit_bias() -> None:
    logits = random_logits()
    best, second = logits[0].topk(2).indices.tolist()
    gap = float(logits[0, best] - logits[0, second])
    batch = Batch()
    batch.add("less", SamplingParams(temperature=0, logit_bias={second: gap * 0.9}))
    batch.add("more", SamplingParams(temperature=0, logit_bias={second: gap * 1.1, best: 0.0}))
    batch.add("ban", SamplingParams(logit_bias={int(best): -100.0}), seed=3)
    batch.add("force", SamplingParams(logit_bias={17: 100.0}), seed=4)
    for _ in range(5):
        less, more, ban, force = batch.sample(logits.expand(4, -1))
        assert (less, more, force) == (best, second, 17)
        assert ban != best


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens(temperature: float) -> None:
    logits = torch.full((1, 50), -20.0)
    logits[0, [10, 11, 12]] = torch.tensor([20.0, 10.0, 0.0])
    params = SamplingParams(temperature=temperature, min_tokens=3, eos_token_ids=(10, 10**6), stop_token_ids=(11,))
    batch = Batch()
    batch.add("r", params)
    assert [batch.sample(logits)[0] for _ in range(4)] == [12, 12, 12, 10]
    ignoring = SamplingParams(temperature=0, min_tokens=3, ignore_eos=True, eos_token_ids=(10,), stop_token_ids=(11,))
    batch = Batch()
    batch.add("r", ignoring)
    assert batch.sample(logits) == [10]


def test_min_tokens_leaves_something_to_choose() -> None:
    """Where another constraint allows only ends, an end is drawn, not a forbidden token."""
    logits = torch.full((1, 10), float("-inf"))
    logits[0, 4] = 1.0
    for temperature in (0.0, 1.0):
        batch = Batch()
        batch.add("r", SamplingParams(temperature=temperature, min_tokens=5, eos_token_ids=(4,)))
        assert batch.sample(logits) == [4]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-4),
        SamplingParams(top_p=1e-4),
        SamplingParams(top_p=1e-46),
        SamplingParams(top_p=1e-300),
        SamplingParams(temperature=1e-4, top_p=1e-4, top_k=3, min_p=0.5),
        SamplingParams(temperature=2.0, min_p=1.0),
        SamplingParams(temperature=1e-5),
    ],
)
def test_extremes_are_near_greedy(params: SamplingParams) -> None:
    logits = random_logits(scale=30.0)
    counts = sample_many(logits, params, 50)
    assert counts[int(logits.argmax())] == 50


@pytest.mark.parametrize("penalty", [1e-10, 1e-40, 1e-46, 1e-300, 1e38, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_extreme_penalties_stay_finite(penalty: float, temperature: float) -> None:
    """Seen tokens become all but certain or all but impossible; banned ones stay banned, and others are left alone."""
    logits = random_logits().abs() + 0.1
    logits[0, 7] = float("-inf")
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    batch = Batch()
    batch.add("extreme", params, prompt=(5, 7, 9))
    batch.add("plain", SamplingParams(temperature=0), prompt=(5,))
    extreme, plain = batch.sample(logits.expand(2, -1))
    assert plain == int(logits.argmax())
    assert (extreme in (5, 9)) if penalty < 1 else (extreme not in (5, 7, 9))


def test_masked_tokens_are_never_drawn() -> None:
    logits = random_logits(scale=0.1)
    allowed = [3, 500, 999]
    masked = torch.full_like(logits, float("-inf"))
    masked[:, allowed] = logits[:, allowed]
    for params in (SamplingParams(), SamplingParams(top_k=50), SamplingParams(top_p=0.99, min_p=0.01)):
        counts = sample_many(masked, params, 300)
        assert counts[allowed].sum() == 300 and (counts[allowed] > 50).all()


def test_ties() -> None:
    """Equals: greedy takes the first; filters keep all of them, whatever their order."""
    logits = torch.zeros(1, 600)
    logits[0, [20, 40, 60, 80]] = 9.0
    batch = Batch()
    batch.add("r", SamplingParams(temperature=0))
    assert batch.sample(logits) == [20]
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.3), SamplingParams(top_k=3, top_p=0.1)):
        counts = sample_many(logits, params, 200)
        assert set(np.flatnonzero(counts)) == {20, 40, 60, 80}


def test_greedy_batch_is_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody draws, sorts or takes a softmax when all rows are greedy."""
    for name in ("softmax", "searchsorted", "topk"):
        monkeypatch.delattr(torch, name, raising=False)
    logits = random_logits(3)
    batch = Batch()
    for id in "abc":
        batch.add(id, SamplingParams(temperature=0))
    assert batch.sample(logits) == logits.argmax(-1).tolist()
