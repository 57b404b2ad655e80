"""Operations and whole steps of the kernel backends, side by side, and how far they are from the machine's limits.

    python benchmarks/kernels.py [--shape smollm2-135m|qwen2.5-0.5b] [--dtype bfloat16] [--threads 2]
        [--kernels torch,cpu] [--batches 1,8,32] [--context 256] [--prompt 1024] [--reps 7] [--isa auto]

The backends take turns within each repetition, with random weights, and the fastest of each is printed: on a shared
machine the others say more of the neighbours. With one thread its CPU time is taken, which they change little. Weights
and caches are more than fit in the CPU's caches, and used in turn.
Limits are measured in the same run: reading memory, and torch's float32 product.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from common import header

from framework.machine import prepare_environment

prepare_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from framework.plugins.kernels.cpu import CpuOptions  # noqa: E402
from framework.plugins.kernels.cpu.backend import CpuBackend  # noqa: E402
from framework.plugins.kernels.torch_backend import TorchBackend  # noqa: E402
from framework.plugins.models.llama import Llama  # noqa: E402

from framework import Batch, KernelBackend  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    },
}  # fmt: skip
CPU = torch.device("cpu")
COLD = 128 << 20
"""Bytes of weights that no cache holds."""


def best(reps: int, works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of the fastest of `reps`, in turn."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(reps):
        for name, work in works.items():
            begin = now()
            work()
            times[name].append(now() - begin)
    return {name: min(some) for name, some in times.items()}


def limits() -> tuple[float, float]:
    """(GB/s read from memory, GFLOP/s of a float32 product)."""
    big, a = torch.ones(COLD), torch.ones(1536, 1536)
    found = best(5, {"read": big.sum, "product": lambda: a @ a})
    return big.nbytes / found["read"] / 1e9, 2 * 1536**3 / found["product"] / 1e9


def batch(starts: list[int], lens: list[int], size: int = 16) -> tuple[Batch, int]:
    """With blocks of its own for every request; the number of blocks."""
    blocks = [-(-(s + n) // size) for s, n in zip(starts, lens, strict=True)]
    order = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32)
    table = np.zeros((len(starts), max(blocks)), np.int32)
    for i, count in enumerate(blocks):
        table[i, :count], order = order[:count], order[count:]
    asks = np.ones(len(starts), np.bool_)
    return Batch(np.array(starts, np.int32), np.array(lens, np.int32), (table,), asks, size), sum(blocks)


class Bench:
    """One model on one backend."""

    def __init__(self, backend: KernelBackend, config: dict[str, Any], dtype: torch.dtype) -> None:
        self.backend, self.dtype = backend, dtype
        self.spec = Llama.spec(config)
        self.model = Llama(self.spec, backend, dtype, CPU)
        self.model.load(self._tensors(config))
        (self.group,) = self.model.cache_spec(16).groups

    def _tensors(self, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        for target in self.model._targets():
            for name, (is_bias, _, rows) in target.parts.items():
                shape = (rows,) if is_bias or len(target.shape) == 1 else (rows, target.shape[1])
                yield name, torch.randn(shape, generator=generator) * 0.02 + (1 if name.endswith("norm.weight") else 0)

    def step(self, starts: list[int], lens: list[int]) -> Callable[[], object]:
        one, blocks = batch(starts, lens)
        caches = self.backend.allocate(self.group, self.dtype, 16, blocks, CPU)
        for cache in caches:
            for pages in cache:
                pages.fill_(0.1)
        tokens = torch.arange(sum(lens)) % 1000
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lens, strict=True)])

        def work() -> torch.Tensor:
            meta = self.backend.prepare(one, CPU)
            return self.model.forward(tokens, positions, caches, meta).argmax(-1)

        return work

    def linear(self, m: int, n: int, k: int) -> tuple[Callable[[], object], int]:
        count = max(1, COLD // (n * k * self.dtype.itemsize)) if m < 256 else 1
        weights = [self.backend.pack("linear", torch.randn(n, k).mul_(0.1).to(self.dtype)) for _ in range(count)]
        x = torch.randn(m, k).to(self.dtype)

        def work() -> None:
            for weight in weights:
                self.backend.linear(x, weight)

        return work, count

    def attention(self, starts: list[int], lens: list[int]) -> tuple[Callable[[], object], int]:
        one, blocks = batch(starts, lens)
        spec, group, itemsize = self.spec, self.group, self.dtype.itemsize
        count = 1 + COLD // (2 * blocks * 16 * group.kv_heads * group.head_dim * itemsize) if max(lens) < 16 else 1
        count = min(count, 60)
        caches = self.backend.allocate(replace(group, layers=count), self.dtype, 16, blocks, CPU)
        for cache in caches:
            for pages in cache:
                pages.normal_()
        q = torch.randn(sum(lens), spec.heads, spec.head_dim).to(self.dtype)
        meta = self.backend.prepare(one, CPU)

        def work() -> None:
            for cache in caches:
                self.backend.attention(q, cache, 0, meta, spec.head_dim**-0.5, None)

        return work, count

    def element_wise(self, m: int) -> dict[str, Callable[[], object]]:
        spec, backend = self.spec, self.backend
        inner = spec.config["intermediate_size"]
        x, wide = torch.randn(m, spec.hidden).to(self.dtype), torch.randn(m, 2 * inner).to(self.dtype)
        residual, weight = torch.zeros_like(x), torch.ones(spec.hidden, dtype=self.dtype)
        one, blocks = batch([100] * m, [1] * m)
        (cache,) = backend.allocate(replace(self.group, layers=1), self.dtype, 16, blocks, CPU)
        meta, rope = backend.prepare(one, CPU), self.model._rope
        widths = [spec.heads * spec.head_dim, *[spec.kv_heads * spec.head_dim] * 2]
        parts = torch.randn(m, sum(widths)).to(self.dtype).split(widths, -1)
        q, k, v = (y.view(m, -1, spec.head_dim) for y in parts)
        positions = torch.full((m,), 100)

        def repeated(work: Callable[[], object]) -> Callable[[], object]:
            return lambda: [work() for _ in range(50)]

        return {
            "add_rmsnorm": repeated(lambda: backend.add_rmsnorm(x, residual, weight, 1e-5)),
            "silu_mul": repeated(lambda: backend.silu_mul(wide)),
            "rope_store": repeated(lambda: backend.rope_store(q, k, v, positions, rope, cache, 0, meta)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="torch,cpu")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--isa", default="auto", help="instruction set of kernel cpu")
    parser.add_argument("--steps-only", action="store_true", help="no single operations")
    options = parser.parse_args()
    header()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    config = SHAPES[options.shape] | {"tie_word_embeddings": True}
    made = {"torch": TorchBackend, "cpu": lambda: CpuBackend(CpuOptions(isa=options.isa))}
    with torch.inference_mode():
        bandwidth, flops = limits()
        print(f"{options.shape}, {options.dtype}, {options.threads} threads; limits measured: {bandwidth:.0f} GB/s, "
              f"{flops:.0f} GFLOP/s in float32")  # fmt: skip
        benches = {name: Bench(made[name](), config, dtype) for name in options.kernels.split(",")}
        run(benches, options, config, bandwidth, flops)


def run(benches: dict[str, Bench], options: Any, config: dict[str, Any], bandwidth: float, flops: float) -> None:
    names = list(benches)
    print(
        f"{'ms':34}" + "".join(f"{name:>10}" for name in names) + f"{'ratio':>8}{'GB/s':>8}{'':>6}{'GFLOP/s':>9}{'':>6}"
    )

    def report(what: str, times: dict[str, float], bytes: float, operations: float, count: int = 1) -> None:
        last = times[names[-1]] / count
        gb, gf = bytes / last / 1e9, operations / last / 1e9
        shares = f"{gb:8.1f}{gb / bandwidth:6.0%}{gf:9.0f}{gf / flops:6.0%}"
        row = "".join(f"{times[name] / count * 1e3:10.3f}" for name in names)
        print(f"{what:34}{row}{times[names[0]] / times[names[-1]]:8.2f}{shares}", flush=True)

    hidden, inner, itemsize = (
        config["hidden_size"],
        config["intermediate_size"],
        next(iter(benches.values())).dtype.itemsize,
    )
    spec = next(iter(benches.values())).spec
    projections = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    sizes = {
        "qkv": (projections, hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    batches = [int(b) for b in options.batches.split(",")]
    context = options.context
    if not options.steps_only:
        for name, (n, k) in sizes.items():
            for m in [*batches, options.prompt]:
                works = {key: bench.linear(m, n, k) for key, bench in benches.items()}
                count = works[names[0]][1]
                times = best(options.reps, {key: work for key, (work, _) in works.items()})
                report(f"{name} {n}x{k}, {m} rows", times, (n * k + m * (n + k)) * itemsize, 2 * m * n * k, count)
        token = 2 * spec.kv_heads * spec.head_dim * itemsize
        for m in batches:
            works = {key: bench.attention([context - 1] * m, [1] * m) for key, bench in benches.items()}
            count = works[names[0]][1]
            times = best(options.reps, {key: work for key, (work, _) in works.items()})
            report(f"attention, {m} decodes of {context}", times, m * context * token,
                   4 * m * context * spec.heads * spec.head_dim, count)  # fmt: skip
        n = options.prompt
        times = best(options.reps, {key: bench.attention([0], [n])[0] for key, bench in benches.items()})
        report(f"attention, prompt of {n}", times, n * token, 2 * n * n * spec.heads * spec.head_dim)
        for m in [*batches, options.prompt]:
            works = {key: bench.element_wise(m) for key, bench in benches.items()}
            for op in works[names[0]]:
                times = best(options.reps, {key: some[op] for key, some in works.items()})
                report(f"{op}, {m} rows", times, 0, 0, 50)
    weights = sum(n * k for n, k in sizes.values()) * spec.layers + hidden * spec.vocab_size
    steps = [(f"decode step, {m} requests", [context - 1] * m, [1] * m) for m in batches]
    steps += [(f"prefill step, {options.prompt} tokens", [0], [options.prompt])]
    for what, starts, lens in steps:
        works = {key: bench.step(starts, lens) for key, bench in benches.items()}
        for work in works.values():
            work()
        times = best(options.reps, works)
        rows, seen = sum(lens), sum(s + n for s, n in zip(starts, lens, strict=True))
        cached = 2 * spec.layers * spec.kv_heads * spec.head_dim * itemsize * seen
        products = 2 * rows * (weights - hidden * spec.vocab_size) + 2 * len(lens) * hidden * spec.vocab_size
        pairs = sum((s + (n + 1) / 2) * n for s, n in zip(starts, lens, strict=True))
        products += 4 * spec.layers * spec.heads * spec.head_dim * pairs
        report(what, times, weights * itemsize + cached, products)


if __name__ == "__main__":
    sys.exit(main())
