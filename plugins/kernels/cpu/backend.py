"""The `cpu` backend: torch on the outside, the operations of csrc/ inside.

It owns the layout of weights and of cache pages, both made of words of 32 bits, 16 columns side by side (csrc/dot.h,
docs/kernels.md). What attention needs to know of a batch is worked out once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from framework import CacheGroup, Decoder, Meta, Quantized, ReferenceBackend, Rope, Support, kept
from framework.log import get_logger
from framework.pages import Arena

from . import CpuOptions
from .build import SOURCES, BuildError, load

PAGE = 16
"""Tokens of a page; a block is one or several."""


EXACT = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12}
"""Formats that csrc/blocks.h keeps, by ggml's number."""
ROUNDED = ("Q2_K", "Q3_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K")
"""Formats that become the nearest Q8_0."""
_ROUNDING = (Path(__file__), *(SOURCES / name for name in ("blocks.h", "formats.h", "int8.h", "dot.h")))


class PackedLinear(NamedTuple):
    """words: [rows / 16, columns / per, 16, per], `per` values to 32 bits: in the weight's type, or int8, of which row
    i is to be multiplied by scales[i] (float32). In blocks (csrc/blocks.h) words are int8, or uint8 of two values each,
    and scales float16 [rows / 16, columns / 32, numbers of a block, 16]. dtype: of activations."""

    words: torch.Tensor
    rows: int
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    dtype: torch.dtype


class PackedPages(NamedTuple):
    """One layer's cache. keys, values: [blocks, kv_heads, block_size / 16, 16 * padded head_dim], see csrc/kernels.h;
    int8: with 64 bytes behind, the 16 tokens' scales."""

    keys: torch.Tensor
    values: torch.Tensor


