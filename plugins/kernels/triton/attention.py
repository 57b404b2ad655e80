"""Attention over the paged cache, in Triton: the online softmax of FlashAttention, and flash-decoding's split context.

Pages are [blocks, kv heads, block size, head_dim]: those of one head lie together, 2 KiB and more, so that a program
reads whole lines although its blocks are scattered. A program has `M` rows, each a new token and one of the query heads
that share a kv head, so a decode of a group of heads reads its pages once. Scores are in base 2: `scale` holds log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(pages, rows, inside, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """[N, DP]: elements `rows` and following of `pages`; zeros outside and behind the head's D numbers."""
    d = tl.arange(0, DP)
    at = pages + rows[:, None] + d[None, :]
    if MASKED:
        x = tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif DP != D:
        x = tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def _walk(
    acc,
    top,
    total,
    q,
    position,
    keys,
    values,
    table,
    begin,
    end,
    low,
    high,
    scale,
    window,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAP: tl.constexpr,
):
    """Add the context [begin, end), N tokens at a time. MASKED: rows may not see all of it, and nothing outside
    [low, high) is read: it need not be the request's."""
    for start in range(begin, end, N):
        at = start + tl.arange(0, N)
        inside = (at >= low) & (at < high)
        if MASKED:
            block = tl.load(table + at // BLOCK, mask=inside, other=0)
        else:
            block = tl.load(table + at // BLOCK)
        rows = block.to(tl.int64) * PAGE + (at % BLOCK) * D  # a pool may have more than 2 ** 31 elements
        k = _load(keys, rows, inside, D, DP, MASKED).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAP > 0:  # CAP * tanh(scores / CAP), and then to base 2
            scores = CAP * 1.4426950408889634 * (1 - 2 / (1 + tl.exp2(scores * (2 * 1.4426950408889634 / CAP))))
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (at[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf minus -inf would be NaN.
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        v = _load(values, rows, inside, D, DP, MASKED).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = highest
    return acc, top, total


@triton.jit(do_not_specialize=["requests", "columns", "window"])
def attend(
    out,
    parts,
    sums,
    q,
    keys,
    values,
    tables,
    cu_lens,
    seq_lens,
    requests,
    columns,
    q_row,
    scale,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    ONES: tl.constexpr,
    MIXED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAP: tl.constexpr,
):
    """Grid (tiles, kv heads, SPLITS). ONES: the requests with one new token, cdiv(GROUP, M) tiles each, whose context
    is cut into SPLITS parts; else those with more, whose tiles are found by search: request r's begin at
    cu_lens[r] * GROUP // M + r, so that there are tokens * GROUP // M + requests in all, some of them empty. MIXED: the
    batch has both kinds.

    q: [tokens, q_row], head h at h * D. out: [tokens, heads * D]. Where SPLITS > 1, instead: parts, float32
    [requests, heads, SPLITS, D], weighted sums; sums, float32 [requests, heads, SPLITS, 2], the highest score and the
    sum of weights. keys, values: [blocks, KV_HEADS, BLOCK, D]. tables: int32 [requests, columns].
    """
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if ONES:
        tiles: tl.constexpr = (GROUP + M - 1) // M
        request = tl.program_id(0) // tiles
        tile = tl.program_id(0) % tiles
    else:
        pid = tl.num_programs(0) - 1 - tl.program_id(0)  # a request's last tile has the most to read: it begins first
        request = 0
        last = requests - 1
        while request < last:
            middle = (request + last + 1) // 2
            if tl.load(cu_lens + middle) * GROUP // M + middle <= pid:
                request = middle
            else:
                last = middle - 1
        tile = pid - tl.load(cu_lens + request) * GROUP // M - request
    first = tl.load(cu_lens + request)
    new = tl.load(cu_lens + request + 1) - first
    if ONES:
        if MIXED:
            if new != 1:
                return
    else:
        if (new == 1) | (tile * M >= new * GROUP):
            return
    length = tl.load(seq_lens + request)
    row = tile * M + tl.arange(0, M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    position = length - new + token
    lowest = length - new + tile * M // GROUP  # positions of the tile's first and last rows
    highest = tl.minimum(length - new + (tile * M + M - 1) // GROUP, length - 1)
    d = tl.arange(0, DP)
    real = (row < new * GROUP)[:, None] & (d < D)[None, :]
    place = (first + token).to(tl.int64)
    x = tl.load(q + (place * q_row + head * D)[:, None] + d[None, :], mask=real, other=0.0)

    high = highest + 1
    low = 0
    if WINDOWED:
        low = tl.maximum(lowest - window + 1, 0)
    begin = low // N * N
    end = high
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(high - begin, N), SPLITS) * N
        begin += split * share
        end = tl.minimum(high, begin + share)
    page: tl.constexpr = KV_HEADS * BLOCK * D
    keys += kv_head * BLOCK * D
    values += kv_head * BLOCK * D
    table = tables + request.to(tl.int64) * columns
    acc = tl.zeros([M, DP], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    middle = begin
    if not WINDOWED:  # what every row of the tile sees
        middle = tl.minimum(tl.maximum((lowest + 1) // N * N, begin), end)
        acc, top, total = _walk(
            acc, top, total, x, position, keys, values, table, begin, middle, low, high, scale, window,
            page, D, DP, BLOCK, N, False, WINDOWED, CAP,
        )  # fmt: skip
    acc, top, total = _walk(
        acc, top, total, x, position, keys, values, table, middle, end, low, high, scale, window,
        page, D, DP, BLOCK, N, True, WINDOWED, CAP,
    )  # fmt: skip
    heads: tl.constexpr = KV_HEADS * GROUP
    if SPLITS > 1:
        part = (request.to(tl.int64) * heads + head) * SPLITS + split
        # Of a part without tokens nothing is read but its sum, which is 0.
        tl.store(parts + part[:, None] * D + d[None, :], acc, mask=real & (begin < end))
        tl.store(sums + part * 2, top, mask=row < GROUP)
        tl.store(sums + part * 2 + 1, total, mask=row < GROUP)
    else:
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + (place * heads * D + head * D)[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=real)


@triton.jit
def combine(
    out,
    parts,
    sums,
    cu_lens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLITS: tl.constexpr,
    MIXED: tl.constexpr,
):
    """Grid (requests, heads): what `attend` left in parts, added up into out [tokens, HEADS * D]."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(cu_lens + request)
    if MIXED:
        if tl.load(cu_lens + request + 1) - first != 1:
            return
    part = (request.to(tl.int64) * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    top = tl.load(sums + part * 2)
    total = tl.load(sums + part * 2 + 1)
    highest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    d = tl.arange(0, DP)
    some = (total != 0)[:, None] & (d < D)[None, :]
    x = tl.load(parts + part[:, None] * D + d[None, :], mask=some, other=0.0)
    y = tl.sum(x * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + first.to(tl.int64) * HEADS * D + head * D + d, y.to(out.dtype.element_ty), mask=d < D)
