"""The KV cache as the core sees it: block tables, reference counts and copies, never a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from .plan import Copy, Delta
from .types import Request

KV_DTYPES = {"int8": "int8", "fp8_e5m2": "float8_e5m2", "fp8_e4m3": "float8_e4m3fn"}
"""torch's names of the values of `--kv-dtype`, besides "auto"."""


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers whose keys and values share one block table."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens a query sees, itself included; None: all before it."""


class CacheSpec(msgspec.Struct, frozen=True):
    """What the model keeps per token, and in blocks of how many tokens. dtype is a torch dtype's name."""

    block_size: int
    dtype: str
    groups: tuple[CacheGroup, ...]


class Capacity(msgspec.Struct, frozen=True):
    """Blocks that an executor has room for: per tier ("device", "host"), the minimum over its workers."""

    blocks: dict[str, int]
    block_bytes: int = 0
    device: str = "cpu"
    """Readable name of the device."""


class Usage(NamedTuple):
    """Device blocks by what they are doing, and blocks swapped to the host. The first four add up to the pool.

    `tokens` is the number of token positions of running requests that hold keys and values, shared ones counted once.
    """

    holding: int
    reserved: int
    cached: int
    free: int
    swapped: int = 0
    tokens: int = 0

    @property
    def total(self) -> int:
        return self.holding + self.reserved + self.cached + self.free


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """`start`: tokens already in the cache after prefix hits or swap-in; `length`: tokens now covered by blocks."""

    start: int
    length: int
    deltas: tuple[Delta, ...]


class KVCache(ABC):
    """Owns the blocks. Only the core calls it, from one thread; nothing here touches a tensor.

    A request's table covers tokens [0, length), those outside its window excepted. Methods added later get a default
    here.
    """

    def prepare(self, request: Request) -> None:  # noqa: B027 - optional: a cache that needs no preparation has none
        """Called once when a request arrives, before it is planned: the place for work that its length costs."""

    @property
    @abstractmethod
    def available(self) -> int:
        """Device blocks that can be had now: free ones and cached ones that nobody holds. O(1)."""

    @abstractmethod
    def peak(self, request: Request, length: int) -> int:
        """The most device blocks `request` ever needs alone if it grows to `length` tokens."""

    def lookup(self, request: Request) -> int:
        """Leading tokens of a request without blocks that can be reused. Pure; takes no reference.

        At most num_tokens - 1, so that something is left to compute. For a swapped request, what it owns on the host.
        For another one that is `scoring`, 0: only what it computes itself tells how likely its prompt is.
        """
        return 0

    @abstractmethod
    def missing(self, request: Request, upto: int, keep: int = 0, without: Collection[Request] = ()) -> int:
        """Blocks short for `reserve(request, upto, keep)`, as if the requests `without` held nothing. Pure."""

    @abstractmethod
    def reserve(self, request: Request, upto: int, keep: int = 0) -> Reservation | None:
        """Give `request` blocks for its first `upto` tokens and leave `keep` blocks available.

        Atomic: None means that nothing changed. Takes references; prefix hits, swap-in and copy-on-write happen
        inside and may log copies. Must succeed whenever `missing` says 0. A request with a sliding window may get
        less than it asked for when it starts, but at least one token beyond what is computed.
        """

    @abstractmethod
    def publish(self, request: Request) -> None:
        """Called when a step that computed tokens of `request` has committed: full blocks below
        `request.computed` may be shared from now on, and are never written again."""

    def fork(self, parent: Request, child: Request) -> bool:
        """Let `child`, which has no blocks, share those of the parent's first `child.computed` tokens.

        False: nothing changed; the child computes its own. The first of `reserve`'s deltas for the child covers its
        whole table.
        """
        return False

    @property
    def swaps(self) -> bool:
        """Whether it can move requests to the host: whether it has a `swap_out` of its own."""
        return type(self).swap_out is not KVCache.swap_out

    def swap_out(self, request: Request) -> bool:
        """Move what `request` computed to the host tier and drop all its device blocks. False: no room, nothing
        changed."""
        return False

    @abstractmethod
    def release(self, request: Request) -> None:
        """Drop all blocks of `request`, device and host. Idempotent."""

    def drain(self) -> tuple[Copy, ...]:
        """Copies decided since the last call, in the order in which they were decided."""
        return ()

    def copied(self, tickets: Collection[int]) -> None:  # noqa: B027 - optional: only asynchronous copies report
        """Asynchronous copies that have ended."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything: every block becomes free and unpublished."""

    @abstractmethod
    def usage(self) -> Usage:
        """What the blocks are doing now. Called several times a step: O(1)."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if blocks were lost, doubled or miscounted. For tests; may be slow."""
