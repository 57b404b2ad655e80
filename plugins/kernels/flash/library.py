"""What a library of FlashAttention is to the backend, and what of a batch it has to know.

All of them take the queries of a ragged batch as the last tokens of their requests' contexts (causal masks aligned to
the bottom right), and count a window as the tokens before a query: ours, less the query itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from framework import Batch

from ..torch_backend import TorchMeta

T = TypeVar("T")
Array = np.ndarray[Any, Any]


class FlashPages(NamedTuple):
    """One layer's cache. k, v: [blocks, block_size, kv_heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


class FlashMeta(TorchMeta):
    """Adds what layers share, made by the first that needs it. It is of one step: `advance` makes a new one."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[Hashable, Any] = {}

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._shared:
            self._shared[key] = make()
        found: T = self._shared[key]
        return found


class Seen(NamedTuple):
    """The pages that each request's new tokens see, from the one on in which the first new token's window begins:
    those before it may be others' by now, and a library that loads whole tiles multiplies their values by 0, which a
    NaN survives.

    first: int64 [R], the first of them, as a column of the block table. pages: int64 [R], how many. lens: int64 [R],
    tokens in them, up to the last new one.
    """

    first: Array
    pages: Array
    lens: Array

    @classmethod
    def of(cls, batch: Batch, window: int | None) -> Seen:
        starts, size = batch.starts.astype(np.int64), batch.block_size
        ends = starts + batch.lens
        first = np.zeros_like(starts) if window is None else np.maximum(starts + 1 - window, 0) // size
        return cls(first, -(-ends // size) - first, ends - first * size)


def blocks(table: Array, first: Array, count: Array) -> Array:
    """Of each request r, table[r, first[r] : first[r] + count[r]], one after the other."""
    request = np.repeat(np.arange(len(count)), count)
    column = np.arange(len(request)) + np.repeat(first - np.cumsum(count) + count, count)
    return np.asarray(table[request, column])


class Library(ABC):
    """One way to attend."""

    name: ClassVar[str]
    """As reasons call it."""
    package: ClassVar[str]
    """That is imported."""
    install: ClassVar[str]
    """How users get it."""
    page: ClassVar[int] = 1
    """Block sizes are multiples of it."""
    title = ""
    """Name and version, for the banner; known once `declines` has answered None."""

    def declines(self, head_dim: int, block_size: int, capability: tuple[int, int]) -> str | None:
        """Why it cannot serve this; None if it can. Imports it only if all else fits but the block size, which is the
        user's to change."""
        if not self.installed():
            return f"not installed ({self.install})"
        reason = self.unfit(head_dim, capability) or (None if self.title else self._import())
        if reason is None and block_size % self.page:
            return f"needs pages of {self.page} tokens: use --block-size {self.page}"
        return reason

    def _import(self) -> str | None:
        try:
            module = importlib.import_module(self.package)
        except Exception as error:  # noqa: BLE001 - native libraries fail to load in any way: the reason says in which
            return f"cannot be imported ({type(error).__name__}: {error})"
        reason = self.load(module)
        if reason is None:
            self.title = " ".join(filter(None, (self.name, self.version(module))))
        return reason

    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    @staticmethod
    def version(module: Any) -> str:
        return str(getattr(module, "__version__", ""))

    def unfit(self, head_dim: int, capability: tuple[int, int]) -> str | None:
        """Why it has no kernel for such heads on such a GPU; None if it has."""
        fits = head_dim % 8 == 0 and head_dim <= 256
        return None if fits else f"has heads of multiples of 8 up to 256, not of {head_dim}"

    @abstractmethod
    def load(self, module: Any) -> str | None:
        """Keep what it calls; why that is not what it ought to be, None if it is."""

    @abstractmethod
    def attention(
        self, q: torch.Tensor, cache: FlashPages, group: int, meta: FlashMeta, scale: float, window: int | None
    ) -> torch.Tensor:
        """[T, heads, head_dim], as q is."""

    def missing(self, module: Any, name: str, *parameters: str) -> str | None:
        """Why `name`, a function or Class.method of the module, cannot be called with these; None if it can."""
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        version = self.version(module)
        if found is None:
            return f"has no {name}" + f" in version {version}" * bool(version)
        known = inspect.signature(found).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            for parameter in parameters:
                if parameter not in known:
                    return f"its {name} takes no {parameter}" + f" in version {version}" * bool(version)
        return None
