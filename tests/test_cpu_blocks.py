"""`--kernel cpu` with weights as a GGUF file has them: products against float64 of what the gguf package makes of the
same bytes, and whole models beside the same with widened weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ggml
import numpy as np
import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_gguf
from framework.plugins.kernels.cpu import CpuOptions, build
from framework.plugins.kernels.cpu.backend import EXACT, ROUNDED, CpuBackend, PackedLinear
from framework.plugins.kernels.torch_backend import TorchBackend
from framework.plugins.models.llama import Llama

from framework import LLM, Batch, KernelBackend, Quantized, SamplingParams
from framework.checkpoint import open_checkpoint
from framework.registry import load_plugins
from framework.settings import Settings

isas = pytest.mark.parametrize("isa", build.supported())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NIBBLES = ("Q4_0", "Q4_1", "Q4_K")
ITSELF = {torch.float32: 4e-6, torch.bfloat16: 2**-8}
"""What a result of so many bits may be off, in parts of the largest."""
OF_WEIGHTS = dict.fromkeys(EXACT, 0.0) | dict.fromkeys(ROUNDED, 0.01) | {"Q4_K": 1e-3}


def part(rows: int, columns: int, kind: str, seed: int = 0) -> tuple[Quantized, torch.Tensor]:
    """Random rows, and what they mean in float64."""
    x = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    data = ggml.quantize(x, kind)

    def widen(data: torch.Tensor) -> torch.Tensor:
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(ggml.dequantize(data.numpy(), kind)).float()

    return Quantized(kind, torch.from_numpy(data), columns, widen, lambda: f"{kind} {seed}"), torch.from_numpy(
        ggml.dequantize(data, kind)
    )


def integers(rows: int, columns: int) -> torch.Tensor:
    """What rounding to 8 bits leaves as it is: 127 is in every 32."""
    x = torch.randint(-127, 128, (rows, columns), generator=torch.Generator().manual_seed(1))
    x[:, ::32] = 127
    return x.double()


def backend(isa: str = "auto") -> CpuBackend:
    return CpuBackend(CpuOptions(isa=isa))


def pack(cpu: CpuBackend, parts: Sequence[Quantized], dtype: torch.dtype, bias: torch.Tensor | None = None) -> Any:
    return cpu.pack_quantized("linear", parts, dtype, bias)


def near(found: torch.Tensor, expected: torch.Tensor, bound: float, scale: float = 0) -> None:
    assert float((found.double() - expected).abs().max()) <= bound * max(scale, float(expected.abs().max()))


@isas
@dtypes
@pytest.mark.parametrize("kind", [*EXACT, *ROUNDED])
def test_products(isa: str, dtype: torch.dtype, kind: str) -> None:
    cpu, block = backend(isa), 256 if "K" in kind else 32
    for m, n, blocks in ((1, 64, 1), (2, 1, 2), (5, 33, 3), (13, 16, 1), (37, 70, 8), (130, 20, 2)):
        weight, meant = part(n, blocks * block, kind)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(dtype)
        x = integers(m, blocks * block)
        found = cpu.linear(x.to(dtype), pack(cpu, [weight], dtype, bias))
        likely = float(x.norm(dim=1).max() * meant.norm(dim=1).max()) / (blocks * block) ** 0.5
        near(found, x @ meant.T + bias.double(), ITSELF[dtype] + OF_WEIGHTS[kind], 3 * likely)
        x = torch.randn(m, blocks * block, generator=torch.Generator().manual_seed(3)).to(dtype)
        found, expected = cpu.linear(x, pack(cpu, [weight], dtype)).double(), x.double() @ meant.T
        if n > 1:
            error = (found - expected).norm() / (x.double().norm(dim=1)[:, None] * meant.norm(dim=1)).norm()
            assert error < (0.008 + ITSELF[dtype] + OF_WEIGHTS[kind]) / 2, "8 bits of activations, and what is above"


@isas
@dtypes
def test_parts_of_different_formats(isa: str, dtype: torch.dtype) -> None:
    """Stay in 4 bits where all are, and otherwise become 8; their borders are where they are."""
    cpu, x = backend(isa), integers(7, 512)
    for kinds in (
        ("Q4_0", "Q4_1", "Q4_K"),
        ("Q4_K", "Q6_K", "Q4_K"),
        ("Q8_0", "Q4_0", "Q8_0"),
        ("Q5_K", "Q8_0", "Q2_K"),
    ):
        parts, meant = zip(*(part(n, 512, kind, n) for n, kind in zip((5, 30, 18), kinds, strict=True)), strict=True)
        packed = pack(cpu, parts, dtype)
        assert packed.words.dtype == (torch.uint8 if set(kinds) <= set(NIBBLES) else torch.int8)
        found = cpu.qkv(x.to(dtype), packed, (5, 30, 18))
        for y, weight, kind in zip(found, meant, kinds, strict=True):
            rounded = 0.01 if packed.words.dtype == torch.int8 and kind != "Q8_0" else OF_WEIGHTS[kind]
            near(y, x @ weight.T, ITSELF[dtype] + rounded)


@isas
@dtypes
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_rows_of_an_embedding(isa: str, dtype: torch.dtype, kind: str) -> None:
    cpu, (weight, meant) = backend(isa), part(70, 512, kind)
    packed = cpu.pack_quantized("logits", [weight], dtype)
    tokens = torch.tensor([69, 0, 15, 16, 3, 3])
    found = cpu.embed(tokens, packed)
    assert found.dtype == dtype
    if kind in ("Q4_K", "Q6_K"):
        near(found, meant[tokens], ITSELF[dtype] + OF_WEIGHTS[kind])
    else:
        assert torch.equal(found, meant[tokens].to(dtype))
    assert cpu.embed(tokens[:0], packed).shape == (0, 512)
    for bad in (70, -1):
        with pytest.raises(RuntimeError, match="a token is out of range"):
            cpu.embed(torch.tensor([bad]), packed)


@isas
@dtypes
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_who_else_is_in_the_batch(isa: str, dtype: torch.dtype, kind: str) -> None:
    """Changes nothing, to the bit; nor does the number of threads."""
    cpu, before = backend(isa), torch.get_num_threads()
    packed = pack(cpu, [part(700, 288, kind)[0]], dtype)
    x = torch.randn(130, 288, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        torch.set_num_threads(1)
        whole = cpu.linear(x, packed)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (1, 7, 13, 48, 130):
                assert torch.equal(cpu.linear(x[:rows], packed), whole[:rows])
    finally:
        torch.set_num_threads(before)


@isas
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q6_K"])
def test_odd_numbers(isa: str, kind: str) -> None:
    """NaN and infinity reach the result, whichever side has them; scales that float16 barely holds are right."""
    cpu, (weight, meant) = backend(isa), part(20, 256, kind)
    packed, x = pack(cpu, [weight], torch.float32), integers(4, 256)
    x[1, 5], x[2, 255] = float("nan"), float("-inf")
    y = cpu.linear(x.float(), packed)
    assert not y[1:3].isfinite().any() and y[[0, 3]].isfinite().all()
    assert cpu.linear(x[:0].float(), packed).shape == (0, 20)
    near(cpu.linear(x[3:].float().T.contiguous().T, packed), x[3:] @ meant.T, 0.01)
    at = 208 if kind == "Q6_K" else 0  # of the first block's scale
    for number in ("nan", "inf"):
        data = weight.data.clone()
        data[3, at : at + 2] = torch.tensor([float(number)], dtype=torch.float16).view(torch.uint8)
        y = cpu.linear(x[:1].float(), pack(cpu, [weight._replace(data=data)], torch.float32))
        assert y.isfinite().logical_not().nonzero().tolist() == [[0, 3]]
    if kind == "Q8_0":
        data = weight.data.clone().view(20, 8, 34)
        data[:, :, :2] = torch.tensor([2.0**-24], dtype=torch.float16).view(torch.uint8)
        tiny = weight._replace(data=data.view(20, -1))
        near(
            cpu.linear(x[:1].float(), pack(cpu, [tiny], torch.float32)), x[:1] @ tiny.widen(tiny.data).double().T, 1e-5
        )


# Whole models

MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}
"""Beside Q4_K: as in files named Q4_K_M."""
FILES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "Q8_0": ("Q8_0", {}, dict.fromkeys(("qkv", "o", "gate_up", "down"), torch.int8)),
    "Q4_0": ("Q4_0", {}, dict.fromkeys(("qkv", "o", "gate_up", "down"), torch.uint8)),
    "Q4_K_M": ("Q4_K", MIXED, {"qkv": torch.int8, "o": torch.uint8, "gate_up": torch.uint8, "down": torch.int8}),
    "F16": ("Q4_0", {"attn_q": "F16", "ffn_down": "F16"}, {"qkv": None, "o": torch.uint8, "down": None}),
}
"""Type of most tensors, of others, and of the words that they become; None: the model's dtype."""


