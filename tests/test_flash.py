"""`--kernel flash`: our side of three libraries' calls, in front of stand-ins of theirs, and why none is chosen.

The libraries need a GPU, so this says that they are asked for the right thing in a form that they take, not that their
kernels do it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import flash_libraries
import pytest
import torch
from flash_libraries import installed
from framework.plugins.kernels.flash import FlashOptions
from framework.plugins.kernels.flash.backend import FlashBackend
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from framework import LLM, CacheGroup, ConfigError, KernelBackend, Rope, SamplingParams
from framework.testing import KernelConformance
from framework.testing.pool import Part, make_batch

CPU = torch.device("cpu")


class OnCpu(FlashBackend):
    """As if this device were such a GPU."""

    gpu: ClassVar[tuple[int, int]] = (9, 0)

    @classmethod
    def capability(cls, device: torch.device) -> tuple[int, int]:  # type: ignore[override]
        return cls.gpu


def made(library: str, block_size: int, *modules: str) -> FlashBackend:
    """A backend that has found its library among `modules`."""
    backend = OnCpu(FlashOptions(library=library), block_size)  # type: ignore[arg-type]
    with installed(*modules):
        support = backend.supports("attention", torch.bfloat16, CPU, head_dim=64)
    assert support.ok, support.reason
    return backend


class _Conformance(KernelConformance):
    dtypes = ("float16", "bfloat16")
    library: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    title: ClassVar[str]

    @pytest.fixture(autouse=True)
    def present(self) -> Iterator[None]:
        with installed(*self.modules):
            yield

    def backend(self) -> KernelBackend:
        backend = made(self.library, self.block_sizes[0], *self.modules)
        assert backend.name == f"flash ({self.title})"
        return backend


class _LargePages(_Conformance):
    block_sizes = (256,)
    windows = (None, 1, 300)
    shapes = ((4, 2, 16), (9, 3, 64))
    batches = 4


class TestTorch(_LargePages):
    dtypes = ("float16",)
    library, modules, title = "torch", ("torch",), f"torch {torch.__version__}"


class TestFlashAttention2(_LargePages):
    dtypes = ("bfloat16",)
    shapes = ((4, 2, 16), (2, 1, 256))
    library, modules, title = "flash-attn", ("flash_attn",), "flash-attn 2.8.3"


class TestFlashAttention3(_Conformance):
    dtypes = ("bfloat16",)
    block_sizes = (16,)
    shapes = ((4, 2, 16), (9, 3, 64), (14, 2, 80), (6, 1, 24), (4, 4, 8), (1, 1, 256))
    library, modules, title = "flash-attn", ("flash_attn", "flash_attn_interface"), "flash-attn-3"


class TestFlashInfer(_Conformance):
    block_sizes = (16,)
    shapes = ((4, 2, 64), (9, 3, 64), (14, 2, 128), (6, 1, 64), (2, 2, 128), (1, 1, 256))
    library, modules, title = "flashinfer", ("flashinfer", "flashinfer_jit_cache"), "flashinfer 0.7.4"


class TestFlashInferOfOddBlocks(_Conformance):
    dtypes = ("bfloat16",)
    block_sizes = (11,)
    shapes = ((4, 2, 64),)
    library, modules, title = TestFlashInfer.library, TestFlashInfer.modules, TestFlashInfer.title


LIBRARIES = [
    ("torch", 256, ("torch",)),
    ("flash-attn", 256, ("flash_attn",)),
    ("flash-attn", 16, ("flash_attn_interface",)),
    ("flashinfer", 16, ("flashinfer", "flashinfer_jit_cache")),
]
libraries = pytest.mark.parametrize(("library", "block_size", "modules"), LIBRARIES)
STEPS = [[(0, 300), (0, 5), (20, 7)], [(300, 1), (5, 1), (27, 1)], [(301, 1), (6, 1), (28, 1)]]
WINDOWS = (None, 40, None, 40)


class Recorder(TorchDispatchMode):
    """Operations that torch is asked for, those within a stand-in left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not flash_libraries.running:
            self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


