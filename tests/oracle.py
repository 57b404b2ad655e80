"""Greedy output of transformers' `generate`, and the comparison that knows near-ties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

NEAR = 2e-4
"""Two float32 logits closer than this may be ranked either way by a correct implementation."""
MOST_NEAR_TIES = 0.005
"""Share of positions that may fall under that rule before a test fails."""


class Reference(NamedTuple):
    """tokens: greedy continuation of `prompt`. gaps: best minus second best logit at each. logprobs: of each token."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    logprobs: list[float]


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
    logits = torch.stack([row[0] for row in out.logits]).float()
    best = logits.topk(2, -1).values
    tokens = out.sequences[0, len(prompt) :]
    logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return Reference(list(prompt), tokens.tolist(), (best[:, 0] - best[:, 1]).tolist(), logprobs.tolist())


def assert_equal(
    references: Sequence[Reference], outputs: Sequence[Sequence[int]], again: Callable[[list[int], int], Sequence[int]]
) -> int:
    """Every output must equal its reference token for token, but for near-ties, after which `again(prompt, count)`
    continues from the reference's token. Returns the number of near-ties; prints and bounds it."""
    near = positions = 0
    for ref, output in zip(references, outputs, strict=True):
        positions += len(ref.tokens)
        start, got = 0, list(output)
        while got != ref.tokens[start:]:
            assert len(got) == len(ref.tokens) - start, f"{len(got)} tokens, expected {len(ref.tokens) - start}"
            at = start + next(i for i, (a, b) in enumerate(zip(got, ref.tokens[start:], strict=True)) if a != b)
            assert ref.gaps[at] < NEAR, (
                f"token {at} is {got[at - start]}, transformers has {ref.tokens[at]}, {ref.gaps[at]:.2g} ahead"
            )
            near += 1
            start = at + 1
            if start == len(ref.tokens):
                break
            got = list(again(ref.prompt + ref.tokens[:start], len(ref.tokens) - start))
    print(f"near-ties: {near} of {positions} positions")
    assert near <= MOST_NEAR_TIES * positions, f"{near} near-ties in {positions} positions"
    return near
