"""framework: a plugin-based LLM serving engine.

Public names are imported on first use, so that `framework --version` and policy tests never pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "llm",
    "RequestOutput": "llm",
    "hookimpl": "hookspecs",
    **dict.fromkeys(
        (
            "Budget",
            "Mode",
            "Provider",
            "Reject",
            "Request",
            "SamplingParams",
            "Shortage",
            "Status",
            "StructuredOutputs",
            "Victim",
            "View",
            "Want",
        ),
        "types",
    ),
    **dict.fromkeys(("Copy", "Delta", "Logprobs", "Plan", "RequestData", "Slice", "StepResult", "Timings"), "plan"),
    **dict.fromkeys(
        ("CacheGroup", "CacheSpec", "Capacity", "KVCache", "Reservation", "Usage"),
        "kv",
    ),
    **dict.fromkeys(
        ("Batch", "Decoder", "DecoderLayer", "GraphLimits", "KernelBackend", "Meta", "Quantized", "Rope", "Support"),
        "kernels",
    ),
    **dict.fromkeys(("Checkpoint", "Model", "ModelSpec"), "model"),
    **dict.fromkeys(("Clock", "Executor", "MonotonicClock", "Pending"), "executor"),
    **dict.fromkeys(("SampleBatch", "Sampled"), "sampling"),
    **dict.fromkeys(("Delivery", "ResponseRecord"), "records"),
    "ReferenceBackend": "ops",
    "send": "device",
    "Tokenizer": "tokenizer",
    **dict.fromkeys(("Parsing", "ToolDelta", "ToolParser"), "tool_parser"),
    **dict.fromkeys(
        ("ConfigError", "EngineDead", "FrameworkError", "InvalidRequest", "ModelError", "PluginError", "Rejected"),
        "errors",
    ),
}
# Spelt out, not computed: type checkers read it, and it is what `framework` exports to them.
__all__ = [
    "LLM",
    "Batch",
    "Budget",
    "CacheGroup",
    "CacheSpec",
    "Capacity",
    "Checkpoint",
    "Clock",
    "ConfigError",
    "Copy",
    "Decoder",
    "DecoderLayer",
    "Delivery",
    "Delta",
    "EngineDead",
    "Executor",
    "FrameworkError",
    "GraphLimits",
    "InvalidRequest",
    "KVCache",
    "KernelBackend",
    "Logprobs",
    "Meta",
    "Mode",
    "Model",
    "ModelError",
    "ModelSpec",
    "MonotonicClock",
    "Parsing",
    "Pending",
    "Plan",
    "PluginError",
    "Provider",
    "Quantized",
    "ReferenceBackend",
    "Reject",
    "Rejected",
    "Request",
    "RequestData",
    "RequestOutput",
    "Reservation",
    "ResponseRecord",
    "Rope",
    "SampleBatch",
    "Sampled",
    "SamplingParams",
    "Shortage",
    "Slice",
    "Status",
    "StepResult",
    "StructuredOutputs",
    "Support",
    "Timings",
    "Tokenizer",
    "ToolDelta",
    "ToolParser",
    "Usage",
    "Victim",
    "View",
    "Want",
    "__version__",
    "hookimpl",
    "send",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from .device import send
    from .errors import (
        ConfigError,
        EngineDead,
        FrameworkError,
        InvalidRequest,
        ModelError,
        PluginError,
        Rejected,
    )
    from .executor import Clock, Executor, MonotonicClock, Pending
    from .hookspecs import hookimpl
    from .kernels import Batch, Decoder, DecoderLayer, GraphLimits, KernelBackend, Meta, Quantized, Rope, Support
    from .kv import CacheGroup, CacheSpec, Capacity, KVCache, Reservation, Usage
    from .llm import LLM, RequestOutput
    from .model import Checkpoint, Model, ModelSpec
    from .ops import ReferenceBackend
    from .plan import Copy, Delta, Logprobs, Plan, RequestData, Slice, StepResult, Timings
    from .records import Delivery, ResponseRecord
    from .sampling import SampleBatch, Sampled
    from .tokenizer import Tokenizer
    from .tool_parser import Parsing, ToolDelta, ToolParser
    from .types import (
        Budget,
        Mode,
        Provider,
        Reject,
        Request,
        SamplingParams,
        Shortage,
        Status,
        StructuredOutputs,
        Victim,
        View,
        Want,
    )
