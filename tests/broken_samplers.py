"""Samplers with one fault each, and the unbroken one that they are made from."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from framework import SampleBatch, Sampled, SamplingParams, hookimpl

Array = np.ndarray[Any, Any]


class Toy:
    """Unbroken, a row at a time."""

    @hookimpl
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        self.begin(batch)
        self.empty: list[bool] = []
        tokens = [self.token(logits[row].double().numpy(), batch, at) for row, at in enumerate(self.owners(batch))]
        return Sampled(torch.tensor(tokens), torch.tensor(self.empty))

    def begin(self, batch: SampleBatch) -> None:
        pass

    def owners(self, batch: SampleBatch) -> list[int]:
        return list(batch.owner)

    def token(self, x: Array, batch: SampleBatch, at: int) -> int:
        params, id = batch.params[at], batch.ids[at]
        self.penalise(x, params, batch.prompt_tokens(id), batch.output_tokens(id))
        for token, bias in params.logit_bias.items():
            x[token] += bias
        self.limit(x, params, batch.output_tokens(id).tolist())
        self.empty.append(self.nothing_left(x))
        if self.too_early(params, batch.output_len[at]):
            self.ban(x, [end for end in params.ends if end < len(x)])
        if params.greedy:
            return self.likeliest(x)
        x = np.exp((x - x.max()) / params.temperature)
        order = np.argsort(-x, kind="stable")
        kept = self.filter(x[order] / x.sum(), params)
        within = np.cumsum(kept) / kept.sum()
        uniform = self.uniform(int(batch.seeds[at]), batch.output_len[at])
        return int(order[min(np.searchsorted(within, uniform, "right"), np.flatnonzero(kept)[-1])])

    def limit(self, x: Array, params: SamplingParams, output: list[int]) -> None:
        if params.allowed_token_ids:
            kept = {token: x[token] for token in params.allowed_token_ids}
            x[:] = -np.inf
            x[[*kept]] = [*kept.values()]
        for *before, token in params.bad_token_ids:
            if self.follows(output, before):
                x[token] = -np.inf

    def follows(self, output: list[int], before: list[int]) -> bool:
        return output[max(0, len(output) - len(before)) :] == before

    def nothing_left(self, x: Array) -> bool:
        empty = bool(x.max() == -np.inf)
        x[0] = 0.0 if empty else x[0]
        return empty

    def penalise(self, x: Array, params: SamplingParams, prompt: Array, output: Array) -> None:
        for token in {*prompt.tolist(), *output.tolist()}:
            repetition = min(max(params.repetition_penalty, 1e-30), 1e30)
            x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        for token, count in self.counts(prompt, output).items():
            x[token] -= params.presence_penalty + params.frequency_penalty * count

    def counts(self, prompt: Array, output: Array) -> Counter[int]:
        return Counter(output.tolist())

    def too_early(self, params: SamplingParams, length: int) -> bool:
        return length < params.min_tokens

    def ban(self, x: Array, ends: list[int]) -> None:
        before = x[ends]
        x[ends] = -np.inf
        if x.max() == -np.inf:
            x[ends] = before

    def likeliest(self, x: Array) -> int:
        return int(x.argmax())

    def filter(self, probs: Array, params: SamplingParams) -> Array:
        """Of probabilities in descending order; what is left need not add up to 1."""
        probs = np.where(probs < params.min_p * probs[0], 0, probs)
        if params.top_k > 0:
            probs[self.top_k(params) :] = 0
        return self.nucleus(probs / probs.sum(), params.top_p)

    def top_k(self, params: SamplingParams) -> int:
        return params.top_k

    def nucleus(self, probs: Array, top_p: float) -> Array:
        return np.where(np.cumsum(probs) - probs < top_p, probs, 0)

    def uniform(self, seed: int, index: int) -> float:
        return float(np.random.default_rng([seed, index]).random())


class AnswersWithNumbers(Toy):
    """Its tokens are int32."""

    @hookimpl
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        return Sampled(super().sample(logits, batch).tokens.int())


class TakesTheLastOfEquals(Toy):
    def likeliest(self, x: Array) -> int:
        return len(x) - 1 - int(x[::-1].argmax())


class TakesTheExecutorsWord(Toy):
    """Greedy requests get the likeliest token, whatever else they asked for."""

    @hookimpl
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        tokens = super().sample(logits, batch).tokens
        if batch.likeliest is not None:
            greedy = torch.tensor([batch.params[owner].greedy for owner in batch.owner])
            tokens = torch.where(greedy, batch.likeliest, tokens)
        return Sampled(tokens)


class AllowsTheEnds(Toy):
    """Whatever is allowed."""

    def limit(self, x: Array, params: SamplingParams, output: list[int]) -> None:
        ends = {end: x[end] for end in params.ends if end < len(x)}
        super().limit(x, params, output)
        x[[*ends]] = [*ends.values()]


class BansWhereverTheyWere(Toy):
    """What went before anywhere in the output, not only at its end."""

    def follows(self, output: list[int], before: list[int]) -> bool:
        return all(token in output for token in before)


class LooksAtOneTokenBefore(Toy):
    def follows(self, output: list[int], before: list[int]) -> bool:
        return super().follows(output, before[-1:])


class DrawsFromNothing(Toy):
    """Says nothing when nothing is left."""

    def nothing_left(self, x: Array) -> bool:
        super().nothing_left(x)
        return False


class IgnoresTheSeed(Toy):
    def uniform(self, seed: int, index: int) -> float:
        return float(np.random.default_rng().random())


class DrawsFromTheGlobalGenerator(Toy):
    def uniform(self, seed: int, index: int) -> float:
        return float(torch.rand(()))


class IgnoresTheIndex(Toy):
    def uniform(self, seed: int, index: int) -> float:
        return super().uniform(seed, 0)


class CutsSeedsInHalf(Toy):
    """Its generator takes 32 bits."""

    def uniform(self, seed: int, index: int) -> float:
        return super().uniform(seed % 2**32, index)


class CountsItsOwnSteps(Toy):
    """Takes its calls for the output's index."""

    steps = 0

    def begin(self, batch: SampleBatch) -> None:
        self.steps += 1

    def uniform(self, seed: int, index: int) -> float:
        return super().uniform(seed, self.steps)


