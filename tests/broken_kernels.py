"""Kernel backends with one fault each, and the unbroken one that they are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from framework import CacheGroup, Decoder, KernelBackend, Meta, ReferenceBackend, Rope, Support


class Toy(ReferenceBackend):
    """Unbroken. Rotates two by two of whatever `pairs` says, and attends over whole blocks, behind a mask."""

    name = "toy"

    def pairs(self, half: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which two numbers turn together."""
        return torch.arange(half), torch.arange(half, 2 * half)

    def rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        rope: Rope,
        cache: Any,
        group: int,
        meta: Meta,
    ) -> torch.Tensor:
        a, b = self.pairs(rope.cos.shape[1], q.shape[-1])
        cos, sin = (table[positions].unsqueeze(1) for table in rope)
        for x in (q, k):
            first, second = x[..., a].float(), x[..., b].float()
            x[..., a], x[..., b] = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
        slots, size = meta.slots[group], meta.batch.block_size
        for pages, new in ((cache.k, k), (cache.v, v)):
            pages[self.begun(slots, size)] = 0
            pages[slots // size, :, slots % size] = new
        return q

    def begun(self, slots: torch.Tensor, size: int) -> torch.Tensor:
        """Blocks whose old contents go."""
        return (slots // size)[slots % size == 0]

    def table(self, meta: Meta, group: int, request: int, first: int, upto: int) -> torch.Tensor:
        return meta.tables[group][request, first:upto].long()

    def attention(
        self, q: torch.Tensor, cache: Any, group: int, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        size, outputs = meta.batch.block_size, []
        lens = meta.batch.lens.tolist()
        for i, (start, x) in enumerate(zip(meta.batch.starts.tolist(), q.split(lens), strict=True)):
            upto = -(-(start + len(x)) // size)
            first = 0 if window is None else max(0, start + 1 - window) // size
            table = self.table(meta, group, i, first, upto)
            k, v = (self.spread(pages[table].transpose(0, 1).flatten(1, 2), q.shape[1]).float() for pages in cache)
            distance = torch.arange(start, start + len(x))[:, None] - torch.arange(first * size, upto * size)
            scores = (x.transpose(0, 1).float() @ k.mT * scale).masked_fill(~self.seen(distance, window), -torch.inf)
            outputs.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1).to(q.dtype))
        return torch.cat(outputs)

    def seen(self, distance: torch.Tensor, window: int | None) -> torch.Tensor:
        """Of tokens so far back."""
        return (distance >= 0) if window is None else (distance >= 0) & (distance < window)

    def spread(self, pages: torch.Tensor, heads: int) -> torch.Tensor:
        """[kv_heads, length, head_dim] for every query head."""
        return pages.repeat_interleave(heads // len(pages), 0)


class ServesNothing(Toy):
    def supports(self, *args: Any, **kwargs: Any) -> Support:
        return Support(False, "not today")


class SaysNoWhy(Toy):
    def supports(self, op: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Support:
        return Support(dtype == torch.float32)


class IgnoresBias(Toy):
    def linear(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return F.linear(x, weight.weight)


class FindsAnyOfEquals(Toy):
    """Reports the last of equals, and no NaN."""

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last = logits.nan_to_num(nan=-torch.inf).flip(-1)
        tokens = logits.shape[1] - 1 - last.argmax(-1)
        return tokens, logits.gather(1, tokens[:, None])[:, 0]


class CutsEquals(Toy):
    """Keeps as many as asked, whichever of equals those are."""

    def largest(
        self, x: torch.Tensor, counts: torch.Tensor, least: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        columns, _, lengths = super().largest(x, counts, least)
        most = torch.where(counts > 0, torch.minimum(counts, lengths), lengths)
        parts = zip(columns.split(lengths.tolist()), most.tolist(), strict=True)
        columns = torch.cat([part[:some] for part, some in parts]) if len(x) else columns
        return columns, x[torch.arange(len(x)).repeat_interleave(most), columns], most


class NeedsRows(Toy):
    """Has no product of nothing."""

    def linear(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return torch.stack([F.linear(row, weight.weight, weight.bias) for row in x])


class SwapsGateAndUp(Toy):
    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = x.chunk(2, -1)
        return F.silu(gate) * up


class SquaresInHalf(Toy):
    """Takes the statistics in the type of the activations."""

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if residual is None else x + residual
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight, x


class AddsInPlace(Toy):
    """Adds the residual to x instead of the other way round."""

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().add_rmsnorm(x if residual is None else x.add_(residual), None, weight, eps)


class CountsOneLayer(Toy):
    def block_bytes(self, group: CacheGroup, dtype: torch.dtype, block_size: int) -> int:
        return super().block_bytes(group, dtype, block_size) // group.layers

    allocate, copy_blocks = ReferenceBackend.allocate, ReferenceBackend.copy_blocks
    rope_store, attention = Toy.rope_store, Toy.attention


class RotatesAll(Toy):
    """Pairs the halves of a head, however much of it turns."""

    def pairs(self, half: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(half), torch.arange(half) + head_dim // 2


class WritesToANeighbour(Toy):
    """The last token of a step goes to the next slot as well."""

    def rope_store(self, q: Any, k: Any, v: Any, positions: Any, rope: Any, cache: Any, group: int, meta: Meta) -> Any:
        q, size = super().rope_store(q, k, v, positions, rope, cache, group, meta), meta.batch.block_size
        slot = int(meta.slots[group][-1])
        behind = (slot + 1) % (len(cache.k) * size)
        for pages in cache:
            pages[behind // size, :, behind % size] = pages[slot // size, :, slot % size]
        return q


class ClearsWhatIsBegun(Toy):
    """Clears every block that it writes to."""

    def begun(self, slots: torch.Tensor, size: int) -> torch.Tensor:
        return slots // size


class MasksNaN(Toy):
    """Leaves in a block what an earlier request left there, and masks it: 0 * NaN."""

    def begun(self, slots: torch.Tensor, size: int) -> torch.Tensor:
        return slots[:0]


class KnowsOneGroup(Toy):
    def table(self, meta: Meta, group: int, request: int, first: int, upto: int) -> torch.Tensor:
        return meta.tables[0][request, first:upto].long()


class SeesTheFuture(Toy):
    def seen(self, distance: torch.Tensor, window: int | None) -> torch.Tensor:
        return super().seen(distance, window) | (distance == -1)


class SeesOneTooMany(Toy):
    """A window that does not count the query."""

    def seen(self, distance: torch.Tensor, window: int | None) -> torch.Tensor:
        return super().seen(distance, None if window is None else window + 1)


class RemembersTheWindow(Toy):
    """What it worked out for the first layer of a step it uses for all."""

    def attention(
        self, q: torch.Tensor, cache: Any, group: int, meta: Any, scale: float, window: int | None
    ) -> torch.Tensor:
        if not hasattr(meta, "window"):
            meta.window = window
        return super().attention(q, cache, group, meta, scale, meta.window)


class NeverSubtractsTheMaximum(Toy):
    """A softmax of plain exponentials, which overflow."""

    def attention(
        self, q: torch.Tensor, cache: Any, group: int, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        found = super().attention(q, cache, group, meta, scale, window)
        k = cache.k[meta.tables[group][:, 0].long()].float()
        k = torch.where(k.isfinite(), k, 0.0)
        return found if q.float().norm(dim=-1).max() * k.norm(dim=-1).max() * scale < 88 else found * torch.nan


class ForgetsWhatIsFarBack(Toy):
    """Splits long contexts, and loses all parts but the last of those that are split twice."""

    def seen(self, distance: torch.Tensor, window: int | None) -> torch.Tensor:
        return super().seen(distance, window) & (distance < 256)


class SharesHeadsInTurn(Toy):
    """Query head h reads head h % kv_heads."""

    def spread(self, pages: torch.Tensor, heads: int) -> torch.Tensor:
        return pages.repeat(heads // len(pages), 1, 1)


class CopiesAtOnce(Toy):
    """All sources are read before anything is written."""

    def copy_blocks(self, caches: list[Any], src: torch.Tensor, dst: torch.Tensor) -> None:
        for pages in (pages for cache in caches for pages in cache):
            pages[dst] = pages[src]


class CopiesTheFirstLayer(Toy):
    def copy_blocks(self, caches: list[Any], src: torch.Tensor, dst: torch.Tensor) -> None:
        super().copy_blocks(caches[:1], src, dst)


class MovesInOrder(Toy):
    """Takes the blocks of a move for neighbours."""

    def move_blocks(self, sources: list[Any], targets: list[Any], pairs: Sequence[tuple[int, int]]) -> None:
        first, there = pairs[0]
        super().move_blocks(sources, targets, [(first + i, there + i) for i in range(len(pairs))])


class SlotsOfOneBlock(Toy):
    """Its `Meta` says of slots where they are in their blocks."""

    def prepare(self, *args: Any, **kwargs: Any) -> Meta:
        meta = super().prepare(*args, **kwargs)
        meta.slots = tuple(slots % meta.batch.block_size for slots in meta.slots)
        return meta


class ForgetsTheLastLayer(Toy):
    def decoder(self, x: Any, decoder: Any, caches: Any, *args: Any) -> Any:
        some = Decoder(decoder.layers[:-1], *(getattr(decoder, name) for name in Decoder.__slots__[1:-1]))
        return KernelBackend.decoder(self, x, some, caches[:-1], *args)


class LeavesTheResidualOut(Toy):
    def decoder(self, *args: Any) -> Any:
        return super().decoder(*args)[0], None