class CpuMeta(Meta):
    """Adds how attention is cut into tasks: by (group, heads, kv heads, window), filled in by the first layer that
    needs it."""

    def __init__(self) -> None:
        self.plans: dict[tuple[int, int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}


class CpuBackend(ReferenceBackend):
    """float32 and bfloat16 on a CPU. `isa` names the instruction set to use; more than one may be in use at once."""

    name = "cpu"
    dtypes = (torch.float32, torch.bfloat16)
    block_sizes = tuple(range(PAGE, 257, PAGE))
    quantizations = ("int8",)
    kv_dtypes = ("int8",)
    meta_type = CpuMeta
    formats = (*EXACT, *ROUNDED)
    layouts = MappingProxyType(
        {**ReferenceBackend.layouts, "pack": ("embed", "linear", "qkv", "gate_up", "logits", "decoder")}
    )

    def __init__(self, options: CpuOptions | None = None, quantization: str = "none") -> None:
        options = options or CpuOptions()
        self._wanted, self._quantization = options.isa, quantization
        if options.gguf != "packed" or quantization != "none":
            self.formats = ()
        self._arena = Arena()

    def supports(
        self, op: str, dtype: torch.dtype, device: torch.device, *, head_dim: int = 64, window: int | None = None
    ) -> Support:
        if device.type != "cpu":
            return Support(False, f"it computes on the CPU, not on {device.type}")
        known = super().supports(op, dtype, device, head_dim=head_dim, window=window)
        if not known.ok:
            return known
        try:
            self._load()
        except BuildError as error:
            return Support(False, str(error))
        return Support(True)

    def _load(self) -> None:
        """Bind the operations. Raises `BuildError`."""
        names = _isas()
        if self._wanted not in ("auto", *names):
            raise BuildError(f"isa {self._wanted}: this CPU has {', '.join(names)}")
        self._isa = 0 if self._wanted == "auto" else names.index(self._wanted)
        ops = torch.ops.framework_cpu
        self._embed, self._pack_blocks = ops.embed.default, ops.pack_blocks.default
        self._pack, self._pack_int8 = ops.pack.default, ops.pack_int8.default
        self._linear, self._rmsnorm = ops.linear.default, ops.rmsnorm.default
        self._silu_mul, self._rope_store = ops.silu_mul.default, ops.rope_store.default
        self._plan, self._attention = ops.plan.default, ops.attention.default
        self._argmax, self._largest = ops.argmax.default, ops.largest.default

    def __getattr__(self, name: str) -> Any:
        # The first use of an operation; who asks `supports` before has them bound by then.
        if not name.startswith("_") or "_isa" in self.__dict__:
            raise AttributeError(name)
        self._load()
        return getattr(self, name)

    # Weights

    def pack(self, op: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if op == "embed":
            return weight
        rows, columns = weight.shape
        kind, pack = weight.dtype, self._pack
        if self._quantization == "int8":
            kind, pack = torch.int8, self._pack_int8
        per = 4 // kind.itemsize
        words = self._arena.empty((-(-rows // 16), -(-columns // per), 16, per), kind)
        return PackedLinear(words, rows, bias, pack(weight, words, self._isa), weight.dtype)

    def pack_tied(self, weight: torch.Tensor) -> tuple[Any, Any]:
        """Once, unless rows read from the head would be those of int8, or not of the length that they had."""
        head = self.pack("logits", weight)
        whole = weight.shape[1] % (4 // weight.dtype.itemsize) == 0
        return (head if whole and self._quantization == "none" else self.pack("embed", weight)), head

    def pack_quantized(
        self, op: str, parts: Sequence[Quantized], dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> Any:
        """In 4 bits where all parts are, else in 8: those of 4 are then rounded to the nearest of these."""
        isa, rows, columns = self._isa, sum(part.shape[0] for part in parts), parts[0].columns
        nibbles = all(part.format in EXACT and part.format != "Q8_0" for part in parts)
        groups, numbers = -(-rows // 16), 2 if nibbles else 1
        shapes = [
            ((groups, columns // (8 if nibbles else 4), 16, 4), torch.uint8 if nibbles else torch.int8),
            ((groups, columns // 32, numbers, 16), torch.float16),
        ]

        def fill(tensors: list[torch.Tensor]) -> None:
            begin = 0
            for part in parts:
                known = EXACT.get(part.format, 0)
                for first, data in [(0, part.data)] if known else part.widened():
                    self._pack_blocks(data, known, begin + first, *tensors, isa)
                begin += part.shape[0]

        # The exact formats are put in order faster than a file of them is hashed.
        if rows * columns >= kept.LEAST and any(part.format in ROUNDED for part in parts):
            names = [part.identity() for part in parts]
            words, scales = kept.kept([_isas()[isa], *names], _ROUNDING, shapes, fill)
        else:
            words, scales = tensors = [self._arena.empty(shape, kind).zero_() for shape, kind in shapes]
            fill(tensors)
        return PackedLinear(words, rows, bias, scales, dtype)

    def embed(self, tokens: torch.Tensor, weight: Any) -> torch.Tensor:
        if not isinstance(weight, PackedLinear):
            return super().embed(tokens, weight)
        y: torch.Tensor = self._embed(tokens, weight.words, weight.scales, weight.rows, weight.dtype, self._isa)
        return y

    def linear(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        y: torch.Tensor = self._linear(x, weight.words, weight.scales, weight.rows, weight.bias, False, self._isa)
        return y

    gate_up = linear
    qkv = ReferenceBackend.qkv

    def logits(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        y: torch.Tensor = self._linear(x, weight.words, weight.scales, weight.rows, weight.bias, True, self._isa)
        return y

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._argmax(logits, self._isa)
        return found

    def largest(
        self, x: torch.Tensor, counts: torch.Tensor, least: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self._largest(x, counts, least, self._isa)
        return found

    # Layers

    def decoder(
        self,
        x: torch.Tensor,
        decoder: Decoder,
        caches: Sequence[Any],
        positions: torch.Tensor,
        rope: Rope,
        group: int,
        meta: Meta,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layers = decoder.prepared
        if layers is None or layers[0] is not caches:
            given = [
                (
                    (one.input_norm, one.q_norm, one.k_norm, one.post_norm),
                    [(w.words, w.scales, w.rows, w.bias) for w in (one.qkv, one.o, one.gate_up, one.down)],
                    *cache,
                    one.window or 0,
                )
                for one, cache in zip(decoder.layers, caches, strict=True)
            ]
            made = torch.classes.framework_cpu.Layers(
                given, decoder.heads, decoder.head_dim, decoder.eps, decoder.scale, self._isa
            )
            layers = decoder.prepared = caches, made
        run = layers[1].run
        y: tuple[torch.Tensor, torch.Tensor] = run(
            x, positions, rope.cos, rope.sin, meta.slots[group], meta.tables[group], meta.cu_lens, meta.seq_lens
        )
        return y

    # Element-wise

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._silu_mul(x, self._isa)
        return y

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self._rmsnorm(x, None, weight, eps, self._isa), x
        residual = residual.contiguous()
        return self._rmsnorm(x, residual, weight, eps, self._isa), residual

    # Cache

    @staticmethod
    def _page(group: CacheGroup, dtype: torch.dtype, block_size: int) -> tuple[int, int, int]:
        """Shape of a block's keys, and of its values: heads are padded to a multiple of 16, and behind a page of bytes
        there is a float32 for each token."""
        scales = PAGE * 4 if dtype == torch.int8 else 0
        return group.kv_heads, block_size // PAGE, PAGE * (-(-group.head_dim // PAGE) * PAGE) + scales

    def allocate(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [PackedPages(*pages) for pages in super().allocate(*args, **kwargs)]

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
        self._rope_store(q, k, v, positions, rope.cos, rope.sin, meta.slots[group], *cache, self._isa)
        return q

    def attention(
        self, q: torch.Tensor, cache: Any, group: int, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        assert isinstance(meta, CpuMeta)
        key = group, q.shape[1], cache.keys.shape[1], window or 0
        plan = meta.plans.get(key)
        if plan is None:
            plan = meta.plans[key] = self._plan(meta.cu_lens, meta.seq_lens, *key[1:])
        y: torch.Tensor = self._attention(
            q, *cache, meta.tables[group], meta.cu_lens, meta.seq_lens, *plan, scale, key[3], self._isa
        )
        return y


def _isas() -> list[str]:
    """Raises `BuildError`."""
    found = _loaded()
    if isinstance(found, str):
        raise BuildError(found)
    return found


@cache
def _loaded() -> list[str] | str:
    """The instruction sets compiled, or what kept them from being: compiling takes minutes, and what stops it stays
    for as long as this process."""
    try:
        return load(get_logger(__name__).info)
    except BuildError as error:
        return str(error)
