"""gpu_check.py, section `kernels`: the Triton kernels against float64. They are loaded without the rest of the package,
so that this needs numpy, torch and triton only; and compiled beforehand by as many processes as there are CPUs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from gpu_common import Report, Run, relative
from gpu_package import ROOT

NEAR = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2}
FP8 = {"float8_e5m2": (8, 0), "float8_e4m3fn": (8, 9)}
"""And the CUDA capability from which on they are converted."""
LLAMA = (32, 8, 128)
"""Heads of Llama-3.1-8B: of queries, of keys and values, numbers in each."""


@functools.cache
def kernels() -> SimpleNamespace:
    """The modules of plugins/kernels/triton but its backend, outside of the package."""
    folder = ROOT / "plugins/kernels/triton"
    spec = importlib.util.spec_from_file_location("gpu_triton", folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["gpu_triton"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    names = ("launch", "tiles", "attention", "elementwise")
    return SimpleNamespace(**{name: importlib.import_module(f"gpu_triton.{name}") for name in names})


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


class Variant(NamedTuple):
    """All that decides what is compiled for attention. part: a `launch.Part`, without its number of tiles."""

    ones: bool
    mixed: bool
    splits: int
    tile: tuple[int, int, int, int]
    heads: tuple[int, int, int]
    block: int
    dtype: str
    kind: str
    windowed: bool = False
    cap: float = 0.0


class Paged:
    """A ragged batch over a paged cache on the device. spans: (tokens in the cache, new ones) of each request.

    Blocks lie in random order. `copies`: so many caches with tables of their own, for timings that no cache of the
    device may help. poisoned: slots that no request owns hold NaN, and tables name such a block where nothing is read.
    """

    def __init__(
        self, run: Run, spans: Sequence[tuple[int, int]], heads: tuple[int, int, int], dtype: str, *, block: int = 16,
        kind: str = "", window: int | None = None, cap: float = 0.0, columns: int = 0, copies: int = 1,
        poisoned: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self.spans, self.heads, self.dtype, self.kind = list(spans), heads, dtype, kind or dtype
        self.block, self.window, self.cap, self.scale = block, window, cap, heads[2] ** -0.5
        random, device = torch.Generator().manual_seed(seed), run.device
        needed = [-(-(start + n) // block) for start, n in spans]
        self.columns, total = max(columns, *needed), sum(needed)
        blocks = copies * total + 1
        order = torch.randperm(blocks - 1, generator=random).to(torch.int32)
        self.tables = []
        for copy in range(copies):
            table = torch.full((len(spans), self.columns), blocks - 1, dtype=torch.int32)
            at = copy * total
            for i, count in enumerate(needed):
                table[i, :count] = order[at : at + count]
                at += count
            if poisoned and window is not None:
                for i, (start, _) in enumerate(spans):
                    table[i, : max(0, start + 1 - window) // block] = blocks - 1
            self.tables.append(table.to(device))
        shape = (blocks, heads[1], block, heads[2])
        kept = dtype_of(self.kind)
        self.keys, self.values = (_normal(shape, kept, device, seed + side) for side in (1, 2))
        if poisoned:
            self._poison(needed)
        lens = torch.tensor([n for _, n in spans])
        ends = torch.cumsum(lens, 0)
        self.cu_lens = torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(torch.int32).to(device)
        self.seq_lens = torch.tensor([start + n for start, n in spans], dtype=torch.int32).to(device)
        self.kinds = bool((lens == 1).any()), bool((lens != 1).any())
        tokens = int(ends[-1])
        x = torch.randn(tokens, heads[0] + 3, heads[2], generator=random).to(dtype_of(dtype)).to(device)
        self.q = x[:, 2 : 2 + heads[0]]  # as a part of a wider product

    def _poison(self, needed: Sequence[int]) -> None:
        own = torch.zeros(self.keys.shape[0], dtype=torch.bool, device=self.keys.device)
        own[self.tables[0][self.tables[0] < self.keys.shape[0] - 1].long()] = True
        for pages in (self.keys, self.values):
            pages.view(torch.uint8).view(pages.shape[0], -1)[~own] = 0xFF  # NaN in every type there is
            for i, (start, n) in enumerate(self.spans):
                if rest := (start + n) % self.block:
                    pages[int(self.tables[0][i, needed[i] - 1])].view(torch.uint8)[:, rest:] = 0xFF

    def plan(self, device: Any) -> list[Any]:
        """What the backend would launch; device: a `launch.Device`."""
        return plan_of(device, self.spans, self.heads, self.dtype, self.columns * self.block)

    def attention(self, parts: list[Any], copy: int = 0) -> torch.Tensor:
        found: torch.Tensor = kernels().launch.attention(
            parts, self.q, self.keys, self.values, self.tables[copy], self.cu_lens, self.seq_lens, self.scale,
            self.window, self.cap,
        )  # fmt: skip
        return found

    def expected(self, request: int, least: int = 0) -> torch.Tensor:
        """Float64 [new tokens from the `least`-th on, heads * head_dim] of one request."""
        start, n = self.spans[request]
        first, length = int(self.cu_lens[request]), start + n
        low = 0 if self.window is None else max(0, start + least + 1 - self.window) // self.block * self.block
        blocks = self.tables[0][request, low // self.block : -(-length // self.block)].long()
        group = self.heads[0] // self.heads[1]
        rows = self.q[first + least : first + n].double().transpose(0, 1)
        sides = []
        for pages in (self.keys, self.values):
            some = pages[blocks].to(torch.float32).double().transpose(0, 1).flatten(1, 2)[:, : length - low]
            sides.append(some.repeat_interleave(group, 0))
        scores = rows @ sides[0].mT * self.scale
        if self.cap:
            scores = self.cap * (scores / self.cap).tanh()
        device = scores.device
        distance = torch.arange(start + least, length, device=device)[:, None] - torch.arange(
            low, length, device=device
        )
        unseen = (distance < 0) | (distance >= (self.window or length))
        return (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ sides[1]).transpose(0, 1).flatten(1)

    def error(self, found: torch.Tensor, requests: Sequence[int], rows: int = 1 << 30) -> float:
        """Of these requests, of the last `rows` tokens of each."""
        worst = 0.0
        for request in requests:
            n = self.spans[request][1]
            least, first = max(0, n - rows), int(self.cu_lens[request])
            worst = max(worst, relative(found[first + least : first + n], self.expected(request, least)))
        return worst


def _normal(shape: tuple[int, ...], kind: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    random = torch.Generator(device).manual_seed(seed)
    if kind.itemsize == 1:
        return torch.randn(shape, device=device, generator=random).to(kind)
    return torch.empty(shape, dtype=kind, device=device).normal_(generator=random)


def plan_of(
    device: Any, spans: Sequence[tuple[int, int]], heads: tuple[int, int, int], dtype: str, room: int
) -> list[Any]:
    lens = [n for _, n in spans]
    kinds = any(n == 1 for n in lens), any(n != 1 for n in lens)
    found: list[Any] = kernels().launch.plan(
        device, sum(lens), len(lens), room, kinds, heads, dtype_of(dtype).itemsize
    )  # fmt: skip
    return found


class Scene(NamedTuple):
    dtype: str
    heads: tuple[int, int, int]
    spans: tuple[tuple[int, int], ...]
    block: int = 16
    window: int | None = None
    cap: float = 0.0
    kind: str = ""

    def __str__(self) -> str:
        lens = {n == 1 for _, n in self.spans}
        what = "mixed" if len(lens) == 2 else "decode" if lens == {True} else "prefill"
        name = f"{what} {self.heads[0]}/{self.heads[1]} D{self.heads[2]} {self.dtype} block {self.block}"
        more = [f"window {self.window}"] * bool(self.window) + [f"cap {self.cap:g}"] * bool(self.cap) + [self.kind]
        return " ".join([name, *filter(None, more)])


def scenes(run: Run, capability: tuple[int, int]) -> Iterator[Scene]:
    """Every dtype with every head size, every kind of batch with windows, soft caps and block sizes, 8-bit caches."""
    ones = run.pick(((1100, 1), (0, 1), (63, 1), (5000, 1), (300, 1)), ((40, 1), (0, 1)))
    more = run.pick(((0, 300), (77, 129), (2000, 64)), ((5, 20), (0, 3)))
    both = (*more[:2], *ones, *more[2:])
    blocks, options = (16, 64, 256), [(None, 0.0), (33, 0.0), (None, 3.0), (700, 5.0)]
    for i, dtype in enumerate(NEAR):
        for j, head_dim in enumerate((64, 80, 96, 128, 256)):
            if not run.interpret or (i + j) % 5 == 0:
                window, cap = options[(i + j) % 4]
                yield Scene(dtype, (8, 2, head_dim), both, blocks[(i + j) % 3], window, cap)
    if run.interpret:
        yield Scene("bfloat16", (4, 2, 64), ones, 16, 7, kind="float8_e5m2")
        return
    for i, spans in enumerate((ones, more)):
        for j, (window, cap) in enumerate(options):
            heads = (LLAMA, (14, 2, 64), (9, 3, 64), (16, 1, 128))[(i + j) % 4]
            yield Scene("bfloat16", heads, spans, blocks[j % 3], window, cap)
    for kind, least in FP8.items():
        if capability >= least:
            yield Scene("bfloat16", LLAMA, both, 16, kind=kind)
            yield Scene("float16", (8, 2, 64), both, 64, 33, kind=kind)


def variants(scene: Scene, device: Any) -> Iterator[Variant]:
    room = -(-max(start + n for start, n in scene.spans) // scene.block) * scene.block
    for part in plan_of(device, scene.spans, scene.heads, scene.dtype, room):
        yield Variant(
            part.ones, part.mixed, part.splits, tuple(part.tile), scene.heads, scene.block, scene.dtype,
            scene.kind or scene.dtype, scene.window is not None, scene.cap,
        )  # fmt: skip


# Compiling beforehand


class _Target:
    """In the place of a driver: what is compiled for. Nothing is launched."""

    def __init__(self, target: Any) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device=None: 0


@functools.cache
def _only_compile(capability: int) -> None:
    """In this process, kernels are compiled for such a device where they would be launched."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    os.nice(5)
    torch.set_num_threads(1)
    driver.set_active(_Target(GPUTarget("cuda", capability, 32)))
    JITFunction.__getitem__ = lambda self, grid: functools.partial(JITFunction.run, self, grid=grid, warmup=True)


