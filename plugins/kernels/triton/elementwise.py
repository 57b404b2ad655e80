"""What surrounds products and attention, in Triton: each reads and writes a row once. All arithmetic is in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fit(x, LIMIT: tl.constexpr):
    """Within the range of an 8-bit type, whose largest number is LIMIT (0: any type): it has no infinity, or conversion
    would make one. NaN stays NaN."""
    if LIMIT > 0:
        x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))
    return x


@triton.jit
def _turn(x, at, row, token, real, positions, cos, sin, turn_row, HALF: tl.constexpr, HP: tl.constexpr):
    """The first 2 * HALF numbers of the heads at x + at, rotated, as two float32 [ROWS, HP]."""
    d = tl.arange(0, HP)
    some = real[:, None] & (d < HALF)[None, :]
    angle = tl.load(positions + token, mask=real, other=0)[:, None] * turn_row + d[None, :]
    c = tl.load(cos + angle, mask=some, other=0.0)
    s = tl.load(sin + angle, mask=some, other=0.0)
    a = tl.load(x + at[:, None] + d[None, :], mask=some, other=0.0).to(tl.float32)
    b = tl.load(x + at[:, None] + d[None, :] + HALF, mask=some, other=0.0).to(tl.float32)
    return a * c - b * s, b * c + a * s


@triton.jit(do_not_specialize=["tokens"])
def rope_store(
    q,
    k,
    v,
    positions,
    cos,
    sin,
    slots,
    keys,
    values,
    tokens,
    q_row,
    k_row,
    v_row,
    turn_row,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Grid cdiv(tokens * HEADS, ROWS) + cdiv(tokens * KV_HEADS, ROWS): heads of q, turned in place; then those of k and
    v, which go to their slots. q, k, v: [tokens, heads, D], rows of tokens strided. cos, sin: float32 [., turn_row]."""
    pid = tl.program_id(0)
    turned = tl.cdiv(tokens * HEADS, ROWS)
    h = tl.arange(0, HP)
    if pid < turned:
        row = pid * ROWS + tl.arange(0, ROWS)
        token = row // HEADS
        real = token < tokens
        some = real[:, None] & (h < HALF)[None, :]
        at = token.to(tl.int64) * q_row + (row % HEADS) * D
        a, b = _turn(q, at, row, token, real, positions, cos, sin, turn_row, HALF, HP)
        tl.store(q + at[:, None] + h[None, :], a.to(q.dtype.element_ty), mask=some)
        tl.store(q + at[:, None] + h[None, :] + HALF, b.to(q.dtype.element_ty), mask=some)
    else:
        row = (pid - turned) * ROWS + tl.arange(0, ROWS)
        token = row // KV_HEADS
        head = row % KV_HEADS
        real = token < tokens
        some = real[:, None] & (h < HALF)[None, :]
        slot = tl.load(slots + token, mask=real, other=0)
        to = slot // BLOCK * (KV_HEADS * BLOCK * D) + head * (BLOCK * D) + slot % BLOCK * D
        at = token.to(tl.int64) * k_row + head * D
        a, b = _turn(k, at, row, token, real, positions, cos, sin, turn_row, HALF, HP)
        tl.store(keys + to[:, None] + h[None, :], _fit(a, LIMIT).to(keys.dtype.element_ty), mask=some)
        tl.store(keys + to[:, None] + h[None, :] + HALF, _fit(b, LIMIT).to(keys.dtype.element_ty), mask=some)
        d = tl.arange(0, DP)
        whole = real[:, None] & (d < D)[None, :]
        if 2 * HALF < D:
            rest = whole & (d >= 2 * HALF)[None, :]
            x = tl.load(k + at[:, None] + d[None, :], mask=rest, other=0.0).to(tl.float32)
            tl.store(keys + to[:, None] + d[None, :], _fit(x, LIMIT).to(keys.dtype.element_ty), mask=rest)
        at = token.to(tl.int64) * v_row + head * D
        x = tl.load(v + at[:, None] + d[None, :], mask=whole, other=0.0).to(tl.float32)
        tl.store(values + to[:, None] + d[None, :], _fit(x, LIMIT).to(values.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["rows"])
def add_rmsnorm(
    out,
    residual,
    x,
    weight,
    rows,
    x_row,
    x_head,
    eps,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Grid cdiv(rows, ROWS). ADD: residual [rows, N] becomes x + residual, and that is normed. x: row r at
    r // HEADS * x_row + r % HEADS * x_head. out: [rows, N]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, NP)
    some = (row < rows)[:, None] & (n < N)[None, :]
    given = (row // HEADS).to(tl.int64) * x_row + row % HEADS * x_head
    at = row.to(tl.int64)[:, None] * N + n[None, :]
    y = tl.load(x + given[:, None] + n[None, :], mask=some, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(residual + at, mask=some, other=0.0).to(tl.float32)
        y = y.to(residual.dtype.element_ty)
        tl.store(residual + at, y, mask=some)
        y = y.to(tl.float32)  # of the sum as it is kept
    y = y * tl.rsqrt(tl.sum(y * y, 1) / N + eps)[:, None]
    y = y * tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=some)


@triton.jit(do_not_specialize=["rows"])
def silu_mul(out, x, rows, x_row, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid (cdiv(rows, ROWS), cdiv(N, COLUMNS)). x: [rows, 2 * N], gate first. out: [rows, N]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    some = (row < rows)[:, None] & (column < N)[None, :]
    at = row.to(tl.int64)[:, None] * x_row + column[None, :]
    gate = tl.load(x + at, mask=some, other=0.0).to(tl.float32)
    up = tl.load(x + at + N, mask=some, other=0.0).to(tl.float32)
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row.to(tl.int64)[:, None] * N + column[None, :], y.to(out.dtype.element_ty), mask=some)
