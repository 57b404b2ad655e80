"""What requests may not generate: all but the allowed tokens, and the ends of sequences that are banned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from framework import SampleBatch, SamplingParams, send

Array = np.ndarray[Any, Any]
NOTHING = float("-inf")


class Limits:
    """Of a batch with these parameters by row, while it stays the same."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        allowed = {row: p.allowed_token_ids for row, p in enumerate(params) if p.allowed_token_ids}
        bad = {row: p.bad_token_ids for row, p in enumerate(params) if p.bad_token_ids}
        never = {row: [one[0] for one in some if len(one) == 1] for row, some in bad.items()}
        rows = sorted(allowed.keys() | bad.keys())
        arrays = [np.array(rows, np.int64), np.array([*allowed], np.int64), *_entries(allowed), *_entries(never)]
        self._rows, self._few, *entries = send(arrays, device)
        self._allowed, self._never = tuple(entries[:2]), tuple(entries[2:])
        self._bad = {row: _Longer([one for one in some if len(one) > 1]) for row, some in bad.items()}

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device) -> Limits | None:
        """None if everybody may generate everything."""
        limited = any(p.allowed_token_ids or p.bad_token_ids for p in params)
        return Limits(params, device) if limited else None

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Change logits [rows, vocab]. bool [rows]: where nothing is left, but for a token to go on with."""
        kept = logits[self._allowed]
        logits.index_fill_(0, self._few, NOTHING)
        logits[self._allowed] = kept
        logits[self._never] = NOTHING
        after: dict[int, list[int]] = {}
        for row, longer in self._bad.items():
            at = batch.owner[row]
            if longer:
                after[row] = longer.after(batch.output_tokens(batch.ids[at])[: batch.output_len[at]])
        if any(after.values()):
            logits[tuple(send(_entries(after), logits.device))] = NOTHING
        empty = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        empty[self._rows] = logits[self._rows].amax(-1) == NOTHING
        logits[:, 0] = torch.where(empty, 0.0, logits[:, 0])
        return empty


class _Longer:
    """Sequences of several tokens, by the last one before the token that may not follow."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}
        for *before, token in sequences:
            self._by_last.setdefault(before[-1], []).append((before, token))

    def __bool__(self) -> bool:
        return bool(self._by_last)

    def after(self, output: Array) -> list[int]:
        """What may not follow these tokens."""
        some = self._by_last.get(int(output[-1]), ()) if len(output) else ()
        return [token for before, token in some if output[-len(before) :].tolist() == before]


def _entries(of: dict[int, Any]) -> list[Array]:
    """int64 [n] each: rows, and the tokens of each."""
    lens = [len(some) for some in of.values()]
    tokens = [np.array(some, np.int64) for some in of.values()]
    return [np.repeat(np.array([*of], np.int64), lens), np.concatenate([np.empty(0, np.int64), *tokens])]
