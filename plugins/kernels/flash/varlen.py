"""Libraries that attend in one call, given a block table: flash-attn, its third version, and torch.

Sources: flash_attn/flash_attn_interface.py and hopper/flash_attn_interface.py of github.com/Dao-AILab/flash-attention;
torch/nn/attention/varlen.py, whose kernels are flash-attn's.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from framework import send

from .library import FlashMeta, FlashPages, Library, Seen


class Tables(NamedTuple):
    """`Seen`, as tensors. table: int32 [R, pages]. lens: int32 [R]. cu_lens: int32 [R + 1], sums of lens. longest: of
    lens."""

    table: torch.Tensor
    lens: torch.Tensor
    cu_lens: torch.Tensor
    longest: int

    @classmethod
    def of(cls, meta: FlashMeta, group: int, window: int | None, device: torch.device) -> Tables:
        first, pages, lens = Seen.of(meta.batch, window)
        arrays = [lens, np.concatenate(([0], np.cumsum(lens)))]
        if window is not None:
            # Behind a request's last page, that page again.
            column = first[:, None] + np.minimum(np.arange(int(pages.max())), pages[:, None] - 1)
            arrays.append(np.take_along_axis(meta.batch.tables[group], column, 1))
        counts, sums, *tables = send([np.ascontiguousarray(array, np.int32) for array in arrays], device)
        return cls(tables[0] if tables else meta.tables[group], counts, sums, int(lens.max()))


class Varlen(Library):
    function: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]]
    """Those of `arguments` that not every version has."""

    def load(self, module: Any) -> str | None:
        reason = self.missing(module, self.function, *self.parameters)
        if reason is None:
            self._attend = getattr(module, self.function)
        return reason

    def attention(
        self, q: torch.Tensor, cache: FlashPages, group: int, meta: FlashMeta, scale: float, window: int | None
    ) -> torch.Tensor:
        known = meta.shared(("tables", group, window), lambda: Tables.of(meta, group, window, q.device))
        y: torch.Tensor = self._attend(q, cache.k, cache.v, **self.arguments(meta, known, scale, window))
        return y

    @abstractmethod
    def arguments(self, meta: FlashMeta, known: Tables, scale: float, window: int | None) -> dict[str, Any]: ...


class FlashAttention2(Varlen):
    name = "flash-attn"
    package = "flash_attn"
    install = "pip install flash-attn"
    page = 256
    function = "flash_attn_varlen_func"
    parameters = ("block_table", "window_size")

    def arguments(self, meta: FlashMeta, known: Tables, scale: float, window: int | None) -> dict[str, Any]:
        return {
            "cu_seqlens_q": meta.cu_lens,
            "cu_seqlens_k": known.cu_lens,
            "max_seqlen_q": meta.max_len,
            "max_seqlen_k": known.longest,
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "block_table": known.table,
        }


class FlashAttention3(Varlen):
    """Its function for caches: the one for ragged batches takes no page table."""

    name = "flash-attn-3"
    package = "flash_attn_interface"
    install = "built from flash-attn's folder hopper"
    function = "flash_attn_with_kvcache"
    parameters = ("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "window_size")

    def unfit(self, head_dim: int, capability: tuple[int, int]) -> str | None:
        if capability[0] != 9:
            return "is for compute capability 9, this GPU has {}.{}".format(*capability)
        return super().unfit(head_dim, capability)

    def arguments(self, meta: FlashMeta, known: Tables, scale: float, window: int | None) -> dict[str, Any]:
        return {
            "cache_seqlens": known.lens,
            "page_table": known.table,
            "cu_seqlens_q": meta.cu_lens,
            "max_seqlen_q": meta.max_len,
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
        }


class TorchVarlen(Varlen):
    name = "torch"
    package = "torch.nn.attention.varlen"
    install = "torch 2.12 has it"
    page = 256
    function = "varlen_attn"
    parameters = ("block_table", "seqused_k", "enable_gqa", "window_size", "scale")

    @staticmethod
    def version(module: Any) -> str:
        return str(torch.__version__)

    def load(self, module: Any) -> str | None:
        reason = super().load(module)
        if reason:
            return f"{reason}, which 2.12 does"
        return None if torch.backends.cuda.is_flash_attention_available() else "built without FlashAttention"

    def arguments(self, meta: FlashMeta, known: Tables, scale: float, window: int | None) -> dict[str, Any]:
        # A single new token sees all there is: where that is said, query heads that share keys are rows of one product.
        whole = (-1, -1) if meta.max_len == 1 else (-1, 0)
        return {
            "cu_seq_q": meta.cu_lens,
            "cu_seq_k": known.cu_lens,
            "max_q": meta.max_len,
            "max_k": known.longest,
            "scale": scale,
            "window_size": whole if window is None else (window - 1, 0),
            "enable_gqa": True,
            "seqused_k": known.lens,
            "block_table": known.table,
        }