def model(path: Path, cpu: KernelBackend, dtype: torch.dtype) -> Llama:
    checkpoint = open_checkpoint(Settings(model=str(path)), load_plugins())
    made = Llama(Llama.spec(checkpoint.config), cpu, dtype, torch.device("cpu"))
    made.load(checkpoint.stored(made.formats, dtype))
    return made


def logits(made: Llama, cpu: KernelBackend) -> torch.Tensor:
    """float32 [40, vocab], of a prompt."""
    spec = made.cache_spec(16)
    caches = cpu.allocate(spec.groups[0], getattr(torch, spec.dtype), 16, 3, torch.device("cpu"))
    one = Batch(np.zeros(1, np.int32), np.full(1, 40, np.int32), (np.arange(3, dtype=np.int32)[None],),
                np.ones(1, np.bool_), 16)  # fmt: skip
    meta = cpu.prepare(one, torch.device("cpu"))
    meta.logits_rows = torch.arange(40)
    with torch.inference_mode():
        return made.forward(torch.arange(3, 43), torch.arange(40), caches, meta).float()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("file", FILES)
@dtypes
def test_whole_models(tmp_path: Path, architecture: str, file: str, dtype: torch.dtype) -> None:
    """Beside the same file with widened weights: near, in all that they predict. Rows of q and k that a file has in
    another order than the model are put right on either way."""
    size = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2}
    size |= {"head_dim": 32} if architecture == "LlamaForCausalLM" else {}
    source = tiny_checkpoint(tmp_path, architecture, tie=architecture != "Qwen2ForCausalLM", **size)
    kind, kinds, words = FILES[file]
    path = tiny_gguf(tmp_path, source, kind, kinds=kinds)
    packed, widened = CpuBackend(), CpuBackend(CpuOptions(gguf="widened"))
    ours, theirs = model(path, packed, dtype), model(path, widened, dtype)
    for name, type in words.items():
        assert getattr(ours._decoder.layers[0], name).words.dtype == (type or dtype), name
    assert (ours._embed is ours._head) == (architecture != "Qwen2ForCausalLM")
    found, expected = logits(ours, packed), logits(theirs, widened)
    # These models are loud: bfloat16 moves logits by 0.045 of their size (0.0028 nats), int8 weights by 0.1 (0.015).
    assert float((found - expected).norm() / expected.norm()) < (0.15 if file == "Q4_K_M" else 0.09)
    divergence = (expected.softmax(-1) * (expected.log_softmax(-1) - found.log_softmax(-1))).sum(-1)
    assert float(divergence.mean()) < 0.02
    again = logits(model(path, TorchBackend(), dtype), TorchBackend())
    assert float((again - expected).norm() / expected.norm()) < (1e-4 if dtype == torch.float32 else 0.09)


def test_who_keeps_them(tmp_path: Path) -> None:
    """By default; --quantization int8 and the option do not."""
    path = tiny_gguf(tmp_path, tiny_checkpoint(tmp_path), "Q8_0")
    flags: dict[str, Any] = {"kernel": "cpu", "dtype": "float32", "kv_blocks": 16, "max_model_len": 64}
    params, found = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), {}
    for name, more in {"packed": {}, "widened": {"kernel_opt": {"gguf": "widened"}}, "int8": {"quantization": "int8"},
                       "torch": {"kernel": "torch"}}.items():  # fmt: skip
        with LLM(str(path), **flags | more) as llm:
            weight = llm.engine.executor.model._decoder.layers[0].down
            kept = (
                isinstance(weight, PackedLinear) and weight.scales is not None and weight.scales.dtype == torch.float16
            )
            assert kept == (name == "packed")
            assert any("stay quantised, as the file has them: Q8_0" in note for note in llm.info.notes) == kept
            found[name] = llm.generate([[i, 5, 7] for i in range(3, 13)], params)
    assert [o.token_ids for o in found["widened"]] == [o.token_ids for o in found["torch"]]