def compile_variant(variant: Variant, capability: int) -> float:
    """Seconds that it took. What it makes lies in Triton's cache, where the launch finds it."""
    _only_compile(capability)
    begin, launch = time.monotonic(), kernels().launch
    heads, dtype = variant.heads, dtype_of(variant.dtype)
    part = launch.Part(variant.ones, variant.mixed, 1, variant.splits, kernels().tiles.Tile(*variant.tile))
    q = torch.zeros(2, heads[0], heads[2], dtype=dtype)
    pages = torch.zeros(2, heads[1], variant.block, heads[2], dtype=dtype_of(variant.kind))
    table, ends = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    window = 7 if variant.windowed else None
    launch.attention([part], q, pages, pages, table, ends, ends[:1], heads[2] ** -0.5, window, variant.cap)
    return time.monotonic() - begin


class Compiler:
    """Processes that compile variants in the order given; what fails there is compiled, or fails, where it is used."""

    def __init__(self, some: Sequence[Variant], capability: tuple[int, int]) -> None:
        self._pool = multiprocessing.get_context("spawn").Pool(max(1, min(16, (os.cpu_count() or 1) - 1)))
        target = 10 * capability[0] + capability[1]
        self._found = [self._pool.apply_async(compile_variant, (one, target)) for one in dict.fromkeys(some)]

    def wait(self, seconds: float, first: int | None = None) -> str:
        """For the `first` of them, or all; says how far it got."""
        begin, spent, failed = time.monotonic(), 0.0, list[Exception]()
        for found in self._found[:first]:
            found.wait(max(0.0, begin + seconds - time.monotonic()))
            if found.ready():
                try:
                    spent += found.get()
                except Exception as error:  # noqa: BLE001 - a tile that does not fit, say: whoever launches it will see
                    failed.append(error)
        done, count = sum(found.ready() for found in self._found[:first]), len(self._found[:first])
        text = f"{done} of {count} compiled, {spent:.0f} s of CPU, waited {time.monotonic() - begin:.0f} s"
        return text + (f"; {len(failed)} failed, such as {str(failed[0]).strip().splitlines()[-1:]}" if failed else "")

    def close(self) -> None:
        self._pool.terminate()


