"""Moving blocks between pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework.moving import direct, gather, move, scatter

BLOCKS = 12
PAIRS = st.permutations(range(BLOCKS)).flatmap(
    lambda targets: st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS).map(
        lambda sources: list(zip(sources, targets, strict=False))
    )
)
Pool = list[tuple[torch.Tensor, ...]]


def pool(dtype: torch.dtype, size: int, start: int) -> Pool:
    """Two layers, keys and values of `size` numbers to a block."""
    layers = []
    for layer in range(2):
        pages = [
            torch.arange(start + 1000 * (2 * layer + i), start + 1000 * (2 * layer + i) + BLOCKS * size)
            for i in range(2)
        ]
        layers.append(tuple((x % 251).to(torch.uint8).view(BLOCKS, size).to(dtype) for x in pages))
    return layers


Way = Callable[[Sequence[Any], Sequence[Any], list[tuple[int, int]]], None]
WAYS: list[Way] = [
    move,
    direct,
    gather,
    scatter,
    lambda *given: gather(*given, staging=30),
    lambda *given: scatter(*given, staging=30),
]


@pytest.mark.parametrize("way", range(len(WAYS)))
@given(PAIRS, st.sampled_from([(torch.float32, 6), (torch.bfloat16, 3), (torch.float8_e5m2, 7), (torch.int8, 8)]))
def test_blocks_get_to_their_places(way: int, pairs: list[tuple[int, int]], kind: tuple[torch.dtype, int]) -> None:
    """In every layer, whatever the order and the type, and however little is copied at once; no other block changes."""
    sources, targets = pool(*kind, 0), pool(*kind, 77)
    expected = [[pages.view(torch.uint8).clone() for pages in layer] for layer in targets]
    for layer, theirs in zip(expected, sources, strict=True):
        for pages, origin in zip(layer, theirs, strict=True):
            for s, d in pairs:
                pages[d] = origin.view(torch.uint8)[s]
    WAYS[way](sources, targets, pairs)
    for layer, theirs in zip(targets, expected, strict=True):
        for pages, right in zip(layer, theirs, strict=True):
            assert torch.equal(pages.view(torch.uint8), right)


@pytest.mark.parametrize(("way", "side"), [(gather, 1), (scatter, 0)])
def test_neighbours_on_the_host_are_one_copy(way: Way, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However scattered they are on the device: per tensor, one for each run of host blocks."""
    from fake_device import FakeDevice, Recorder, installed

    host, device = [3, 4, 5, 9, 1, 0], [7, 2, 11, 3, 6, 8]
    pairs = list(zip(device, host, strict=True)) if side else list(zip(host, device, strict=True))
    sources, targets = pool(torch.float32, 4, 0), pool(torch.float32, 4, 1)
    with installed(FakeDevice()), Recorder() as recorder:
        way(sources, targets, pairs)
    aten = torch.ops.aten
    kinds = {aten.index_select, aten.index_copy_}
    assert sum(call[0].overloadpacket in kinds for call in recorder.calls) == 3 * 4