def run(backend: KernelBackend, block_size: int) -> list[set[str]]:
    """Three steps of a model of four layers in two groups; what each layer of each step asks torch for."""
    caches = backend.allocate(CacheGroup(4, 2, 64), torch.bfloat16, block_size, 64, CPU)
    blocks = [[20 * i + j for j in range(20)] for i in range(3)]
    rope, asked, meta = Rope(torch.ones(400, 32), torch.zeros(400, 32)), [], None
    for step, spans in enumerate(STEPS):
        parts = [Part(start, n, own) for (start, n), own in zip(spans, blocks, strict=True)]
        batch = make_batch(block_size, parts, parts)
        meta = backend.prepare(batch, CPU) if step < 2 else backend.advance(batch, meta, CPU, True)
        at = torch.cat([torch.arange(part.start, part.start + part.tokens) for part in parts])
        for layer, window in enumerate(WINDOWS):
            q, k, v = (torch.randn(len(at), heads, 64).bfloat16() for heads in (4, 2, 2))
            with Recorder() as recorder:
                q = backend.rope_store(q, k, v, at, rope, caches[layer], layer % 2, meta)
                backend.attention(q, caches[layer], layer % 2, meta, 0.1, window)
            asked.append(recorder.seen)
    return asked


@libraries
def test_layers_share_what_is_worked_out_of_the_batch(library: str, block_size: int, modules: tuple[str, ...]) -> None:
    """The third and fourth layer of a step only rotate, write and attend: nothing that a GPU has to be waited for, and
    nothing that is made of the batch."""
    flash_libraries.calls.clear()
    asked = run(made(library, block_size, *modules), block_size)
    waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::index.Tensor", "aten::cumsum", "aten::arange"}
    assert "aten::index.Tensor" in asked[0], "rows of cosines and sines, that the other layers share"
    for step in range(3):
        for layer in (2, 3):
            assert "aten::index_copy_" in asked[4 * step + layer]
            assert not waits & asked[4 * step + layer]
    if library == "flashinfer":
        plans = [name for name in flash_libraries.calls if name.endswith(".plan")]
        assert len(plans) == 3 * 2, "one for each window in each step"


def test_flashinfer_has_one_workspace() -> None:
    backend = made("flashinfer", 16, "flashinfer", "flashinfer_jit_cache")
    run(backend, 16)
    planned = backend._library._planned.values()  # type: ignore[union-attr]
    assert len(planned) == 4, "two windows, in prompts and in decodes"
    assert len({one.wrapper.workspace.data_ptr() for one in planned}) == 1


def test_flashinfer_plans_anew_for_a_batch_that_comes_back() -> None:
    """A wrapper knows one plan: who goes on with an earlier batch needs it made again."""
    backend = made("flashinfer", 16, "flashinfer", "flashinfer_jit_cache")
    cache = backend.allocate(CacheGroup(1, 2, 64), torch.bfloat16, 16, 8, CPU)[0]
    for pages in cache:
        pages.normal_()
    metas = [backend.prepare(make_batch(16, [Part(start, 1, [1, 2])]), CPU) for start in (3, 20)]
    q = torch.randn(1, 4, 64).bfloat16()
    first, second, again = (backend.attention(q, cache, 0, metas[i], 0.1, None) for i in (0, 1, 0))
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8])
def test_flashinfer_decodes_any_number_of_heads_to_a_kv_head(heads: int) -> None:
    backend = made("flashinfer", 16, "flashinfer", "flashinfer_jit_cache")
    cache = backend.allocate(CacheGroup(1, 2, 64), torch.bfloat16, 16, 8, CPU)[0]
    meta = backend.prepare(make_batch(16, [Part(3, 1, [1])]), CPU)
    q = torch.randn(1, 2 * heads, 64).bfloat16()
    assert backend.attention(q, cache, 0, meta, 0.1, None).shape == (1, 128 * heads)


