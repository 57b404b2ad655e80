"""`--kernel cpu` in 8 bits: the conformance kit with wider tolerances, and products to the integer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from framework.plugins.kernels.cpu import CpuOptions, build
from framework.plugins.kernels.cpu.backend import CpuBackend

from framework import LLM, Batch, CacheGroup, ConfigError, KernelBackend, Rope, SamplingParams
from framework.testing import KernelConformance

PRODUCTS = ("linear", "qkv", "gate_up", "logits")
CPU = torch.device("cpu")
isas = pytest.mark.parametrize("isa", build.supported())


class _Int8(KernelConformance):
    """Weights, keys and values; fewer cases than in test_cpu_kernels.py, since the algorithms are the same."""

    provider = "cpu"
    settings: ClassVar = {"quantization": "int8", "kv_dtype": "int8"}
    dtypes: ClassVar = ("float32", "bfloat16")
    block_sizes: ClassVar = (32,)
    windows: ClassVar = (None, 9)
    shapes: ClassVar = ((4, 2, 16), (9, 3, 64), (6, 1, 20))
    batches = 3
    test_attention_of_large_scores = None  # rounding such keys moves scores by more than what tells them apart

    def backend(self) -> KernelBackend:
        if self.options["isa"] not in ("auto", *build.supported()):
            pytest.skip(f"this CPU has no {self.options['isa']}")
        return super().backend()

    def tolerance(self, op: str, dtype: torch.dtype) -> float:
        """Both sides of a product are rounded to 1/254 of the largest number of their row, keys and values likewise."""
        wider = dict.fromkeys(PRODUCTS, 0.08) | {"attention": 0.1}
        return wider.get(op) or super().tolerance(op, dtype)


class TestInt8(_Int8):
    options: ClassVar = {"isa": "auto"}
    block_sizes: ClassVar = (16, 32)
    shapes = KernelConformance.shapes
    batches = 10


class TestInt8Vnni(_Int8):
    options: ClassVar = {"isa": "avx512_vnni"}


class TestInt8Avx512(_Int8):
    options: ClassVar = {"isa": "avx512"}


class TestInt8Avx2(_Int8):
    options: ClassVar = {"isa": "avx2"}


class TestInt8Portable(_Int8):
    options: ClassVar = {"isa": "portable"}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_exact(isa: str, dtype: torch.dtype) -> None:
    """Integers up to 127, where 127 is in every 64, are what they are rounded to, and nothing saturates on the way."""
    backend = CpuBackend(CpuOptions(isa=isa), "int8")
    random = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 40, 64), (7, 33, 130), (70, 300, 2100), (3, 16, 70000)):
        x, weight, bias = (torch.randint(-127, 128, size, generator=random) for size in ((m, k), (n, k), (n,)))
        x[:, ::64] = weight[:, ::64] = 127
        weight[1], weight[2, ::2], weight[2, 1::2], x[m // 2] = 127, 127, -127, -127
        x[m // 2, ::64] = 127
        expected = x @ weight.T
        near = {"rtol": 1e-6 if dtype == torch.float32 else 2**-8, "atol": 1e-6 * float(expected.abs().max())}
        found = backend.linear(x.to(dtype), backend.pack("linear", weight.to(dtype), bias.to(dtype)))
        torch.testing.assert_close(found.double(), (expected + bias).double(), **near)
        found = backend.linear(2**-5 * x.to(dtype), backend.pack("linear", weight.to(dtype) / 4))
        torch.testing.assert_close(found.double() * 2**7, expected.double(), **near)


@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_who_else_is_in_the_batch(isa: str, dtype: torch.dtype) -> None:
    """Changes nothing, to the bit; nor does the number of threads."""
    backend, x = CpuBackend(CpuOptions(isa=isa), "int8"), normal(130, 300, dtype=dtype)
    packed, before = backend.pack("linear", normal(700, 300, dtype=dtype, seed=1)), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = backend.linear(x, packed)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (1, 7, 48, 130):
                assert torch.equal(backend.linear(x[:rows], packed), whole[:rows])
    finally:
        torch.set_num_threads(before)


@isas
def test_odd_numbers(isa: str) -> None:
    """NaN and infinity reach the logits; rows of nothing, of tiny and of huge numbers do not make them."""
    backend = CpuBackend(CpuOptions(isa=isa), "int8")
    for dtype in (torch.float32, torch.bfloat16):
        x, packed = normal(6, 37, dtype=dtype), backend.pack("logits", torch.eye(37, dtype=dtype))
        x[1, 5], x[2, 36] = float("nan"), float("-inf")
        x[3], x[4], x[5] = 0, x[4] * 1e-38, x[5] * 1e34
        y = backend.logits(x, packed)
        assert not y[1:3].isfinite().any()
        assert y[[0, 3, 4, 5]].isfinite().all() and (y[3] == 0).all() and (y[4].abs() < 1e-30).all()
        assert torch.allclose(y[[0, 5]].float(), x[[0, 5]].float(), rtol=0.02, atol=0.02 * float(x[5].abs().max()))
        weight = torch.eye(37, dtype=dtype)
        weight[3, 3] = float("nan")
        assert backend.logits(x, backend.pack("logits", weight))[0].isnan().nonzero().tolist() == [[3]]
        none = backend.linear(x[:0], backend.pack("linear", weight))
        assert none.shape == (0, 37)
        assert torch.equal(backend.logits(x[3:].T.contiguous().T, packed), y[3:]), "columns are contiguous, not rows"


@isas
def test_what_is_far_larger_than_the_rest(isa: str) -> None:
    """Costs its 64 neighbours their bits, and nobody else."""
    backend = CpuBackend(CpuOptions(isa=isa), "int8")
    x = normal(3, 200)
    x[:, 70] = 5000.0
    error = (backend.linear(x, backend.pack("linear", torch.eye(200))) - x).abs()
    assert error[:, 64:128].max() > 1 and torch.cat((error[:, :64], error[:, 128:]), 1).max() < 0.03


@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_page_of_bytes(isa: str, dtype: torch.dtype) -> None:
    """Half the size and a scale per token and head: what tokens of very different size are rounded to is near each."""
    backend = CpuBackend(CpuOptions(isa=isa))
    group = CacheGroup(1, 3, 40)
    assert backend.block_bytes(group, torch.int8, 32) == 2 * 3 * 32 * (48 + 4)
    (cache,) = backend.allocate(group, torch.int8, 32, 2, CPU)
    k, v = (normal(40, 3, 40, seed=i).to(dtype) * 10.0 ** torch.arange(-20, 20)[:, None, None] for i in (0, 1))
    k, v = k.to(dtype), v.to(dtype)
    still = Rope(torch.ones(40, 20), torch.zeros(40, 20))
    ones, table = np.ones(40, np.int32), np.array([[1, 0]], np.int32)
    meta = backend.prepare(Batch(ones[:1] * 0, ones[:1] * 40, (table,), ones[:1] > 0, 32), CPU)
    backend.rope_store(k[:, :1].clone(), k.clone(), v, torch.arange(40), still, cache, 0, meta)
    # Whoever sees one token alone gets its value.
    found = backend.attention(torch.zeros(40, 3, 40, dtype=dtype), cache, 0, meta, 1.0, 1).view(40, 3, 40)
    largest = v.float().abs().amax(-1, keepdim=True)
    assert ((found.float() - v.float()).abs() <= largest * (0.5 / 127 + 2**-8)).all()
    assert ((found.float() - v.float()).abs() > largest / 1000).any(), "it was rounded to 8 bits"


# The settings

FLAGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64}


def test_who_has_weights_in_8_bits(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), quantization="int8", **FLAGS) as llm:
        assert (llm.info.providers["kernel"], llm.info.quantization) == ("cpu", "int8")
        assert llm.generate("Once upon a time")[0].token_ids
    with pytest.raises(ConfigError, match="torch: it has no --quantization int8"):
        LLM(str(tiny_llama), quantization="int8", kernel="torch", **FLAGS)
    with pytest.raises(ConfigError, match=r"--quantization: must be 'none' or 'int8', got 'int4'"):
        LLM(str(tiny_llama), quantization="int4", **FLAGS)


def test_who_has_a_cache_of_8_bits(tiny_llama: Path) -> None:
    """The same memory holds more of its blocks, and they swap and fork as any."""
    blocks = {}
    for kv_dtype in ("auto", "int8"):
        with LLM(str(tiny_llama), kv_dtype=kv_dtype, **FLAGS | {"max_num_seqs": 2**15, "kv_memory": "4MiB"}) as llm:
            assert llm.info.kv_dtype == {"auto": "float32", "int8": "int8"}[kv_dtype]
            blocks[kv_dtype] = llm.info.kv_blocks
            assert all(output.token_ids for output in llm.generate("Once upon a time", n=3))
    assert blocks["int8"] > 3 * blocks["auto"]
    prompts = [[i, *range(3, 40)] for i in range(3, 11)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(tiny_llama), kv_dtype="int8", kv_blocks=64, **FLAGS | {"max_num_seqs": 8}) as llm:
        roomy = [output.token_ids for output in llm.generate(prompts, params)]
    with LLM(str(tiny_llama), kv_dtype="int8", kv_blocks=12, swap_space="1MiB", preemption="swap",
             **FLAGS | {"max_num_seqs": 8}) as llm:  # fmt: skip
        assert [output.token_ids for output in llm.generate(prompts, params)] == roomy
        assert llm.engine.stats().preemptions_swap
    with pytest.raises(ConfigError, match="torch: it has no --kv-dtype int8"):
        LLM(str(tiny_llama), kv_dtype="int8", kernel="torch", **FLAGS)
    with pytest.raises(ConfigError, match=r"--kv-dtype: must be 'auto', 'int8', 'fp8_e5m2' or 'fp8_e4m3', got 'fp8'"):
        LLM(str(tiny_llama), kv_dtype="fp8", **FLAGS)
