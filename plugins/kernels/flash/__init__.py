"""`--kernel flash`: attention by a FlashAttention library that is installed. docs/kernels.md describes it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class FlashOptions(BaseModel):
    library: Literal["auto", "flash-attn", "flashinfer", "torch"] = Field(
        default="auto", description="Whose FlashAttention; auto: the first of those installed that fits."
    )
