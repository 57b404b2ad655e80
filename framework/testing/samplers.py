"""What every sampler must do, as tests: against exact probabilities."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ..batch import RowBatch
from ..registry import load_plugins
from ..settings import Settings
from ..types import SamplingParams
from .limits import Limits
from .reach import reachable
from .sampling import Sampling, random_logits

Array = np.ndarray[Any, Any]
GREEDY = SamplingParams(temperature=0)
PROMPT, OUTPUT = (4, 4, 9), (5, 5, 7)
CASES = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=2.0),
    "hotter": SamplingParams(temperature=5.0),
    "hottest": SamplingParams(temperature=1e6),
    "as hot as can be": SamplingParams(temperature=1.7e308),
    "top_k": SamplingParams(top_k=7),
    "top_k of one": SamplingParams(top_k=1),
    "top_k off": SamplingParams(top_k=-1),
    "top_k above the vocabulary": SamplingParams(top_k=10**7),
    "top_p": SamplingParams(top_p=0.8),
    "top_p near 1": SamplingParams(top_p=0.999),
    "min_p": SamplingParams(min_p=0.1),
    "top_p of top_k": SamplingParams(top_k=12, top_p=0.7),
    "top_p of min_p": SamplingParams(min_p=0.1, top_p=0.7),
    "filters when hot": SamplingParams(temperature=1.6, min_p=0.05, top_p=0.9),
    "filters when hotter": SamplingParams(temperature=5.0, min_p=0.6, top_k=30, top_p=0.9),
    "top_k when hottest": SamplingParams(temperature=1e6, top_k=7),
    "top_p when hottest": SamplingParams(temperature=1e6, top_p=0.29),
    "filters when hottest": SamplingParams(temperature=1e6, min_p=0.9, top_k=30, top_p=0.51),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=-0.7),
    "bias": SamplingParams(logit_bias={3: 1.5, 8: -2.0, 20: -100.0}),
    "min_tokens": SamplingParams(min_tokens=4, stop_token_ids=(1, 2), eos_token_ids=(3, 10**6)),
    "min_tokens reached": SamplingParams(min_tokens=3, stop_token_ids=(1, 2), eos_token_ids=(3,)),
    "allowed": SamplingParams(allowed_token_ids=(3, 9, 20, 31, 3)),
    "allowed with others": SamplingParams(allowed_token_ids=tuple(range(5, 40)), top_k=7, logit_bias={3: 9.0, 20: 2.0}),
    "bad tokens": SamplingParams(bad_token_ids=((11,), (30,), (11,), (7, 40), (5, 41), (5, 7, 42), (4, 5, 5, 7, 43))),
    "bad and allowed": SamplingParams(allowed_token_ids=(1, 2, 40, 42), bad_token_ids=((2,), (7, 42)), top_p=0.9),
    "all": SamplingParams(
        temperature=1.3, min_p=0.02, top_k=30, top_p=0.9, repetition_penalty=0.8, logit_bias={9: 1.0}
    ),
}
EXTREMES = (
    SamplingParams(temperature=1e-4),
    SamplingParams(temperature=1e-5),
    SamplingParams(top_p=1e-4),
    SamplingParams(top_p=1e-46),
    SamplingParams(top_p=1e-300),
    SamplingParams(temperature=1e-4, top_p=1e-4, top_k=3, min_p=0.5),
    SamplingParams(temperature=2.0, min_p=1.0),
)
FREE = (
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.7),
    SamplingParams(top_k=900, top_p=0.99),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=50.0, top_k=40, top_p=0.8),
    SamplingParams(temperature=0, repetition_penalty=1.8),
    SamplingParams(presence_penalty=1.5, frequency_penalty=-0.5),
    SamplingParams(logit_bias={1: 5.0, 2: -100.0}),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=0.7, frequency_penalty=2.0),
    SamplingParams(min_tokens=3, stop_token_ids=(1, 2, 3), eos_token_ids=(4,)),
)
"""Those that may generate everything."""
KINDS = (
    *FREE,
    SamplingParams(allowed_token_ids=(1, 2, 3, 4), bad_token_ids=((1, 2), (2, 2), (3, 4, 1), (4,)), temperature=1.5),
    SamplingParams(allowed_token_ids=tuple(range(9)), bad_token_ids=((7, 8), (8, 7), (5, 5)), temperature=0),
    SamplingParams(allowed_token_ids=(6, 8), bad_token_ids=((6, 6), (6, 8), (8, 8))),
)


def probabilities(
    logits: Array, params: SamplingParams, prompt: Sequence[int] = PROMPT, output: Sequence[int] = ()
) -> Array:
    """float64 [vocab]: how likely each token is, given logits [vocab]. In order: penalties, bias, allowed and bad
    tokens, `min_tokens`, temperature, min-p, top-k, top-p."""
    x = np.array(logits, np.float64)
    seen, counts = np.unique([*prompt, *output]).astype(int), np.bincount([*output], minlength=len(x))
    x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    x -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if params.allowed_token_ids:
        x[sorted(set(range(len(x))) - set(params.allowed_token_ids))] = -np.inf
    for *before, token in params.bad_token_ids:
        if before == [*output][len(output) - len(before) :]:
            x[token] = -np.inf
    if len(output) < params.min_tokens:
        x[[token for token in params.ends if token < len(x)]] = -np.inf
    if params.greedy:
        only: Array = np.eye(1, len(x), int(x.argmax()))[0]
        return only
    probs: Array = np.exp((x - x.max()) / params.temperature)
    probs[probs < params.min_p * probs.max()] = 0
    if 0 < params.top_k < len(x):
        probs[probs < np.sort(probs)[-params.top_k]] = 0
    order = np.argsort(-probs)
    ordered = probs[order] / probs.sum()
    probs[order[np.cumsum(ordered) - ordered >= params.top_p]] = 0
    probs /= probs.sum()
    return probs


class SamplerConformance(Limits):
    """Subclass it in a test module, and pytest runs the tests below on your sampler::

        from framework.testing import SamplerConformance

        class TestMine(SamplerConformance):
            provider = "mine"

    For one that is not installed, override `sampler`. A row whose logits are not finite is none of its business: the
    executor reports it and shows zeros instead. Single tokens may be masked (-inf).
    """

    provider: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = "cpu"
    draws: ClassVar[int] = 10_000
    """For each distribution: the fewer, the less is noticed."""

    def sampler(self) -> object:
        """A new one."""
        created: object = load_plugins().create("sampler", self.provider, self.options, settings=Settings())
        return created

    def _sampling(self) -> Sampling:
        return Sampling(self.sampler(), self.device)

    def _draw(self, logits: torch.Tensor, params: SamplingParams, count: int, **known: Any) -> Array:
        """How often each token is drawn from one row of logits by `count` requests with different seeds."""
        sampling = self._sampling()
        for seed in range(count):
            sampling.add(str(seed), params, seed, **known)
        return np.bincount(sampling.sample(logits.expand(count, -1)), minlength=logits.shape[-1])

    # What is drawn

    def test_greedy_takes_the_first_of_the_likeliest(self) -> None:
        """Whatever the filters: at temperature 0, and just above."""
        logits = random_logits(4)
        logits[2, [30, 20, 40]] = 99.0
        logits[3] = 0.0
        for params in (GREEDY, SamplingParams(temperature=9e-6), SamplingParams(temperature=0, top_p=0.1, top_k=2)):
            sampling = self._sampling()
            for id in "abcd":
                sampling.add(id, params)
            found, expected = sampling.sample(logits), logits.numpy().argmax(-1).tolist()
            assert found == expected, f"{params}: {found} instead of {expected}"

    def test_frequencies(self) -> None:
        """Tokens are drawn as often as they are likely, over seeds: chi-square."""
        logits = random_logits(vocab=60, scale=1.5)
        for name, params in CASES.items():
            counts = self._draw(logits, params, self.draws, prompt=PROMPT, output=OUTPUT)
            _compare(name, counts, probabilities(logits[0].numpy(), params, PROMPT, OUTPUT))

    def test_frequencies_of_many(self) -> None:
        """The same where hundreds of tokens are about as likely."""
        logits = random_logits(vocab=1200, scale=0.3)
        for params in (
            SamplingParams(),
            SamplingParams(top_k=700),
            SamplingParams(top_p=0.6),
            SamplingParams(min_p=0.3),
        ):
            counts, probs = self._draw(logits, params, self.draws), probabilities(logits[0].numpy(), params)
            by_rank = np.argsort(-probs, kind="stable").reshape(40, -1)
            _compare(f"of many, {params}", counts[by_rank].sum(1), probs[by_rank].sum(1))

    def test_frequencies_over_indices(self) -> None:
        """The same over the outputs of few requests."""
        logits = random_logits(vocab=30, scale=1.0)
        params, few = SamplingParams(), 50
        sampling, counts = self._sampling(), np.zeros(30, np.int64)
        for seed in range(few):
            sampling.add(str(seed), params, seed)
        for _ in range(self.draws // few):
            counts += np.bincount(sampling.sample(logits.expand(few, -1)), minlength=30)
        _compare("over indices", counts, probabilities(logits[0].numpy(), params))

    def test_extremes_are_near_greedy(self) -> None:
        logits = random_logits(scale=30.0)
        for params in EXTREMES:
            assert self._draw(logits, params, 50)[int(logits.argmax())] == 50, f"{params}: not always the likeliest"

    def test_masked_tokens_are_never_drawn(self) -> None:
        """-inf is a ban, by a grammar mostly: nothing outweighs it, and where one token is left, it is drawn."""
        logits, allowed = random_logits(scale=0.1), [3, 500, 999]
        masked = torch.full_like(logits, -torch.inf)
        masked[:, allowed] = logits[:, allowed]
        for params in (SamplingParams(), SamplingParams(top_k=50), SamplingParams(top_p=0.99, min_p=0.01)):
            counts = self._draw(masked, params, 300)
            assert counts[allowed].sum() == 300, f"{params}: drew {np.flatnonzero(counts)}, allowed are {allowed}"
            assert (counts[allowed] > 50).all(), f"{params}: drew {counts[allowed]} times what is about as likely"
        masked[:, allowed[1:]] = -torch.inf
        biased = SamplingParams(logit_bias={5: 100.0}, repetition_penalty=0.1, frequency_penalty=-2.0)
        ending = SamplingParams(min_tokens=9, stop_token_ids=(3,))
        for params in (*FREE, biased, ending, SamplingParams(temperature=0, min_tokens=9, eos_token_ids=(3,))):
            assert self._draw(masked, params, 5, output=(5, 6))[3] == 5, f"{params}: 3 was the only token left"

    # What a draw depends on

    def test_seed_and_index_decide(self) -> None:
        """The same (seed, output index) draws the same, other ones independently; nothing global plays a part."""
        logits, seeds = random_logits(), (1, 1, 2, 2**64 - 1, 2**63, 2**32 + 1)
        runs = []
        for salt in (1, 2):
            sampling = self._sampling()
            for i, seed in enumerate(seeds):
                sampling.add(str(i), SamplingParams(), seed)
            random.seed(salt)
            np.random.seed(salt)
            torch.manual_seed(salt)
            steps = [sampling.sample(logits.expand(len(seeds), -1)) for _ in range(20)]
            runs.append([list(output) for output in zip(*steps, strict=True)])
        outputs = runs[0]
        assert outputs == runs[1], "the same seeds, and other tokens"
        assert outputs[0] == outputs[1], "requests of the same seed differ"
        assert len({tuple(output) for output in outputs}) == len(seeds) - 1, "requests of different seeds do not differ"
        assert all(len(set(output)) > 1 for output in outputs), "a request draws the same at every index"
        resumed = self._sampling()
        resumed.add("0", SamplingParams(), 1, output=outputs[0][:10])
        assert [resumed.sample(logits)[0] for _ in range(10)] == outputs[0][10:], "a resumed request draws otherwise"

    def test_company_changes_nothing(self) -> None:
        """Alone, together, and with others that come, go, sit out and are resumed, in any order: each gets the same
        tokens. Logits are rounded to bfloat16: full of ties."""
        steps, names = 12, [str(i) for i in range(len(KINDS))]
        rounded = [random_logits(len(KINDS), seed=step).bfloat16().float() for step in range(steps)]
        alone: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            sampling = self._sampling()
            sampling.add(name, KINDS[i], seed=1000 + i, prompt=[i, 7])
            alone[name] = [sampling.sample(rounded[step][i : i + 1])[0] for step in range(steps)]
        rng = np.random.default_rng(5)
        for _ in range(4):
            sampling, got = self._sampling(), {name: list[int]() for name in names}
            while any(len(tokens) < steps for tokens in got.values()):
                for i, name in enumerate(names):
                    known = name in sampling.rows.index
                    if not known and len(got[name]) < steps and rng.random() < 0.5:
                        sampling.add(name, KINDS[i], seed=1000 + i, prompt=[i, 7], output=got[name])
                    elif known and (len(got[name]) == steps or rng.random() < 0.1):
                        sampling.remove(name)
                running = [name for name in names if name in sampling.rows.index and rng.random() < 0.8]
                rng.shuffle(running)
                if running:
                    logits = torch.stack([rounded[len(got[name])][int(name)] for name in running])
                    for name, token in zip(running, sampling.sample(logits, *running), strict=True):
                        got[name].append(token)
            for i, name in enumerate(names):
                assert got[name] == alone[name], f"{KINDS[i]}: in company {got[name]}, alone {alone[name]}"

    def test_owner_says_whose_row_it_is(self) -> None:
        """`batch.owner[row]` is an index into what is listed by request."""
        logits = random_logits(len(KINDS))
        sampling, order = self._sampling(), np.random.default_rng(0).permutation(len(KINDS)).tolist()
        for i, params in enumerate(KINDS):
            sampling.add(str(i), params, i, prompt=[i, 7], output=[int(logits[i].argmax())])
        expected = sampling.answer(logits, sampling.batch())
        sampling.rows.settle()
        batch = sampling.batch()  # of the same requests: nobody came or left
        batch.owner = order
        found = sampling.answer(logits[order], batch)
        assert found == [expected[i] for i in order], f"rows of requests {order}: {found}, in order {expected}"

    # What a request asks for

    def test_penalties_by_hand(self) -> None:
        """Repetition: positive logits divided, negative ones multiplied, of prompt and output. Presence and frequency:
        taken off tokens of the output alone. A rival just above or below the result tells what it is."""
        logits, prompt, output = {0: 4.0, 1: 3.0, 2: 2.5, 3: -1.0, 5: -10.0}, [0, 0, 5], [1, 1, 2]
        expected: list[tuple[SamplingParams, dict[int, float]]] = [
            (SamplingParams(temperature=0, repetition_penalty=2.0), {0: 2.0, 1: 1.5, 2: 1.25, 3: -1.0, 5: -20.0}),
            (SamplingParams(temperature=0, presence_penalty=1.5), {0: 4.0, 1: 1.5, 2: 1.0, 3: -1.0, 5: -10.0}),
            (SamplingParams(temperature=0, frequency_penalty=0.5), {0: 4.0, 1: 2.0, 2: 2.0, 3: -1.0, 5: -10.0}),
            (
                SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.5),
                {0: 4.0, 1: 1.0, 2: 1.0, 3: -1.0, 5: -10.0},
            ),
            (SamplingParams(temperature=0, presence_penalty=-1.0), {0: 4.0, 1: 4.0, 2: 3.5, 3: -1.0, 5: -10.0}),
        ]
        for params, results in expected:
            for token, result in results.items():
                for margin, winner in ((0.01, 7), (-0.01, token)):
                    row = torch.full((1, 8), -1000.0)
                    row[0, token], row[0, 7] = logits[token], result + margin
                    sampling = self._sampling()
                    sampling.add("r", params, prompt=prompt, output=output)
                    (found,) = sampling.sample(row)
                    assert found == winner, f"{params}: {logits[token]} of token {token} does not become {result}"

    def test_penalties_follow_the_output(self) -> None:
        """Token by token, they are those of all that is known."""
        for params in (
            SamplingParams(temperature=0, repetition_penalty=1.3),
            SamplingParams(temperature=0, repetition_penalty=0.8, frequency_penalty=0.4, presence_penalty=-0.3),
        ):
            sampling, output = self._sampling(), list[int]()
            sampling.add("r", params, prompt=PROMPT)
            for step in range(80):
                logits = random_logits(vocab=20, seed=step)
                expected = int(probabilities(logits[0].numpy(), params, PROMPT, output).argmax())
                assert sampling.sample(logits) == [expected], f"{params}, after {output}"
                output.append(expected)

    def test_extreme_penalties_stay_finite(self) -> None:
        """Seen tokens become all but certain or all but impossible; masked ones stay so, and others are left alone."""
        logits = random_logits().abs() + 0.1
        logits[0, 7] = -torch.inf
        for penalty in (1e-10, 1e-40, 1e-46, 1e-300, 1e38, 1e300):
            for temperature in (0.0, 1e-5, 1.0):
                sampling = self._sampling()
                params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
                sampling.add("extreme", params, prompt=(5, 7, 9))
                sampling.add("plain", GREEDY, prompt=(5,))
                extreme, plain = sampling.sample(logits.expand(2, -1))
                assert plain == int(logits.argmax()), f"{params} changed another request"
                assert (extreme in (5, 9)) if penalty < 1 else (extreme not in (5, 7, 9)), f"{params}: drew {extreme}"

    def test_logit_bias(self) -> None:
        logits = random_logits()
        best, second = logits[0].topk(2).indices.tolist()
        gap = float(logits[0, best] - logits[0, second])
        sampling = self._sampling()
        sampling.add("less", SamplingParams(temperature=0, logit_bias={second: gap * 0.9}))
        sampling.add("more", SamplingParams(temperature=0, logit_bias={second: gap * 1.1, best: 0.0}))
        sampling.add("ban", SamplingParams(logit_bias={best: -100.0}), seed=3)
        sampling.add("force", SamplingParams(logit_bias={17: 100.0}), seed=4)
        for _ in range(5):
            less, more, ban, force = sampling.sample(logits.expand(4, -1))
            assert (less, more, force) == (best, second, 17)
            assert ban != best

    def test_min_tokens(self) -> None:
        """No EOS and no stop id before that many tokens, and either from then on. Checkpoints name EOS ids beyond the
        vocabulary; `ignore_eos` makes of EOS a token like others."""
        logits = torch.full((1, 50), -20.0)
        logits[0, [10, 11, 12]] = torch.tensor([20.0, 10.0, 0.0])
        ends: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": (11,)}
        for temperature in (0.0, 1.0):
            sampling = self._sampling()
            sampling.add("r", SamplingParams(temperature=temperature, eos_token_ids=(10, 10**6), **ends))
            found = [sampling.sample(logits)[0] for _ in range(4)]
            assert found == [12, 12, 12, 10], f"10 and 11 end the output, after three tokens: {found}"
            resumed = self._sampling()
            resumed.add("r", SamplingParams(temperature=temperature, eos_token_ids=(10,), **ends), output=(12, 12))
            found = [resumed.sample(logits)[0] for _ in range(2)]
            assert found == [12, 10], f"two tokens were known, and one was missing: {found}"
        sampling = self._sampling()
        sampling.add("r", SamplingParams(temperature=0, ignore_eos=True, eos_token_ids=(10,), **ends))
        assert sampling.sample(logits) == [10]

    # What it keeps, and what it leaves alone

    def test_an_id_may_come_back(self) -> None:
        """With a shorter output, another one, or other parameters: nothing is left of the request before."""
        params = SamplingParams(temperature=0, frequency_penalty=2.0)
        logits = torch.tensor([[3.0, 2.0, 0.0, 0.0]])
        sampling = self._sampling()
        sampling.add("r", params, prompt=[3], output=[0, 0])
        assert sampling.sample(logits) == [1]
        sampling.add("r", params, prompt=[3], output=[1, 1, 1])  # replaced, without having been removed
        assert sampling.sample(logits) == [0]
        sampling.remove("r")
        sampling.add("r", params, prompt=[3])
        assert [sampling.sample(logits)[0] for _ in range(3)] == [0, 1, 0]
        sampling.remove("r")
        sampling.add("r", SamplingParams(temperature=0, logit_bias={2: 100.0}))
        assert sampling.sample(logits) == [2]

    def test_forgets_who_left(self) -> None:
        """Nothing that it refers to names a request that was removed."""
        sampling, logits = self._sampling(), random_logits(len(KINDS))
        for turn in range(3):
            gone = [f"gone {turn} {i}" for i in range(len(KINDS))]
            for id, params in zip(gone, KINDS, strict=True):
                sampling.add(id, params)
            for _ in range(2):
                sampling.sample(logits)
            sampling.remove(*gone)
        sampling.add("other", KINDS[-2])
        for _ in range(2):
            sampling.sample(logits[:1])
        kept = {one for one in reachable(sampling.sampler) if isinstance(one, str) and one.startswith("gone ")}
        assert not kept, f"it still knows {sorted(kept)}"

    def test_leaves_what_it_is_shown_alone(self) -> None:
        """The logits are its own; the batch is not."""
        sampling = self._sampling()
        for i, params in enumerate(KINDS):
            sampling.add(str(i), params, i, prompt=[9, i, 7], output=[3, i, 1])
        for step in range(3):
            batch = sampling.batch()
            before = _snapshot(batch)
            sampling.answer(random_logits(len(KINDS), seed=step), batch)
            for name, value in _snapshot(batch).items():
                assert value == before[name], f"it changed {name} from {before[name]} to {value}"
            sampling.rows.settle()


def _compare(name: str, counts: Array, probs: Array) -> None:
    never = np.flatnonzero((probs == 0) & (counts > 0))
    assert not len(never), f"{name}: drew tokens {never.tolist()}, which are filtered out"
    often = probs * counts.sum() >= 5
    seen = np.append(counts[often], counts[~often].sum())
    due = np.append(probs[often], probs[~often].sum()) * counts.sum()
    seen, due = seen[due > 0], due[due > 0]
    chi2, free = float(((seen - due) ** 2 / due).sum()), max(1, len(due) - 1)
    # Wilson and Hilferty: the quantile of chi-square that chance exceeds once in 30,000 runs (4 sigma).
    most = free * (1 - 2 / (9 * free) + 4 * (2 / (9 * free)) ** 0.5) ** 3
    assert chi2 < most, f"{name}: chi-square {chi2:.0f} with {free} degrees of freedom, chance stays below {most:.0f}"


def _snapshot(batch: RowBatch) -> dict[str, Any]:
    names = ("ids", "params", "extra", "owner", "output_len", "added", "removed")
    shown: dict[str, Any] = {name: repr(list(getattr(batch, name))) for name in names}
    shown["seeds"] = batch.seeds.tolist()
    for id in list(batch.ids):
        shown[f"the prompt of {id}"] = batch.prompt_tokens(id).tolist()
        shown[f"the output of {id}"] = batch.output_tokens(id).tolist()
    return shown
