"""`--kernel cpu`: operations in C++, compiled on this machine for this machine. docs/kernels.md describes them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class CpuOptions(BaseModel):
    isa: Literal["auto", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"] = Field(
        default="auto", description="Instruction set; auto: the best that the CPU has."
    )
    gguf: Literal["packed", "widened"] = Field(
        default="packed", description="Quantised weights of a GGUF file: as they are stored, or in the model's dtype."
    )
