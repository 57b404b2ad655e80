"""The Llama family: pre-norm decoders with grouped-query attention, rotary positions and a gated MLP.

This module imports no torch at the top: the server process reads specs too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from framework import (
    CacheGroup,
    CacheSpec,
    Decoder,
    DecoderLayer,
    KernelBackend,
    Meta,
    Model,
    ModelError,
    ModelSpec,
    Quantized,
    Rope,
)
from framework.checkpoint import expect

from . import rope

if TYPE_CHECKING:
    import torch

    Weight = torch.Tensor | tuple[Quantized, ...]

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
"""Served architectures, and what a key that their config omits means. An explicit null is not an omission."""
_SIZE = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
KINDS: dict[str, Any] = {
    **dict.fromkeys(_SIZES, _SIZE),
    "num_hidden_layers": Annotated[int, msgspec.Meta(ge=1, le=10_000)],  # some memory each, before a tensor is read
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), _SIZE | None),
    "rms_norm_eps": Annotated[float, msgspec.Meta(gt=0, le=1)],
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), bool | None),
    **dict.fromkeys(("dtype", "torch_dtype"), str | None),
    "max_window_layers": int | None,
    "layer_types": list[str] | None,
}
"""What the keys of a config may hold; those of rotary embeddings are in rope.py."""
ROPE_POSITIONS = 2**17
"""So many have their rotations computed at the start, more once a request gets there: some configs claim contexts
whose table is larger than the KV pool, which nobody will fill."""
HARMLESS = ("rotary_emb.inv_freq",)
"""Endings of tensor names that old checkpoints carry and nobody needs."""


@dataclass(eq=False, slots=True)
class Target:
    """One packed weight while its tensors arrive. `parts`: tensor name -> (is a bias, first row, rows). `stored`: by
    first row, those held as the checkpoint has them, in case all are."""

    shape: tuple[int, ...]
    done: Callable[[Weight, torch.Tensor | None], None]
    parts: dict[str, tuple[bool, int, int]] = field(default_factory=dict)
    stored: dict[int, Quantized] = field(default_factory=dict)
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class Llama(Model):
    """Llama, SmolLM2, Mistral, Qwen2 and Qwen3."""

    architectures = tuple(DEFAULTS)

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        expect(config, {"architectures": list[str] | None}, "config.json")
        named = config.get("architectures") or []
        architecture = next((name for name in named if name in DEFAULTS), None)
        if architecture is None:
            raise ModelError(
                f"config.json: architectures {named} is not supported; supported: {', '.join(cls.architectures)}"
            )
        config = {"rms_norm_eps": 1e-6} | DEFAULTS[architecture] | config
        expect(config, KINDS, "config.json")
        if config.get("quantization_config"):
            raise ModelError("config.json: quantization_config is not supported; use an unquantized checkpoint or GGUF")
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"config.json: hidden_act {config['hidden_act']!r} is not supported (only 'silu')")
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        if heads % kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim {head_dim} must be even")
        return ModelSpec(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            max_model_len=rope.max_length(config),
            layers=layers,
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
            windows=_windows(architecture, config, layers),
            config=config,
        )

    def __init__(self, spec: ModelSpec, backend: KernelBackend, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._backend, self._dtype, self._device = spec, backend, dtype, device
        self.formats = backend.formats
        eps, scale = float(spec.config["rms_norm_eps"]), spec.head_dim**-0.5
        layers = [DecoderLayer(window) for window in spec.windows]
        self._decoder = Decoder(layers, spec.heads, spec.kv_heads, spec.head_dim, eps, scale)
        self._rope = self._positions(min(spec.max_model_len, ROPE_POSITIONS))
        self._embed: Any = None
        self._norm: Any = None
        self._head: Any = None

    def load(
        self, tensors: Iterable[tuple[str, torch.Tensor | Quantized]], progress: Callable[[], None] = lambda: None
    ) -> None:
        waiting = {name: target for target in self._targets() for name in target.parts}
        missing = set(waiting)
        tied = self._spec.config.get("tie_word_embeddings", False)
        for name, tensor in tensors:
            progress()
            if not name.endswith(HARMLESS) and not (tied and name == "lm_head.weight"):
                if name not in missing:
                    raise ModelError(
                        f"tensor {name} occurs twice in the checkpoint"
                        if name in waiting
                        else f"unknown tensor {name} in a {self._spec.architecture} checkpoint"
                    )
                missing.remove(name)
                self._fill(waiting[name], name, tensor)
            del tensor  # before the next is read
        if missing:
            some = sorted(missing)[:3]
            raise ModelError(
                f"the checkpoint lacks {len(missing)} of {len(waiting)} tensors: {', '.join(some)}"
                + (", ..." if len(missing) > len(some) else "")
            )

    def _fill(self, target: Target, name: str, tensor: torch.Tensor | Quantized) -> None:
        """Copy a tensor into its place (it may be memory-mapped, and is not held); pack what is complete."""
        is_bias, first, rows = target.parts.pop(name)
        shape = target.shape[:1] if is_bias else target.shape
        expected = (rows, *shape[1:])
        floating = isinstance(tensor, Quantized) or tensor.is_floating_point()
        if tuple(tensor.shape) != expected or not floating:
            found = tensor.format if isinstance(tensor, Quantized) else tensor.dtype
            raise ModelError(f"tensor {name} is {found} {list(tensor.shape)}, expected floating point {list(expected)}")
        if isinstance(tensor, Quantized):
            target.stored[first] = tensor
        elif is_bias:
            target.bias = self._copy(target.bias, shape, first, tensor)
        else:
            target.weight = self._copy(target.weight, shape, first, tensor)
        if target.parts:
            return
        stored = dict(sorted(target.stored.items()))
        if target.weight is None:
            target.done(tuple(stored.values()), target.bias)
        else:  # some of its parts are not quantised
            for first, part in stored.items():
                for row, some in part.widened():
                    self._copy(target.weight, shape, first + row, some)
            target.done(target.weight, target.bias)
        target.weight = target.bias = None
        target.stored.clear()

    def _copy(self, whole: torch.Tensor | None, shape: tuple[int, ...], first: int, part: torch.Tensor) -> torch.Tensor:
        import torch

        if whole is None and self._device.type == "cpu":
            from framework.pages import zeros  # needs torch

            # Not from malloc's heap: what a backend has packed and let go is to go back to the system.
            whole = zeros(shape, self._dtype)
        elif whole is None:
            whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        whole[first : first + part.shape[0]].copy_(part)
        return whole

    def _pack(self, op: str, weight: Weight, bias: torch.Tensor | None) -> Any:
        if isinstance(weight, tuple):
            return self._backend.pack_quantized(op, weight, self._dtype, bias)
        return self._backend.pack(op, weight, bias)

    def _targets(self) -> list[Target]:
        """What `load` has to fill. Everything that depends on the architecture is here and in `spec`."""
        spec, config = self._spec, self._spec.config
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        hidden, inner = spec.hidden, config["intermediate_size"]
        attention_bias = spec.architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(
            config.get("attention_bias")
        )
        qkv_bias = attention_bias or spec.architecture == "Qwen2ForCausalLM"
        mlp_bias = spec.architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias"))
        targets: list[Target] = []

        def norm(owner: object, attribute: str, name: str, size: int) -> None:
            def done(weight: Weight, bias: torch.Tensor | None) -> None:
                setattr(owner, attribute, weight)

            targets.append(Target((size,), done, {f"{name}.weight": (False, 0, size)}))

        def projection(
            owner: object, attribute: str, op: str, columns: int, parts: dict[str, int], bias: bool = False
        ) -> None:
            def done(weight: Weight, bias: torch.Tensor | None) -> None:
                setattr(owner, attribute, self._pack(op, weight, bias))

            target = Target((sum(parts.values()), columns), done)
            first = 0
            for name, rows in parts.items():
                target.parts[f"{name}.weight"] = (False, first, rows)
                if bias:
                    target.parts[f"{name}.bias"] = (True, first, rows)
                first += rows
            targets.append(target)

        embed = {"model.embed_tokens": spec.vocab_size}
        if config.get("tie_word_embeddings", False):

            def both(weight: Weight, bias: torch.Tensor | None) -> None:
                if isinstance(weight, tuple):
                    self._embed = self._head = self._pack("logits", weight, bias)
                else:
                    self._embed, self._head = self._backend.pack_tied(weight)

            name = "model.embed_tokens.weight"
            targets.append(Target((spec.vocab_size, hidden), both, {name: (False, 0, spec.vocab_size)}))
        else:
            projection(self, "_embed", "embed", hidden, embed)
            projection(self, "_head", "logits", hidden, {"lm_head": spec.vocab_size})
        norm(self, "_norm", "model.norm", hidden)
        for i, layer in enumerate(self._decoder.layers):
            attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            norm(layer, "input_norm", f"model.layers.{i}.input_layernorm", hidden)
            norm(layer, "post_norm", f"model.layers.{i}.post_attention_layernorm", hidden)
            if spec.architecture == "Qwen3ForCausalLM":
                norm(layer, "q_norm", f"{attention}.q_norm", spec.head_dim)
                norm(layer, "k_norm", f"{attention}.k_norm", spec.head_dim)
            qkv = {f"{attention}.q_proj": q, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv}
            projection(layer, "qkv", "qkv", hidden, qkv, qkv_bias)
            projection(layer, "o", "linear", q, {f"{attention}.o_proj": hidden}, attention_bias)
            gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
            projection(layer, "gate_up", "gate_up", hidden, gate_up, mlp_bias)
            projection(layer, "down", "linear", inner, {f"{mlp}.down_proj": hidden}, mlp_bias)
        return targets

    def _positions(self, count: int) -> Rope:
        spec = self._spec
        return rope.table(spec.config, spec.head_dim, count, self._device)

    def cache_spec(self, block_size: int) -> CacheSpec:
        spec = self._spec
        # One block table for all layers; the pool may forget what lies behind a window only if all layers have it.
        window = spec.windows[0] if len(set(spec.windows)) == 1 else None
        group = CacheGroup(spec.layers, spec.kv_heads, spec.head_dim, window)
        return CacheSpec(block_size, str(self._dtype).removeprefix("torch."), (group,))

    def states(self, tokens: torch.Tensor, positions: torch.Tensor, caches: list[Any], meta: Meta) -> torch.Tensor:
        ops = self._backend
        if meta.max_seq > (known := self._rope.cos.shape[0]):
            self._rope = self._positions(min(self._spec.max_model_len, max(meta.max_seq, 2 * known)))
        x, residual = ops.decoder(ops.embed(tokens, self._embed), self._decoder, caches, positions, self._rope, 0, meta)
        if len(meta.logits_rows) < len(x):
            x = x.index_select(0, meta.logits_rows)
            residual = None if residual is None else residual.index_select(0, meta.logits_rows)
        x, _ = ops.add_rmsnorm(x, residual, self._norm, self._decoder.eps)
        return x

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._backend.logits(states, self._head)


def _windows(architecture: str, config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * layers
    window = config.get("sliding_window")
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    if not config.get("use_sliding_window"):
        return (None,) * layers
    window = config.get("sliding_window", 4096)
    types = config.get("layer_types")
    if types is None:
        first = 28 if config.get("max_window_layers") is None else config["max_window_layers"]
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != layers:
        raise ModelError(
            f"config.json: layer_types must name sliding_attention or full_attention for each of {layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
