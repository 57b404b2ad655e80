"""GGUF files: metadata and tensors in Hugging Face's terms, as they are stored or dequantised by the gguf package."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import gguf
import msgspec
import numpy as np

from framework import Checkpoint, FrameworkError, ModelError, Quantized, Tokenizer
from framework.checkpoint import expect

from .gguf_file import GGUFFile, TensorInfo
from .gguf_tokenizer import build_tokenizer
from .huggingface import check_layers

if TYPE_CHECKING:
    import torch

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPE_FACTORS = "rope_freqs.weight"
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_COUNT = Annotated[int, msgspec.Meta(ge=1)]
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_KINDS: dict[str, Any] = {
    **dict.fromkeys(_PER_LAYER, _COUNT | list[_COUNT] | None),
    **dict.fromkeys(("embedding_length", "block_count", "context_length", "attention.key_length"), _COUNT | None),
    **dict.fromkeys(("rope.dimension_count", "attention.sliding_window", "expert_count"), int | None),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "rope.freq_base"), float | None),
    "rope.scaling.type": str | None,
}
"""What metadata may hold, below the name of the architecture."""
_PLAIN = {getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "BF16")}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class GGUFCheckpoint(Checkpoint):
    """One .gguf file of the llama, qwen2 or qwen3 architecture."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._file = GGUFFile(path)
        meta = self._file.metadata
        expect(meta, {"split.count": int | None}, f"--model {path}: GGUF metadata")
        if (meta.get("split.count") or 1) > 1:
            raise ModelError(
                f"--model {path}: one of {meta['split.count']} parts; join them with `llama-gguf-split --merge`"
            )
        self._arch = str(meta.get("general.architecture"))
        if self._arch not in _ARCHITECTURES:
            raise ModelError(
                f"--model {path}: GGUF architecture {self._arch!r} is not supported; supported: "
                f"{', '.join(_ARCHITECTURES)}"
            )
        kinds = {f"{self._arch}.{key}": kind for key, kind in _KINDS.items()}
        expect(meta, kinds, f"--model {path}: GGUF metadata")
        self._config = self._translate()
        unknown = [name for name in self._file.tensors if name != _ROPE_FACTORS and _hf_name(name) is None]
        if unknown:
            raise ModelError(
                f"--model {path}: {len(unknown)} tensors are not of a plain {self._arch} model: "
                f"{', '.join(unknown[:3])}"
            )
        names = (_hf_name(name) or name for name in self._file.tensors)
        check_layers(self._config, names, f"--model {path}: GGUF metadata")

    @classmethod
    def opens(cls, path: Path) -> bool:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return path.suffix == ".gguf" or file.read(4) == b"GGUF"

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def generation_config(self) -> dict[str, Any]:
        meta, prefix = self._file.metadata, "general.sampling"  # the ids that end an answer are the tokenizer's
        return {name: meta[f"{prefix}.{key}"] for key, name in _SAMPLING.items() if f"{prefix}.{key}" in meta}

    @property
    def num_tensors(self) -> int:
        return len(self._file.tensors) - (_ROPE_FACTORS in self._file.tensors)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.stored(()):
            assert not isinstance(tensor, Quantized)
            yield name, tensor

    def stored(
        self, formats: Collection[str], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor | Quantized]]:
        import torch

        # Copy-on-write, as torch has no read-only tensors; nothing is written, so nothing is copied.
        data = np.memmap(self.path, mode="c")
        heads = {
            "attn_q": self._config["num_attention_heads"],
            "attn_k": self._config["num_key_value_heads"],
        }
        for name, info in sorted(self._file.tensors.items(), key=lambda item: item[0].startswith("blk.")):
            hf_name = _hf_name(name)
            if hf_name is None:
                continue
            part = name.split(".")[2] if name.startswith("blk.") else ""
            turned = heads[part] if self._arch == "llama" and part in heads else None
            if info.kind not in _PLAIN and len(info.shape) == 2 and info.shape[1]:
                rows = torch.from_numpy(_rows(data, info))
                rows = rows if turned is None else _interleaved_to_halves(rows, turned)
                identity = partial(self._identity, hf_name)
                stored = Quantized(info.kind.name, rows, info.shape[1], partial(_widen, info), identity)
                yield hf_name, stored if stored.format in formats else _whole(stored, dtype)
            else:
                tensor = _read(data, info, torch)
                yield hf_name, tensor if turned is None else _interleaved_to_halves(tensor, turned)

    def _identity(self, name: str) -> str:
        return f"{self._file.content_hash()} {name}"

    def tokenizer(self) -> Tokenizer:
        try:
            return build_tokenizer(self._file.metadata)
        except KeyError as exc:
            why = f"the file has no {exc.args[0]}"
            raise ModelError(f"--model {self.path}: {why}, so its tokenizer cannot be built") from exc
        except FrameworkError:
            raise
        except Exception as exc:  # tokenizers raises nothing narrower for a vocabulary that does not fit together
            raise ModelError(f"--model {self.path}: the file's vocabulary is damaged: {exc}") from exc

    def _translate(self) -> dict[str, Any]:
        """The metadata in the keys of a config.json."""
        meta, arch = self._file.metadata, self._arch

        def get(key: str, default: Any = None) -> Any:
            return meta.get(f"{arch}.{key}", default)

        def need(key: str) -> Any:
            value = get(key)
            if value is None:
                raise ModelError(f"--model {self.path}: the GGUF metadata lacks {arch}.{key}")
            if isinstance(value, list):
                if len(set(value)) != 1:
                    raise ModelError(f"--model {self.path}: {arch}.{key} that differs between layers is not supported")
                return value[0]
            return value

        if get("expert_count"):
            raise ModelError(f"--model {self.path}: mixture-of-experts GGUF files are not supported")
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError(f"--model {self.path}: the GGUF file has no matrix token_embd.weight")
        heads, hidden = need("attention.head_count"), need("embedding_length")
        head_dim = get("attention.key_length") or hidden // heads
        if get("rope.dimension_count", head_dim) != head_dim:
            raise ModelError(
                f"--model {self.path}: {arch}.rope.dimension_count {get('rope.dimension_count')} is not the head's "
                f"size {head_dim}; partial rotary embeddings are not supported"
            )
        window = get("attention.sliding_window")
        architecture = "MistralForCausalLM" if window and arch == "llama" else _ARCHITECTURES[arch]
        config: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": architecture.removesuffix("ForCausalLM").lower(),
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": need("feed_forward_length"),
            "num_hidden_layers": need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": need("attention.head_count_kv")
            if get("attention.head_count_kv") is not None
            else heads,
            "head_dim": head_dim,
            "max_position_embeddings": need("context_length"),
            "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
            "hidden_act": "silu",
            "rope_parameters": self._rope(head_dim),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._file.tensors,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "max_window_layers": 0,
            "dtype": {"F32": "float32", "BF16": "bfloat16"}.get(embedding.kind.name, "float16"),
        }
        for role in ("bos", "eos"):
            config[f"{role}_token_id"] = meta.get(f"tokenizer.ggml.{role}_token_id")
        return config

    def _rope(self, head_dim: int) -> dict[str, Any]:
        meta, arch = self._file.metadata, self._arch
        scaling = {k.rpartition(".")[2]: v for k, v in meta.items() if k.startswith(f"{arch}.rope.scaling.")}
        rope: dict[str, Any] = {"rope_theta": meta.get(f"{arch}.rope.freq_base", 10000.0)}
        kind = scaling.get("type", "none")
        if _ROPE_FACTORS in self._file.tensors:
            info = self._file.tensors[_ROPE_FACTORS]
            factors = np.memmap(self.path, np.float32, "r", info.offset, info.shape)
            found = _llama3_parameters(factors.astype(np.float64), rope["rope_theta"], head_dim)
            if found is None or kind != "none":
                raise ModelError(f"--model {self.path}: tensor {_ROPE_FACTORS}: rope scaling of an unsupported form")
            return rope | found
        if kind == "none":
            return rope | {"rope_type": "default"}
        if kind == "linear":
            return rope | {"rope_type": "linear", "factor": scaling.get("factor")}
        if kind == "yarn":
            names = {
                "factor": "factor",
                "original_context_length": "original_max_position_embeddings",
                "attn_factor": "attention_factor",
                "yarn_beta_fast": "beta_fast",
                "yarn_beta_slow": "beta_slow",
            }
            return rope | {"rope_type": "yarn"} | {v: scaling[k] for k, v in names.items() if k in scaling}
        raise ModelError(
            f"--model {self.path}: {arch}.rope.scaling.type {kind!r} is not supported (none, linear, yarn)"
        )


