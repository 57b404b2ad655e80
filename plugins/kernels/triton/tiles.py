"""Shapes of the kernels' tiles: a table instead of measuring at start-up, so that what runs is known beforehand.

Every entry is compiled ahead of time by the tests, without a GPU: none spills registers (some variants do, up to four),
and none takes more shared memory than the smallest part of its row has.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """rows: M of `attend`, at least 16 (the tensor cores' least); columns: N, tokens of context read at a time; warps
    and stages as Triton has them."""

    rows: int
    columns: int
    warps: int
    stages: int


ATTEND = {
    # (least capability, bytes of an activation, largest padded head): (one new token, more of them)
    ((8, 0), 2, 64): (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3)),
    ((8, 0), 2, 128): (Tile(16, 64, 4, 2), Tile(64, 64, 8, 2)),
    ((8, 0), 2, 256): (Tile(16, 32, 4, 2), Tile(64, 32, 8, 2)),
    # Products of whole warp groups, and more than twice the shared memory of the parts between 8.0 and 9.0.
    ((9, 0), 2, 64): (Tile(16, 64, 4, 3), Tile(128, 64, 8, 3)),
    ((9, 0), 2, 128): (Tile(16, 64, 4, 3), Tile(128, 64, 8, 2)),
    ((9, 0), 2, 256): (Tile(16, 32, 4, 3), Tile(64, 64, 8, 2)),
    ((10, 0), 2, 64): (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3)),  # 9.0's spills with a window and a soft cap
    ((10, 0), 2, 128): (Tile(16, 64, 4, 3), Tile(128, 64, 8, 2)),
    ((10, 0), 2, 256): (Tile(16, 32, 4, 3), Tile(64, 64, 8, 2)),
    # In float32 proper there are no tensor cores: small tiles, or their sums do not fit the registers.
    ((8, 0), 4, 64): (Tile(16, 32, 4, 2), Tile(16, 32, 4, 2)),
    ((8, 0), 4, 128): (Tile(16, 32, 4, 1), Tile(16, 32, 8, 1)),
    ((8, 0), 4, 256): (Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
}
ATTEND |= {((12, 0), *key[1:]): tiles for key, tiles in ATTEND.items() if key[0] == (8, 0)}
"""12.0 is made like 8.9: 99 KiB of shared memory, and products of single warps."""
MOST_ROWS = 64
"""Of a tile for one new token: query heads of one kv head that are served at once."""
MOST_SPLITS = 64
LEAST_SHARE = 128
"""Tokens of context below which a part is not worth its own program."""
HEAD_DIMS = range(16, 257, 16)
BLOCK_SIZES = tuple(range(16, 257, 16))


def padded(count: int, least: int = 16) -> int:
    """The next power of two: the only lengths that Triton's tensors have."""
    return max(least, 1 << (count - 1).bit_length())


def attend_tiles(capability: tuple[int, int], itemsize: int, head_dim: int, group: int) -> tuple[Tile, Tile]:
    """For the requests with one new token, of `group` query heads to a kv head, and for the others."""
    known = [key for key in ATTEND if key[0] <= capability and key[1:] == (itemsize, padded(head_dim, 64))]
    one, more = ATTEND[max(known)]
    if itemsize < 4:
        rows = max(one.rows, min(padded(group), MOST_ROWS))
        one = one._replace(rows=rows, warps=8 if rows == MOST_ROWS else one.warps)
    return one, more


def splits(programs: int, tokens: int, processors: int) -> int:
    """Into how many parts contexts of up to `tokens` are cut, a power of two, so that what would be `programs` keep
    `processors` busy twice over. Nothing that changes from step to step goes in: a captured launch stays right."""
    count = 1
    while count < MOST_SPLITS and programs * count < 2 * processors and tokens >= 2 * count * LEAST_SHARE:
        count *= 2
    return count
