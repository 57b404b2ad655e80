"""What the paged cache knows of a request: its block table, its blocks on the host, or what it could start with."""

from __future__ import annotations

from typing import NamedTuple


class Table:
    """`blocks[i]` holds positions from i * block_size on; those below `first` fell out of the window and are others'
    by now."""

    __slots__ = ("blocks", "filled", "first", "forked", "published", "told")

    def __init__(self, blocks: list[int], first: int) -> None:
        self.blocks = blocks
        self.first = first
        self.published = first  # blocks that `publish` has dealt with
        self.told = len(blocks)  # blocks that the executor knows
        self.forked = False  # the next position to be written may lie in a block that others hold or may find
        self.filled = 0  # positions that a fork found written, of which the last are written again


class Swapped(NamedTuple):
    """Host blocks of the computed positions from block `first` on."""

    first: int
    blocks: list[int]


class Start(NamedTuple):
    """What is there already of a request without blocks: `blocks[i]` is block `first + i`, None if on the host."""

    tokens: int
    first: int
    blocks: list[int | None]
