"""Operations and whole steps of the kernel backends, side by side, and how far they are from the machine's limits.

    python benchmarks/kernels.py [--shape smollm2-135m|qwen2.5-0.5b] [--dtype bfloat16] [--threads 2]
        [--kernels torch,cpu] [--batches 1,8,32] [--context 256] [--prompt 1024] [--reps 7] [--isa auto]

The backends take turns within each repetition, with random weights, and the fastest of each is printed: on a shared
machine the others say more of the neighbours. With one thread its CPU time is taken, which they change little. Weights
and caches are more than fit in the CPU's caches, and used in turn. Kernel int8 is cpu with weights in 8 bits, kv8 with
keys and values; q8_0, q4_0 and so on have weights as a GGUF file of that type has them. Bytes are counted as those of
--dtype.
Limits are measured in the same run: reading memory, and torch's product of two large matrices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from common import COLD, bandwidth, best, header

from framework.machine import prepare_environment

prepare_environment()

import gguf  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from framework.plugins.kernels.cpu import CpuOptions  # noqa: E402
from framework.plugins.kernels.cpu.backend import CpuBackend  # noqa: E402
from framework.plugins.kernels.torch_backend import TorchBackend  # noqa: E402
from framework.plugins.models.llama import Llama  # noqa: E402
from msgspec import structs  # noqa: E402

from framework import Batch, KernelBackend, ModelSpec, Quantized  # noqa: E402

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
STORED = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}


def limits(dtype: torch.dtype) -> tuple[float, float, torch.dtype]:
    """(GB/s read from memory, GFLOP/s of torch's product, in which type: `dtype` only where the hardware has it)."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtype = torch.float32
    a = torch.ones(1536, 1536, dtype=dtype)
    return bandwidth(), 2 * 1536**3 / best(5, {"product": lambda: a @ a})["product"] / 1e9, dtype


def batch(starts: list[int], lens: list[int], size: int = 16) -> tuple[Batch, int]:
    """With blocks of its own for every request; the number of blocks."""
    blocks = [-(-(s + n) // size) for s, n in zip(starts, lens, strict=True)]
    order = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32)
    table = np.zeros((len(starts), max(blocks)), np.int32)
    for i, count in enumerate(blocks):
        table[i, :count], order = order[:count], order[count:]
    asks = np.ones(len(starts), np.bool_)
    return Batch(np.array(starts, np.int32), np.array(lens, np.int32), (table,), asks, size), sum(blocks)


def quantized(weight: torch.Tensor, name: str) -> Quantized:
    kind = gguf.GGMLQuantizationType[name]
    data = torch.from_numpy(gguf.quantize(weight.numpy(), kind))
    return Quantized(
        name, data, weight.shape[1], lambda rows: torch.from_numpy(gguf.dequantize(rows.numpy(), kind)), lambda: ""
    )


class Bench:
    """One model on one backend. stored: the ggml type of its weights, or none."""

    def __init__(
        self, backend: KernelBackend, config: dict[str, Any], dtype: torch.dtype, kv: torch.dtype, stored: str
    ) -> None:
        self.backend, self.dtype, self.kv, self.stored = backend, dtype, kv, stored
        self.spec = Llama.spec(config)
        self.model = Llama(self.spec, backend, dtype, CPU)
        self.model.load(self._tensors(config))
        (self.group,) = self.model.cache_spec(16).groups

    def _tensors(self, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor | Quantized]]:
        generator = torch.Generator().manual_seed(1)
        for target in self.model._targets():
            for name, (is_bias, _, rows) in target.parts.items():
                shape = (rows,) if is_bias or len(target.shape) == 1 else (rows, target.shape[1])
                weight = torch.randn(shape, generator=generator) * 0.02 + (1 if name.endswith("norm.weight") else 0)
                yield name, quantized(weight, self.stored) if self.stored and weight.dim() == 2 else weight

    def step(self, starts: list[int], lens: list[int]) -> tuple[Callable[[], object], int]:
        one, blocks = batch(starts, lens)
        caches = self.backend.allocate(self.group, self.kv, 16, blocks, CPU)
        for cache in caches:
            for pages in cache:
                pages.fill_(0.1)
        tokens = torch.arange(sum(lens)) % 1000
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lens, strict=True)])

        def work() -> torch.Tensor:
            meta = self.backend.prepare(one, CPU)
            return self.backend.argmax(self.model.forward(tokens, positions, caches, meta).float())

        return work, 1

    def linear(self, m: int, n: int, k: int) -> tuple[Callable[[], object], int]:
        count = max(1, COLD // (n * k * self.dtype.itemsize)) if m < 256 else 1
        weights = [self._pack(torch.randn(n, k).mul_(0.1)) for _ in range(count)]
        x = torch.randn(m, k).to(self.dtype)

        def work() -> None:
            for weight in weights:
                self.backend.linear(x, weight)

        return work, count

    def _pack(self, weight: torch.Tensor) -> Any:
        if self.stored:
            return self.backend.pack_quantized("linear", [quantized(weight, self.stored)], self.dtype)
        return self.backend.pack("linear", weight.to(self.dtype))

    def attention(self, starts: list[int], lens: list[int]) -> tuple[Callable[[], object], int]:
        one, blocks = batch(starts, lens)
        spec, group, itemsize = self.spec, self.group, self.dtype.itemsize
        count = 1 + COLD // (2 * blocks * 16 * group.kv_heads * group.head_dim * itemsize) if max(lens) < 16 else 1
        count = min(count, 60)
        caches = self.backend.allocate(structs.replace(group, layers=count), self.kv, 16, blocks, CPU)
        for cache in caches:
            for pages in cache:
                pages.fill_(0.1)
        q = torch.randn(sum(lens), spec.heads, spec.head_dim).to(self.dtype)
        meta = self.backend.prepare(one, CPU)

        def work() -> None:
            for cache in caches:
                self.backend.attention(q, cache, 0, meta, spec.head_dim**-0.5, None)

        return work, count

    def element_wise(self, op: str, m: int) -> tuple[Callable[[], object], int]:
        spec, backend = self.spec, self.backend
        inner = spec.config["intermediate_size"]
        x, wide = torch.randn(m, spec.hidden).to(self.dtype), torch.randn(m, 2 * inner).to(self.dtype)
        residual, weight = torch.zeros_like(x), torch.ones(spec.hidden, dtype=self.dtype)
        one, blocks = batch([100] * m, [1] * m)
        (cache,) = backend.allocate(structs.replace(self.group, layers=1), self.kv, 16, blocks, CPU)
        meta, rope = backend.prepare(one, CPU), self.model._rope
        widths = [spec.heads * spec.head_dim, *[spec.kv_heads * spec.head_dim] * 2]
        parts = torch.randn(m, sum(widths)).to(self.dtype).split(widths, -1)
        q, k, v = (y.view(m, -1, spec.head_dim) for y in parts)
        positions = torch.full((m,), 100)
        ops: dict[str, Callable[[], object]] = {
            "add_rmsnorm": lambda: backend.add_rmsnorm(x, residual, weight, 1e-5),
            "silu_mul": lambda: backend.silu_mul(wide),
            "rope_store": lambda: backend.rope_store(q, k, v, positions, rope, cache, 0, meta),
        }
        return lambda: [ops[op]() for _ in range(50)], 50


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
    parser.add_argument("--only", default="", help="linear, attention, element or step")
    options = parser.parse_args()
    header()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    config = SHAPES[options.shape] | {"tie_word_embeddings": True}
    isa = CpuOptions(isa=options.isa)
    made: dict[str, Callable[[], KernelBackend]] = {
        "torch": TorchBackend,
        **dict.fromkeys(("cpu", "kv8"), lambda: CpuBackend(isa)),
        "int8": lambda: CpuBackend(isa, "int8"),
        **dict.fromkeys(STORED, lambda: CpuBackend(isa)),
    }
    kv = {"kv8": torch.int8}
    with torch.inference_mode():
        read, flops, kind = limits(dtype)
        print(f"{options.shape}, {options.dtype}, {options.threads} threads; limits measured: {read:.0f} GB/s, "
              f"{flops:.0f} GFLOP/s in {kind}")  # fmt: skip
        benches = {
            name: Bench(made[name](), config, dtype, kv.get(name, dtype), STORED.get(name, ""))
            for name in options.kernels.split(",")
        }
        batches = [int(size) for size in options.batches.split(",")]
        some = cases(Llama.spec(config), dtype.itemsize, batches, options.context, options.prompt)
        some = (case for case in some if options.only in ("", case.kind))
        run(benches, some, options.reps, read, flops)


class Case(NamedTuple):
    """make: what to time, and how often it does the operation. bytes, operations: of one."""

    kind: str
    what: str
    make: Callable[[Bench], tuple[Callable[[], object], int]]
    bytes: float
    operations: float


def cases(spec: ModelSpec, itemsize: int, batches: list[int], context: int, prompt: int) -> Iterator[Case]:
    hidden, inner, attended = spec.hidden, spec.config["intermediate_size"], spec.heads * spec.head_dim
    token = 2 * spec.kv_heads * spec.head_dim * itemsize
    sizes = {
        "qkv": ((spec.heads + 2 * spec.kv_heads) * spec.head_dim, hidden),
        "o": (hidden, attended),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    for name, (n, k) in sizes.items():
        for m in [*batches, prompt]:
            moved = (n * k + m * (n + k)) * itemsize
            yield Case(
                "linear", f"{name} {n}x{k}, {m} rows", partial(Bench.linear, m=m, n=n, k=k), moved, 2 * m * n * k
            )
    steps = [(f"{m} decodes of {context}", [context - 1] * m, [1] * m) for m in batches]
    steps += [(f"prompt of {prompt}", [0], [prompt])]
    layer, head = sum(n * k for n, k in sizes.values()), hidden * spec.vocab_size
    whole = []
    for what, starts, lens in steps:
        seen = sum(starts) + sum(lens)
        products = 4 * attended * sum((s + (n + 1) / 2) * n for s, n in zip(starts, lens, strict=True))
        some = {"starts": starts, "lens": lens}
        yield Case("attention", f"attention, {what}", partial(Bench.attention, **some), seen * token, products)
        products = spec.layers * (products + 2 * sum(lens) * layer) + 2 * len(lens) * head
        moved = (spec.layers * layer + head) * itemsize + spec.layers * seen * token
        whole.append(Case("step", f"step, {what}", partial(Bench.step, **some), moved, products))
    for m in [*batches, prompt]:
        for op, values in (("add_rmsnorm", 4 * hidden), ("silu_mul", 3 * inner), ("rope_store", 3 * attended)):
            yield Case("element", f"{op}, {m} rows", partial(Bench.element_wise, op=op, m=m), m * values * itemsize, 0)
    yield from whole


def run(benches: dict[str, Bench], some: Iterable[Case], reps: int, read: float, flops: float) -> None:
    """The last backend's GB/s and GFLOP/s, and their share of the limits, are shown."""
    first, last = next(iter(benches)), list(benches)[-1]
    print(f"{'ms':30}{''.join(f'{name:>10}' for name in benches)}{'ratio':>8}{'GB/s':>8}{'GFLOP/s':>15}")
    for case in some:
        works = {name: case.make(bench) for name, bench in benches.items()}
        count = works[last][1]
        for work, _ in works.values():
            work()
        times = {name: t / count for name, t in best(reps, {name: work for name, (work, _) in works.items()}).items()}
        gb, gf = case.bytes / times[last] / 1e9, case.operations / times[last] / 1e9
        row = "".join(f"{times[name] * 1e3:10.3f}" for name in benches)
        print(f"{case.what:30}{row}{times[first] / times[last]:8.2f}{gb:8.1f}{gb / read:6.0%}{gf:9.0f}"
              f"{gf / flops:6.0%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