# The section


def check_kernels(run: Run) -> None:
    report, launch = run.report, kernels().launch
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is allocated and not filled holds NaN
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operations that are not deterministic, which is not what it is for
            device = launch.device_of(run.device)
            for scene in scenes(run, device.capability):
                with report.part(str(scene)):
                    _attention(run, scene, device)
            for dtype in run.pick(list(NEAR), ["float32", "bfloat16"]):
                with report.part(f"rmsnorm and silu x mul, {dtype}"):
                    _rows(run, dtype)
                with report.part(f"rope and store, {dtype}"):
                    _store(run, dtype, "")
            for kind, least in run.pick(FP8, {"float8_e5m2": (8, 0)}).items():
                if device.capability >= least:
                    with report.part(f"rope and store, {kind}"):
                        _store(run, "bfloat16", kind)
            if run.cuda:
                with report.part("replays of a graph"):
                    _replays(run, device)
    finally:
        torch.use_deterministic_algorithms(False)
    report.raise_wrong()


def _attention(run: Run, scene: Scene, device: Any) -> None:
    dtype, heads, spans, block, window, cap, kind = scene
    paged = Paged(run, spans, heads, dtype, block=block, kind=kind, window=window, cap=cap, poisoned=True)
    found = paged.attention(paged.plan(device))
    _within(run.report, str(scene), paged.error(found, range(len(spans))), NEAR[dtype])


