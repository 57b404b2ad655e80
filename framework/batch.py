"""What an executor keeps of its requests between steps: tokens and block tables as numpy rows, and the ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .kernels import Batch
from .plan import Plan, RequestData
from .types import SamplingParams

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]
_NO_PARAMS = SamplingParams()


class Step(NamedTuple):
    """A plan's slices as arrays. rows: int64 [R], tokens: int64 [T], positions: int64 [T]."""

    batch: Batch
    rows: Array
    tokens: Array
    positions: Array


class Rows:
    """One row per known request; freed rows are reused, and all arrays grow on demand.

    tokens: int32 [rows, columns]; tables: int32 [rows, blocks] per cache group; length (known tokens), prompt_len:
    int64 [rows]; seeds: uint64 [rows]. `added` and `removed` (insertion-ordered sets) tell samplers who came and left
    since `settle`.
    """

    def __init__(self, groups: int, block_size: int, rows: int = 64) -> None:
        self.block_size = block_size
        self.index: dict[str, int] = {}
        self.added: dict[str, None] = {}
        self.removed: dict[str, None] = {}
        self.tokens: Array = np.zeros((rows, 256), np.int32)
        self.tables: list[Array] = [np.zeros((rows, 16), np.int32) for _ in range(groups)]
        self.length: Array = np.zeros(rows, np.int64)
        self.prompt_len: Array = np.zeros(rows, np.int64)
        self.seeds: Array = np.zeros(rows, np.uint64)
        self.params: list[SamplingParams] = [_NO_PARAMS] * rows
        self.extra: list[dict[str, Any]] = [{}] * rows
        self._free = list(range(rows - 1, -1, -1))

    def update(self, plan: Plan) -> None:
        """Drop who finished or was preempted, then take in who is new or resumed; a known id is replaced."""
        for id in plan.finished:
            self._drop(id)
        for preempted in plan.preempted:
            self._drop(preempted.request_id)
        for data in plan.new:
            self._add(data)

    def build(self, plan: Plan) -> Step:
        """Apply the slices' block deltas and lay the slices out as one flat ragged batch."""
        slices, index = plan.slices, self.index
        for s in slices:
            for delta in s.deltas:
                table, upto = self.tables[delta.group], delta.first + len(delta.blocks)
                if upto > table.shape[1]:
                    table = self.tables[delta.group] = _widen(table, upto)
                table[index[s.request_id], delta.first : upto] = delta.blocks
        count = len(slices)
        rows = np.fromiter([index[s.request_id] for s in slices], np.int64, count)
        starts = np.fromiter([s.start for s in slices], np.int32, count)
        lens = np.fromiter([s.tokens for s in slices], np.int32, count)
        samples = np.fromiter([s.samples for s in slices], np.bool_, count)
        ends = starts + lens
        wrong = (lens <= 0) | np.where(samples, ends != self.length[rows], ends > self.length[rows])
        if wrong.any():
            at = slices[int(wrong.argmax())]
            known = self.length[index[at.request_id]]
            raise RuntimeError(f"step {plan.step}: {at} does not fit the {known} tokens known of the request")
        last = np.cumsum(lens, dtype=np.int64)
        flat = np.repeat(rows, lens)
        positions = np.arange(last[-1], dtype=np.int64) + np.repeat(starts - last + lens, lens)
        blocks = -(-int(ends.max()) // self.block_size)
        tables = tuple(table[rows, :blocks] for table in self.tables)
        batch = Batch(starts, lens, tables, samples, self.block_size)
        return Step(batch, rows, self.tokens[flat, positions].astype(np.int64), positions)

    def append(self, rows: Array, tokens: Array) -> None:
        """Add one sampled token to each of these rows."""
        if len(rows):
            at = self.length[rows]
            self._fit(int(at.max()) + 1)
            self.tokens[rows, at] = tokens
            self.length[rows] += 1

    def settle(self) -> None:
        """A sampler has seen `added` and `removed`."""
        self.added.clear()
        self.removed.clear()

    def _add(self, data: RequestData) -> None:
        row = self.index.get(data.id)
        if row is None:
            if not self._free:
                self._grow()
            row = self.index[data.id] = self._free.pop()
        count = len(data.tokens)
        self._fit(count + 1)
        self.tokens[row, :count] = data.tokens
        self.length[row] = count
        self.prompt_len[row] = data.prompt_len
        self.seeds[row] = data.seed
        self.params[row] = data.params
        self.extra[row] = data.extra
        self.added[data.id] = None

    def _drop(self, id: str) -> None:
        row = self.index.pop(id, None)
        if row is not None:
            self._free.append(row)
            self.params[row], self.extra[row] = _NO_PARAMS, {}
            self.added.pop(id, None)
            self.removed[id] = None

    def _fit(self, columns: int) -> None:
        if columns > self.tokens.shape[1]:
            self.tokens = _widen(self.tokens, columns)

    def _grow(self) -> None:
        rows = len(self.params)
        self.tokens, self.length, self.prompt_len, self.seeds, *self.tables = (
            np.concatenate([array, np.zeros_like(array)])
            for array in (self.tokens, self.length, self.prompt_len, self.seeds, *self.tables)
        )
        self.params += [_NO_PARAMS] * rows
        self.extra += [{}] * rows
        self._free.extend(range(2 * rows - 1, rows - 1, -1))


def _widen(array: Array, columns: int) -> Array:
    wider = np.zeros((array.shape[0], max(columns, 2 * array.shape[1])), array.dtype)
    wider[:, : array.shape[1]] = array
    return wider


class RowBatch:
    """The `SampleBatch` of one step: one row per request, in the order of the plan."""

    def __init__(self, rows: Rows, ids: list[str], index: Array) -> None:
        where = index.tolist()
        self.ids: Sequence[str] = ids
        self.params: Sequence[SamplingParams] = [rows.params[row] for row in where]
        self.extra: Sequence[dict[str, Any]] = [rows.extra[row] for row in where]
        self.seeds: Array = rows.seeds[index]
        self.owner: Sequence[int] = range(len(ids))
        self.output_len: Sequence[int] = (rows.length[index] - rows.prompt_len[index]).tolist()
        self.added: Sequence[str] = tuple(rows.added)
        self.removed: Sequence[str] = tuple(rows.removed)
        self.likeliest: torch.Tensor | None = None
        self._rows = rows

    def prompt_tokens(self, id: str) -> Array:
        row = self._rows.index[id]
        return self._rows.tokens[row, : self._rows.prompt_len[row]]

    def output_tokens(self, id: str) -> Array:
        row = self._rows.index[id]
        return self._rows.tokens[row, self._rows.prompt_len[row] : self._rows.length[row]]
