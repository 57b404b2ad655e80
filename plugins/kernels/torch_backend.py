"""The `torch` backend: the reference's layout of cache pages, batched attention, oneDNN weights on CPU.

Attention has two paths. Requests with few new tokens (decodes above all) are grouped by how many, and by context
length; each group gathers its pages once and is two batched products. Longer chunks run one by one through torch's
fused attention. What both need to know of the batch is worked out once per step, not per layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from framework import Batch, Meta, ReferenceBackend, Rope

FEW = 16
"""Most new tokens of a request that takes the grouped path."""
GATHER_ELEMENTS = 8 << 20
"""Bounds the scratch memory of one group: elements of its gathered keys, and of its values."""


class OneDNNLinear(NamedTuple):
    """weight: oneDNN's own blocked layout of [out, in]; size: out."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    size: int


class Group(NamedTuple):
    """R requests with n new tokens each, and pages for L tokens of context.

    rows: int64 [R * n], in the flat batch. pages: int64 [R * kv_heads * L / block_size], into pages seen as
    [blocks * kv_heads, ...]. bias: float32 [R, 1, 1, n, L], 0 where a token sees a position, else -inf.
    """

    n: int
    rows: torch.Tensor
    pages: torch.Tensor
    bias: torch.Tensor


class Chunk(NamedTuple):
    """One request's chunk. rows: in the flat batch. pages: int64 [kv_heads * blocks]. length: tokens of context in
    them. bias: [rows, length] in the model's dtype; None: causal from the first token on."""

    rows: slice
    pages: torch.Tensor
    length: int
    bias: torch.Tensor | None


class TorchMeta(Meta):
    """Adds what the layers of one step share, filled in by the first that needs it."""

    def __init__(self) -> None:
        self.rotary: tuple[Rope, torch.Tensor, torch.Tensor] | None = None
        self.stores: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.parts: dict[tuple[int, int, int | None], list[Group | Chunk]] = {}