def _within(report: Report, what: str, error: float, bound: float) -> None:
    report.check(what, error <= bound, f"error {error:.1e}, at most {bound:.0e}", error=error, bound=bound)


def _rows(run: Run, dtype: str) -> None:
    launch, kind, random = kernels().launch, dtype_of(dtype), torch.Generator(run.device).manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=run.device, generator=random).to(kind)

    for rows, size in run.pick([(1, 4096), (33, 576), (300, 5000)], [(3, 100)]):
        x, other, weight = normal(rows, size + 8)[:, 8:], normal(rows, size), normal(size)
        for residual in (None, other.clone()):
            normed, total = launch.add_rmsnorm(x, residual, weight, 1e-5)
            summed = x.double() if residual is None else x.double() + other.double()
            y = total.double()
            expected = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
            error = max(relative(total, summed), relative(normed, expected))
            _within(
                run.report,
                f"rmsnorm{'' if residual is None else ' of a sum'} {rows}x{size} {dtype}",
                error,
                NEAR[dtype],
            )
        wide = normal(rows, 2 * size + 8)[:, 8:] * 4
        gate, up = wide.double().chunk(2, -1)
        error = relative(launch.silu_mul(wide), gate / (1 + (-gate).exp()) * up)
        _within(run.report, f"silu x mul {rows}x{size} {dtype}", error, NEAR[dtype])


