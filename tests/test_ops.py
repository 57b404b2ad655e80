"""What only the bundled kernel backends do. All that any backend must do: tests/test_conformance_kernels.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from framework.plugins import kernels
from framework.plugins.kernels import torch_backend
from framework.plugins.kernels.cpu.backend import CpuBackend
from framework.plugins.kernels.torch_backend import TorchBackend

from framework import Batch, Meta, ReferenceBackend
from framework.kernels import OPS
from framework.testing.pool import Part, Pool, Shape, close

CPU = torch.device("cpu")


def test_groups_are_split_to_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "GATHER_ELEMENTS", 3 * 5 * 4 * 2 * 16)  # three requests of five blocks
    pool = Pool(TorchBackend(), torch.float32, CPU, block_size=4, blocks=126, shape=Shape(4, 2, 16))
    past = [Part(0, 17, range(5 * i, 5 * i + 5)) for i in range(10)] + [Part(0, 300, range(50, 126))]
    pool.store(past, pool.prepare(past))
    parts = [Part(part.tokens, 1, part.blocks) for part in past]
    meta = pool.prepare(parts)
    pool.store(parts, meta)
    close(*pool.attend(parts, meta), torch.float32, 2e-5)
    assert isinstance(meta, torch_backend.TorchMeta)
    (split,) = meta.parts.values()
    assert [part.bias.shape[0] for part in split if isinstance(part, torch_backend.Group)] == [3, 3, 3, 1, 1]


def test_the_torch_provider_makes_the_torch_backend() -> None:
    provider = next(p for p in kernels.providers() if p.name == "torch")
    assert provider.kind == "kernel"
    assert type(provider.factory()) is TorchBackend


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("backend", [ReferenceBackend(), TorchBackend(), CpuBackend()], ids=lambda b: b.name)
def test_advance(backend: ReferenceBackend, block_size: int) -> None:
    """What it makes of the step before's `Meta` is what `prepare` makes of the batch, step after step."""
    rng = np.random.default_rng(block_size)
    starts, lens = rng.integers(0, 40, 5, np.int32), np.ones(5, np.int32)
    tables = tuple(rng.integers(0, 10**6, (5, 100 // block_size + 1), np.int32) for _ in range(2))
    batch = Batch(starts, lens, tables, lens > 0, block_size)
    meta = backend.prepare(batch, CPU)
    for step in range(40):
        changed = step % 4 == 3
        if changed:  # the block of the new token is another: it was shared, say
            tables[step % 2][step % 5, (starts[step % 5] + 1) // block_size] = step
        starts += 1
        vars(meta)["plans"] = vars(meta)["parts"] = {"of": "the step before"}
        meta = backend.advance(batch, meta, CPU, changed or bool((starts % block_size == 0).any()))
        new = backend.prepare(Batch(starts.copy(), lens, tuple(t.copy() for t in tables), lens > 0, block_size), CPU)
        for name in ("cu_lens", "seq_lens", "logits_rows"):
            assert torch.equal(getattr(meta, name), getattr(new, name)), name
        for name in ("slots", "tables"):
            for ours, theirs in zip(getattr(meta, name), getattr(new, name), strict=True):
                assert torch.equal(ours, theirs), name
        known = {"cu_lens", "seq_lens", "logits_rows", "slots", "tables", "batch"}
        rest = [{k: v for k, v in vars(one).items() if k not in known} for one in (meta, new)]
        assert type(meta) is type(new) and rest[0] == rest[1] and meta.batch is batch


def test_who_overrides_prepare_advances_with_it() -> None:
    class Counts(TorchBackend):
        calls = 0

        def prepare(self, *args: Any, **kwargs: Any) -> Meta:
            self.calls += 1
            return super().prepare(*args, **kwargs)

    class Below(Counts):
        pass

    ones = np.ones(1, np.int32)
    batch = Batch(ones, ones, (np.zeros((1, 4), np.int32),), ones > 0, 16)
    for backend in (Counts(), Below()):
        backend.advance(batch, backend.prepare(batch, CPU), CPU, False)
        assert backend.calls == 2


@pytest.mark.parametrize("backend", [ReferenceBackend(), TorchBackend()], ids=lambda backend: backend.name)
def test_supports(backend: ReferenceBackend) -> None:
    """Everything, in every floating point type: the conformance kit skips nothing."""
    for op in OPS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert backend.supports(op, dtype, CPU).ok
    assert "int8" in backend.supports("linear", torch.int8, CPU).reason
    assert not backend.supports("convolution", torch.float32, CPU).ok
