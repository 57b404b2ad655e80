"""flashinfer: wrappers that are given a plan of the batch on the host, and then run it layer by layer.

Sources: flashinfer/decode.py, flashinfer/prefill.py and include/flashinfer/attention of
github.com/flashinfer-ai/flashinfer.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .library import Array, FlashMeta, FlashPages, Library, Seen, blocks

WORKSPACE = 128 << 20
"""Bytes for partial results: what its documentation recommends."""
HEAD_DIMS = (64, 128, 256)
ROWS = 2
"""Most query heads to a kv head for which decodes go without tensor cores: it has such kernels for some numbers, which
differ between versions, and from 3 on tensor cores are worth their while."""


class Pages:
    """`Seen` as host tensors of int32, the indices of requests' pages one after the other. queries: [R + 1]."""

    def __init__(self, meta: FlashMeta, group: int, window: int | None) -> None:
        first, pages, lens = Seen.of(meta.batch, window)
        self.indptr = _host(np.concatenate(([0], np.cumsum(pages))))
        self.indices = _host(blocks(meta.batch.tables[group], first, pages))
        self.last = _host(lens - (pages - 1) * meta.batch.block_size)
        self.queries = _host(np.concatenate(([0], np.cumsum(meta.batch.lens))))


class Planned:
    """A wrapper, and the step that its plan is of."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.meta: FlashMeta | None = None


class FlashInfer(Library):
    """A plan is of one batch and one kind of attention: there is a wrapper for each kind that the model has, planned
    anew by the first of its layers in each step. They share the workspace, as they run one after the other."""

    name = "flashinfer"
    package = "flashinfer"
    install = "pip install flashinfer-python"

    def __init__(self) -> None:
        self._planned: dict[Hashable, Planned] = {}
        self._workspace: torch.Tensor | None = None

    def unfit(self, head_dim: int, capability: tuple[int, int]) -> str | None:
        if head_dim not in HEAD_DIMS:
            return f"has heads of {', '.join(map(str, HEAD_DIMS))}, not of {head_dim}"
        if not _compiles():
            return "compiles its kernels, and there is no nvcc: install CUDA's, or flashinfer-jit-cache"
        return None

    def load(self, module: Any) -> str | None:
        recent = "q_data_type", "kv_data_type", "sm_scale"
        reason = self.missing(module, "BatchDecodeWithPagedKVCacheWrapper.plan", "window_left", *recent)
        prefill = "BatchPrefillWithPagedKVCacheWrapper.plan"
        reason = reason or self.missing(module, prefill, "window_left", "head_dim_qk", *recent)
        if reason is None:
            self._decode = module.BatchDecodeWithPagedKVCacheWrapper
            self._prefill = module.BatchPrefillWithPagedKVCacheWrapper
        return reason

    def attention(
        self, q: torch.Tensor, cache: FlashPages, group: int, meta: FlashMeta, scale: float, window: int | None
    ) -> torch.Tensor:
        decodes, kv_heads = meta.max_len == 1, cache.k.shape[2]
        key = decodes, group, q.shape[1:], kv_heads, q.dtype, scale, window
        planned = self._planned.get(key)
        if planned is None:
            planned = self._planned[key] = Planned(self._wrapper(decodes, q, kv_heads))
        if planned.meta is not meta:
            self._plan(planned.wrapper, decodes, q, kv_heads, group, meta, scale, window)
            planned.meta = meta
        y: torch.Tensor = planned.wrapper.run(q, (cache.k, cache.v))
        return y

    def _wrapper(self, decodes: bool, q: torch.Tensor, kv_heads: int) -> Any:
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
        if not decodes:
            return self._prefill(self._workspace, kv_layout="NHD")
        return self._decode(self._workspace, kv_layout="NHD", use_tensor_cores=q.shape[1] > ROWS * kv_heads)

    @staticmethod
    def _plan(
        wrapper: Any,
        decodes: bool,
        q: torch.Tensor,
        kv_heads: int,
        group: int,
        meta: FlashMeta,
        scale: float,
        window: int | None,
    ) -> None:
        pages = meta.shared(("pages", group, window), lambda: Pages(meta, group, window))
        heads, head_dim = q.shape[1:]
        same = {
            "num_qo_heads": heads,
            "num_kv_heads": kv_heads,
            "page_size": meta.batch.block_size,
            "window_left": -1 if window is None else window - 1,
            "q_data_type": q.dtype,
            "kv_data_type": q.dtype,
            "sm_scale": scale,
        }
        if decodes:
            given = {"indptr": pages.indptr, "indices": pages.indices, "last_page_len": pages.last}
            wrapper.plan(**given, head_dim=head_dim, **same)
        else:
            given = {
                "qo_indptr": pages.queries,
                "paged_kv_indptr": pages.indptr,
                "paged_kv_indices": pages.indices,
                "paged_kv_last_page_len": pages.last,
            }
            wrapper.plan(**given, head_dim_qk=head_dim, causal=True, **same)


def _host(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int32))


def _compiles() -> bool:
    """Whether it can compile its kernels, or has them: as its jit/cpp_ext.py and jit/env.py look for them."""
    if importlib.util.find_spec("flashinfer_jit_cache") or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return True
    return shutil.which("nvcc") is not None or Path("/usr/local/cuda").exists()
