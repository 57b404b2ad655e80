"""Checkpoints shared by the whole session."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # it counts when triton is first imported, by whoever does
# Clients that ask the network when they are imported or used: none of them has to. They read these when imported.
os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_UPDATE_DOWNLOAD_COUNTS="0",
    LANGSMITH_TRACING="false",
    DO_NOT_TRACK="1",
)

from checkpoints import tiny_checkpoint, tiny_gguf


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied float32 LlamaForCausalLM with a byte-level tokenizer and a ChatML template."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_llama_spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied float32 LlamaForCausalLM with a sentencepiece-like tokenizer that adds BOS."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny-llama-spm"
    return tiny_checkpoint(path, tokenizer="sentencepiece", tie=False)


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied float32 Qwen2ForCausalLM (biases) in two shards."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny-qwen2"
    return tiny_checkpoint(path, "Qwen2ForCausalLM", tie=False, shards=2)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied float32 Qwen3ForCausalLM (normed queries and keys, head_dim apart from hidden / heads)."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-qwen3", "Qwen3ForCausalLM")


@pytest.fixture(scope="session")
def tiny_llama_gguf(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` as an F32 GGUF file."""
    return tiny_gguf(tmp_path_factory.mktemp("checkpoints"), tiny_llama)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo weights: SmolLM2-135M-Instruct, Q4_1."""
    from framework.checkpoint import demo_weights

    return demo_weights()


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """For tests that set up the logs of their own process."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    logging.captureWarnings(False)
    root.setLevel(level)
    root.handlers[:] = handlers


class _Outside(OSError):
    """A connection to another machine, refused."""


_tried: list[str] | None = None


def _watch(event: str, args: tuple[Any, ...]) -> None:
    """Refuses whatever leaves this machine, while `_tried` keeps the attempts: what a client swallows is seen too."""
    if _tried is None or event not in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        return
    address = args[0] if event.startswith("socket.get") else args[1]
    host = address[0] if isinstance(address, tuple) else address  # a path: of a socket on this machine
    name = host.decode() if isinstance(host, bytes) else host
    local = name in (None, "", "localhost", "::1") or name.startswith(("127.", "/"))
    if not local:
        _tried.append(f"{event} {name}")
        raise _Outside(f"{event} {name}: these tests have no network")


@pytest.fixture(scope="session")
def _watched() -> None:
    sys.addaudithook(_watch)  # for good: what it costs others is one comparison


@pytest.fixture
def offline(_watched: None) -> Iterator[None]:
    """A test whose client may speak to this machine only. It fails if the client even tries anything else."""
    global _tried
    _tried = tried = []
    yield
    _tried = None
    assert not tried
