"""What the engine process takes: weights and pool once, and little beside them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from checkpoints import tiny_checkpoint
from framework.plugins.kernels.cpu.backend import CpuBackend
from framework.plugins.kernels.torch_backend import TorchBackend
from framework.plugins.models.llama import Llama

from framework import SamplingParams
from framework.checkpoint import open_checkpoint
from framework.messages import Add, Fatal, FromEngine, Outputs, Ready
from framework.process import spawn
from framework.registry import load_plugins
from framework.settings import Settings

BESIDE = 450e6
"""Bytes that the process may take beside weights and pool: torch alone is half of them."""


class Watched:
    """Memory of a process, by what the system says of it. Pages of the checkpoint's file do not count: the system may
    drop them."""

    def __init__(self, pid: int, file: Path) -> None:
        self._proc, self._file, self.peak = Path(f"/proc/{pid}"), str(file), 0

    def look(self) -> None:
        """Now; what was higher in between is missed."""
        self.peak = max(self.peak, self._resident(file=False))

    def begin(self) -> None:
        """Forget the peak that the system remembers."""
        (self._proc / "clear_refs").write_text("5")

    def end(self) -> None:
        """Since `begin`."""
        lines = (self._proc / "status").read_text().splitlines()
        highest = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        self.peak = max(self.peak, highest - self._resident(file=True))

    def _resident(self, file: bool) -> int:
        """Bytes of the checkpoint's file, or of all else."""
        total, counts = 0, False
        for line in (self._proc / "smaps").read_text().splitlines():
            key = line.split()[0]
            if not key.endswith(":"):
                counts = line.endswith(self._file) == file
            elif counts and key == "Rss:":
                total += int(line.split()[1]) * 1024
        return total


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"quantization": "int8"}], ids=["bfloat16", "int8"])
def test_engine_process(tmp_path: Path, more: dict[str, Any]) -> None:
    """While it loads, and while it serves: a large vocabulary, so that one copy of it too many is seen."""
    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 64}
    sizes |= {"num_attention_heads": 12, "num_key_value_heads": 4}
    vocab, prompts, length, answer = 120_000, 32, 64, 16
    tiny_checkpoint(tmp_path, dtype="bfloat16", vocab=vocab, **sizes)
    file = tmp_path / "model.safetensors"
    embedding = 2 * vocab * sizes["hidden_size"]
    # int8: the embedding stays, beside a head and layers of half the size.
    weights = file.stat().st_size if not more else embedding + file.stat().st_size // 2
    settings = Settings(
        model=str(tmp_path), kernel="cpu", dtype="bfloat16", kv_blocks=512, max_model_len=256, threads=2, **more
    )
    engine, context = spawn(settings), zmq.Context()
    watched, decoder = Watched(engine.process.pid, file), msgspec.msgpack.Decoder(FromEngine)
    socket = context.socket(zmq.PAIR)
    deadline, pool, running = time.monotonic() + 120, 0.0, {str(i) for i in range(prompts)}
    try:
        socket.bind(engine.address)
        while running:
            assert time.monotonic() < deadline and engine.process.poll() is None
            if not socket.poll(5):
                if not pool:
                    watched.look()
                continue
            match decoder.decode(socket.recv()):
                case Ready(info):
                    pool = info.kv_blocks * info.block_bytes
                    watched.look()
                    watched.begin()
                    for i in range(prompts):
                        tokens = [(997 * i + 31 * j) % vocab for j in range(length)]
                        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
                        socket.send(msgspec.msgpack.encode(Add(str(i), tokens, params, time.monotonic_ns())))
                case Outputs(outputs):
                    running -= {output.id for output in outputs if output.finish_reason == "length"}
                case Fatal(message):
                    pytest.fail(message)
        watched.end()
    finally:
        engine.end()
        socket.close(0)
        context.term()
    beside = watched.peak - weights - pool
    assert 50e6 < beside < BESIDE, (
        f"{beside / 1e6:.0f} MB beside weights of {weights / 1e6:.0f} and pool of {pool / 1e6:.0f}"
    )


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [48, 52])
def test_tied_weights_are_held_once(tmp_path: Path, dtype: torch.dtype, quantization: str, hidden: int) -> None:
    """On kernel `cpu`; with int8 the embedding stays in the model's type. Rows are the same as those of `torch`."""
    tiny_checkpoint(tmp_path, hidden_size=hidden, vocab=1003)
    checkpoint = open_checkpoint(Settings(model=str(tmp_path)), load_plugins())
    cpu = CpuBackend(quantization=quantization)
    ours, theirs = (Llama(Llama.spec(checkpoint.config), b, dtype, torch.device("cpu")) for b in (cpu, TorchBackend()))
    for model in (ours, theirs):
        model.load(checkpoint.tensors())
    held = {t.data_ptr(): t.nbytes for w in (ours._embed, ours._head) for t in (w if isinstance(w, tuple) else (w,))
            if isinstance(t, torch.Tensor)}  # fmt: skip
    whole, padded = 1003 * hidden * dtype.itemsize, 1008 * hidden
    assert sum(held.values()) == (padded * dtype.itemsize if quantization == "none" else whole + padded + 1008 * 4)
    tokens = torch.tensor([1002, 0, 15, 16, 63, 64, 960, 5, 5])
    assert torch.equal(cpu.embed(tokens, ours._embed), TorchBackend().embed(tokens, theirs._embed))