def _hf_name(name: str) -> str | None:
    if name in _GLOBAL:
        return _GLOBAL[name]
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, suffix = rest.rpartition(".")
    if block != "blk" or part not in _LAYER or suffix not in ("weight", "bias"):
        return None
    return f"model.layers.{layer}.{_LAYER[part]}.{suffix}"


def _read(data: np.memmap[Any, Any], info: TensorInfo, torch: Any) -> torch.Tensor:
    """The tensor as torch has it: F32, F16 and BF16 mapped as they are, everything else dequantised to float32."""
    packed = data[info.offset : info.offset + info.nbytes]
    kind = gguf.GGMLQuantizationType
    if info.kind in (kind.F32, kind.F16):
        array = packed.view(np.float32 if info.kind == kind.F32 else np.float16).reshape(info.shape)
        return torch.from_numpy(array)  # type: ignore[no-any-return]
    if info.kind == kind.BF16:
        return torch.from_numpy(packed.view(np.int16).reshape(info.shape)).view(torch.bfloat16)  # type: ignore[no-any-return]
    return torch.from_numpy(_dequantize(_rows(data, info), info))  # type: ignore[no-any-return]


def _rows(data: np.memmap[Any, Any], info: TensorInfo) -> np.ndarray[Any, Any]:
    """uint8 [..., bytes of a row]."""
    if info.shape[-1] % gguf.GGML_QUANT_SIZES[info.kind][0]:
        raise ModelError(f"tensor {info.name}: rows of {info.shape[-1]} values are no whole blocks of {info.kind.name}")
    return data[info.offset : info.offset + info.nbytes].reshape(*info.shape[:-1], -1)


