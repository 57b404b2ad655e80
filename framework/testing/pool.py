"""KV blocks of a kernel backend, and beside them what they ought to hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels import Batch, KernelBackend, Meta, Rope
from ..kv import CacheGroup

UNDEFINED = 10**9
"""In a table behind a request's last block: fails whoever uses it."""


class Shape(NamedTuple):
    """Of attention: query heads, key and value heads, numbers in each."""

    heads: int
    kv_heads: int
    head_dim: int


class Part(NamedTuple):
    """One request's share of a step: `tokens` new ones behind `start`, in these blocks."""

    start: int
    tokens: int
    blocks: Sequence[int]


def normal(dtype: torch.dtype, seed: int, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, tolerance: float) -> None:
    """Of this type, and within `tolerance` of the float64 `expected`, relative to each number and to their root mean
    square."""
    assert found.dtype == dtype, f"{found.dtype} instead of {dtype}"
    assert found.shape == expected.shape, f"shape {list(found.shape)} instead of {list(expected.shape)}"
    if expected.numel():
        found = found.cpu().double()
        far = (found - expected).abs() / (expected.abs() + expected.square().mean().sqrt())
        far = far.nan_to_num(nan=torch.inf).where(found != expected, 0.0)
        at = np.unravel_index(int(far.argmax()), far.shape)
        worst = f"at {[int(i) for i in at]}: {float(found[at])} instead of {float(expected[at])}"
        wrong = int((far > tolerance).sum())
        assert not wrong, f"{wrong} of {far.numel()} numbers are further off than {tolerance}, the worst {worst}"


