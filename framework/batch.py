"""What an executor keeps of its requests between steps: tokens and block tables as numpy rows, and the ragged batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .kernels import Batch
from .plan import Delta, Plan, RequestData
from .types import SamplingParams

if TYPE_CHECKING:
    import torch

    from .sampling import Largest

Array = np.ndarray[Any, Any]
_NO_PARAMS = SamplingParams()


SPARE = 16
"""Blocks by which a batch's tables are wider than they need to be, so that its requests can go on for a while."""
_FIELDS = attrgetter("request_id", "start", "tokens", "deltas", "samples")


class Step:
    """A plan's slices as arrays, valid until the next step is built: that may be this object, changed in place.

    rows: int64 [R], tokens: int64 [T], positions: int64 [T]. sampled: the requests that are sampled, None if nobody is.
    advanced: the arrays are those of the step before, with each of its requests one token further. moved: then,
    whether a token begins a block or a table changed. scores: None if no prompt's log-probabilities are told. fed:
    int64 [2, n], entries of `tokens` that only the device knows (they are anything), and which of `Rows.unknown` they
    are; None: there are none, or the step is advanced and they are all of them.
    """

    __slots__ = (
        "advanced",
        "batch",
        "counters",
        "counts",
        "fed",
        "ids",
        "left",
        "longest",
        "moved",
        "positions",
        "room",
        "rows",
        "sampled",
        "samples",
        "scores",
        "tokens",
    )
    ids: tuple[str, ...]
    counts: tuple[int, ...]
    samples: tuple[bool, ...]
    batch: Batch
    rows: Array
    tokens: Array
    positions: Array
    sampled: RowBatch | None
    advanced: bool
    moved: bool
    scores: Scores | None
    fed: Array | None
    longest: int  # most tokens that any of the requests has, this step's included
    # Only of a decode step, one whose requests all compute one token and sample the next:
    counters: Array | None  # int64 [3, R], what grows by 1 a step: positions, known tokens, output tokens
    left: int  # steps that can follow before a token begins a block
    room: int  # tokens that the batch's tables have room for


class Scores(NamedTuple):
    """Prompt tokens whose log-probabilities a step tells, and which rows of the flat batch tell them.

    ids, lens: the requests, and how many tokens of each. rows, tokens: int64 [sum of lens]. counts: for each token, how
    many of the likeliest in its place are wanted.
    """

    ids: list[str]
    lens: list[int]
    rows: Array
    tokens: Array
    counts: list[int]


class Sampling:
    """Tokens that a step has sampled, before the host knows them.

    index, at: int64 [R], rows of `Rows.tokens`, and where in them they go. turn: of `Rows`, then. tokens: int64 [R],
    where they were sampled. wait: brings them here.
    """

    def __init__(self, index: Array, at: Array, turn: int, tokens: Any, wait: Callable[[], list[int]]) -> None:
        self.index, self.at, self.turn, self.tokens = index, at, turn, tokens
        self._wait: Callable[[], list[int]] | None = wait
        self._values: list[int] = []

    def values(self) -> list[int]:
        if self._wait is not None:
            self._values, self._wait = self._wait(), None
        return self._values


