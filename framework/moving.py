"""Moving blocks between the device's pool and the host's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .device import send

STAGING = 32 << 20
"""Most bytes that are gathered on the device at once."""
Pair = tuple[int, int]


def move(sources: Sequence[Any], targets: Sequence[Any], pairs: Sequence[Pair]) -> None:
    """Block s of every tensor in `sources` to block d of the one in `targets` for each (s, d), no d twice.

    Between a GPU and the host, one copy for each run of neighbours in the host's pool, whatever their places in the
    other: of single blocks, most of the time would go into beginning copies.
    """
    theirs, ours = sources[0][0].device, targets[0][0].device
    if theirs == ours:
        direct(sources, targets, pairs)
    elif ours.type == "cpu":
        gather(sources, targets, pairs)
    else:
        scatter(sources, targets, pairs)


def direct(sources: Sequence[Any], targets: Sequence[Any], pairs: Sequence[Pair]) -> None:
    """One copy for each run of neighbours in both pools."""
    runs = [(*pairs[first], count) for first, count in _runs(pairs)]
    for theirs, ours in _tensors(sources, targets):
        for s, d, count in runs:
            ours[d : d + count].copy_(theirs[s : s + count], non_blocking=True)


def gather(sources: Sequence[Any], targets: Sequence[Any], pairs: Sequence[Pair], staging: int = STAGING) -> None:
    """Bring together what are neighbours in `targets`, then copy it at once."""
    pairs = sorted(pairs, key=lambda pair: pair[1])
    [index] = send([np.array([s for s, _ in pairs], np.int64)], sources[0][0].device)
    runs = _runs([(d,) for _, d in pairs])
    for theirs, ours in _tensors(sources, targets):
        for at, count in _pieces(runs, ours, staging):
            d = pairs[at][1]
            ours[d : d + count].copy_(theirs.index_select(0, index[at : at + count]), non_blocking=True)


def scatter(sources: Sequence[Any], targets: Sequence[Any], pairs: Sequence[Pair], staging: int = STAGING) -> None:
    """Copy what are neighbours in `sources` at once, then put it into its places."""
    pairs = sorted(pairs)
    [index] = send([np.array([d for _, d in pairs], np.int64)], targets[0][0].device)
    runs = _runs([(s,) for s, _ in pairs])
    for theirs, ours in _tensors(sources, targets):
        for at, count in _pieces(runs, theirs, staging):
            s = pairs[at][0]
            some = theirs[s : s + count].to(ours.device, non_blocking=True)
            ours.index_copy_(0, index[at : at + count], some)


def _runs(blocks: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """(first, count) of the stretches in which each entry is the next of the one before, in all its numbers."""
    runs: list[tuple[int, int]] = []
    for at, entry in enumerate(blocks):
        if runs and entry == tuple(block + 1 for block in blocks[at - 1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((at, 1))
    return runs


def _pieces(runs: Sequence[tuple[int, int]], pages: torch.Tensor, staging: int) -> Iterator[tuple[int, int]]:
    """The runs, cut into pieces of at most `staging` bytes."""
    most = max(1, staging // pages[0].nbytes)
    for first, count in runs:
        for at in range(0, count, most):
            yield first + at, min(most, count - at)


def _tensors(sources: Sequence[Any], targets: Sequence[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for source, target in zip(sources, targets, strict=True):
        for pair in zip(source, target, strict=True):
            yield tuple(map(_words, pair))  # type: ignore[misc]


def _words(pages: torch.Tensor) -> torch.Tensor:
    """As numbers that every operation knows, 8-bit floats are not among them, and few of them: int64 if they divide."""
    if not pages.is_contiguous():
        return pages
    rows = pages.view(torch.uint8).view(pages.shape[0], -1)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and pages.data_ptr() % 8 == 0 else rows
