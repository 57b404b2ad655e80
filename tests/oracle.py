"""Greedy output of transformers' `generate`, and comparisons that know near-ties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import exp
from typing import Any, NamedTuple

import numpy as np
import torch
from framework.plugins.samplers.default import uniforms

from framework import Logprobs

NEAR = 2e-4
"""Two float32 logits closer than this may be ranked either way by a correct implementation."""
MOST_NEAR_TIES = 0.005
"""Share of positions that may fall under that rule before a test fails."""
CLOSE = 1e-4
"""Log-probabilities of two correct implementations differ by less."""
TOP = 8
"""How many of each position's likeliest tokens a reference keeps."""


class Reference(NamedTuple):
    """tokens: greedy continuation of `prompt`. tops: at each, the log-probabilities of the TOP likeliest tokens."""

    prompt: list[int]
    tokens: list[int]
    tops: list[dict[int, float]]


@torch.inference_mode()
def reference(model: Any, prompt: Sequence[int], count: int) -> Reference:
    """`count` greedy tokens by transformers, EOS ignored."""
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=None,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([row[0] for row in out.logits]).float().log_softmax(-1).topk(TOP)
    tops = [dict(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return Reference(list(prompt), out.sequences[0, len(prompt) :].tolist(), tops)


def assert_equal(
    references: Sequence[Reference],
    outputs: Sequence[Sequence[Logprobs]],
    again: Callable[[list[int], int], Sequence[Logprobs]],
) -> int:
    """Every output must equal its reference token for token, but for near-ties, after which `again(prompt, count)`
    continues from the reference's token: so every position is compared, with its log-probabilities. Returns the number
    of near-ties; prints and bounds it."""
    near = positions = 0
    for ref, output in zip(references, outputs, strict=True):
        positions += len(ref.tokens)
        start, got = 0, output
        while start < len(ref.tokens):
            assert len(got) == len(ref.tokens) - start, f"{len(got)} tokens, expected {len(ref.tokens) - start}"
            for at, entry in enumerate(got, start):
                _assert_close(entry, ref.tops[at], at)
                if entry.token != ref.tokens[at]:
                    near += 1
                    break
            start = at + 1
            if start < len(ref.tokens):
                got = again(ref.prompt + ref.tokens[:start], len(ref.tokens) - start)
    print(f"near-ties: {near} of {positions} positions")
    assert near <= MOST_NEAR_TIES * positions, f"{near} near-ties in {positions} positions"
    return near


def assert_drawn(outputs: Sequence[Sequence[Logprobs]], seeds: Sequence[int], temperature: float) -> None:
    """Every token is the one that its seed draws from the TOP likeliest and whatever equals the last of them, in order
    of id, or one less than NEAR away. More than TOP may be listed: so are equals."""
    for output, seed in zip(outputs, seeds, strict=True):
        draws = uniforms(np.full(len(output), seed, np.uint64), np.arange(len(output), dtype=np.uint64))
        for entry, draw in zip(output, draws.tolist(), strict=True):
            assert any(begin - NEAR < draw < begin + share + NEAR for begin, share in _shares(entry, temperature)), (
                f"{draw} does not draw {entry}"
            )


def _shares(entry: Logprobs, temperature: float) -> Iterator[tuple[float, float]]:
    """Where the token's share begins among those of the tokens that may be drawn, and how large it is. One per set of
    them that there may have been: of log-probabilities that equal the last of the TOP some do so by rounding only."""
    listed = {**dict(entry.top), entry.token: entry.logprob}  # a token may be left out of a list whose last it equals
    least = sorted((value for _, value in entry.top), reverse=True)[TOP - 1]
    above = [token for token, value in listed.items() if value > least]
    equal = [token for token, value in listed.items() if value == least]
    for count in range(TOP - len(above), len(equal) + 1):
        for some in combinations(equal, count):
            weights = {token: exp(listed[token] / temperature) for token in (*above, *some)}
            if entry.token in weights:
                total = sum(weights.values())
                yield (
                    sum(weight for token, weight in weights.items() if token < entry.token) / total,
                    weights[entry.token] / total,
                )


def assert_same(expected: Sequence[Sequence[Logprobs]], outputs: Sequence[Sequence[Logprobs]]) -> None:
    """Drawn outputs are equal token for token and in their log-probabilities, up to a near-tie in few of them; that it
    is one, `assert_drawn` has to say of both. What follows one is another story, and not compared."""
    near = 0
    for one, other in zip(expected, outputs, strict=True):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            if mine.token != theirs.token:
                near += 1
                break
            assert abs(mine.logprob - theirs.logprob) < CLOSE
    positions = sum(map(len, expected))
    print(f"near-ties: {near} of {positions} draws")
    assert near <= MOST_NEAR_TIES * positions, f"{near} of {len(expected)} outputs differ"


def _assert_close(entry: Logprobs, top: dict[int, float], at: int) -> None:
    """The token is the reference's best or nearly so; so are those listed beside it, and their values."""
    values = sorted(top.values(), reverse=True)
    behind = values[0] - top.get(entry.token, float("-inf"))
    assert behind < NEAR, f"token {at} is {entry.token}, {behind:.2g} behind the best of {top}"
    for (token, value), expected in zip([(entry.token, entry.logprob), *entry.top], values[:1] + values, strict=False):
        assert token in top, f"token {at}: {token} is listed, and none of {top}"
        assert abs(value - top[token]) < CLOSE, f"token {at}: log-probability {value} of {token}, not {top[token]}"
        assert value > expected - NEAR, f"token {at}: {token} is listed before a likelier one of {top}"