class Rows:
    """One row per known request; freed rows are reused, and all arrays grow on demand.

    tokens: int32 [rows, columns]; tables: int32 [rows, blocks] per cache group; length (known tokens), prompt_len,
    scored (leading prompt tokens whose log-probabilities are known or not asked for): int64 [rows]; seeds: uint64
    [rows]. `added` and `removed` (insertion-ordered sets) tell samplers who came and left
    since `settle`. unknown: what the last step sampled, unless the host knows it by now; `tokens` have their places.
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
        self.scored: Array = np.zeros(rows, np.int64)
        self.seeds: Array = np.zeros(rows, np.uint64)
        self.params: list[SamplingParams] = [_NO_PARAMS] * rows
        self.extra: list[dict[str, Any]] = [{}] * rows
        self.unknown: Sampling | None = None
        self._turn = 0  # plans in which somebody came or left
        self._born: Array = np.zeros(rows, np.int64)  # by row, the turn in which its owner came or left
        self._free = list(range(rows - 1, -1, -1))
        self._last: Step | None = None  # a decode step that was sampled, and nobody came or left since

    def update(self, plan: Plan) -> None:
        """Drop who finished or was preempted, then take in who is new or resumed; a known id is replaced."""
        if plan.finished or plan.preempted or plan.new:
            self._last = None
            self._turn += 1
        for id in plan.finished:
            self._drop(id)
        for preempted in plan.preempted:
            self._drop(preempted.request_id)
        for data in plan.new:
            self._add(data)

    def build(self, plan: Plan) -> Step:
        """Apply the slices' block deltas and lay the slices out as one flat ragged batch.

        A decode step of those who decoded in the step before, by far the commonest, takes over its arrays.
        """
        ids, starts, counts, deltas, samples = zip(*map(_FIELDS, plan.slices), strict=True)
        changes = [(at, delta) for at in compress(range(len(ids)), deltas) for delta in deltas[at]]
        for at, delta in changes:
            table, upto = self.tables[delta.group], delta.first + len(delta.blocks)
            if upto > table.shape[1]:
                table = self.tables[delta.group] = _widen(table, upto)
            table[self.index[ids[at]], delta.first : upto] = delta.blocks
        last, self._last = self._last, None
        same = last is not None and (last.ids, last.counts, last.samples) == (ids, counts, samples)
        if last is not None and same and self._advance(last, starts, changes):
            return last
        return self._lay_out(plan, ids, starts, counts, samples)

    def _lay_out(
        self,
        plan: Plan,
        ids: tuple[str, ...],
        starts_: tuple[int, ...],
        counts: tuple[int, ...],
        samples_: tuple[bool, ...],
    ) -> Step:
        step = Step()
        step.ids, step.counts, step.samples = ids, counts, samples_
        step.rows = rows = np.fromiter(map(self.index.__getitem__, ids), np.int64, len(ids))
        starts, lens, samples = np.array(starts_, np.int32), np.array(counts, np.int32), np.array(samples_, np.bool_)
        ends = starts + lens
        wrong = (lens <= 0) | np.where(samples, ends != self.length[rows], ends > self.length[rows])
        if wrong.any():
            one = plan.slices[int(wrong.argmax())]
            known = self.length[self.index[one.request_id]]
            raise RuntimeError(f"step {plan.step}: {one} does not fit the {known} tokens known of the request")
        last = np.cumsum(lens, dtype=np.int64)
        flat = np.repeat(rows, lens)
        step.positions = np.arange(last[-1], dtype=np.int64) + np.repeat(starts - last + lens, lens)
        step.tokens = self.tokens[flat, step.positions].astype(np.int64)
        step.longest = int(ends.max())
        width = -(-step.longest // self.block_size) + SPARE
        tables = tuple(table[rows, :width] for table in self.tables)
        step.sampled = RowBatch(self, list(compress(ids, samples_)), rows[samples]) if any(samples_) else None
        step.scores = self._scores(ids, rows, starts, ends, last - lens)
        step.advanced = step.moved = False
        step.counters = step.fed = None
        if self.unknown is not None:
            source = np.full(len(self.params), -1, np.int64)
            source[self.unknown.index] = np.where(self._own(self.unknown), np.arange(len(self.unknown.index)), -1)
            source = np.where(samples, source[rows], -1)
            at = np.flatnonzero(source >= 0)
            step.fed = np.stack((last[at] - 1, source[at])) if len(at) else None
        if all(samples_) and max(counts) == 1:
            step.counters = np.stack((step.positions, ends, ends - self.prompt_len[rows]))
            step.positions = step.counters[0]
            step.left = self._left(step.positions)
            step.room = min((table.shape[1] for table in tables), default=0) * self.block_size
        step.batch = Batch(starts, lens, tables, samples, self.block_size, step.tokens, step.positions)
        return step

    def _scores(self, ids: Sequence[str], rows: Array, starts: Array, ends: Array, first: Array) -> Scores | None:
        """first: where each request begins in the flat batch. The row of a token tells how likely the next one is."""
        begin = np.maximum(starts, self.scored[rows] - 1)
        lens = np.minimum(ends, self.prompt_len[rows] - 1) - begin
        at = np.flatnonzero(lens > 0)
        if not len(at):
            return None
        lens = lens[at]
        inside = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
        flat = np.repeat((first - starts + begin)[at], lens) + inside
        tokens = self.tokens[np.repeat(rows[at], lens), np.repeat(begin[at], lens) + inside + 1].astype(np.int64)
        counts = np.repeat([self.params[row].prompt_logprobs or 0 for row in rows[at].tolist()], lens).tolist()
        return Scores([ids[i] for i in at.tolist()], lens.tolist(), flat, tokens, counts)

    def _advance(self, step: Step, starts: tuple[int, ...], changes: list[tuple[int, Delta]]) -> bool:
        """Make `step` the one after it; False, and it is of no more use, if it cannot be."""
        batch, step.longest = step.batch, step.longest + 1
        if step.longest > step.room:
            return False
        np.add(batch.starts, 1, out=batch.starts)
        if tuple(batch.starts.tolist()) != starts:
            return False
        for at, delta in changes:
            table, upto = batch.tables[delta.group], delta.first + len(delta.blocks)
            if upto > table.shape[1]:
                return False
            table[at, delta.first : upto] = delta.blocks
        assert step.counters is not None and step.sampled is not None
        step.counters += 1
        step.sampled.advance(step.counters[2])
        begins = step.left == 0
        step.left = self._left(step.positions) if begins else step.left - 1
        step.advanced, step.moved = True, begins or bool(changes)
        step.fed = None
        return True

    def _left(self, positions: Array) -> int:
        return int((~positions % self.block_size).min())

    def sampled(self, step: Step, tokens: Any, wait: Callable[[], list[int]]) -> Sampling:
        """`step` was sampled: `tokens` on the device, which `wait` brings here. Its requests have one more each, for
        which there is a place now; `learn` puts them there. The sampler has seen who came and left."""
        assert step.sampled is not None
        if step.counters is None:
            index = step.rows[step.batch.samples]
            at = self.length[index]
        else:
            index, at = step.rows, step.counters[1].copy()
            self._last = step
        self._fit(int(at.max()) + 1)
        self.length[index] = at + 1
        self.unknown = Sampling(index, at, self._turn, tokens, wait)
        self.settle()
        return self.unknown

    def learn(self, sampling: Sampling) -> list[int]:
        """Wait for tokens, and put them in their places, unless those are others' by now. Raises what waiting raises;
        then they are never known."""
        last = self.unknown is sampling
        if last:
            self.unknown = None
        values = sampling.values()
        if sampling.turn == self._turn:
            self.tokens[sampling.index, sampling.at] = values
        else:
            own = self._own(sampling)
            self.tokens[sampling.index[own], sampling.at[own]] = np.array(values)[own]
        if last and self._last is not None:
            self._last.tokens[:] = values
        return values

    def _own(self, sampling: Sampling) -> Array:
        """bool [R]: whose rows are still those of the requests that were sampled."""
        return self._born[sampling.index] <= sampling.turn

    def append(self, rows: Array, tokens: Array) -> None:
        """Add one sampled token to each of these rows."""
        if len(rows):
            at = self.length[rows]
            self._fit(int(at.max()) + 1)
            self.tokens[rows, at] = tokens
            self.length[rows] = at + 1

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
        self._born[row] = self._turn
        count = len(data.tokens)
        self._fit(count + 1)
        self.tokens[row, :count] = data.tokens
        self.length[row] = count
        self.prompt_len[row] = data.prompt_len
        self.scored[row] = data.prompt_len if data.params.prompt_logprobs is None else data.scored
        self.seeds[row] = data.seed
        self.params[row] = data.params
        self.extra[row] = data.extra
        self.added[data.id] = None

    def _drop(self, id: str) -> None:
        row = self.index.pop(id, None)
        if row is not None:
            self._free.append(row)
            self._born[row] = self._turn
            self.params[row], self.extra[row] = _NO_PARAMS, {}
            self.added.pop(id, None)
            self.removed[id] = None

    def _fit(self, columns: int) -> None:
        if columns > self.tokens.shape[1]:
            self.tokens = _widen(self.tokens, columns)

    def _grow(self) -> None:
        rows = len(self.params)
        self.tokens, self.length, self.prompt_len, self.scored, self.seeds, self._born, *self.tables = (
            np.concatenate([array, np.zeros_like(array)])
            for array in (
                self.tokens,
                self.length,
                self.prompt_len,
                self.scored,
                self.seeds,
                self._born,
                *self.tables,
            )
        )
        self.params += [_NO_PARAMS] * rows
        self.extra += [{}] * rows
        self._free.extend(range(2 * rows - 1, rows - 1, -1))


def _widen(array: Array, columns: int) -> Array:
    wider = np.zeros((array.shape[0], max(columns, 2 * array.shape[1])), array.dtype)
    wider[:, : array.shape[1]] = array
    return wider


class RowBatch:
    """The `SampleBatch` of one step: one row per request, in the order of the plan. asked: rows of the requests that
    want log-probabilities."""

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
        self.largest: Largest | None = None
        self.errors: dict[str, str] = {}
        self.asked = [row for row, params in enumerate(self.params) if params.logprobs is not None]
        self._rows = rows

    def advance(self, output_len: Array) -> None:
        """The next step samples the same requests."""
        self.output_len, self.added, self.removed, self.likeliest = output_len.tolist(), (), (), None
        self.errors = {}

    def prompt_tokens(self, id: str) -> Array:
        row = self._rows.index[id]
        return self._rows.tokens[row, : self._rows.prompt_len[row]]

    def output_tokens(self, id: str) -> Array:
        if self._rows.unknown is not None:
            self._rows.learn(self._rows.unknown)
        row = self._rows.index[id]
        return self._rows.tokens[row, self._rows.prompt_len[row] : self._rows.length[row]]
