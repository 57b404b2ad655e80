"""Triton's interpreter with types that numpy lacks computed as hardware does.

It keeps bfloat16 and 8-bit floats as the integers of their bits. It adds and multiplies those as if they were numbers,
truncates where it should round, and its 8-bit rounding neither breaks ties to even nor carries. Here every operation on
them is one on float32, and what comes out is rounded by torch, to the nearest, ties to even.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch


@cache
def device() -> torch.device:
    """What Triton's kernels run on in tests: a GPU if there is one, else the CPU, interpreted."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    install()
    return torch.device("cpu")


def install() -> None:
    """Once per process. TRITON_INTERPRET was set before triton was first imported."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    kinds = {tl.bfloat16: torch.bfloat16, tl.float8e5: torch.float8_e5m2, tl.float8e4nv: torch.float8_e4m3fn}

    def widen(x: Any) -> Any:
        kind = kinds.get(x.dtype.scalar)
        if kind is None or x.data.dtype.kind == "f":
            return x
        bits = torch.from_numpy(np.ascontiguousarray(x.data)).view(kind)
        return TensorHandle(bits.float().numpy().reshape(x.data.shape), tl.float32)

    def narrow(x: Any, dtype: Any) -> Any:
        kind = kinds[dtype]
        bits = torch.from_numpy(np.ascontiguousarray(x.data, np.float32)).to(kind)
        unsigned = torch.uint16 if kind.itemsize == 2 else torch.uint8
        return TensorHandle(bits.view(unsigned).numpy().reshape(x.data.shape), dtype)

    plain_cast, plain_binary, plain_dot = (
        getattr(InterpreterBuilder, name) for name in ("cast_impl", "binary_op", "create_dot")
    )

    def cast(self: Any, src: Any, dst_type: Any, rounding: Any = None) -> Any:
        if src.dtype.scalar == dst_type.scalar:
            return src
        wide = widen(src)
        return narrow(wide, dst_type.scalar) if dst_type.scalar in kinds else plain_cast(self, wide, dst_type)

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar not in kinds:
            return plain_binary(self, lhs, rhs, op)
        found = plain_binary(self, widen(lhs), widen(rhs), op)
        return found if found.data.dtype == bool else narrow(found, lhs.dtype.scalar)

    def dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        return plain_dot(self, widen(a), widen(b), d, *how)

    InterpreterBuilder.cast_impl = InterpreterBuilder.create_fp_to_fp = cast
    InterpreterBuilder.binary_op, InterpreterBuilder.create_dot = binary, dot
