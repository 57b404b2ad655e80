"""Log-probabilities of tokens that were sampled, and of a prompt's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np
import torch

from .batch import Scores
from .plan import Logprobs

ROWS = 128
"""Rows of a prompt whose logits are held at once: of all tokens of a step they may be gigabytes."""


def score(
    head: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, tokens: torch.Tensor, scores: Scores
) -> dict[str, tuple[Logprobs, ...]]:
    """Of prompt tokens, by request. head: see `Model.logits`. states: what it takes, of `scores.rows`. tokens: int64,
    `scores.tokens` on the device. Waits for the device."""
    found = list[Logprobs]()
    for at in range(0, len(states), ROWS):
        logprobs = torch.log_softmax(head(states[at : at + ROWS]).float(), -1)
        found += log_probabilities(logprobs, tokens[at : at + ROWS], scores.counts[at : at + ROWS])
    rest = iter(found)
    return {id: tuple(islice(rest, count)) for id, count in zip(scores.ids, scores.lens, strict=True)}


def log_probabilities(logprobs: torch.Tensor, chosen: torch.Tensor, counts: list[int]) -> list[Logprobs]:
    """For each row of log-probabilities [rows, vocab]: of the token chosen, and of the counts[row] likeliest.

    Equal ones are listed by token id, so the list does not depend on who shares the batch.
    """
    own = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > own).sum(-1, dtype=torch.int32) + 1  # to int64, torch's sum takes many times as long on a CPU
    most = min(max(counts), logprobs.shape[1])
    tops: list[list[tuple[int, float]]] = [[] for _ in counts]
    if most:
        # A row's k-th value is its threshold; ties at it make more than k candidates, cut after sorting.
        kth = torch.tensor([max(0, min(k, most) - 1) for k in counts], device=logprobs.device)
        least = logprobs.topk(most).values.gather(1, kth[:, None])
        at = (logprobs >= least).nonzero(as_tuple=True)
        row, token, value = (x.cpu().numpy() for x in (*at, logprobs[at]))
        for entry in np.lexsort((token, -value, row)):
            if len(tops[row[entry]]) < counts[row[entry]]:
                tops[row[entry]].append((int(token[entry]), float(value[entry])))
    return [
        Logprobs(token, value, rank, tuple(top))
        for token, value, rank, top in zip(chosen.tolist(), own[:, 0].tolist(), ranks.tolist(), tops, strict=True)
    ]
