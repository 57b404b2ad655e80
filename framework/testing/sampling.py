"""What a sampler sees of an executor, step after step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..batch import RowBatch, Rows
from ..ops import ReferenceBackend
from ..plan import Plan, RequestData
from ..registry import Plugins
from ..types import SamplingParams


def random_logits(rows: int = 1, vocab: int = 1000, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """float32 [rows, vocab]."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


class Sampling:
    """Requests known to an executor, as a sampler sees them step after step."""

    def __init__(self, sampler: object, device: str = "cpu") -> None:
        self.rows, self.sampler, self.device = Rows(0, 1, rows=4), sampler, device
        self.empty: list[bool] = []  # rows of the last step of which nothing was left
        self._informed = False
        self._plugins = Plugins()
        self._plugins.add(sampler, "sampler")

    def add(
        self, id: str, params: SamplingParams, seed: int = 0, prompt: Sequence[int] = (1,), output: Sequence[int] = ()
    ) -> None:
        data = RequestData(id, [*prompt, *output], len(prompt), params, seed)
        self.rows.update(Plan(0, new=(data,)))

    def remove(self, *ids: str) -> None:
        self.rows.update(Plan(0, finished=ids))

    def batch(self, *ids: str) -> RowBatch:
        """One step of these requests, or of all."""
        names = list(ids or self.rows.index)
        return RowBatch(self.rows, names, np.array([self.rows.index[id] for id in names]))

    def answer(self, logits: torch.Tensor, batch: RowBatch) -> list[int]:
        """What the sampler says of these logits, one row for each of `batch.owner`. Its requests stay as they are."""
        given = logits.float().to(self.device, copy=True)
        self._informed = not self._informed  # the same has to come of it whether or not the executor knows
        batch.likeliest = torch.from_numpy(given.cpu().numpy().argmax(-1)).to(self.device) if self._informed else None
        batch.largest = ReferenceBackend().largest if self._informed else None
        tokens = getattr(answer := self._plugins.call("sample", logits=given, batch=batch), "tokens", None)
        assert isinstance(tokens, torch.Tensor), f"it answered {answer!r}, not Sampled"
        assert tokens.dtype == torch.int64 and tokens.shape == logits.shape[:1], (
            f"its tokens are {tokens.dtype} {list(tokens.shape)}, not int64 [{len(logits)}]"
        )
        empty = getattr(answer, "empty", None)
        assert empty is None or (isinstance(empty, torch.Tensor) and empty.shape == tokens.shape), f"empty is {empty}"
        self.empty = [False] * len(tokens) if empty is None else empty.bool().tolist()
        found: list[int] = tokens.tolist()
        assert all(0 <= token < logits.shape[1] for token in found), f"{found} are not all of the vocabulary"
        return found

    def sample(self, logits: torch.Tensor, *ids: str) -> list[int]:
        """One step of these requests, or of all; the tokens join their outputs."""
        batch = self.batch(*ids)
        tokens = self.answer(logits, batch)
        self.rows.append(np.array([self.rows.index[id] for id in batch.ids]), np.array(tokens))
        self.rows.settle()
        return tokens
