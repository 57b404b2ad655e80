"""Launches of the kernels: grids and constants out of shapes alone, so that nothing waits for the device and a captured
launch stays right while contexts grow. Imports triton, so only the backend imports it, when it has to."""

from __future__ import annotations

from functools import cache
from math import e, log2
from typing import Any, NamedTuple

import torch

from . import attention as kernels
from . import elementwise
from .tiles import Tile, attend_tiles, padded, splits

LIMITS = {torch.float8_e5m2: 57344.0, torch.float8_e4m3fn: 448.0}
"""Largest numbers of types that are converted to by saturating."""
WARPS = 4
ELEMENTS = 2048
"""That a program of the row-wise kernels takes, or one row."""


class Part(NamedTuple):
    """How `attend` is launched once. ones: for requests with one new token; mixed: there are others, too."""

    ones: bool
    mixed: bool
    tiles: int
    splits: int
    tile: Tile


class Device(NamedTuple):
    """capability: of CUDA; the interpreter's is any. processors: that run at the same time."""

    capability: tuple[int, int] = (8, 0)
    processors: int = 8


@cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device()
    found = torch.cuda.get_device_properties(device)
    return Device((found.major, found.minor), found.multi_processor_count)


def plan(
    device: Device, tokens: int, requests: int, room: int, kinds: tuple[bool, bool], heads: tuple[int, int, int],
    itemsize: int,
) -> list[Part]:  # fmt: skip
    """The launches of one layer's attention: everything that depends on the step is decided here. It depends on the
    step's shape, never on how long contexts are.

    kinds: whether some request has one new token, and whether one has more. room: tokens that tables have room for.
    heads: query heads, kv heads, head_dim.
    """
    group = heads[0] // heads[1]
    one, more = attend_tiles(device.capability, itemsize, heads[2], group)
    parts = []
    if kinds[1]:
        parts.append(Part(False, kinds[0], tokens * group // more.rows + requests, 1, more))
    if kinds[0]:
        tiles = requests * -(-group // one.rows)
        parts.append(Part(True, kinds[1], tiles, splits(tiles * heads[1], room, device.processors), one))
    return parts


def attend_constants(
    part: Part, heads: tuple[int, int, int], block_size: int, windowed: bool, cap: float
) -> dict[str, Any]:
    return {
        "KV_HEADS": heads[1], "GROUP": heads[0] // heads[1], "D": heads[2], "DP": padded(heads[2]),
        "BLOCK": block_size, "M": part.tile.rows, "N": part.tile.columns, "SPLITS": part.splits,
        "ONES": part.ones, "MIXED": part.mixed, "WINDOWED": windowed, "CAP": cap,
    }  # fmt: skip


def combine_constants(part: Part, heads: tuple[int, int, int]) -> dict[str, Any]:
    head = padded(heads[2])
    return {"HEADS": heads[0], "D": heads[2], "DP": head, "SPLITS": part.splits, "MIXED": part.mixed}


def combine_warps(constants: dict[str, Any]) -> int:
    return 8 if constants["SPLITS"] * constants["DP"] > 8192 else WARPS


def attention(
    parts: list[Part],
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    cu_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None,
    cap: float = 0.0,
) -> torch.Tensor:
    """q: [tokens, heads, head_dim]; tokens may be apart. cap: soft cap of scores, cap * tanh(score / cap); 0: none.
    Returns [tokens, heads * head_dim]."""
    tokens, count, head_dim = q.shape
    heads, block_size = (count, keys.shape[1], head_dim), keys.shape[2]
    out = q.new_empty(tokens, count * head_dim)
    if not tokens:
        return out
    if q.stride()[1:] != (head_dim, 1):
        q = q.contiguous()
    requests = seq_lens.shape[0]
    if not cap:
        scale *= log2(e)
    for part in parts:
        sums = some = out
        if part.splits > 1:
            some = q.new_empty(requests, count, part.splits, head_dim, dtype=torch.float32)
            sums = q.new_empty(requests, count, part.splits, 2, dtype=torch.float32)
        kernels.attend[(part.tiles, heads[1], part.splits)](
            out, some, sums, q, keys, values, tables, cu_lens, seq_lens, requests, tables.shape[1], q.stride(0),
            scale, window or 0, **attend_constants(part, heads, block_size, window is not None, cap),
            num_warps=part.tile.warps, num_stages=part.tile.stages,
        )  # fmt: skip
        if part.splits > 1:
            constants = combine_constants(part, heads)
            kernels.combine[(requests, count)](
                out, some, sums, cu_lens, **constants, num_warps=combine_warps(constants)
            )
    return out


def rope_constants(
    heads: int, kv_heads: int, head_dim: int, half: int, block_size: int, kind: torch.dtype
) -> dict[str, Any]:
    width = padded(half, 1)
    return {
        "HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "DP": padded(head_dim), "HALF": half, "HP": width,
        "BLOCK": block_size, "ROWS": min(64, max(16, ELEMENTS // width)), "LIMIT": LIMITS.get(kind, 0.0),
    }  # fmt: skip


def rope_store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """q, which is turned in place, unless its heads lie apart."""
    tokens, heads, head_dim = q.shape
    q, k, v = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (q, k, v))
    if tokens:
        constants = rope_constants(heads, k.shape[1], head_dim, cos.shape[1], keys.shape[2], keys.dtype)
        programs = sum(-(-tokens * count // constants["ROWS"]) for count in (heads, k.shape[1]))
        elementwise.rope_store[(programs,)](
            q, k, v, positions, cos, sin, slots, keys, values, tokens, q.stride(0), k.stride(0), v.stride(0),
            cos.stride(0), **constants, num_warps=WARPS,
        )  # fmt: skip
    return q


def rmsnorm_constants(heads: int, size: int, add: bool) -> tuple[dict[str, Any], int]:
    """And how many warps."""
    width = padded(size)
    rows = max(1, ELEMENTS // width)
    return {"HEADS": heads, "N": size, "NP": width, "ROWS": rows, "ADD": add}, min(16, max(WARPS, width // 1024))


def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the last dimension of x, [rows, size] or [tokens, heads, size]; `residual` is overwritten by the sum."""
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.contiguous().view(-1, x.shape[-1])
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else residual.contiguous()
    rows = x.shape[0] * heads
    if rows:
        constants, warps = rmsnorm_constants(heads, x.shape[-1], residual is not None)
        elementwise.add_rmsnorm[(-(-rows // constants["ROWS"]),)](
            out, total, x, weight, rows, x.stride(0), x.stride(1), eps, **constants, num_warps=warps
        )
    return out, total


def silu_mul_constants(size: int) -> dict[str, Any]:
    columns = min(1024, padded(size))
    return {"ROWS": max(1, ELEMENTS // 2 // columns), "COLUMNS": columns}


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """[rows, 2 * size] -> [rows, size]."""
    rows, size = x.shape[0], x.shape[1] // 2
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(rows, size)
    if rows and size:
        constants = silu_mul_constants(size)
        grid = -(-rows // constants["ROWS"]), -(-size // constants["COLUMNS"])
        elementwise.silu_mul[grid](out, x, rows, x.stride(0), size, **constants, num_warps=WARPS)
    return out
