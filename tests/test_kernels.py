"""The contract of kernel backends: what a class has to override together."""

from __future__ import annotations

from typing import Any

import pytest
from framework.plugins.kernels.torch_backend import TorchBackend

from framework import KernelBackend, ReferenceBackend


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
