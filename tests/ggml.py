"""Rows in the formats of ggml, for those that the gguf package reads but does not write."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
ROUNDED = ("Q2_K", "Q3_K", "Q5_K")


def quantize(x: Rows, kind: str) -> Bytes:
    """uint8 [rows, bytes of a row] of float32 [rows, columns]: near the values, if not the nearest that there is.

    Of ROUNDED it is random blocks of about the size of the values, as nothing here writes them.
    """
    if kind == "Q4_K":
        return _q4_k(x)
    if kind == "Q6_K":
        return _q6_k(x)
    if kind in ROUNDED:
        return _random(x, kind)
    return gguf.quantize(x, gguf.GGMLQuantizationType[kind])


def dequantize(rows: Bytes, kind: str) -> npt.NDArray[np.float64]:
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]).astype(np.float64)


def _divide(x: Rows, by: Rows) -> Rows:
    return np.divide(x, by, out=np.zeros_like(x), where=by != 0)


def _q4_k(x: Rows) -> Bytes:
    """256 values: float16 d and dmin, eight 6-bit scales and minima in 12 bytes, 128 bytes of two values each."""
    count = x.size // 256
    blocks = x.reshape(count, 8, 32)
    low = np.maximum(-blocks.min(-1), 0)
    step = (blocks.max(-1) + low) / 15
    d, dmin = (y.max(-1, keepdims=True).astype(np.float16) for y in (step / 63, low / 63))
    scale, least = (
        np.clip(np.rint(_divide(y, z.astype(np.float32))), 0, 63).astype(np.uint8) for y, z in ((step, d), (low, dmin))
    )
    by = (d.astype(np.float32) * scale)[:, :, None]
    q = np.clip(np.rint(_divide(blocks + (dmin.astype(np.float32) * least)[:, :, None], by)), 0, 15).astype(np.uint8)
    packed = np.empty((count, 12), np.uint8)
    packed[:, :4] = scale[:, :4] | scale[:, 4:] >> 4 << 6
    packed[:, 4:8] = least[:, :4] | least[:, 4:] >> 4 << 6
    packed[:, 8:] = scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4
    halves = (q[:, ::2] | q[:, 1::2] << 4).reshape(count, 128)
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), packed, halves], 1).reshape(x.shape[0], -1)


def _q6_k(x: Rows) -> Bytes:
    """256 values: 128 bytes of their lower halves, 64 of their upper two bits, 16 scales of 8 bits, float16 d."""
    count = x.size // 256
    blocks = x.reshape(count, 16, 16)
    step = np.abs(blocks).max(-1) / 31
    d = (step.max(-1, keepdims=True) / 127).astype(np.float16)
    scale = np.rint(_divide(step, d.astype(np.float32))).astype(np.int8)
    by = (d.astype(np.float32) * scale)[:, :, None]
    q = (np.clip(np.rint(_divide(blocks, by)), -32, 31) + 32).astype(np.uint8).reshape(count, 2, 4, 32)
    low = np.concatenate([q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4], -1).reshape(count, 128)
    high = (q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6).reshape(count, 64)
    return np.concatenate([low, high, scale.view(np.uint8), d.view(np.uint8)], 1).reshape(x.shape[0], -1)


def _random(x: Rows, kind: str) -> Bytes:
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(x.size).integers(0, 256, (x.size // values, size), dtype=np.uint8)
    d = np.float16(np.abs(x).max() / 200)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q5_K": (0, 2)}[kind]:
        blocks[:, at : at + 2] = np.full((len(blocks), 1), d).view(np.uint8)
    return blocks.reshape(x.shape[0], -1)
