"""`--kernel triton` as a provider: what it declines, models that it serves, and the conformance kit. Without a GPU in
Triton's interpreter, with one on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import interpreter
import pytest
import torch
from framework.plugins.kernels.triton.backend import TritonBackend, _missing

from framework import LLM, ConfigError, KernelBackend, SamplingParams
from framework.kv import KV_DTYPES
from framework.registry import load_plugins
from framework.settings import Settings
from framework.testing import KernelConformance

DEVICE = interpreter.device()
CUDA = DEVICE.type == "cuda"
FP8 = ("fp8_e5m2", "fp8_e4m3")
EXHAUSTIVE = "EXHAUSTIVE" in os.environ


@pytest.mark.parametrize(
    ("capability", "given", "reason"),
    [
        ((7, 5), {}, "it needs CUDA capability 8.0, this device has 7.5"),
        (
            (8, 6),
            {"kv_dtype": "fp8_e4m3"},
            "--kv-dtype fp8_e4m3 needs CUDA capability 8.9, this device has 8.6; fp8",
        ),
        ((8, 9), {"kv_dtype": "fp8_e4m3"}, ""),
        ((8, 0), {"kv_dtype": "fp8_e5m2"}, ""),
        ((8, 0), {"head_dim": 20}, "head size 20 is not a multiple of 16 up to 256"),
        ((8, 0), {"dtype": torch.float64}, "dtype torch.float64 is not one of"),
        ((8, 0), {"cuda": None}, "it computes on NVIDIA GPUs, and this build of torch is not for them"),
        ((8, 0), {"device": "cpu"}, "it computes on NVIDIA GPUs, not on cpu"),
        ((8, 0), {"path": ""}, "triton compiles its launcher in C, and here is no C compiler ($CC, gcc or clang)"),
        ((8, 0), {"missing": True}, "the package triton is not installed"),
    ],
)
def test_what_it_declines(
    capability: tuple[int, int], given: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", given.get("cuda", "13.0"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", given.get("path", os.environ["PATH"]))
    _missing.cache_clear()
    if given.get("missing"):
        monkeypatch.setitem(sys.modules, "triton", None)
    backend = TritonBackend(Settings(kv_dtype=given.get("kv_dtype", "auto"), kernel="auto"))
    device = torch.device(given.get("device", "cuda"))
    found = backend.supports(
        "attention", given.get("dtype", torch.bfloat16), device, head_dim=given.get("head_dim", 64)
    )
    assert found.ok == (not reason) and found.reason.startswith(reason), found


def test_triton_is_imported_by_nobody_who_does_not_use_it() -> None:
    code = (
        "import sys, torch\n"
        "from framework.registry import load_plugins\n"
        "from framework.settings import Settings\n"
        "backend = load_plugins().create('kernel', 'triton', settings=Settings())\n"
        "assert not backend.supports('attention', torch.float16, torch.device('cpu')).ok\n"
        "assert 'triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(CUDA, reason="of CPUs")
def test_auto_takes_another_on_a_cpu(tiny_llama: Path) -> None:
    """Interpreted or not."""
    with LLM(str(tiny_llama), dtype="float16", kv_blocks=16, threads=1) as llm:
        assert llm.info.providers["kernel"] == "torch"
        assert any("triton: it computes on NVIDIA GPUs, not on cpu" in note for note in llm.info.notes)
    with pytest.raises(ConfigError, match="triton: block size 8 is not one of 16, 32"):
        LLM(str(tiny_llama), kernel="triton", block_size=8)


def generated(path: Path, kernel: str, **flags: Any) -> list[list[int]]:
    prompts = [list(range(5, 75)), list(range(5, 60)) + [9] * 7, [8, 9]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    shared = {"dtype": "float32", "kv_blocks": 64, "threads": 1, "max_num_batched_tokens": 40}
    with LLM(str(path), kernel=kernel, **shared | flags) as llm:
        first = llm.generate(prompts[:1], params)
        rest = llm.generate(prompts[1:], params)  # behind a prefix of the first
        assert llm.engine.stats().prefix_hit_tokens >= 32
        return [list(output.token_ids) for output in (*first, *rest)]


@pytest.mark.slow
def test_a_model_is_served(tiny_llama: Path) -> None:
    """Chunks of a prompt, decodes beside them, a cached prefix: the tokens of `torch`."""
    assert generated(tiny_llama, "triton") == generated(tiny_llama, "torch")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_qwen2", "tiny_qwen3"])
def test_other_models_are_served(model: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    assert generated(path, "triton") == generated(path, "torch")


def served(path: Path, kv_dtype: str, prompts: list[list[int]], tokens: int, **flags: Any) -> tuple[list[Any], LLM]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    shared = {"dtype": "float32", "threads": 1, "kernel": "triton", "kv_dtype": kv_dtype}
    with LLM(str(path), **shared | flags) as llm:
        assert llm.info.kv_dtype == KV_DTYPES[kv_dtype]
        return [output.token_ids for output in llm.generate(prompts, params)], llm


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", FP8)
def test_a_model_is_served_from_8_bits(tiny_llama: Path, kv_dtype: str) -> None:
    """In a quarter of the memory."""
    found, llm = served(tiny_llama, kv_dtype, [[8, 9, 10]], 2, kv_blocks=4, max_num_batched_tokens=16)
    assert len(found[0]) == 2
    (group,) = llm.engine.executor.cache_spec.groups
    assert llm.info.block_bytes == 2 * 16 * group.layers * group.kv_heads * group.head_dim


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", FP8 if EXHAUSTIVE else ["fp8_e4m3"])
def test_8_bits_are_swapped_out_and_in(tiny_llama: Path, kv_dtype: str) -> None:
    """Requests get the same tokens on a pool that holds few of them."""
    prompts = [list(range(5 + i, 35 + i)) for i in range(3)]
    roomy, _ = served(tiny_llama, kv_dtype, prompts, 8, kv_blocks=32)
    found, llm = served(tiny_llama, kv_dtype, prompts, 8, kv_blocks=6, swap_space="1MiB", preemption="swap")
    assert found == roomy and llm.engine.stats().preemptions_swap


class _Kit(KernelConformance):
    provider = "triton"
    device = str(DEVICE)

    def backend(self) -> KernelBackend:
        created: KernelBackend = load_plugins().create(
            "kernel", "triton", settings=Settings(kernel="triton", **self.settings)
        )
        return created


class TestSome(_Kit):
    test_block_bytes = test_copy_blocks = None  # the reference's, and long when interpreted
    dtypes: ClassVar = ("float16",)
    block_sizes: ClassVar = (16,)
    windows: ClassVar = (None, 6)
    shapes: ClassVar = ((4, 2, 16),)
    batches = 3

    def axes(self) -> dict[str, Sequence[Any]]:
        return super().axes() | {"kind": ("mixed", "far apart")}


class _Fp8(_Kit):
    dtypes: ClassVar = ("bfloat16",)
    block_sizes: ClassVar = (16,)
    windows: ClassVar = (None, 6) if EXHAUSTIVE else (6,)
    shapes: ClassVar = ((4, 2, 16), (9, 3, 64)) if EXHAUSTIVE else ((9, 3, 64),)
    batches = 5 if EXHAUSTIVE else 1
    test_attention_of_large_scores = None  # rounding such keys moves scores by more than what tells them apart

    def tolerance(self, op: str, dtype: torch.dtype) -> float:
        """Mantissas of 2 and 3 bits: the worst of many results, which differ from those of the rounded keys and values
        by no more than others (`test_what_8_bit_caches_cost`)."""
        wider = {"attention": 0.8 if self.settings["kv_dtype"] == "fp8_e5m2" else 0.4}
        return wider.get(op) or super().tolerance(op, dtype)


if EXHAUSTIVE:

    @pytest.mark.slow
    class TestE5m2(_Fp8):
        settings: ClassVar = {"kv_dtype": "fp8_e5m2"}


@pytest.mark.slow
class TestE4m3(_Fp8):
    settings: ClassVar = {"kv_dtype": "fp8_e4m3"}


@pytest.mark.slow
class TestAll(_Kit):
    """A part of it, unless EXHAUSTIVE is set in the environment: interpreted, the whole takes an hour."""

    block_sizes: ClassVar = (16, 32) if EXHAUSTIVE else (32,)
    if not EXHAUSTIVE:
        test_block_bytes = test_copy_blocks = None
        dtypes: ClassVar = ("float32",)
        windows: ClassVar = (6,)
        shapes: ClassVar = ((9, 3, 64),)
        batches = 1
