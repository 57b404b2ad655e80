"""The reference kernel backend: every operation in plain torch, written to be read and to be right.

It runs on any device in float32, bfloat16 or float16. Faster backends subclass it and are tested against it.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from .kernels import OPS, Batch, KernelBackend, Meta, Rope, Support
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


def _tensor(array: np.ndarray[Any, Any], dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device, non_blocking=True)


def _slots(
    batch: Batch, request: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """For each group, where the tokens at `positions` of the requests `request` are stored."""
    block, offset = np.divmod(positions, batch.block_size)
    found = (table[request, block].astype(np.int64) * batch.block_size + offset for table in batch.tables)
    return tuple(_tensor(slots, np.int64, device) for slots in found)


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
        assert out is None, "this backend has no graphs"
        starts, lens = batch.starts.astype(np.int64), batch.lens.astype(np.int64)
        ends = np.cumsum(lens)
        request = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(len(request)) - np.repeat(ends - lens - starts, lens)
        meta = self.meta_type()
        meta.batch = batch
        meta.cu_lens = _tensor(np.concatenate(([0], ends)), np.int32, device)
        meta.seq_lens = _tensor(starts + lens, np.int32, device)
        meta.slots = _slots(batch, request, positions, device)
        meta.tables = tuple(_tensor(table, np.int32, device) for table in batch.tables)
        meta.logits_rows = _tensor(ends[batch.samples] - 1, np.int64, device)
        meta.max_len = int(lens.max())
        meta.max_seq = int((starts + lens).max())
        return meta

    def advance(self, batch: Batch, meta: Meta, device: torch.device, moved: bool) -> Meta:
        new = self.meta_type()  # what a subclass adds is of one step
        new.batch, new.cu_lens, new.logits_rows, new.max_len = batch, meta.cu_lens, meta.logits_rows, meta.max_len
        new.seq_lens, new.max_seq = meta.seq_lens.add_(1), meta.max_seq + 1
        if moved:
            new.slots = _slots(batch, np.arange(len(batch.starts)), batch.starts, device)
            new.tables = tuple(_tensor(table, np.int32, device) for table in batch.tables)
        else:
            new.slots, new.tables = tuple(slots.add_(1) for slots in meta.slots), meta.tables
        return new

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
        to = torch.tensor(list(holds), dtype=torch.int64, device=src.device)
        origin = torch.tensor(list(holds.values()), dtype=torch.int64, device=src.device)
        for cache in caches:
            for pages in cache:
                pages[to] = pages[origin]