class TorchBackend(ReferenceBackend):
    name = "torch"
    meta_type = TorchMeta

    # Weights

    def pack(self, op: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if op == "embed" or not _onednn(weight):
            return super().pack(op, weight, bias)
        return OneDNNLinear(torch.ops.mkldnn._reorder_linear_weight(weight), bias, weight.shape[0])

    def linear(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        if not isinstance(weight, OneDNNLinear):
            return super().linear(x, weight)
        if not x.shape[0]:  # oneDNN has no product of nothing
            return x.new_empty(0, weight.size)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.weight, weight.bias, "none", [], "")
        return y

    # Element-wise

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if residual is None else residual.add_(x)
        return F.rms_norm(x, weight.shape, weight, eps), x

    # Cache

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
        q, k = self.rotate(q, k, positions, rope, meta)
        fresh, slots = self._stores(cache, group, meta)
        for pages, new in ((cache.k, k), (cache.v, v)):
            pages.index_fill_(0, fresh, 0)
            pages.view(-1, k.shape[-1]).index_copy_(0, slots, new.reshape(-1, k.shape[-1]))
        return q

    @staticmethod
    def rotate(
        q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, rope: Rope, meta: Meta
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k, turned by their positions, each in memory of its own."""
        assert isinstance(meta, TorchMeta)
        if meta.rotary is None or meta.rotary[0] is not rope:
            cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
            meta.rotary = rope, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        _, cos, sin = meta.rotary
        width, head_dim = cos.shape[-1], k.shape[-1]

        def turned(x: torch.Tensor) -> torch.Tensor:
            part = x[..., :width].float()
            y = torch.addcmul(part * cos, part.roll(width // 2, -1), sin).to(x.dtype)
            return y if width == head_dim else torch.cat((y, x[..., width:]), -1)

        return turned(q), turned(k)

    @staticmethod
    def _stores(cache: Any, group: int, meta: Meta) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks begun in this step, and the row of every new (token, kv head) in pages seen as [rows, head_dim].

        Attention reads whole pages and masks what lies behind the last token. Begun blocks are cleared first, so
        that a NaN which an earlier owner left there cannot pass the mask (0 * NaN).
        """
        assert isinstance(meta, TorchMeta)
        kv_heads, block_size = cache.k.shape[1:3]
        known = meta.stores.get((group, kv_heads))
        if known is None:
            slots = meta.slots[group]
            block, offset = slots // block_size, slots % block_size
            heads = torch.arange(kv_heads, device=slots.device)
            rows = ((block[:, None] * kv_heads + heads) * block_size + offset[:, None]).flatten()
            known = meta.stores[group, kv_heads] = block[offset == 0], rows
        return known

    def attention(
        self, q: torch.Tensor, cache: Any, group: int, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        assert isinstance(meta, TorchMeta)
        kv_heads = cache.k.shape[1]
        parts = meta.parts.get((group, kv_heads, window))
        if parts is None:
            parts = list(_parts(meta.batch, group, cache.k, q, window))
            meta.parts[group, kv_heads, window] = parts
        k, v = (pages.view(-1, pages.shape[2] * pages.shape[3]) for pages in cache)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for part in parts:
            if isinstance(part, Group):
                out.index_copy_(0, part.rows, _attend_group(q, k, v, part, kv_heads, scale))
            else:
                out[part.rows] = _attend_chunk(q[part.rows], k, v, part, kv_heads, scale)
        return out


def _onednn(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by this weight faster than torch's own product does."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _parts(
    batch: Batch, group: int, pages: torch.Tensor, q: torch.Tensor, window: int | None
) -> Iterator[Group | Chunk]:
    """Split a batch into what attention runs at once."""
    _, kv_heads, size, head_dim = pages.shape
    heads = np.arange(kv_heads)
    starts, lens = batch.starts.astype(np.int64), batch.lens.astype(np.int64)
    ends, row = starts + lens, np.cumsum(lens) - lens
    first = np.zeros_like(starts) if window is None else np.maximum(starts - window + 1, 0) // size
    blocks = -(-ends // size) - first

    def index(chosen: np.ndarray[Any, Any], width: int) -> torch.Tensor:
        """Rows of `pages.flatten(0, 1)`; beyond a request's last block, that block again: always its own."""
        column = first[chosen, None] + np.minimum(np.arange(width), blocks[chosen, None] - 1)
        block = batch.tables[group][chosen[:, None], column].astype(np.int64)
        return _to((block[:, None, :] * kv_heads + heads[:, None]).ravel(), q.device)

    def bias(chosen: np.ndarray[Any, Any], n: int, length: int) -> torch.Tensor:
        query = starts[chosen, None] + np.arange(n)
        key = first[chosen, None] * size + np.arange(length)
        distance = query[:, :, None] - key[:, None, :]
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return _to(np.where(seen, np.float32(0), np.float32("-inf")), q.device)

    few = np.flatnonzero(lens <= FEW)
    few = few[np.lexsort((blocks[few], lens[few]))]
    while len(few):
        n, least = int(lens[few[0]]), int(blocks[few[0]])
        elements = blocks[few] * (kv_heads * size * head_dim) * np.arange(1, len(few) + 1)
        alike = (lens[few] == n) & (blocks[few] <= least + least // 2 + 4) & (elements <= GATHER_ELEMENTS)
        count = max(1, int(np.argmin(np.append(alike, False))))
        chosen, few = few[:count], few[count:]
        widest = int(blocks[chosen[-1]])
        yield Group(
            n,
            _to((row[chosen, None] + np.arange(n)).ravel(), q.device),
            index(chosen, widest),
            bias(chosen, n, widest * size)[:, None, None],
        )
    for i in np.flatnonzero(lens > FEW):
        one, length = np.array([i]), int(ends[i] - first[i] * size)
        causal = starts[i] == 0 and (window is None or lens[i] <= window)
        yield Chunk(
            slice(int(row[i]), int(row[i] + lens[i])),
            index(one, int(blocks[i])),
            length,
            None if causal else bias(one, int(lens[i]), length)[0].to(q.dtype),
        )


def _to(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _attend_group(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Group, kv_heads: int, scale: float
) -> torch.Tensor:
    """[R * n, heads * head_dim]. The query heads of one kv head, and the n tokens, are rows of one product."""
    _, heads, head_dim = q.shape
    count, n, ratio = part.bias.shape[0], part.n, heads // kv_heads
    x = q.index_select(0, part.rows).view(count, n, kv_heads, ratio, head_dim).permute(0, 2, 3, 1, 4)
    x = x.reshape(count * kv_heads, ratio * n, head_dim)
    k, v = (y.index_select(0, part.pages).view(count * kv_heads, -1, head_dim) for y in (k, v))
    # Scores in float32: rounding them to 16 bits would cost more than rounding the probabilities does.
    scores = torch.bmm(x.float().mul(scale), k.float().mT).view(count, kv_heads, ratio, n, -1)
    weights = scores.add_(part.bias).softmax(-1).to(v.dtype).view(count * kv_heads, ratio * n, -1)
    y = torch.bmm(weights, v).view(count, kv_heads, ratio, n, head_dim)
    return y.permute(0, 3, 1, 2, 4).reshape(count * n, heads * head_dim)


def _attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Chunk, kv_heads: int, scale: float
) -> torch.Tensor:
    """[tokens, heads * head_dim]. kv heads take the place of the batch, so that k and v are never repeated."""
    n, heads, head_dim = q.shape
    x = q.view(n, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    k, v = (
        y.index_select(0, part.pages)
        .view(kv_heads, 1, -1, head_dim)[:, :, : part.length]
        .expand(-1, heads // kv_heads, -1, -1)
        for y in (k, v)
    )
    y = F.scaled_dot_product_attention(x, k, v, part.bias, is_causal=part.bias is None, scale=scale)
    return y.permute(2, 0, 1, 3).reshape(n, heads * head_dim)