def make_batch(block_size: int, *groups: Sequence[Part], window: int | None = None) -> Batch:
    """The same slices of requests for each group of layers, in blocks of its own. Under a window, blocks wholly before
    it are replaced by others."""
    tables = []
    for parts in groups:
        table = np.full((len(parts), max(len(part.blocks) for part in parts) + 1), UNDEFINED, np.int32)
        for row, part in zip(table, parts, strict=True):
            row[: len(part.blocks)] = part.blocks
            if window is not None:
                row[: max(0, part.start + 1 - window) // block_size] = 0
        tables.append(table)
    starts, lens = (np.array([part[i] for part in groups[0]], np.int32) for i in (0, 1))
    return Batch(starts, lens, tuple(tables), np.ones(len(starts), np.bool_), block_size)


class Pool:
    """Written by `rope_store` and read by `attention` alone: how a backend lays out its pages is its own affair. At
    first every slot holds NaN, as if a request that failed had left it.

    k, v: float64 [layers, blocks, block_size, kv_heads, head_dim], on the host: what is in the slots that count; a
    block that is begun again holds nothing (NaN) behind what is written. spread: how large queries are.
    """

    def __init__(
        self,
        backend: KernelBackend,
        dtype: torch.dtype,
        device: torch.device,
        *,
        block_size: int,
        blocks: int,
        shape: Shape,
        layers: int = 1,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
        spread: float = 1.0,
    ) -> None:
        self.backend, self.dtype, self.device, self.block_size = backend, dtype, device, block_size
        self.shape, self.spread = shape, spread
        self.scale = 0.9 * shape.head_dim**-0.5  # not what a library would take by itself
        self.random = torch.Generator().manual_seed(seed)
        group = CacheGroup(layers, shape.kv_heads, shape.head_dim)
        self.caches = backend.allocate(group, kv_dtype or dtype, block_size, blocks, device)
        size = (layers, blocks, block_size, shape.kv_heads, shape.head_dim)
        self.k, self.v = (torch.full(size, torch.nan, dtype=torch.float64) for _ in range(2))
        self.poison()

    def poison(self) -> None:
        """Leave NaN in every slot."""
        blocks = self.k.shape[1]
        whole = [Part(0, blocks * self.block_size, range(blocks))]
        nothing = torch.full((blocks * self.block_size, *self.shape[1:]), torch.nan, dtype=self.dtype)
        self.store(whole, self.prepare(whole), nothing)

    def fill(self) -> None:
        """Random contents in every block, each of which is the whole context of one request."""
        parts = [Part(0, self.block_size, [block]) for block in range(self.k.shape[1])]
        self.store(parts, self.prepare(parts))

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.random).to(self.dtype)

    def prepare(self, parts: Sequence[Part], window: int | None = None) -> Meta:
        return self.backend.prepare(make_batch(self.block_size, parts, window=window), self.device)

    def store(self, parts: Sequence[Part], meta: Meta, given: torch.Tensor | None = None, group: int = 0) -> None:
        """Write the parts' new tokens in every layer, unrotated: `given` [tokens, kv_heads, head_dim] as keys and as
        values, or random ones."""
        at, (heads, kv_heads, head_dim) = self.positions(parts), self.shape
        ones = torch.ones(int(at.max()) + 1, head_dim // 2, device=self.device)
        rope = Rope(ones, torch.zeros_like(ones))
        for layer, cache in enumerate(self.caches):
            k, v = (self.normal(len(at), kv_heads, head_dim) if given is None else given for _ in range(2))
            self.wrote(parts, k.double(), v.double(), layer)
            q, k, v = (x.to(self.device, copy=True) for x in (self.normal(len(at), heads, head_dim), k, v))
            self.backend.rope_store(q, k, v, at.to(self.device), rope, cache, group, meta)

    @staticmethod
    def positions(parts: Sequence[Part]) -> torch.Tensor:
        return torch.cat([torch.arange(part.start, part.start + part.tokens) for part in parts])

    def wrote(self, parts: Sequence[Part], k: torch.Tensor, v: torch.Tensor, layer: int = 0) -> None:
        """These keys and values, float64 [tokens, kv_heads, head_dim], ought now to be there."""
        block = torch.cat([torch.tensor(part.blocks)[self.positions([part]) // self.block_size] for part in parts])
        offset = self.positions(parts) % self.block_size
        for pages, new in ((self.k, k), (self.v, v)):
            pages[layer, block[offset == 0]] = torch.nan
            pages[layer, block, offset] = new

    def attend(
        self, parts: Sequence[Part], meta: Meta, window: int | None = None, layer: int = 0, group: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of random queries: the backend's, and in float64 what it ought to be."""
        q = self.normal(sum(part.tokens for part in parts), *self.shape[::2]) * self.spread
        given = q.to(self.device, copy=True)
        found = self.backend.attention(given, self.caches[layer], group, meta, self.scale, window)
        return found, self.attended(parts, q, window, layer)

    def attended(
        self, parts: Sequence[Part], q: torch.Tensor, window: int | None = None, layer: int = 0
    ) -> torch.Tensor:
        """What attention of these queries ought to be, float64."""
        rows, row, ratio = [], 0, self.shape.heads // self.shape.kv_heads
        for part in parts:
            position = torch.arange(part.start + part.tokens)
            block = torch.tensor(part.blocks)[position // self.block_size]
            k, v = (pages[layer, block, position % self.block_size] for pages in (self.k, self.v))
            k, v = (x.repeat_interleave(ratio, 1).transpose(0, 1) for x in (k, v))  # [heads, length, head_dim]
            distance = position[part.start :, None] - position
            unseen = (distance < 0) if window is None else (distance < 0) | (distance >= window)
            x = q[row : row + part.tokens].double().transpose(0, 1)
            scores = (x @ k.mT * self.scale).masked_fill(unseen, -torch.inf)
            rows.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
            row += part.tokens
        return torch.cat(rows)

    def check(self, tolerance: float) -> None:
        """Every block holds what it ought to: read each as the whole context of one request."""
        for layer, pages in enumerate(self.k):
            filled = pages[:, :, 0, 0].isfinite().long().cumprod(1).sum(1).tolist()
            parts = [Part(0, count, [block]) for block, count in enumerate(filled) if count]
            found, expected = self.attend(parts, self.prepare(parts), layer=layer)
            close(found, expected, self.dtype, tolerance)

    def nbytes(self) -> int:
        """Of the tensors among `caches`, the same memory counted once."""
        found: dict[int, int] = {}

        def look(x: Any) -> None:
            if isinstance(x, torch.Tensor):
                found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            elif isinstance(x, dict | list | tuple):
                for one in x.values() if isinstance(x, dict) else x:
                    look(one)

        look(self.caches)
        return sum(found.values())
