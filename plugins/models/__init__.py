"""Models and the file formats of their checkpoints."""

from __future__ import annotations

from typing import Any

from framework import Provider, hookimpl


def _huggingface() -> Any:
    from .huggingface import HuggingFaceCheckpoint

    return HuggingFaceCheckpoint


def _gguf() -> Any:
    from .gguf import GGUFCheckpoint

    return GGUFCheckpoint


def _llama() -> Any:
    from .llama import Llama

    return Llama


@hookimpl
def providers() -> list[Provider]:
    return [
        Provider("checkpoint", "huggingface", _huggingface, summary="directory with config.json and safetensors"),
        Provider(
            "checkpoint",
            "gguf",
            _gguf,
            summary="a .gguf file, quantised weights as they are where the kernel takes them",
        ),
        Provider("model", "llama", _llama, summary="Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3"),
    ]
