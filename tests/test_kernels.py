"""The contract of kernel backends: what a class has to override together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from framework.plugins.kernels.cpu.backend import CpuBackend
from framework.plugins.kernels.torch_backend import TorchBackend

from framework import KernelBackend, ReferenceBackend, pages


@pytest.mark.parametrize("base", [ReferenceBackend, TorchBackend])
def test_a_new_layout_needs_the_operations_that_read_it(base: type[ReferenceBackend]) -> None:
    def own(self: Any, *args: Any) -> Any: ...

    cache = {"block_bytes": own, "rope_store": own, "attention": own, "copy_blocks": own}
    type("Whole", (base,), {"allocate": own, **cache})
    for missing in cache:
        rest = {name: method for name, method in cache.items() if name != missing}
        with pytest.raises(TypeError, match=f"Part overrides allocate, so Part needs {missing} of its own"):
            type("Part", (base,), {"allocate": own, **rest})
        type("Same", (base,), {"allocate": own, **rest, missing: getattr(base, missing)})
    with pytest.raises(TypeError, match="overrides pack, so Packs needs linear of its own"):
        type("Packs", (base,), {"pack": own})
    type("Packs", (base,), {"pack": own, "linear": own})


@pytest.mark.parametrize("base", [ReferenceBackend, TorchBackend])
def test_operations_alone_keep_the_layout(base: type[ReferenceBackend]) -> None:
    class Below(base):  # type: ignore[misc, valid-type]
        def attention(self, *args: Any) -> Any: ...

        def qkv(self, *args: Any) -> Any: ...

    class Further(Below):
        def silu_mul(self, x: Any) -> Any: ...

    assert Further().name == base.name


def test_a_pack_of_ones_own_is_for_tied_weights_too() -> None:
    class Reads(ReferenceBackend):
        def pack_tied(self, weight: Any) -> Any: ...

    class Packs(Reads):
        def pack(self, *args: Any) -> Any: ...

        def linear(self, *args: Any) -> Any: ...

    class Both(Packs):
        def pack_tied(self, weight: Any) -> Any: ...

    assert Reads.pack_tied is not KernelBackend.pack_tied
    assert Packs.pack_tied is KernelBackend.pack_tied
    assert Both.pack_tied is not KernelBackend.pack_tied


def test_a_part_of_ones_own_is_used_by_the_whole() -> None:
    """Wherever a class below one with a decoder of its own gets it from."""

    class Fused(ReferenceBackend):
        def decoder(self, *args: Any) -> Any: ...

    class Deriving(Fused):
        def attention(self, *args: Any) -> Any: ...

    class Part:
        def silu_mul(self, x: Any) -> Any: ...

    class Mixed(Part, Fused): ...

    class Named(Deriving):
        name = "named"

    class Again(Deriving):
        def decoder(self, *args: Any) -> Any: ...

    assert ReferenceBackend.decoder is KernelBackend.decoder
    assert Fused.decoder is not KernelBackend.decoder
    for composed in (Deriving, Mixed, Named):
        assert composed.decoder is KernelBackend.decoder, composed
    assert Again.decoder is not KernelBackend.decoder


def test_who_packs_below_a_backend_that_reads_words_brings_all_products() -> None:
    with pytest.raises(TypeError, match="embed, qkv, gate_up, logits"):

        class Packs(CpuBackend):
            def pack(self, *args: Any) -> Any: ...

            def linear(self, *args: Any) -> Any: ...


def test_memory_of_pages() -> None:
    """Zeros that begin where a page or a cache line does; pieces do not overlap and outlive their arena."""
    assert pages.zeros((3, 5), torch.bfloat16).sum() == 0
    large = pages.zeros((pages.HUGE, 3), torch.int8)
    assert large.shape == (pages.HUGE, 3) and large.data_ptr() % pages.HUGE == 0 and not large.any()
    arena = pages.Arena()
    pieces = [arena.empty((size,), torch.int16) for size in (1, 33, 1 << 20, 7 << 20, 1 << 20, 3 << 20, 1)]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    del arena
    assert all(piece.data_ptr() % pages.LINE == 0 for piece in pieces)
    assert [int(piece[0]) for piece in pieces] == [int(piece[-1]) for piece in pieces] == list(range(7))
