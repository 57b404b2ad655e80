"""What a kernel backend must do that has graphs: fill inputs that stay where they are, and read nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ..device import make_device
from ..kernels import Batch, GraphLimits, Meta, Rope
from .pool import Part, Pool, close

ROWS, LONGEST, STEPS = 4, 79, 12


def check_graph(pool: Pool, window: int | None, tolerance: float) -> None:
    """Three times other requests, in tables narrower or wider than the graph's, and then their next steps: attention is
    what it ought to be, and no tensor has moved. What was captured in the first step is replayed in all."""
    backend, device, size = pool.backend, make_device(pool.device), pool.block_size
    if backend.graphs == "none":
        pytest.skip(f"{backend.name} has no graphs")
    columns = -(-LONGEST // size)
    limits = GraphLimits(ROWS, (columns,), columns * size, size, pool.device)
    meta = backend.graph_buffers(limits)
    before, [cache], (heads, kv_heads, head_dim) = _addresses(meta), pool.caches, pool.shape
    given = [pool.normal(ROWS, count, head_dim).to(pool.device) for count in (heads, kv_heads, kv_heads)]
    ones = torch.ones(limits.max_seq, head_dim // 2, device=pool.device)
    rope, out = Rope(ones, torch.zeros_like(ones)), given[0].flatten(1).clone()
    rng, graph = np.random.default_rng(size), None

    def run() -> None:
        assert meta.positions is not None
        q, k, v = (x.clone() for x in given)
        q = backend.rope_store(q, k, v, meta.positions, rope, cache, 0, meta)
        out.copy_(backend.attention(q, cache, 0, meta, pool.scale, window))

    for _ in range(3):
        blocks = rng.permutation(ROWS * columns).reshape(ROWS, columns)
        starts = rng.integers(1, LONGEST - STEPS, ROWS).astype(np.int32)
        past = [Part(0, int(start), own.tolist()) for start, own in zip(starts, blocks, strict=True)]
        pool.store(past, pool.prepare(past))
        table = np.zeros((ROWS, int(rng.integers(-(-int(starts.max() + STEPS) // size), columns + 3))), np.int32)
        table[:, :columns] = blocks[:, : table.shape[1]]
        tokens, positions = np.stack((rng.integers(0, 9, ROWS), starts))
        ready = np.ones(ROWS, np.int32), (table,), np.ones(ROWS, np.bool_), size
        batch = Batch(starts, *ready, tokens, positions)
        for step in range(STEPS):
            if step:
                starts += 1
                positions += 1
                found = backend.advance(batch, meta, pool.device, bool((starts % size == 0).any()))
            else:
                found = backend.prepare(batch, pool.device, meta)
            assert found is meta and meta.limits == limits
            parts = [Part(int(start), 1, own.tolist()) for start, own in zip(starts, blocks, strict=True)]
            q, k, v = new = [pool.normal(*x.shape) for x in given]
            for there, here in zip(given, new, strict=True):
                there.copy_(here)
            if graph is None and device.graphs:
                graph = device.capture(run)
            out.fill_(torch.nan)
            if graph is None:
                run()
            else:
                graph.replay()
            pool.wrote(parts, k.double(), v.double())
            close(out, pool.attended(parts, q, window), pool.dtype, tolerance)
    assert _addresses(meta) == before, "a tensor of the graph's inputs has moved"


def _addresses(meta: Meta) -> list[int]:
    assert meta.tokens is not None and meta.positions is not None, "graph_buffers left tokens or positions unset"
    tensors = (meta.tokens, meta.positions, meta.cu_lens, meta.seq_lens, meta.logits_rows, *meta.slots, *meta.tables)
    return [x.data_ptr() for x in tensors]
