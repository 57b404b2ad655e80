"""The `flash` backend: pages of a layout that FlashAttention libraries read, attention by one of them.

Everything else is the `torch` backend's: on a GPU its operations are torch's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from framework import CacheGroup, Meta, ReferenceBackend, Rope, Support, send

from ..torch_backend import TorchBackend
from . import FlashOptions
from .library import FlashMeta, FlashPages, Library, blocks
from .planned import FlashInfer
from .varlen import FlashAttention2, FlashAttention3, TorchVarlen

CAPABILITY = 8, 0
"""The least: FlashAttention-2 needs it, and flashinfer's bfloat16."""
DTYPES = (torch.bfloat16, torch.float16)
LIBRARIES: tuple[tuple[str, type[Library]], ...] = (
    ("flash-attn", FlashAttention3),
    ("flash-attn", FlashAttention2),
    ("flashinfer", FlashInfer),
    ("torch", TorchVarlen),
)
"""By the option that names them, in the order in which they are asked: what somebody installed for this purpose before
what torch brings, and kernels that are compiled before those that will be at first use."""


class FlashBackend(TorchBackend):
    """For blocks of the one size that it is made for, since libraries differ in the sizes that they take."""

    name = "flash"
    meta_type = FlashMeta

    def __init__(self, options: FlashOptions | None = None, block_size: int = 16) -> None:
        self.block_sizes = (block_size,)
        wanted = (options or FlashOptions()).library
        self._libraries = [kind() for name, kind in LIBRARIES if wanted in ("auto", name)]
        self._library: Library | None = None

    def supports(
        self, op: str, dtype: torch.dtype, device: torch.device, *, head_dim: int = 64, window: int | None = None
    ) -> Support:
        capability = self.capability(device)
        if capability < CAPABILITY:
            this = "{} has {}.{}".format(device, *capability) if any(capability) else f"this is {device}"
            return Support(
                False, "it needs an NVIDIA GPU of compute capability {}.{} or newer, {}".format(*CAPABILITY, this)
            )
        known = super().supports(op, dtype, device, head_dim=head_dim, window=window)
        if not known.ok or op != "attention":
            return known
        if dtype not in DTYPES:
            return Support(False, f"dtype {dtype} is not one of {', '.join(map(str, DTYPES))}")
        reasons = []
        for library in self._libraries:
            reason = library.declines(head_dim, self.block_sizes[0], capability)
            if reason is None:
                self._library, self.name = library, f"{type(self).name} ({library.title})"
                return Support(True)
            reasons.append(f"{library.name}: {reason}")
        return Support(False, "; ".join(reasons))

    @staticmethod
    def capability(device: torch.device) -> tuple[int, int]:
        """Of an NVIDIA GPU; (0, 0) for other devices."""
        if device.type != "cuda" or torch.version.cuda is None:  # torch calls AMD's GPUs cuda, too
            return 0, 0
        return torch.cuda.get_device_capability(device)

    # Cache

    @staticmethod
    def _page(group: CacheGroup, dtype: torch.dtype, block_size: int) -> tuple[int, int, int]:
        return block_size, group.kv_heads, group.head_dim

    def allocate(
        self,
        group: CacheGroup,
        dtype: torch.dtype,
        block_size: int,
        blocks: int,
        device: torch.device,
        pinned: bool = False,
    ) -> list[Any]:
        shape = blocks, *self._page(group, dtype, block_size)

        def pages() -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        return [FlashPages(pages(), pages()) for _ in range(group.layers)]

    block_bytes = ReferenceBackend.block_bytes
    copy_blocks = ReferenceBackend.copy_blocks

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
        assert isinstance(meta, FlashMeta)
        q, k = self.rotate(q, k, positions, rope, meta)
        begun = meta.shared(("begun", group), lambda: _begun(meta, group, q.device))
        if begun is not None:
            cache.v.index_fill_(0, begun, 0)
        for pages, new in ((cache.k, k), (cache.v, v)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, meta.slots[group], new)
        return q

    def attention(
        self, q: torch.Tensor, cache: Any, group: int, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        assert isinstance(meta, FlashMeta)
        assert self._library is not None, "`supports` has found none"
        return self._library.attention(q, cache, group, meta, scale, window).flatten(1)


def _begun(meta: FlashMeta, group: int, device: torch.device) -> torch.Tensor | None:
    """Blocks whose first token is new, int64; None for none.

    Their values are cleared before any is written: a library may multiply what lies behind the last token by a weight
    of 0, and a NaN that an earlier owner left there would pass (0 * NaN). Scores of such keys are replaced in all of
    them, NaN or not.
    """
    batch = meta.batch
    starts = batch.starts.astype(np.int64)
    first, end = (-(-x // batch.block_size) for x in (starts, starts + batch.lens))
    found = blocks(batch.tables[group], first, end - first)
    return send([found.astype(np.int64)], device)[0] if len(found) else None
