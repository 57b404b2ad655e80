"""The reference and the torch backend pass the conformance kit, and the kit can fail: broken backends do not."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import ClassVar

import broken_kernels as broken
import pytest
import torch

from framework import KernelBackend, ReferenceBackend, Support
from framework.kernels import OPS
from framework.testing import KernelConformance


class TestReference(KernelConformance):
    def backend(self) -> KernelBackend:
        return ReferenceBackend()


class TestTorch(KernelConformance):
    provider = "torch"


class TestToy(KernelConformance):
    dtypes: ClassVar[Sequence[str]] = ("float32", "float16")
    block_sizes: ClassVar[Sequence[int]] = (1, 16)
    shapes: ClassVar[Sequence[tuple[int, int, int]]] = ((4, 2, 16), (9, 3, 64))
    batches = 10

    def backend(self) -> KernelBackend:
        return broken.Toy()


# The kit can fail

BACKENDS = {
    broken.ServesNothing: ["test_some_model_can_run"],
    broken.SaysNoWhy: ["test_embed"],
    broken.IgnoresBias: ["test_products"],
    broken.FindsAnyOfEquals: ["test_argmax"],
    broken.CutsEquals: ["test_largest"],
    broken.ForgetsTheLastLayer: ["test_decoder"],
    broken.LeavesTheResidualOut: ["test_decoder"],
    broken.NeedsRows: ["test_products"],
    broken.SwapsGateAndUp: ["test_silu_mul"],
    broken.SquaresInHalf: ["test_add_rmsnorm"],
    broken.AddsInPlace: ["test_add_rmsnorm"],
    broken.CountsOneLayer: ["test_block_bytes"],
    broken.RotatesAll: ["test_rope_store"],
    broken.WritesToANeighbour: ["test_rope_store", "test_attention"],
    broken.ClearsWhatIsBegun: ["test_rope_store", "test_attention"],
    broken.MasksNaN: ["test_attention", "test_any_batch"],
    broken.KnowsOneGroup: ["test_groups_have_blocks_of_their_own"],
    broken.SeesTheFuture: ["test_attention", "test_any_batch"],
    broken.SeesOneTooMany: ["test_attention"],
    broken.RemembersTheWindow: ["test_one_meta_serves_layers_of_different_windows"],
    broken.NeverSubtractsTheMaximum: ["test_attention_of_large_scores"],
    broken.ForgetsWhatIsFarBack: ["test_attention"],
    broken.SharesHeadsInTurn: ["test_attention_of_shapes"],
    broken.CopiesAtOnce: ["test_copy_blocks"],
    broken.CopiesTheFirstLayer: ["test_copy_blocks", "test_copy_on_write"],
    broken.MovesInOrder: ["test_move_blocks"],
    broken.SlotsOfOneBlock: ["test_prepare"],
}


def run(suite: KernelConformance, check: str) -> list[str]:
    """One check with all that its arguments go through, until one fails; the reasons of those that are skipped."""
    method, skipped = getattr(suite, check), []
    axes = [suite.axes()[name] for name in inspect.signature(method).parameters]
    for values in itertools.product(*axes):
        try:
            method(*values)
        except pytest.skip.Exception as skip:
            skipped.append(str(skip))
    return skipped


@pytest.mark.parametrize("plugin", BACKENDS, ids=lambda plugin: plugin.__name__)
def test_a_broken_backend_fails(plugin: type[KernelBackend]) -> None:
    class Suite(TestToy):
        def backend(self) -> KernelBackend:
            return plugin()

    for check in BACKENDS[plugin]:
        with pytest.raises((AssertionError, RuntimeError)):
            run(Suite(), check)


def test_what_is_declined_is_skipped_by_name() -> None:
    """And only that."""

    class Picky(broken.Toy):
        name = "picky"
        block_sizes = (16, 32)

        def supports(
            self, op: str, dtype: torch.dtype, device: torch.device, *, head_dim: int = 64, window: int | None = None
        ) -> Support:
            if op == "attention" and window is not None and head_dim != 16:
                return Support(False, "windows need heads of 16")
            return Support(True) if op in OPS else Support(False, "unknown")

    class Suite(TestToy):
        def backend(self) -> KernelBackend:
            return Picky()

    assert run(Suite(), "test_products") == []
    said = "picky declines attention in float32, head_dim 64, window 6: windows need heads of 16"
    assert said in (skipped := run(Suite(), "test_attention_of_shapes"))
    assert len(skipped) == 6, "two dtypes, three windows, one of the shapes"
    assert set(run(Suite(), "test_copy_blocks")) == {"picky declines block size 1: it serves (16, 32)"}


def test_tolerances_can_be_wider() -> None:
    class Coarse(ReferenceBackend):
        def linear(self, x: torch.Tensor, weight: object) -> torch.Tensor:
            return super().linear(x, weight) * 1.01

    class Suite(TestToy):
        def backend(self) -> KernelBackend:
            return Coarse()

    class Wider(Suite):
        def tolerance(self, op: str, dtype: torch.dtype) -> float:
            return 0.02 if op in ("linear", "qkv", "gate_up", "logits") else super().tolerance(op, dtype)

    run(Wider(), "test_products")
    with pytest.raises(AssertionError, match="further off"):
        run(Suite(), "test_products")
