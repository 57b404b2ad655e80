"""How much worse a text is predicted in fewer bits: perplexity and the likeliest token, teacher-forced.

    python benchmarks/quality.py [--model PATH] [--text tests/alice.txt] [--tokens 4096] [--window 512] [--threads 2]
        [--check]

Each variant computes the same windows of the text, in chunks that read what earlier ones left in the cache. *top-1*:
how often its likeliest token, the greedy choice, is that of bfloat16 on the same kernel, and that of float32. *KL*: the
mean divergence of its distribution from float32's, in nats. *logits*: root mean square and largest of the differences
from float32's, over all tokens and the whole vocabulary. Weights of a GGUF file are widened but for "packed weights".
The default text is the first chapter of Alice's Adventures in Wonderland by Lewis Carroll (1865), in the public domain.
With --check the exit code is 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import finish, header

from framework.machine import prepare_environment

prepare_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from framework import Batch  # noqa: E402
from framework.checkpoint import open_checkpoint  # noqa: E402
from framework.registry import load_plugins  # noqa: E402
from framework.settings import Settings  # noqa: E402
from framework.worker import TorchExecutor  # noqa: E402

EXACT, FLOAT, BASE = "torch float32", "cpu float32", "cpu bfloat16"
CPU: dict[str, Any] = {"kernel": "cpu", "dtype": "bfloat16", "kernel_opt": {"gguf": "widened"}}
VARIANTS: dict[str, dict[str, Any]] = {
    EXACT: {"kernel": "torch", "dtype": "float32"},
    FLOAT: CPU | {"dtype": "float32"},
    "torch bfloat16": {"kernel": "torch", "dtype": "bfloat16"},
    BASE: CPU,
    "packed weights": {"kernel": "cpu", "dtype": "bfloat16"},
    "int8 weights": CPU | {"quantization": "int8"},
    "int8 cache": CPU | {"kv_dtype": "int8"},
    "int8 weights and cache": CPU | {"quantization": "int8", "kv_dtype": "int8"},
}
"""The first is what the others are compared with."""
CHUNK, BLOCK = 128, 16


class Quality(NamedTuple):
    """losses, divergence, squares, largest: float64 [tokens]; best: int64 [tokens]. squares, largest: of differences
    between logits, mean and maximum over the vocabulary."""

    losses: torch.Tensor
    divergence: torch.Tensor
    squares: torch.Tensor
    largest: torch.Tensor
    best: torch.Tensor

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))


def measure(settings: Settings, text: Path, window: int, most: int, exact: list[torch.Tensor]) -> Quality:
    """Of a model under these settings. exact: float32 logits [tokens, vocab] of each chunk to compare with; an empty
    list is filled."""
    plugins = load_plugins()
    plugins.activate(settings, engine=True)
    executor = TorchExecutor(settings, plugins, open_checkpoint(settings, plugins))
    executor.start()
    assert executor.model is not None
    tokens = executor.checkpoint.tokenizer().encode(text.read_text("utf-8"))[:most]
    first, rows = not exact, []
    for number, (given, following, start) in enumerate(chunks(tokens, window)):
        count = len(given)
        table = np.arange(-(-(start + count) // BLOCK), dtype=np.int32)[None]
        starts, lens = np.array([start], np.int32), np.array([count], np.int32)
        batch = Batch(starts, lens, (table,), np.ones(1, np.bool_), BLOCK)
        meta = executor.backend.prepare(batch, executor.device.torch)
        meta.logits_rows = torch.arange(count)
        logits = executor.model.forward(given, torch.arange(start, start + count), executor._caches, meta)
        logits = logits.float()
        if first:
            exact.append(logits)
        found, true = logits.log_softmax(-1), exact[number].log_softmax(-1)
        loss, divergence = -found.gather(1, following[:, None])[:, 0], (true.exp() * (true - found)).sum(-1)
        off = (logits - exact[number]).abs()
        figures = (loss, divergence, off.square().mean(-1), off.amax(-1))
        rows.append((*(x.double() for x in figures), logits.argmax(-1)))
    executor.stop()
    return Quality(*map(torch.cat, zip(*rows, strict=True)))


def chunks(tokens: list[int], window: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """(tokens, those that follow each, tokens before them in their window)."""
    text = torch.tensor(tokens)
    for begin in range(0, len(text) - 1, window):
        part = text[begin : begin + window + 1]
        for start in range(0, len(part) - 1, CHUNK):
            given = part[start : start + CHUNK + 1]
            yield given[: min(CHUNK, len(given) - 1)], given[1:], start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the installed demo weights")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "tests" / "alice.txt")
    parser.add_argument("--tokens", type=int, default=4096, help="at most so many of the text")
    parser.add_argument("--window", type=int, default=512, help="tokens before the context begins anew")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    header()
    common = {"model": options.model, "threads": options.threads, "kv_blocks": options.window // BLOCK + 1}
    exact: list[torch.Tensor] = []
    with torch.inference_mode():
        found = {
            name: measure(Settings.load(**common, **flags), options.text, options.window, options.tokens, exact)
            for name, flags in VARIANTS.items()
        }
    base = found[BASE]
    print(f"{options.text.name}: {len(base.losses)} tokens predicted, in windows of {options.window}")
    print(f"{'':24}{'perplexity':>11}{'over bf16':>11}{'top-1':>8}{'':8}{'KL':>10}{'logits':>10}")
    print(f"{'':46}{'of bf16':>8}{'of fp32':>8}{'':10}{'rms':>10}{'most':>9}")
    worse, agree, greedy, far, rms, most = {}, {}, {}, {}, {}, {}
    for name, quality in found.items():
        worse[name] = quality.perplexity / base.perplexity - 1
        agree[name] = float((quality.best == base.best).double().mean())
        far[name] = float(quality.divergence.mean())
        greedy[name] = float((quality.best == found[EXACT].best).double().mean())
        rms[name], most[name] = float(quality.squares.mean()) ** 0.5, float(quality.largest.max())
        print(
            f"{name:24}{quality.perplexity:11.3f}{worse[name]:+11.2%}{agree[name]:8.1%}{greedy[name]:8.1%}"
            f"{far[name]:10.5f}{rms[name]:10.5f}{most[name]:9.4f}"
        )
    finish(
        options.check,
        [
            ("int8 weights: perplexity under 3% over bfloat16", worse["int8 weights"] < 0.03),
            ("int8 cache: perplexity under 1% over bfloat16", worse["int8 cache"] < 0.01),
            ("packed weights: perplexity under 2% over bfloat16", worse["packed weights"] < 0.02),
            ("packed weights: nearer float32 than int8 weights", far["packed weights"] < far["int8 weights"]),
            ("packed weights: top-1 at least 93%", agree["packed weights"] >= 0.93),
            *((f"{name}: top-1 at least 90%", share >= 0.9) for name, share in agree.items() if "int8" in name),
            (
                "float32: top-1 of torch at least 99.9%, logits within 0.001",
                greedy[FLOAT] >= 0.999 and most[FLOAT] < 1e-3,
            ),
            ("bfloat16: logits within 2 of float32, root mean square 0.15", most[BASE] < 2 and rms[BASE] < 0.15),
            (
                "bfloat16: top-1 of float32 and of torch at least 95%",
                min(greedy[BASE], agree["torch bfloat16"]) >= 0.95,
            ),
            ("bfloat16: as near float32 as torch", far[BASE] <= far["torch bfloat16"]),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
