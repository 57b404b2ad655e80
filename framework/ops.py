"""The reference kernel backend: every operation in plain torch, written to be read and to be right.

It runs on any device in float32, bfloat16 or float16. Faster backends subclass it and are tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from .device import send
from .kernels import OPS, Batch, GraphLimits, KernelBackend, Meta, Rope, Support
from .kv import CacheGroup
from .pages import zeros


class Linear(NamedTuple):
    """What `pack` makes of a projection. weight: [out, in]; bias: [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Pages(NamedTuple):
    """One layer's cache. k, v: [blocks, kv_heads, block_size, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


def _array(array: np.ndarray[Any, Any], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array, dtype)


def _slots(
    batch: Batch, request: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]
) -> Iterator[np.ndarray[Any, Any]]:
    """For each group, int64: where the tokens at `positions` of the requests `request` are stored."""
    block, offset = np.divmod(positions, batch.block_size)
    for table in batch.tables:
        yield table[request, block].astype(np.int64) * batch.block_size + offset


class ReferenceBackend(KernelBackend):
    """The oracle. Attention runs request by request in float32."""

    name = "reference"
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    meta_type: type[Meta] = Meta

    def supports(
        self, op: str, dtype: torch.dtype, device: torch.device, *, head_dim: int = 64, window: int | None = None
    ) -> Support:
        if op not in OPS:
            return Support(False, f"unknown operation {op!r}")
        if dtype not in self.dtypes:
            return Support(False, f"dtype {dtype} is not one of {', '.join(map(str, self.dtypes))}")
        return Support(True)

    # Layouts

    def pack(self, op: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return weight if op == "embed" else Linear(weight, bias)

    def block_bytes(self, group: CacheGroup, dtype: torch.dtype, block_size: int) -> int:
        return 2 * group.layers * prod(self._page(group, dtype, block_size)) * dtype.itemsize

    def allocate(
        self,
        group: CacheGroup,
        dtype: torch.dtype,
        block_size: int,
        blocks: int,
        device: torch.device,
        pinned: bool = False,
    ) -> list[Any]:
        shape = (blocks, *self._page(group, dtype, block_size))

        def pages() -> torch.Tensor:
            if pinned or device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
            return zeros(shape, dtype)  # torch.zeros writes it all, seconds for a large pool

        return [Pages(pages(), pages()) for _ in range(group.layers)]

    @staticmethod
    def _page(group: CacheGroup, dtype: torch.dtype, block_size: int) -> tuple[int, int, int]:
        return group.kv_heads, block_size, group.head_dim

    def prepare(self, batch: Batch, device: torch.device, out: Meta | None = None) -> Meta:
        if out is not None:
            return self._fill(batch, out, True)
        starts, lens = batch.starts.astype(np.int64), batch.lens.astype(np.int64)
        ends = np.cumsum(lens)
        request = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(len(request)) - np.repeat(ends - lens - starts, lens)
        arrays = [
            _array(np.concatenate(([0], ends)), np.int32),
            _array(starts + lens, np.int32),
            ends[batch.samples] - 1,
            *_slots(batch, request, positions),
            *(_array(table, np.int32) for table in batch.tables),
        ]
        meta, groups = self.meta_type(), len(batch.tables)
        meta.batch = batch
        meta.cu_lens, meta.seq_lens, meta.logits_rows, *rest = self._send(batch, arrays, meta, device)
        meta.slots, meta.tables = tuple(rest[:groups]), tuple(rest[groups:])
        meta.max_len = int(lens.max())
        meta.max_seq = int((starts + lens).max())
        return meta

    @staticmethod
    def _send(batch: Batch, arrays: list[np.ndarray[Any, Any]], meta: Meta, device: torch.device) -> list[torch.Tensor]:
        """Move the arrays, and the batch's tokens and positions into `meta`, in one copy."""
        if batch.tokens is None or batch.positions is None:
            return send(arrays, device)
        meta.tokens, meta.positions, *sent = send([batch.tokens, batch.positions, *arrays], device)
        return sent

    def advance(self, batch: Batch, meta: Meta, device: torch.device, moved: bool) -> Meta:
        if meta.limits is not None:
            return self._fill(batch, meta, moved)
        new, groups = self.meta_type(), len(batch.tables)  # what a subclass adds is of one step
        new.batch, new.cu_lens, new.logits_rows, new.max_len = batch, meta.cu_lens, meta.logits_rows, meta.max_len
        new.seq_lens, new.max_seq = meta.seq_lens.add_(1), meta.max_seq + 1
        arrays = []
        if moved:
            arrays = [*_slots(batch, np.arange(len(batch.starts)), batch.starts)]
            arrays += [_array(table, np.int32) for table in batch.tables]
        sent = tuple(self._send(batch, arrays, new, device))
        if moved:
            new.slots, new.tables = sent[:groups], sent[groups:]
        else:
            new.slots, new.tables = tuple(slots.add_(1) for slots in meta.slots), meta.tables
        return new

    # Graphs, for the backends below that have them

    def graph_buffers(self, limits: GraphLimits) -> Meta:
        """All that changes with every step is one tensor, `lines`, int64 [3 + groups, rows or one more]: tokens,
        positions, each group's slots, and in the first half of the last line seq_lens. One copy fills it, one more each
        table. All tensors begin at multiples of 16 bytes, as those do that `send` makes."""
        rows, groups = limits.rows, len(limits.columns)
        kind: dict[str, Any] = {"dtype": torch.int32, "device": limits.device}
        meta = self.meta_type()
        meta.limits = limits
        meta.lines = lines = torch.zeros((3 + groups, rows + rows % 2), dtype=torch.int64, device=limits.device)
        meta.tokens, meta.positions, *slots = lines[:-1, :rows].unbind()
        meta.slots, meta.seq_lens = tuple(slots), lines[-1].view(torch.int32)[:rows].fill_(1)
        meta.tables = tuple(torch.zeros((rows, columns), **kind) for columns in limits.columns)
        meta.cu_lens = torch.arange(rows + 1, **kind)
        meta.logits_rows = torch.arange(rows, dtype=torch.int64, device=limits.device)
        meta.max_len, meta.max_seq = 1, limits.max_seq
        return meta

    def _fill(self, batch: Batch, out: Meta, tables: bool) -> Meta:
        """The inputs of a graph. tables: these, too, else they are what they were."""
        assert out.limits is not None and out.lines is not None
        rows, lines = out.limits.rows, np.zeros(out.lines.shape, np.int64)
        lines[0, :rows], lines[1, :rows] = 0 if batch.tokens is None else batch.tokens, batch.starts
        for line, slots in zip(lines[2:], _slots(batch, np.arange(rows), batch.starts), strict=False):
            line[:rows] = slots
        lines[-1].view(np.int32)[:rows] = batch.starts + 1
        some = zip(batch.tables, out.limits.columns, strict=True) if tables else ()
        sent, *wide = send([lines, *(table[:, :most] for table, most in some)], out.limits.device)
        out.lines.copy_(sent)
        for ours, theirs in zip(out.tables, wide, strict=False):
            ours[:, : theirs.shape[1]].copy_(theirs)
        out.batch = batch
        return out

    # Operations

    def embed(self, tokens: torch.Tensor, weight: Any) -> torch.Tensor:
        return F.embedding(tokens, weight)

    def linear(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return F.linear(x, weight.weight, weight.bias)

    def qkv(self, x: torch.Tensor, weight: Any, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
        return torch.split(self.linear(x, weight), list(sizes), -1)

    def gate_up(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return self.linear(x, weight)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if residual is None else x + residual
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype), x

    def rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        rope: Rope,
        cache: Any,
        group: int,
        meta: Meta,
    ) -> torch.Tensor:
        cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            rotary, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
            a, b = rotary.float().chunk(2, -1)
            return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), -1)

        slots, block_size = meta.slots[group], meta.batch.block_size
        block, offset = slots // block_size, slots % block_size
        cache.k[block, :, offset] = rotate(k)
        cache.v[block, :, offset] = v
        return rotate(q)

    def attention(
        self, q: torch.Tensor, cache: Any, group: int, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        heads, kv_heads = q.shape[1], cache.k.shape[1]
        outputs = []
        rows = meta.batch.lens.tolist()
        for n, start, table, x in zip(
            rows, meta.batch.starts.tolist(), meta.tables[group], torch.split(q, rows), strict=True
        ):
            # Blocks wholly before the window may by now be others', and masking does not stop their NaN (0 * NaN).
            first = 0 if window is None else max(0, start + 1 - window) // meta.batch.block_size
            begin, end = first * meta.batch.block_size, start + n
            blocks = table[first : -(-end // meta.batch.block_size)].long()
            # [blocks, kv_heads, block_size, head_dim] -> [heads, length, head_dim]
            k, v = (pages[blocks].transpose(0, 1).flatten(1, 2)[:, : end - begin] for pages in (cache.k, cache.v))
            k, v = (y.float().repeat_interleave(heads // kv_heads, 0) for y in (k, v))
            distance = torch.arange(start, end, device=q.device)[:, None] - torch.arange(begin, end, device=q.device)
            unseen = (distance < 0) if window is None else (distance < 0) | (distance >= window)
            scores = (x.transpose(0, 1).float() @ k.mT * scale).masked_fill(unseen, float("-inf"))
            outputs.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1).to(q.dtype))
        return torch.cat(outputs)

    def logits(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return self.linear(x, weight)

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cpu = logits.device.type == "cpu"  # where numpy's is some fifteen times as fast as torch's
        tokens = torch.from_numpy(logits.numpy().argmax(-1)) if cpu else logits.argmax(-1)
        return tokens, logits.gather(1, tokens[:, None])[:, 0]

    def largest(
        self, x: torch.Tensor, counts: torch.Tensor, least: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, vocab = x.shape
        counts = torch.where(counts < vocab, counts, 0)
        most = int(counts.max()) if rows else 0
        if most:
            kth = x.topk(most).values.gather(1, (counts[:, None] - 1).clamp(min=0))[:, 0]
            least = torch.where(counts > 0, torch.maximum(least, kth), least)
        row, column = (x >= least[:, None]).nonzero(as_tuple=True)
        return column, x[row, column], torch.bincount(row, minlength=rows)

    def copy_blocks(self, caches: list[Any], src: torch.Tensor, dst: torch.Tensor) -> None:
        # A block may be a source after it was a destination: find what each finally holds, then gather before
        # anything is written.
        holds: dict[int, int] = {}
        for s, d in zip(src.tolist(), dst.tolist(), strict=True):
            holds[d] = holds.get(s, s)
        to, origin = send([np.array(list(some), np.int64) for some in (holds, holds.values())], caches[0][0].device)
        for cache in caches:
            for pages in cache:
                pages[to] = pages[origin]
