"""Block memory that remembers who wrote what, instead of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..plan import Copy


class PlanFault(AssertionError):
    """A plan that broke its contract: the message says which request, where, and what was found there."""


class Written(NamedTuple):
    """What a slot holds. `prefix` is a hash of all tokens up to and including this one: two slots with the same
    prefix hold the same keys and values, whoever wrote them."""

    request_id: str
    position: int
    token: int
    prefix: int

    def __str__(self) -> str:
        return f"token {self.token} of {self.request_id} at position {self.position}"


class Memory:
    """Slots of `size` blocks per tier, the same for each group of layers."""

    def __init__(self, size: Mapping[str, int], groups: int, block_size: int) -> None:
        self.block_size = block_size
        self._size = size
        self._blocks: dict[tuple[str, int], dict[int, list[Written | None]]] = {
            (tier, group): {} for tier in size for group in range(groups)
        }

    def block(self, tier: str, group: int, block: int) -> list[Written | None]:
        """The slots of a block, to read or to write. Raises `PlanFault` if there is no such block."""
        blocks = self._blocks.get((tier, group))
        if blocks is None or not 0 <= block < self._size[tier]:
            raise PlanFault(f"no block {block} in tier {tier!r}, group {group}: the pool has {dict(self._size)}")
        return blocks.setdefault(block, [None] * self.block_size)

    def copy(self, copy: Copy) -> None:
        source = self.block(copy.src_tier, copy.group, copy.src)
        if source[0] is None:
            raise PlanFault(f"{copy.request_id}: copies {copy.src_tier} block {copy.src}, which was never written")
        self.block(copy.dst_tier, copy.group, copy.dst)[:] = source
