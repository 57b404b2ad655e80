"""The `triton` backend: the reference's layout of weights and of cache pages, torch's products, Triton kernels around
them."""

from __future__ import annotations

import os
import sysconfig
from functools import cache, cached_property
from importlib.util import find_spec
from shutil import which
from typing import TYPE_CHECKING, Any

import torch

from framework import Meta, ReferenceBackend, Rope, Support

from .tiles import BLOCK_SIZES, HEAD_DIMS

if TYPE_CHECKING:
    from framework.settings import Settings

LEAST = (8, 0)
"""CUDA capability below which the kernels spill registers."""
E4M3 = (8, 9)
"""That from which on 8-bit floats with 3 bits of mantissa are converted in hardware; Triton has no other way."""


class TritonMeta(Meta):
    """Adds what kinds of requests there are: whether some has one new token, and whether one has more."""

    @cached_property
    def kinds(self) -> tuple[bool, bool]:
        if self.max_len == 1:  # all that a graph's has to tell
            return True, False
        return bool((self.batch.lens == 1).any()), True


class TritonBackend(ReferenceBackend):
    """NVIDIA GPUs of capability 8.0 and later; under Triton's interpreter, for tests, a CPU."""

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
            return Support(False, f"it computes on NVIDIA GPUs, not on {device.type}")
        if device.type == "cuda" and torch.version.cuda is None:  # torch calls AMD's GPUs cuda, too
            return Support(False, "it computes on NVIDIA GPUs, and this build of torch is not for them")
        if find_spec("triton") is None:
            return Support(False, "the package triton is not installed")
        if device.type == "cuda":
            found = torch.cuda.get_device_capability(device)
            for least, wanted, what in ((LEAST, True, "it"), (E4M3, self._e4m3, "--kv-dtype fp8_e4m3")):
                if wanted and found < least:
                    need, have = (".".join(map(str, one)) for one in (least, found))
                    hint = "; fp8_e5m2 needs no more than 8.0" if least == E4M3 else ""
                    return Support(False, f"{what} needs CUDA capability {need}, this device has {have}{hint}")
            missing = _missing()
            if missing:
                return Support(False, f"triton compiles its launcher in C, and here is no {missing}")
        if head_dim not in HEAD_DIMS:
            return Support(False, f"head size {head_dim} is not a multiple of 16 up to {HEAD_DIMS[-1]}")
        return Support(True)

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


@cache
def _missing() -> str:
    """What triton needs, besides itself, to launch a kernel."""
    if not ("CC" in os.environ or which("gcc") or which("clang")):
        return "C compiler ($CC, gcc or clang)"
    headers = sysconfig.get_path("include", "posix_prefix")
    return "" if os.path.exists(os.path.join(headers, "Python.h")) else f"Python.h in {headers}"


def _interpreted() -> bool:
    """As Triton itself reads it, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
