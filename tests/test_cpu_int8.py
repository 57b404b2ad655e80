"""`--kernel cpu` in 8 bits: the conformance kit with wider tolerances, and products to the integer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from framework.plugins.kernels.cpu import CpuOptions, build
from framework.plugins.kernels.cpu.backend import CpuBackend

from framework import LLM, ConfigError, KernelBackend
from framework.testing import KernelConformance

PRODUCTS = ("linear", "qkv", "gate_up", "logits")
isas = pytest.mark.parametrize("isa", build.supported())


class TestWeights(KernelConformance):
    """All else is as in test_cpu_kernels.py: a few cases are enough."""

    provider = "cpu"
    settings: ClassVar = {"quantization": "int8"}
    dtypes: ClassVar = ("float32", "bfloat16")
    block_sizes = (16,)
    windows = (None,)
    shapes = ((4, 2, 16),)
    batches = 1

    def backend(self) -> KernelBackend:
        if self.options.get("isa", "portable") not in build.supported():
            pytest.skip(f"this CPU has no {self.options['isa']}")
        return super().backend()

    def tolerance(self, op: str, dtype: torch.dtype) -> float:
        """Both sides are rounded to 1/254 of the largest number of their row."""
        return 0.08 if op in PRODUCTS else super().tolerance(op, dtype)


class TestWeightsVnni(TestWeights):
    options: ClassVar = {"isa": "avx512_vnni"}


class TestWeightsAvx512(TestWeights):
    options: ClassVar = {"isa": "avx512"}


class TestWeightsAvx2(TestWeights):
    options: ClassVar = {"isa": "avx2"}


class TestWeightsPortable(TestWeights):
    options: ClassVar = {"isa": "portable"}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_exact(isa: str, dtype: torch.dtype) -> None:
    """Integers up to 127 are what they are rounded to, and nothing saturates on the way."""
    backend = CpuBackend(CpuOptions(isa=isa), "int8")
    random = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 40, 64), (7, 33, 130), (70, 300, 2100), (3, 16, 65536)):
        x, weight, bias = (torch.randint(-127, 128, size, generator=random) for size in ((m, k), (n, k), (n,)))
        x[:, -1] = weight[:, -1] = 127
        weight[1], weight[2, ::2], weight[2, 1::2], x[m // 2] = 127, 127, -127, -127
        expected = (x @ weight.T).float() + bias
        found = backend.linear(x.to(dtype), backend.pack("linear", weight.to(dtype), bias.to(dtype)))
        assert torch.equal(found, expected.to(dtype))
        assert torch.equal(backend.linear(2**-5 * x.to(dtype), backend.pack("linear", weight.to(dtype) / 4)),
                           (2**-7 * (x @ weight.T).float()).to(dtype))  # fmt: skip


@isas
def test_odd_numbers(isa: str) -> None:
    """NaN and infinity reach the logits; rows of nothing, of tiny and of huge numbers do not make them."""
    backend = CpuBackend(CpuOptions(isa=isa), "int8")
    for dtype in (torch.float32, torch.bfloat16):
        x, packed = normal(6, 37, dtype=dtype), backend.pack("logits", torch.eye(37, dtype=dtype))
        x[1, 5], x[2, 36] = float("nan"), float("-inf")
        x[3], x[4], x[5] = 0, x[4] * 1e-38, x[5] * 1e37
        y = backend.logits(x, packed)
        assert not y[1:3].isfinite().any()
        assert y[[0, 3, 4, 5]].isfinite().all() and (y[3] == 0).all() and (y[4].abs() < 1e-30).all()
        assert torch.allclose(y[[0, 5]].float(), x[[0, 5]].float(), rtol=0.02, atol=0.02 * float(x[5].abs().max()))
        weight = torch.eye(37, dtype=dtype)
        weight[3, 3] = float("nan")
        assert backend.logits(x, backend.pack("logits", weight))[0].isnan().nonzero().tolist() == [[3]]
        none = backend.linear(x[:0], backend.pack("linear", weight))
        assert none.shape == (0, 37)


def test_too_long_a_sum_is_refused() -> None:
    with pytest.raises(RuntimeError, match="would overflow"):
        CpuBackend(quantization="int8").pack("linear", torch.zeros(1, 2**16 + 1))


# The setting

FLAGS: dict[str, Any] = {"dtype": "float32", "kv_blocks": 16}


def test_who_has_it(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), quantization="int8", **FLAGS) as llm:
        assert (llm.info.providers["kernel"], llm.info.quantization) == ("cpu", "int8")
        assert llm.generate("Once upon a time")[0].token_ids
    with pytest.raises(ConfigError, match="torch: it has no --quantization int8"):
        LLM(str(tiny_llama), quantization="int8", kernel="torch", **FLAGS)
    with pytest.raises(ConfigError, match=r"--quantization: must be 'none' or 'int8', got 'int4'"):
        LLM(str(tiny_llama), quantization="int4", **FLAGS)
