"""What requests may not generate: all but the allowed tokens, and the ends of sequences that are banned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from framework import SampleBatch, SamplingParams, send

Array = np.ndarray[Any, Any]
NOTHING = float("-inf")


class Limit:
    """Of one request, for as long as it stays. masked: bool [vocab], all that is not allowed, None where all is.
    never: int64 [n], tokens that are banned wherever they come."""

    def __init__(self, params: SamplingParams, device: torch.device, vocab: int) -> None:
        self.masked: torch.Tensor | None = None
        if params.allowed_token_ids:
            masked = np.ones(vocab, np.bool_)
            masked[np.array(params.allowed_token_ids)] = False
            [self.masked] = send([masked], device)
        self.never: Array = np.array([one[0] for one in params.bad_token_ids if len(one) == 1], np.int64)
        # The tokens that may not follow, by the whole sequence before them, and by its length.
        self._longer: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, token in params.bad_token_ids:
            if before:
                self._longer.setdefault(len(before), {}).setdefault(tuple(before), []).append(token)
        self._longest = max(self._longer, default=0)

    @staticmethod
    def of(params: SamplingParams) -> bool:
        """Whether there is one: others may generate everything."""
        return bool(params.allowed_token_ids or params.bad_token_ids)

    def after(self, batch: SampleBatch, at: int) -> list[int]:
        """What may not follow the output of the request at this index."""
        if not self._longer:
            return []
        length = batch.output_len[at]
        last = tuple(batch.output_tokens(batch.ids[at])[max(0, length - self._longest) : length].tolist())
        return [
            token
            for count, by in self._longer.items()
            if count <= len(last)
            for token in by.get(last[len(last) - count :], ())
        ]


class Limits:
    """Of a batch while it stays the same: `of` has the limits of its requests by id."""

    def __init__(self, batch: SampleBatch, of: Mapping[str, Limit], device: torch.device) -> None:
        self._by_row = {row: of[batch.ids[at]] for row, at in enumerate(batch.owner) if batch.ids[at] in of}
        masks = {row: limit.masked for row, limit in self._by_row.items() if limit.masked is not None}
        never = _entries({row: limit.never for row, limit in self._by_row.items()})
        arrays = [np.array([*self._by_row], np.int64), np.array([*masks], np.int64), *never]
        self._rows, self._few, *entries = send(arrays, device)
        self._never, self._masked = tuple(entries), torch.stack([*masks.values()]) if masks else None

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Change logits [rows, vocab]. bool [rows]: where nothing is left, but for a token to go on with."""
        if self._masked is not None:
            logits[self._few] = logits[self._few].masked_fill_(self._masked, NOTHING)
        logits[self._never] = NOTHING
        after = {row: limit.after(batch, batch.owner[row]) for row, limit in self._by_row.items()}
        if any(after.values()):
            logits[tuple(send(_entries(after), logits.device))] = NOTHING
        empty = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        empty[self._rows] = logits[self._rows].amax(-1) == NOTHING
        logits[:, 0] = torch.where(empty, 0.0, logits[:, 0])
        return empty


def _entries(of: Mapping[int, Sequence[int] | Array]) -> list[Array]:
    """int64 [n] each: rows, and the tokens of each."""
    lens = [len(some) for some in of.values()]
    return [np.repeat(np.array([*of], np.int64), lens), np.concatenate([np.array(x, np.int64) for x in of.values()])]