# Signatures


def test_torch_is_called_as_it_is() -> None:
    """The parameters that we name are those of the installed torch, by keyword where they have to be."""
    real = inspect.signature(varlen.varlen_attn)
    backend = made("torch", 256, "torch")
    meta = backend.prepare(make_batch(256, [Part(3, 1, [1]), Part(0, 4, [0])]), CPU)
    with patch.object(backend._library, "_attend", lambda *args, **kwargs: (real.bind(*args, **kwargs), args[0])[1]):
        cache = backend.allocate(CacheGroup(1, 2, 64), torch.bfloat16, 256, 2, CPU)[0]
        backend.attention(torch.randn(5, 4, 64).bfloat16(), cache, 0, meta, 0.1, 30)


# Why not


def reason(backend: FlashBackend, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, **given: Any) -> str:
    found = backend.supports("attention", dtype, CPU, head_dim=head_dim, **given)
    assert not found.ok
    return found.reason


ABSENT = (
    "flash-attn-3: not installed (built from flash-attn's folder hopper); "
    "flash-attn: not installed (pip install flash-attn); "
    "flashinfer: not installed (pip install flashinfer-python); "
)


def test_nothing_is_installed() -> None:
    with installed("torch"):
        assert reason(OnCpu(block_size=16)) == ABSENT + "torch: needs pages of 256 tokens: use --block-size 256"


def test_a_torch_whose_varlen_attn_has_no_block_table() -> None:
    def earlier(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool = False
    ) -> None: ...

    with installed("torch"), patch.object(varlen, "varlen_attn", earlier):
        expected = f"torch: its varlen_attn takes no block_table in version {torch.__version__}, which 2.12 does"
        assert reason(OnCpu(block_size=256)) == ABSENT + expected


def test_a_torch_without_varlen_attn() -> None:
    with patch.dict("sys.modules", {"torch.nn.attention.varlen": None}):
        assert reason(OnCpu(FlashOptions(library="torch"), 256)).startswith("torch: not installed (torch 2.12 has it)")


def test_a_torch_built_without_flash_attention() -> None:
    assert reason(OnCpu(FlashOptions(library="torch"), 256)) == "torch: built without FlashAttention"


def test_a_gpu_of_another_generation() -> None:
    class Ampere(OnCpu):
        gpu = (8, 6)

    with installed("flash_attn_interface", "flash_attn"):
        found = reason(Ampere(FlashOptions(library="flash-attn"), 32))
        assert found == (
            "flash-attn-3: is for compute capability 9, this GPU has 8.6; "
            "flash-attn: needs pages of 256 tokens: use --block-size 256"
        )
        assert Ampere(FlashOptions(library="flash-attn"), 512).supports("attention", torch.float16, CPU).ok


def test_a_gpu_that_is_too_old() -> None:
    class Turing(OnCpu):
        gpu = (7, 5)

    assert reason(Turing()) == "it needs an NVIDIA GPU of compute capability 8.0 or newer, cpu has 7.5"


@pytest.mark.parametrize(("head_dim", "has"), [(60, "multiples of 8 up to 256"), (264, "multiples of 8 up to 256")])
def test_head_sizes(head_dim: int, has: str) -> None:
    with installed("torch", "flashinfer", "flashinfer_jit_cache"):
        torch_, infer = (OnCpu(FlashOptions(library=name), 256) for name in ("torch", "flashinfer"))  # type: ignore[arg-type]
        assert reason(torch_, head_dim=head_dim) == f"torch: has heads of {has}, not of {head_dim}"
        assert reason(infer, head_dim=head_dim) == f"flashinfer: has heads of 64, 128, 256, not of {head_dim}"