def _dequantize(rows: np.ndarray[Any, Any], info: TensorInfo) -> np.ndarray[Any, Any]:
    try:
        return gguf.dequantize(rows, info.kind)
    except NotImplementedError as exc:
        raise ModelError(f"tensor {info.name}: the gguf package cannot dequantise {info.kind.name}") from exc


def _widen(info: TensorInfo, rows: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.from_numpy(_dequantize(rows.numpy(), info))


def _whole(stored: Quantized, dtype: torch.dtype | None) -> torch.Tensor:
    """All rows in `dtype`, from the second start on those that were kept; None: in float32, made anew."""
    import torch

    from framework import kept  # needs torch

    def fill(tensors: list[torch.Tensor]) -> None:
        for first, rows in stored.widened():
            tensors[0][first : first + len(rows)].copy_(rows)

    if dtype is not None and math.prod(stored.shape) >= kept.LEAST:
        parts = ("widened", stored.identity(), version("gguf"))
        return kept.kept(parts, (Path(__file__),), [(stored.shape, dtype)], fill)[0]
    tensor = torch.empty(stored.shape, dtype=dtype or torch.float32)
    fill([tensor])
    return tensor


def _interleaved_to_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring pairs of rows, Hugging Face a head's first half against its second."""
    rows = tensor.shape[0] // heads
    if rows * heads != tensor.shape[0] or rows % 2:
        return tensor  # not of the shape that the model will ask for
    return tensor.reshape(heads, rows // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _llama3_parameters(factors: np.ndarray[Any, Any], theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 rope scaling that divides the inverse frequencies by `factors`; None if there is none.

    It is keep = (turns over the original context - low) / (high - low), clamped to 0..1, and
    1 / factor = keep + (1 - keep) / largest factor. A line has two numbers and the scaling three; low is 1, as in
    every model of this kind.
    """
    largest = float(factors.max())
    if factors.shape != (head_dim // 2,) or factors.min() < 1 - 1e-6:
        return None
    if largest < 1 + 1e-6:
        return {"rope_type": "default"}
    turns = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)  # per token, falling
    keep = (1 / factors - 1 / largest) / (1 - 1 / largest)
    kept, scaled = keep > 1 - 1e-6, keep < 1e-6
    between = ~(kept | scaled)
    if between.sum() >= 2:
        slope, shift = np.polyfit(turns[between], keep[between], 1)  # keep = slope * turns + shift
    elif not kept.any() or not scaled.any():
        return None
    else:  # the steepest line that the ends demand, through what lies between
        ends = ((turns[kept][-1], 1.0), (turns[scaled][0], 0.0))
        x, y = (turns[between][0], keep[between][0]) if between.any() else ends[0]
        slope = max((y - at) / (x - end) for end, at in ends if end != x)
        shift = y - slope * x
    if shift >= 0:
        return None
    exact = (float(slope / -shift), float(1 - 1 / shift))
    rounded = (round(exact[0]), round(exact[1], 3))  # as models have them
    for context, high in (rounded, exact):
        again = np.clip((context * turns - 1) / (high - 1), 0, 1)
        if np.allclose(1 / (again + (1 - again) / largest), factors, rtol=2e-6):
            return {
                "rope_type": "llama3",
                "factor": round(largest, 4),
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    return None
