"""What only the bundled kernel backends do. All that any backend must do: tests/test_conformance_kernels.py."""

from __future__ import annotations

import pytest
import torch
from framework.plugins import kernels
from framework.plugins.kernels import torch_backend
from framework.plugins.kernels.torch_backend import TorchBackend

from framework import ReferenceBackend
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


@pytest.mark.parametrize("backend", [ReferenceBackend(), TorchBackend()], ids=lambda backend: backend.name)
def test_supports(backend: ReferenceBackend) -> None:
    """Everything, in every floating point type: the conformance kit skips nothing."""
    for op in OPS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert backend.supports(op, dtype, CPU).ok
    assert "int8" in backend.supports("linear", torch.int8, CPU).reason
    assert not backend.supports("convolution", torch.float32, CPU).ok
