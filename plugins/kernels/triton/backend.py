"""The `triton` backend: the reference's layout of weights and of cache pages, torch's products, Triton kernels around
them. A step's numbers reach the device in one copy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from framework import Batch, Meta, ReferenceBackend, Rope, Support

from .tiles import BLOCK_SIZES, HEAD_DIMS

if TYPE_CHECKING:
    from framework.settings import Settings

LEAST = (8, 0)
"""CUDA capability below which the kernels spill registers."""
E4M3 = (8, 9)
"""That from which on 8-bit floats with 3 bits of mantissa are converted in hardware; Triton has no other way."""


class TritonMeta(Meta):
    """Views of `buffer`, uint8: each begins where a multiple of 16 bytes does, which a kernel is compiled for.

    kinds: whether some request has one new token, and whether one has more."""

    buffer: torch.Tensor
    kinds: tuple[bool, bool] = (True, False)

    @classmethod
    def empty(
        cls, tokens: int, rows: int, sampled: int, widths: Sequence[int], device: torch.device, pinned: bool = False
    ) -> TritonMeta:
        """For `rows` requests with `tokens` new tokens in all, `sampled` of them sampled, and for each group of layers
        a table so many blocks wide."""
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((tokens,), torch.int64) for _ in widths]
        shapes += [((sampled,), torch.int64), ((rows + 1,), torch.int32), ((rows,), torch.int32)]
        shapes += [((rows, width), torch.int32) for width in widths]
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in shapes]
        ends = list(accumulate(-(-size // 16) * 16 for size in sizes))
        meta = cls()
        meta.buffer = torch.empty(ends[-1], dtype=torch.uint8, device=device, pin_memory=pinned)
        views = [
            meta.buffer[begin : begin + size].view(dtype).view(shape)
            for begin, size, (shape, dtype) in zip([0, *ends], sizes, shapes, strict=False)
        ]
        groups = len(widths)
        meta.slots, meta.tables = tuple(views[:groups]), tuple(views[groups + 3 :])
        meta.logits_rows, meta.cu_lens, meta.seq_lens = views[groups : groups + 3]
        return meta


class TritonBackend(ReferenceBackend):
    """CUDA devices of capability 8.0 and later; under Triton's interpreter, for tests, a CPU."""

    name = "triton"
    block_sizes = BLOCK_SIZES
    kv_dtypes = ("fp8_e5m2", "fp8_e4m3")
    graphs = "decode"
    meta_type = TritonMeta

    def __init__(self, settings: Settings | None = None) -> None:
        self._named = settings is None or settings.kernel != "auto"
        self._e4m3 = settings is not None and settings.kv_dtype == "fp8_e4m3"

    def supports(
        self, op: str, dtype: torch.dtype, device: torch.device, *, head_dim: int = 64, window: int | None = None
    ) -> Support:
        known = super().supports(op, dtype, device, head_dim=head_dim, window=window)
        if not known.ok:
            return known
        if device.type != "cuda" and not (device.type == "cpu" and _interpreted() and self._named):
            return Support(False, f"it computes on CUDA devices, not on {device.type}")
        if find_spec("triton") is None:
            return Support(False, "the package triton is not installed")
        if device.type == "cuda":
            found = torch.cuda.get_device_capability(device)
            for least, wanted, what in ((LEAST, True, "it"), (E4M3, self._e4m3, "--kv-dtype fp8_e4m3")):
                if wanted and found < least:
                    need, have = (".".join(map(str, one)) for one in (least, found))
                    hint = "; fp8_e5m2 needs no more than 8.0" if least == E4M3 else ""
                    return Support(False, f"{what} needs CUDA capability {need}, this device has {have}{hint}")
        if head_dim not in HEAD_DIMS:
            return Support(False, f"head size {head_dim} is not a multiple of 16 up to {HEAD_DIMS[-1]}")
        return Support(True)

    # The batch

    def prepare(self, batch: Batch, device: torch.device, out: Meta | None = None) -> Meta:
        assert out is None or isinstance(out, TritonMeta)
        starts, lens = batch.starts.astype(np.int64), batch.lens.astype(np.int64)
        cuda, seqs, ends = device.type == "cuda", starts + lens, np.cumsum(lens)
        if cuda and device.index is not None:
            torch.cuda.set_device(device)  # kernels are launched on the current one
        longest = int(seqs.max())
        used = -(-longest // batch.block_size)
        sampled = np.flatnonzero(batch.samples)
        widths = [table.shape[1] for table in (batch.tables if out is None else out.tables)]
        host = TritonMeta.empty(int(ends[-1]), len(lens), len(sampled), widths, torch.device("cpu"), pinned=cuda)
        request = np.repeat(np.arange(len(lens)), lens)
        block, offset = np.divmod(np.arange(len(request)) - np.repeat(ends - seqs, lens), batch.block_size)
        for table, own, slots in zip(batch.tables, host.tables, host.slots, strict=True):
            own.numpy()[:, :used] = table[:, :used]
            slots.numpy()[:] = table[request, block].astype(np.int64) * batch.block_size + offset
        host.cu_lens.numpy()[:] = np.concatenate(([0], ends))
        host.seq_lens.numpy()[:] = seqs
        host.logits_rows.numpy()[:] = ends[sampled] - 1
        if out is None:
            meta = host if not cuda else TritonMeta.empty(int(ends[-1]), len(lens), len(sampled), widths, device)
        else:
            meta = out
        if meta is not host:
            meta.buffer.copy_(host.buffer, non_blocking=True)
        meta.batch, meta.max_len, meta.max_seq = batch, int(lens.max()), longest
        ones = lens == 1
        meta.kinds = bool(ones.any()), not ones.all()
        return meta

    advance = ReferenceBackend.advance

    # Operations

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        from . import launch

        return launch.silu_mul(x)

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from . import launch

        return launch.add_rmsnorm(x, residual, weight, eps)

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
        from . import launch

        return launch.rope_store(q, k, v, positions, *rope, meta.slots[group], cache.k, cache.v)

    def attention(
        self, q: torch.Tensor, cache: Any, group: int, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        from . import launch

        assert isinstance(meta, TritonMeta)
        tables, device = meta.tables[group], launch.device_of(q.device)
        heads = q.shape[1], cache.k.shape[1], q.shape[2]
        room = tables.shape[1] * cache.k.shape[2]
        parts = launch.plan(device, q.shape[0], len(meta.seq_lens), room, meta.kinds, heads, q.dtype.itemsize)
        return launch.attention(parts, q, cache.k, cache.v, tables, meta.cu_lens, meta.seq_lens, scale, window)


def _interpreted() -> bool:
    """As Triton itself reads it, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
