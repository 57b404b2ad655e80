"""The llama family against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from framework.plugins.kernels.torch_backend import TorchBackend
from framework.plugins.models import llama as llama_module
from framework.plugins.models.llama import Llama

from framework import Batch, ModelError, ReferenceBackend, Rope

CPU = torch.device("cpu")
VOCAB = 150
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_TUNED = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head_dim": ("Llama", {"head_dim": 24}),
    "llama multi-head": ("Llama", {"num_key_value_heads": None}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama eps": ("Llama", {"rms_norm_eps": 0.1}),
    "llama theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "llama dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "llama llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama yarn tuned": (
        "Llama",
        {"rope_parameters": YARN | YARN_TUNED},
    ),
    "llama yarn amplitude": ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 9, "head_dim": 24}),
    "mistral tied": ("Mistral", {"tie_word_embeddings": True, "sliding_window": 200}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("Qwen2", QWEN_WINDOW),
    "qwen2 yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3 tied": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3 biases": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "qwen3 window": (
        "Qwen3",
        {
            "head_dim": 24,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}  # fmt: skip


def oracle(family: str, **overrides: Any) -> tuple[dict[str, Any], Any]:
    """(config.json, transformers model): every weight random, norms and biases included."""
    config = getattr(transformers, f"{family}Config")(**{**BASE, **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = name.endswith("norm.weight")
            parameter.copy_(1 + 0.3 * noise if norm else noise * (0.5 if "embed" in name else 0.2))
    data = json.loads(config.to_json_string(use_diff=False))
    return data | {"architectures": [f"{family}ForCausalLM"]}, model


def loaded(
    config: dict[str, Any],
    model: Any,
    backend: ReferenceBackend | None = None,
    dtype: torch.dtype = torch.float32,
) -> Llama:
    llama = Llama(Llama.spec(config), backend or TorchBackend(), dtype, CPU)
    llama.load(model.state_dict().items())
    return llama


class Runner:
    """Runs a model over a paged cache; `step` takes (request, new tokens) pairs."""

    def __init__(self, model: Llama, backend: ReferenceBackend, requests: int, size: int = 4) -> None:
        self.model, self.backend, self.size = model, backend, size
        spec = model.cache_spec(size)
        columns = 80 // size
        dtype = getattr(torch, spec.dtype)
        self.caches = backend.allocate(spec.groups[0], dtype, size, requests * columns, CPU)
        self.tables = np.random.default_rng(0).permutation(requests * columns).reshape(requests, columns)
        self.done = np.zeros(requests, np.int64)

    @torch.inference_mode()
    def step(self, parts: list[tuple[int, torch.Tensor]], samples: list[bool] | None = None) -> torch.Tensor:
        who, lens = [i for i, _ in parts], [len(tokens) for _, tokens in parts]
        starts = self.done[who]
        batch = Batch(
            starts.astype(np.int32),
            np.array(lens, np.int32),
            (self.tables[who].astype(np.int32),),
            np.array(samples or [True] * len(parts)),
            self.size,
        )
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts.tolist(), lens, strict=True)])
        self.done[who] += lens
        meta = self.backend.prepare(batch, CPU)
        return self.model.forward(torch.cat([tokens for _, tokens in parts]), positions, self.caches, meta)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.log_softmax(-1), expected.detach().log_softmax(-1), rtol=0, atol=1e-4)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    family, overrides = CASES[case]
    config, model = oracle(family, **overrides)
    prompt = tokens(70)
    expected = model(prompt[None]).logits[0]
    assert expected.std() > 0.5  # a model whose logits hardly vary would prove nothing
    for backend in (ReferenceBackend(), TorchBackend()):
        llama = loaded(config, model, backend)
        for chunk in (70, 7, 1) if isinstance(backend, TorchBackend) else (70, 16):
            runner = Runner(llama, backend, 1)
            ends = [*range(chunk, 70, chunk), 70]
            for start, end in zip([0, *ends], ends, strict=False):
                close(runner.step([(0, prompt[start:end])])[0], expected[end - 1])


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_a_ragged_batch_equals_each_request_alone(family: str) -> None:
    config, model = oracle(family, **(QWEN_WINDOW if family == "Qwen2" else {}))
    backend = TorchBackend()
    prompts = [tokens(n, seed) for seed, n in enumerate((60, 33, 47, 21, 55))]
    expected = [model(prompt[None]).logits[0] for prompt in prompts]
    runner = Runner(loaded(config, model, backend), backend, len(prompts))
    rng = np.random.default_rng(1)
    while True:
        left = [i for i, prompt in enumerate(prompts) if runner.done[i] < len(prompt)]
        if not left:
            break
        parts = []
        for i in rng.permutation(left)[: rng.integers(1, len(left) + 1)].tolist():
            start = int(runner.done[i])
            parts.append((i, prompts[i][start : start + int(rng.choice([1, 1, 5, 20]))]))
        sampled = (rng.random(len(parts)) < 0.7).tolist()
        logits = runner.step(parts, sampled)
        rows = [i for (i, _), chosen in zip(parts, sampled, strict=True) if chosen]
        assert logits.shape == (len(rows), VOCAB)
        for i, row in zip(rows, logits, strict=True):
            close(row, expected[i][int(runner.done[i]) - 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_float32(dtype: torch.dtype) -> None:
    config, model = oracle("Llama")
    expected = model(tokens(40)[None]).logits[0, -1].detach()
    for backend in (ReferenceBackend(), TorchBackend()):
        runner = Runner(loaded(config, model, backend, dtype), backend, 1)
        (logits,) = runner.step([(0, tokens(40))])
        assert logits.dtype == dtype
        assert torch.nn.functional.cosine_similarity(logits.float(), expected, 0) > 0.999


# Reading configs


def minimal(**overrides: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **BASE, **overrides}


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, {"type": "linear", "factor": 3.0}])
def test_old_spelling_of_rope(scaling: dict[str, Any] | None) -> None:
    old = None if scaling is None else {k: v for k, v in scaling.items() if k != "rope_theta"}
    config, model = oracle("Llama", rope_theta=3000.0, rope_scaling=old)
    config = {k: v for k, v in config.items() if k != "rope_parameters"}
    config |= {"rope_theta": 3000.0, "rope_scaling": old}
    backend = TorchBackend()
    close(
        Runner(loaded(config, model, backend), backend, 1).step([(0, tokens(70))])[0],
        model(tokens(70)[None]).logits[0, -1],
    )


def test_defaults_of_omitted_keys_are_those_of_transformers() -> None:
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        theirs = getattr(transformers, f"{family}Config")(**{k: BASE[k] for k in ("vocab_size",)})
        given = {
            k: getattr(theirs, k)
            for k in (
                "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            )
        }  # fmt: skip
        spec = Llama.spec({"architectures": [f"{family}ForCausalLM"], **given})
        assert spec.kv_heads == theirs.num_key_value_heads
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert spec.head_dim == head_dim
        assert spec.max_model_len == theirs.max_position_embeddings
        window = theirs.sliding_window if family == "Mistral" else None
        assert spec.windows == (window,) * theirs.num_hidden_layers


def test_spec_fields() -> None:
    config = minimal(torch_dtype="bfloat16", head_dim=20)
    spec = Llama.spec(config)
    assert (spec.architecture, spec.vocab_size, spec.dtype) == ("LlamaForCausalLM", VOCAB, "bfloat16")
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (3, 64, 4, 2, 20)
    assert Llama.spec(minimal(dtype="torch.float16")).dtype == "float16"
    linear = minimal(rope_scaling={"type": "linear", "factor": 2.0})
    assert Llama.spec(linear).max_model_len == 512
    assert Llama.spec(minimal(rope_parameters=LLAMA3)).max_model_len == 256
    assert Llama.spec(minimal(max_position_embeddings=32, rope_parameters=YARN)).max_model_len == 128
    qwen = minimal(architectures=["Qwen2ForCausalLM"], **QWEN_WINDOW)
    assert Llama.spec(qwen).windows == (None, 9, 9)


def test_cache_spec() -> None:
    def group(config: dict[str, Any]) -> Any:
        model = Llama(Llama.spec(config), TorchBackend(), torch.bfloat16, CPU)
        spec = model.cache_spec(16)
        assert (spec.block_size, spec.dtype) == (16, "bfloat16")
        (only,) = spec.groups
        return only

    plain = group(minimal())
    assert (plain.layers, plain.kv_heads, plain.head_dim, plain.window) == (3, 2, 16, None)
    assert group(minimal(architectures=["MistralForCausalLM"], sliding_window=9)).window == 9
    # Layers that see everything keep everything.
    assert group(minimal(architectures=["Qwen2ForCausalLM"], **QWEN_WINDOW)).window is None


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architectures", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config"]),
        ({"hidden_size": None}, ["hidden_size", "None"]),
        ({"num_hidden_layers": "3"}, ["num_hidden_layers", "'3'"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": 15}, ["head_dim 15", "even"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, ["rope_scaling", "longrope", "llama3"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "None"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, ["rope_scaling.factor", "'4'"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings", "None"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, ["sliding_window", "-1"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures: expected", "'LlamaForCausalLM'"]),
        ({"architectures": [5]}, ["architectures: expected"]),
        ({"rms_norm_eps": "x"}, ["rms_norm_eps: expected `float`", "'x'"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps: expected `float`", "None"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps: expected `float` > 0", "nan"]),
        ({"max_position_embeddings": 10**12}, ["max_position_embeddings: expected `int` <= 2147483647"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers: expected `int` <= 10000"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers: expected `int`", "True"]),
        ({"tie_word_embeddings": "x"}, ["tie_word_embeddings: expected `bool", "'x'"]),
        ({"attention_bias": 1}, ["attention_bias: expected `bool"]),
        ({"dtype": 5}, ["dtype: expected `str"]),
        ({"rope_theta": "x"}, ["rope_theta: expected `float"]),
        ({"rope_parameters": 5}, ["rope_parameters: expected"]),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, ["rope_parameters.rope_type: expected"]),
        ({"rope_parameters": {"rope_theta": [1]}}, ["rope_parameters.rope_theta: expected"]),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, ["rope_parameters.high_freq_factor", "above"]),
        ({"rope_parameters": YARN | {"mscale": "x"}}, ["rope_parameters.mscale: expected"]),
        ({"rope_parameters": YARN | {"factor": float("inf")}}, ["rope_parameters.factor: expected"]),
        ({"partial_rotary_factor": "x"}, ["partial_rotary_factor: expected"]),
        ({"original_max_position_embeddings": "x"}, ["original_max_position_embeddings: expected"]),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": "x"},
            ["max_window_layers: expected", "'x'"],
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": [["x"]] * 3},
            ["layer_types: expected"],
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2}}, ["rope_parameters.low_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["linear"] * 3},
            ["layer_types", "sliding_attention"],
        ),
    ],
)
def test_unsupported_config_is_named(overrides: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        Llama.spec(minimal(**overrides))
    assert all(name in str(error.value) for name in names), str(error.value)


def test_reading_a_spec_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from framework.plugins.models.llama import Llama\n"
        f"Llama.spec({minimal(rope_parameters=YARN)!r})\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_positions_beyond_the_first_table_are_computed_when_a_request_gets_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, model = oracle("Llama")
    expected = model(tokens(80)[None]).logits[0, -1]
    monkeypatch.setattr(llama_module, "ROPE_POSITIONS", 8)
    made: list[int] = []
    table = llama_module.rope.table

    def counted(config: dict[str, Any], head_dim: int, positions: int, device: torch.device) -> Rope:
        made.append(positions)
        return table(config, head_dim, positions, device)

    monkeypatch.setattr(llama_module.rope, "table", counted)
    for backend in (ReferenceBackend(), TorchBackend()):
        made.clear()
        runner = Runner(loaded(config, model, backend), backend, 1)
        for start in range(0, 80, 10):
            (logits,) = runner.step([(0, tokens(80)[start : start + 10])])
        close(logits, expected)
        assert made == [8, 16, 32, 64, 128]


def test_a_context_longer_than_any_memory_costs_nothing() -> None:
    config, model = oracle("Llama")
    config["max_position_embeddings"] = 2**31 - 1
    runner = Runner(loaded(config, model), TorchBackend(), 1)
    close(runner.step([(0, tokens(20))])[0], model(tokens(20)[None]).logits[0, -1])


# Loading


def test_loading_holds_no_tensor_and_reports_progress() -> None:
    config, model = oracle("Qwen2", tie_word_embeddings=True)
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    expected = model(tokens(20)[None]).logits[0, -1]
    last: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(state):
            assert not last or last.pop()() is None, f"still holds what came before {name}"
            copy = state[name].clone()
            last.append(weakref.ref(copy))
            yield name, copy
            del copy

    ticks: list[None] = []
    backend = TorchBackend()
    llama = Llama(Llama.spec(config), backend, torch.float32, CPU)
    llama.load(stream(), lambda: ticks.append(None))
    assert len(ticks) == len(state)
    close(Runner(llama, backend, 1).step([(0, tokens(20))])[0], expected)


def test_loading_copies_memory_mapped_tensors() -> None:
    """What the checkpoint hands out may be unmapped afterwards: here it is overwritten."""
    config, model = oracle("Qwen3", head_dim=24)
    expected = model(tokens(20)[None]).logits[0, -1].detach()
    for backend in (ReferenceBackend(), TorchBackend()):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        llama = Llama(Llama.spec(config), backend, torch.float32, CPU)
        llama.load(state.items())
        for tensor in state.values():
            tensor.fill_(float("nan"))
        close(Runner(llama, backend, 1).step([(0, tokens(20))])[0], expected)


def test_harmless_tensors_are_ignored() -> None:
    config, model = oracle("Llama")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    llama = Llama(Llama.spec(config), TorchBackend(), torch.float32, CPU)
    llama.load((model.state_dict() | extra).items())


def _without(state: dict[str, torch.Tensor], *names: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in state.items() if name not in names]


NORM, K = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda s: _without(s, K), [K, "lacks 1 of 30"]),
        (lambda s: _without(s, *[k for k in s if "layers.2" in k]), ["lacks 9 of 30", "model.layers.2.", "..."]),
        (lambda s: [*s.items(), ("model.extra.weight", torch.ones(1))], ["unknown", "model.extra.weight"]),
        (lambda s: [*s.items(), (K, s[K])], [K, "twice"]),
        (lambda s: [*_without(s, K), (K, s[K][1:])], [K, "[31, 64]", "[32, 64]"]),
        (lambda s: [*_without(s, K), (K, s[K].T)], [K, "[64, 32]"]),
        (lambda s: [*_without(s, NORM), (NORM, s[NORM][:1])], [NORM, "[1]", "[64]"]),
        (lambda s: [*_without(s, NORM), (NORM, s[NORM].to(torch.int8))], [NORM, "int8"]),
    ],
)
def test_a_wrong_checkpoint_is_named(change: Any, names: list[str]) -> None:
    config, model = oracle("Llama")
    llama = Llama(Llama.spec(config), TorchBackend(), torch.float32, CPU)
    with pytest.raises(ModelError) as error:
        llama.load(change(model.state_dict()))
    assert all(name in str(error.value) for name in names), str(error.value)