def _store(run: Run, dtype: str, kind: str) -> None:
    """Partly rotated heads, too; nothing but the tokens' slots is written; 8-bit floats saturate."""
    launch, kept = kernels().launch, dtype_of(kind or dtype)
    for head_dim, share in run.pick([(64, 1.0), (80, 1.0), (96, 0.5), (128, 1.0), (256, 0.25)], [(64, 0.5)]):
        tokens, heads, kv_heads, block = run.pick(70, 5), 9, 3, 16
        random = torch.Generator().manual_seed(head_dim)
        x = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=random) * (100 if kind else 1)
        x[0] *= 9
        x = x.to(dtype_of(dtype)).to(run.device)
        q, k, v = (part.double() for part in torch.split(x.clone(), [heads, kv_heads, kv_heads], 1))
        half = int(head_dim * share) // 2
        angle = torch.arange(64, dtype=torch.float64)[:, None] * 0.7 ** torch.arange(half, dtype=torch.float64)
        angle = angle.to(run.device)
        positions = torch.randint(64, (tokens,), generator=random).to(run.device)
        slots = torch.randperm(5 * block, generator=random)[:tokens].to(run.device)
        turn = angle[positions, None]

        def rotated(y: torch.Tensor, half: int = half, turn: torch.Tensor = turn) -> torch.Tensor:
            a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
            return torch.cat((a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin(), rest), -1)

        pages = [torch.full((5, kv_heads, block, head_dim), 7.0, device=run.device).to(kept) for _ in range(2)]
        parts = torch.split(x, [heads, kv_heads, kv_heads], 1)
        turned = launch.rope_store(*parts, positions, angle.cos().float(), angle.sin().float(), slots, *pages)
        error, step, most = relative(turned, rotated(q)), 0.0, torch.finfo(kept).max
        for side, given in zip(pages, (rotated(k), v), strict=True):
            held = side.float().transpose(1, 2).flatten(0, 1)
            rest = torch.ones(len(held), dtype=torch.bool, device=run.device)
            rest[slots] = False
            clean = bool((held[rest] == 7).all())
            if kind:  # half a step of its numbers, at most
                far = (held[slots].double() - given.clamp(-most, most)).abs() - 1e-2
                step = max(step, float((far / given.abs().clamp(max=most)).nan_to_num(nan=9.0).max()) if clean else 9.0)
            else:
                error = max(error, relative(held[slots], given)) if clean else torch.inf
        name = f"rope and store D{head_dim} of which {2 * half} turn, {dtype} {kind}".strip()
        if kind:
            _within(run.report, f"{name}, pages", step, {"float8_e5m2": 2**-3, "float8_e4m3fn": 2**-4}[kind])
        _within(run.report, name, error, NEAR[dtype])


def _replays(run: Run, device: Any) -> None:
    """A captured launch sees other lengths and tables at the same addresses, and gives what an eager one does."""
    paged = Paged(run, [(900, 1), (3, 1), (250, 1), (77, 1)], LLAMA, "bfloat16", columns=128)
    parts = paged.plan(device)
    eager: Callable[[], torch.Tensor] = functools.partial(paged.attention, parts)
    eager()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = eager()
    for starts in ([900, 3, 250, 77], [901, 4, 251, 78], [15, 1003, 16, 0]):
        needed = [start // paged.block + 1 for start in starts]
        order = torch.randperm(paged.keys.shape[0] - 1).to(torch.int32)
        for row, count in zip(paged.tables[0], needed, strict=True):
            row[:count], order = order[:count].to(run.device), order.roll(-count)
        paged.spans = [(start, 1) for start in starts]
        paged.seq_lens.copy_(torch.tensor([start + 1 for start in starts]))
        graph.replay()
        right = torch.equal(captured, eager())
        error = paged.error(captured, range(4))
        run.report.check(
            f"replay of a graph at contexts {starts}", right and error <= 1e-2,
            f"{'equal to' if right else 'other than'} eager, error {error:.1e}", error=error,
        )  # fmt: skip
