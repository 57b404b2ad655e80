"""Rotary position embedding: which scalings are served, and their tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from framework import ModelError, Rope
from framework.checkpoint import expect

if TYPE_CHECKING:
    import torch

REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),  # equals default up to max_position_embeddings, which is as far as we serve it
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
"""Served types and the keys that they need."""
_NUMBER = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_IN_CONFIG: dict[str, Any] = {
    "rope_theta": Annotated[float, msgspec.Meta(gt=1, le=1e15)] | None,
    "original_max_position_embeddings": Annotated[float, msgspec.Meta(gt=0, le=2**31 - 1)] | None,
    "partial_rotary_factor": float | None,
}
KINDS: dict[str, Any] = {
    **_IN_CONFIG,
    **dict.fromkeys(("rope_type", "type"), str | None),
    **dict.fromkeys(_NUMBERS, _NUMBER | None),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None),
    "truncate": bool | None,
}
"""What the rope settings may hold."""


def parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rope settings of a config in either spelling, checked: always has rope_type, rope_theta and, for a scaled
    type, original_max_position_embeddings and factor. Raises `ModelError` naming the key that cannot be served.
    """
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    expect(config, _IN_CONFIG | {key: dict[str, Any] | None}, "config.json")
    rope = dict(config.get(key) or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(f"config.json: {key} that differs between layers is not supported")
    _expect(rope, KINDS, key)
    kind = rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in REQUIRED:
        raise ModelError(f"config.json: {key}.rope_type {kind!r} is not supported; supported: {', '.join(REQUIRED)}")
    _expect(rope, dict.fromkeys(REQUIRED[kind], _NUMBER), key)
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise ModelError(f"config.json: {key}.high_freq_factor must be above low_freq_factor")
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor {partial} is not supported (only 1.0)")
    rope["rope_theta"] = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    limit = config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or limit
    rope["original_max_position_embeddings"] = original
    rope["factor"] = rope.get("factor") or limit / original
    return rope


def _expect(rope: dict[str, Any], kinds: dict[str, Any], key: str) -> None:
    expect(
        {f"{key}.{name}": value for name, value in rope.items()},
        {f"{key}.{name}": kind for name, kind in kinds.items()},
        "config.json",
    )


def max_length(config: dict[str, Any]) -> int:
    """Longest context that the scaled embedding is meant for, in tokens."""
    rope, limit = parameters(config), int(config["max_position_embeddings"])
    if rope["rope_type"] == "linear":
        return int(limit * rope["factor"])
    if rope["rope_type"] == "yarn":
        return max(limit, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return limit


def table(config: dict[str, Any], head_dim: int, positions: int, device: torch.device) -> Rope:
    """cos and sin for the first `positions` positions, computed in float32."""
    import torch

    rope = parameters(config)
    base, factor, original = rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"]
    frequency = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    amplitude = 1.0
    match rope["rope_type"]:
        case "linear":
            frequency /= factor
        case "llama3":
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            turns = original * frequency / (2 * math.pi)  # over the original context
            keep = ((turns - low) / (high - low)).clamp(0, 1)
            frequency = frequency * keep + frequency / factor * (1 - keep)
        case "yarn":

            def dimension(turns: float) -> float:
                """The one whose frequency makes so many turns over the original context."""
                return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

            low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
            if rope.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
            keep = 1 - ramp.clamp(0, 1)
            frequency = frequency * keep + frequency / factor * (1 - keep)
            amplitude = _yarn_amplitude(rope)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    return Rope(angles.cos().mul_(amplitude).to(device), angles.sin_().mul_(amplitude).to(device))


def _yarn_amplitude(rope: dict[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(numerator) / scale(denominator) if numerator and denominator else scale(1.0)
