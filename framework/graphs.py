"""Decode steps as captured graphs: the device repeats a forward pass by itself, without the host launching each kernel.

There is a graph for each of some numbers of requests. A step takes the next larger one; the rows that are too many are
padding, which reads and writes a spare block of the pool that no request is ever given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from .device import Device, Graph
from .kernels import Batch, GraphLimits, KernelBackend, Meta

Inputs = tuple[torch.Tensor, torch.Tensor, Meta]
MOST_ROWS = 512
"""Requests of the largest graph: a step of more keeps a GPU busy while the host launches its kernels."""


def ladder(most: int) -> list[int]:
    """Numbers of requests that have a graph, for steps of up to `most`: dense enough that padding costs little."""
    most = min(most, MOST_ROWS)
    return [*(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, MOST_ROWS, 32)) if size < most), most]


class Graphs:
    """Graphs of one model, backend and pool, all of which stay where they are while these exist.

    forward: the model's, of the inputs given. limits: those of the largest graph. spare: a block for padding.
    """

    def __init__(
        self,
        device: Device,
        backend: KernelBackend,
        forward: Callable[[Inputs], torch.Tensor],
        limits: GraphLimits,
        spare: int,
    ) -> None:
        self._device, self._backend, self._forward = device, backend, forward
        self._limits, self._spare = limits, spare
        self._metas: dict[int, Meta] = {}
        self._graphs: dict[int, Graph] = {}
        self._logits: torch.Tensor | None = None  # of all graphs, [rows of the largest, vocab]
        self._tables: tuple[np.ndarray[tuple[int, ...], np.dtype[np.int32]], ...] = ()  # padded, of the last step
        self.sizes: list[int] = []

    def capture(self, size: int) -> None:
        """Add the graph of a size; the largest comes first, whose scratch memory serves the others, too. Raises
        whatever the capture raises."""
        meta = self._backend.graph_buffers(self._limits._replace(rows=size))
        nobody = np.empty(0, np.int32)
        tables = tuple(np.empty((0, columns), np.int32) for columns in self._limits.columns)
        nothing = Batch(nobody, nobody, tables, nobody > 0, self._limits.block_size, nobody, nobody)
        self._backend.prepare(self._pad(nothing, size, True), self._device.torch, meta)
        inputs = _inputs(meta)
        if self._logits is None:
            self._logits = torch.empty_like(self._forward(inputs))
        logits = self._logits[:size]  # elsewhere than a graph's scratch memory, which the next graph overwrites
        largest = next(iter(self._graphs.values()), None)
        self._graphs[size] = self._device.capture(lambda: logits.copy_(self._forward(inputs)), largest)
        self._metas[size] = meta
        self.sizes = sorted(self._graphs)

    def prepare(self, batch: Batch, longest: int) -> Inputs | None:
        """Fill a graph's inputs with those of a decode step, one whose requests have one token each, all sampled.
        None: no graph serves it. longest: most tokens of a request."""
        at = bisect_left(self.sizes, len(batch.starts))
        if at == len(self.sizes) or longest > self._limits.max_seq:
            return None
        meta = self._metas[self.sizes[at]]
        padded = self._pad(batch, self.sizes[at], True)
        return self._cut(batch, self._backend.prepare(padded, self._device.torch, meta))

    def advance(self, batch: Batch, longest: int, meta: Meta, moved: bool) -> Inputs | None:
        """The same for the step after the one that `meta` was filled with: see `KernelBackend.advance`."""
        if longest > self._limits.max_seq:
            return None
        assert meta.limits is not None
        padded = self._pad(batch, meta.limits.rows, moved)
        return self._cut(batch, self._backend.advance(padded, meta, self._device.torch, moved))

    def replay(self, meta: Meta, rows: int) -> torch.Tensor:
        """Logits [rows, vocab] of what `meta` was filled with; they are overwritten by the next replay."""
        assert meta.limits is not None and self._logits is not None
        self._graphs[meta.limits.rows].replay()
        return self._logits[:rows]

    def _pad(self, batch: Batch, size: int, moved: bool) -> Batch:
        """To `size` requests. moved: the tables changed."""
        assert batch.tokens is not None and batch.positions is not None
        more = size - len(batch.starts)
        if not more:
            return batch
        if moved:
            spare = (np.full((more, table.shape[1]), self._spare, np.int32) for table in batch.tables)
            self._tables = tuple(map(np.concatenate, zip(batch.tables, spare, strict=True)))
        zeros, ones = np.zeros(more, np.int64), np.ones(more, np.int32)
        return Batch(
            np.concatenate((batch.starts, zeros), dtype=np.int32),
            np.concatenate((batch.lens, ones)),
            self._tables,
            np.ones(size, np.bool_),
            batch.block_size,
            np.concatenate((batch.tokens, zeros)),
            np.concatenate((batch.positions, zeros)),
        )

    @staticmethod
    def _cut(batch: Batch, meta: Meta) -> Inputs:
        """Tokens and positions of the requests, without padding: views of what the graph reads."""
        tokens, positions, _ = _inputs(meta)
        return tokens[: len(batch.starts)], positions[: len(batch.starts)], meta


def _inputs(meta: Meta) -> Inputs:
    if meta.tokens is None or meta.positions is None:
        raise TypeError("graph_buffers left `tokens` or `positions` of its Meta unset")
    return meta.tokens, meta.positions, meta


def graph_memory(device: Device, graphs: Graphs, sizes: list[int]) -> int:
    """Bytes that graphs of `sizes` (ascending) will take, by what the first two take: the largest, with the scratch
    memory that all share, and one more."""
    device.release_memory()
    free = [device.free_memory()]
    for size in sizes[:-3:-1]:
        graphs.capture(size)
        device.release_memory()
        free.append(device.free_memory())
    first, *another = (max(0, before - after) for before, after in pairwise(free))
    return first + (len(sizes) - 1) * sum(another)
