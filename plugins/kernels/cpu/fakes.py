"""What the operations of csrc/ops.cpp give, by shape and type alone: for torch's compilers and graph capture, which run
models on tensors without data.

All operations that take tensors have one. The class `Layers` (the operation `decoder`) has none: an object that holds
pointers to weights and caches is opaque to them.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
TASK = 10
"""Numbers of a task of attention (csrc/kernels.h)."""


def pack(weight: Tensor, words: Tensor, isa: int) -> None: ...


def pack_int8(weight: Tensor, words: Tensor, isa: int) -> Tensor:
    return weight.new_empty(-(-weight.shape[0] // 16) * 16, dtype=torch.float32)


def pack_blocks(data: Tensor, format: int, first: int, words: Tensor, numbers: Tensor, isa: int) -> None: ...


def embed(tokens: Tensor, words: Tensor, numbers: Tensor | None, n: int, dtype: torch.dtype, isa: int) -> Tensor:
    per = 8 if words.dtype == torch.uint8 else 4 // words.element_size()
    return words.new_empty(tokens.numel(), words.shape[1] * per, dtype=dtype)


def linear(
    x: Tensor, words: Tensor, scales: Tensor | None, n: int, bias: Tensor | None, wide: bool, isa: int
) -> Tensor:
    return x.new_empty(x.shape[0], n, dtype=torch.float32 if wide else x.dtype)


def rmsnorm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, isa: int) -> Tensor:
    return x.new_empty(x.shape)


def silu_mul(x: Tensor, isa: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor,
    values: Tensor, isa: int,
) -> None: ...  # fmt: skip


def plan(cu_lens: Tensor, seq_lens: Tensor, heads: int, kv_heads: int, window: int) -> tuple[Tensor, Tensor]:
    known = torch.library.get_ctx()
    tasks, counters = known.new_dynamic_size(), known.new_dynamic_size()
    return cu_lens.new_empty(tasks, TASK), cu_lens.new_empty(counters)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, cu_lens: Tensor, seq_lens: Tensor, tasks: Tensor,
    counters: Tensor, scale: float, window: int, isa: int,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def argmax(x: Tensor, isa: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.int64), x.new_empty(x.shape[0])


def largest(x: Tensor, counts: Tensor, least: Tensor, isa: int) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.library.get_ctx().new_dynamic_size()
    return (x.new_empty(total, dtype=torch.int64), x.new_empty(total), x.new_empty(x.shape[0], dtype=torch.int64))


def register() -> None:
    """Once, after the library is loaded."""
    for fake in (
        pack, pack_int8, pack_blocks, embed, linear, rmsnorm, silu_mul, rope_store, plan, attention, argmax, largest,
    ):  # fmt: skip
        torch.library.register_fake(f"framework_cpu::{fake.__name__}", fake)