def test_float32() -> None:
    with installed("torch"):
        found = reason(OnCpu(block_size=256), torch.float32)
    assert found == "dtype torch.float32 is not one of torch.bfloat16, torch.float16"


def test_flashinfer_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", "")
    with installed("flashinfer"), patch("pathlib.Path.exists", lambda path: False):
        found = reason(OnCpu(FlashOptions(library="flashinfer")))
    assert found == ("flashinfer: compiles its kernels, and there is no nvcc: install CUDA's, or flashinfer-jit-cache")


def test_a_flashinfer_that_is_too_old() -> None:
    contents = dict(flash_libraries.MODULES["flashinfer"][1])
    del contents["BatchPrefillWithPagedKVCacheWrapper"]
    with (
        installed("flashinfer_jit_cache"),
        patch.dict("sys.modules", {"flashinfer": flash_libraries.module("flashinfer", "0.0.1", contents)}),
    ):
        found = reason(OnCpu(FlashOptions(library="flashinfer")))
    assert found == "flashinfer: has no BatchPrefillWithPagedKVCacheWrapper.plan in version 0.0.1"


def test_a_library_that_fails_to_load(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("raise OSError('libcudart.so.12: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    found = reason(OnCpu(FlashOptions(library="flash-attn"), 256))
    assert found.endswith("; flash-attn: cannot be imported (OSError: libcudart.so.12: no such file)")


def test_who_is_asked_first() -> None:
    everything = ("torch", *flash_libraries.MODULES)
    assert made("auto", 256, *everything).name == "flash (flash-attn-3)"
    assert made("auto", 256, *(set(everything) - {"flash_attn_interface"})).name == "flash (flash-attn 2.8.3)"
    assert made("auto", 16, *(set(everything) - {"flash_attn_interface"})).name == "flash (flashinfer 0.7.4)"
    assert made("auto", 256, "torch").name == f"flash (torch {torch.__version__})"


def test_a_cpu_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without looking for any library, let alone importing one."""
    monkeypatch.setattr("importlib.util.find_spec", lambda *args: pytest.fail("looked for a library"))
    expected = "it needs an NVIDIA GPU of compute capability 8.0 or newer, this is cpu"
    assert FlashBackend().supports("embed", torch.float32, CPU) == (False, expected)


# In an engine


def test_who_names_it_on_a_cpu_is_told_why_not(tiny_llama: Path) -> None:
    said = r"--kernel flash: it needs .* or newer, this is cpu; auto takes the first backend that can serve"
    with pytest.raises(ConfigError, match=said):
        LLM(str(tiny_llama), kernel="flash", kv_blocks=16)


def test_who_names_a_library_that_is_not_there_is_told(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashBackend, "capability", OnCpu.capability)
    given: dict[str, Any] = {"kernel": "flash", "dtype": "bfloat16", "kv_blocks": 16}
    with pytest.raises(
        ConfigError, match=r"--kernel flash: attention: flashinfer: not installed \(pip install [\w-]+\); auto"
    ):
        LLM(str(tiny_llama), kernel_opt={"library": "flashinfer"}, **given)
    with pytest.raises(ConfigError, match="--kernel-opt library"):
        LLM(str(tiny_llama), kernel_opt={"library": "xformers"}, **given)


def test_an_engine_says_which_it_took_and_generates(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as with the kernel `torch`, in chunks of prompts and in decodes."""
    monkeypatch.setattr(FlashBackend, "capability", OnCpu.capability)
    given: dict[str, Any] = {"dtype": "float16", "kv_blocks": 64, "max_num_batched_tokens": 32}
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts, found = ["a" * 50, "bc", "d" * 17], []
    with installed("flash_attn_interface"):
        for kernel in ("torch", "flash"):
            with LLM(str(tiny_llama), kernel=kernel, **given) as llm:
                found.append([output.token_ids for output in llm.generate(prompts, params)])
        assert llm.info.providers["kernel"] == "flash (flash-attn-3)"
    assert found[0] == found[1]