class DrawsInTurn(Toy):
    """One generator for the whole batch, seeded by the request that comes first."""

    def begin(self, batch: SampleBatch) -> None:
        self.generator = np.random.default_rng([int(batch.seeds[0]), batch.output_len[0]])

    def uniform(self, seed: int, index: int) -> float:
        return float(self.generator.random())


class TakesRowsForRequests(Toy):
    def owners(self, batch: SampleBatch) -> list[int]:
        return list(range(len(batch.owner)))


class KeepsOneMoreThanTopK(Toy):
    def top_k(self, params: SamplingParams) -> int:
        return params.top_k + 1


class KeepsNoMoreThan256(Toy):
    """Sorts the likeliest 256 alone."""

    def top_k(self, params: SamplingParams) -> int:
        return min(params.top_k, 256)

    def filter(self, probs: Array, params: SamplingParams) -> Array:
        return super().filter(np.where(np.arange(len(probs)) < 256, probs, 0), params)


class KeepsOneMoreThanTopP(Toy):
    def nucleus(self, probs: Array, top_p: float) -> Array:
        count = int((np.cumsum(probs) - probs < top_p).sum())
        return np.where(np.arange(len(probs)) <= count, probs, 0)


class NeverNormalisesTopP(Toy):
    """Takes top-p of what there was before the other filters."""

    def filter(self, probs: Array, params: SamplingParams) -> Array:
        rest = super().filter(probs, SamplingParams(min_p=params.min_p, top_k=params.top_k))
        return np.where(rest > 0, self.nucleus(probs, params.top_p), 0)


class PenalisesThePrompt(Toy):
    def counts(self, prompt: Array, output: Array) -> Counter[int]:
        return Counter([*prompt.tolist(), *output.tolist()])


class OnlyDivides(Toy):
    """Makes negative logits of seen tokens likelier."""

    def penalise(self, x: Array, params: SamplingParams, prompt: Array, output: Array) -> None:
        x[np.unique([*prompt, *output]).astype(int)] /= params.repetition_penalty
        super().penalise(x, SamplingParams(presence_penalty=params.presence_penalty), prompt, output)


class EndsOneEarly(Toy):
    def too_early(self, params: SamplingParams, length: int) -> bool:
        return length + 1 < params.min_tokens


class BansByALargeNumber(Toy):
    """Draws what a grammar forbids rather than an end."""

    def ban(self, x: Array, ends: list[int]) -> None:
        x[ends] = -np.inf
        x[:] = np.maximum(x, -1e9)


class KeepsTheFirstParameters(Toy):
    """By id, for as long as it lives."""

    def __init__(self) -> None:
        self.known: dict[str, Counter[int]] = {}

    def token(self, x: Array, batch: SampleBatch, at: int) -> int:
        self.now = self.known.setdefault(batch.ids[at], Counter(batch.output_tokens(batch.ids[at]).tolist()))
        token = super().token(x, batch, at)
        self.now[token] += 1
        return token

    def counts(self, prompt: Array, output: Array) -> Counter[int]:
        return self.now


class KeepsWhoLeft(Toy):
    """A set that only grows."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def begin(self, batch: SampleBatch) -> None:
        self.seen.update(batch.added)


class SortsTheOutput(Toy):
    """In place, to count it."""

    def counts(self, prompt: Array, output: Array) -> Counter[int]:
        output.sort()
        return Counter(output.tolist())
