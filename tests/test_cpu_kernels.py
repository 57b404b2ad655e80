"""`--kernel cpu`: the conformance kit on each instruction set that this CPU has, and what it asks of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import pytest
import torch
from framework.plugins.kernels.cpu import CpuOptions, build
from framework.plugins.kernels.cpu.backend import CpuBackend
from framework.plugins.kernels.torch_backend import TorchBackend

from framework import Batch, CacheGroup, KernelBackend, Meta, ReferenceBackend, Rope
from framework.testing import KernelConformance

CPU = torch.device("cpu")
isas = pytest.mark.parametrize("isa", build.supported())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class TestCpu(KernelConformance):
    """The best instruction set of this CPU."""

    provider = "cpu"
    dtypes = ("float32", "bfloat16")
    block_sizes = (16, 32)


class _Lower(KernelConformance):
    """One that is forced: fewer cases, since the algorithms are the same."""

    provider = "cpu"
    dtypes = ("float32", "bfloat16")
    block_sizes = (16,)
    windows = (None, 9)
    batches = 3

    def backend(self) -> KernelBackend:
        if self.options["isa"] not in build.supported():
            pytest.skip(f"this CPU has no {self.options['isa']}")
        return super().backend()


class TestAvx512(_Lower):
    options: ClassVar[dict[str, str]] = {"isa": "avx512"}


class TestAvx2(_Lower):
    options: ClassVar[dict[str, str]] = {"isa": "avx2"}


class TestPortable(_Lower):
    options: ClassVar[dict[str, str]] = {"isa": "portable"}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@isas
@dtypes
def test_rows_of_a_tied_head(isa: str, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    """As they were, to the bit, from the weight that the head multiplies by: whatever tile they are in."""
    cpu = CpuBackend(CpuOptions(isa=isa))
    for rows, columns, count in ((1, 2, 1), (70, 64, 2), (300, 98, 3), (1003, 48, 4)):
        threads(count)
        weight = normal(rows, columns, dtype=dtype)
        weight[0, 0] = torch.nan
        embed, head = cpu.pack_tied(weight)
        assert embed is head
        tokens = torch.cat([torch.arange(rows).flip(0), torch.zeros(500, dtype=torch.int64)])
        assert torch.equal(cpu.embed(tokens, embed).view(torch.uint8), weight[tokens].view(torch.uint8))
        x = normal(3, columns, dtype=dtype, seed=1)
        plain = cpu.logits(x, cpu.pack("logits", weight))
        assert torch.equal(cpu.logits(x, head)[:, 1:], plain[:, 1:])
        assert cpu.embed(tokens[:0], embed).shape == (0, columns)
        for bad in (rows, -1):
            with pytest.raises(RuntimeError, match="a token is out of range"):
                cpu.embed(torch.tensor([bad]), embed)
    for other, columns in ((cpu, 33), (CpuBackend(CpuOptions(isa=isa), "int8"), 48)):  # the latter in two forms
        weight = normal(20, columns, dtype=dtype)
        embed, head = other.pack_tied(weight)
        assert torch.equal(other.embed(tokens[-3:], embed), weight[tokens[-3:]])
        assert other.logits(normal(2, columns, dtype=dtype), head).shape == (2, 20)


class Scene:
    """One step: requests of (cached, new) tokens, whose keys and values are stored through the backend."""

    def __init__(self, backend: ReferenceBackend, spans: list[tuple[int, int]], heads: int, kv: int, size: int,
                 dtype: torch.dtype) -> None:  # fmt: skip
        self.backend = backend
        lengths = [s + n for s, n in spans]
        needed = [-(-length // 16) for length in lengths]
        (self.cache,) = backend.allocate(CacheGroup(1, kv, size), dtype, 16, sum(needed), CPU)
        table, free = np.zeros((len(spans), max(needed)), np.int32), list(range(sum(needed)))[::-1]
        for row, count in zip(table, needed, strict=True):
            row[:count] = [free.pop() for _ in range(count)]
        self.k, self.v = (
            normal(sum(lengths), kv, size, dtype=dtype),
            normal(sum(lengths), kv, size, dtype=dtype, seed=1),
        )
        self.q = normal(sum(n for _, n in spans), heads, size, dtype=dtype, seed=2)
        self.spans, self.lengths, self.scale = spans, lengths, size**-0.5
        still = Rope(torch.ones(max(lengths), size // 2), torch.zeros(max(lengths), size // 2))
        first = self._prepare(table, [0] * len(spans), lengths)
        positions = torch.cat([torch.arange(length) for length in lengths])
        backend.rope_store(self.k[:, :1].clone(), self.k.clone(), self.v, positions, still, self.cache, 0, first)
        self.meta = self._prepare(table, [s for s, _ in spans], [n for _, n in spans])

    def _prepare(self, table: np.ndarray, starts: list[int], lens: list[int]) -> Meta:
        some = np.ones(len(lens), np.bool_)
        return self.backend.prepare(
            Batch(np.array(starts, np.int32), np.array(lens, np.int32), (table,), some, 16), CPU
        )

    def attend(self, window: int | None = None) -> torch.Tensor:
        return self.backend.attention(self.q.clone(), self.cache, 0, self.meta, self.scale, window)

    def expected(self) -> torch.Tensor:
        """In float64."""
        outputs = []
        parts = (x.double().split(self.lengths) for x in (self.k, self.v))
        for (start, n), k, v, q in zip(
            self.spans, *parts, self.q.double().split([n for _, n in self.spans]), strict=True
        ):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
            unseen = torch.arange(start, start + n)[:, None] < torch.arange(start + n)
            weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        return torch.cat(outputs)


LONG = [(700, 1), (3, 1), (0, 90), (250, 20), (1023, 1)]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).square().mean().sqrt())


@isas
def test_bfloat16_is_rounded_no_worse_than_by_torch(isa: str) -> None:
    """Root mean square of the errors against float64 of the same bfloat16 inputs."""
    ours, theirs = CpuBackend(CpuOptions(isa=isa)), TorchBackend()
    errors = []
    scenes = [Scene(backend, LONG, 9, 3, 64, torch.bfloat16) for backend in (ours, theirs)]
    errors.append([error(scene.attend(), scene.expected()) for scene in scenes])
    x, weight = normal(40, 576, dtype=torch.bfloat16), normal(300, 576, dtype=torch.bfloat16, seed=1)
    expected = x.double() @ weight.double().T
    errors.append([error(b.linear(x, b.pack("linear", weight)), expected) for b in (ours, theirs)])
    wide = normal(40, 600, dtype=torch.bfloat16) * 3
    gate, up = wide.double().chunk(2, -1)
    errors.append([error(b.silu_mul(wide.clone()), gate * gate.sigmoid() * up) for b in (ours, theirs)])
    for own, torchs in errors:
        assert own <= 1.02 * torchs, errors


@isas
@dtypes
def test_any_number_of_threads(isa: str, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    """Products are the same to the bit; attention, which is cut up by the number of threads, almost."""
    backend = CpuBackend(CpuOptions(isa=isa))
    products, attended = [], []
    packed = backend.pack("linear", normal(700, 300, dtype=dtype))
    scene = Scene(backend, LONG, 6, 2, 32, dtype)
    for count in range(1, 5):
        threads(count)
        scene.meta.plans.clear()  # type: ignore[attr-defined]
        products.append([backend.linear(normal(m, 300, dtype=dtype), packed) for m in (1, 7, 130)])
        attended.append(scene.attend().float())
    assert all(torch.equal(a, b) for some in products[1:] for a, b in zip(some, products[0], strict=True))
    for some in attended:
        torch.testing.assert_close(
            some.double(), scene.expected(), rtol=0, atol=1e-5 if dtype == torch.float32 else 8e-3
        )


@isas
@dtypes
def test_views_and_offsets(isa: str, dtype: torch.dtype) -> None:
    """Tensors need not begin at a multiple of anything, nor be contiguous beyond their rows."""
    backend = CpuBackend(CpuOptions(isa=isa))
    flat = normal(9 * 101 + 3, dtype=dtype)
    x = flat[3:].view(9, 101)[:, 1:98]
    weight = normal(201, 97, dtype=dtype, seed=1)[1:]
    torch.testing.assert_close(
        backend.linear(x, backend.pack("linear", weight)), x @ weight.T, rtol=2e-2 if dtype != torch.float32 else 1e-4,
        atol=1e-1 if dtype != torch.float32 else 1e-4,
    )  # fmt: skip
    assert torch.equal(backend.silu_mul(x[:, :96]), backend.silu_mul(x[:, :96].contiguous()))
    scale = normal(98, dtype=dtype, seed=2)[1:]
    assert torch.equal(
        backend.add_rmsnorm(x, None, scale, 1e-5)[0], backend.add_rmsnorm(x.contiguous(), None, scale.clone(), 1e-5)[0]
    )
    turned = normal(97, 9, dtype=dtype).T
    assert torch.equal(backend.linear(turned, backend.pack("linear", weight)),
                       backend.linear(turned.contiguous(), backend.pack("linear", weight)))  # fmt: skip


@isas
def test_numbers_that_are_none_stay_so(isa: str) -> None:
    """NaN and infinity reach the logits, where the engine looks for them."""
    backend = CpuBackend(CpuOptions(isa=isa))
    for dtype in (torch.float32, torch.bfloat16):
        x, eye = normal(3, 32, dtype=dtype), backend.pack("logits", torch.eye(32, dtype=dtype))
        x[1, 5], x[2, 7] = float("nan"), float("inf")
        y = backend.logits(x, eye)
        assert y[0].isfinite().all() and y[1].isnan().all() and not y[2].isfinite().any()
        assert backend.add_rmsnorm(x, None, torch.ones(32, dtype=dtype), 1e-5)[0].isnan()[1].all()
        assert backend.silu_mul(x)[1, 5].isnan() and backend.silu_mul(x)[0].isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    backend = CpuBackend()
    packed = backend.pack("linear", normal(20, 30))
    for x in (normal(2, 31), normal(2, 30, dtype=torch.bfloat16), normal(2, 2, 30)):
        with pytest.raises(RuntimeError, match="packed for another product"):
            backend.linear(x, packed)
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        backend.silu_mul(normal(2, 30, dtype=torch.float16))
    (cache,) = backend.allocate(CacheGroup(1, 2, 16), torch.float32, 16, 4, CPU)
    with pytest.raises(RuntimeError, match="too small for the head"):
        backend.attention(normal(1, 4, 32), cache, 0, Scene(backend, [(3, 1)], 4, 2, 16, torch.float32).meta, 1.0, None)


def test_nothing_of_nothing() -> None:
    backend = CpuBackend()
    for dtype in (torch.float32, torch.bfloat16):
        none, weight = normal(0, 32, dtype=dtype), normal(48, 32, dtype=dtype)
        assert backend.linear(none, backend.pack("linear", weight)).shape == (0, 48)
        assert [x.shape[1] for x in backend.qkv(none, backend.pack("qkv", weight), (16, 16, 16))] == [16] * 3
        assert backend.silu_mul(none).shape == (0, 16)
        assert backend.add_rmsnorm(none, none.clone(), weight[0], 1e-5)[0].shape == (0, 32)


@isas
@pytest.mark.parametrize("kind", ["float", "int8"])
def test_any_number_of_rows(isa: str, kind: str) -> None:
    """Steps of about 1,000 tokens, whose rows go in parts of a size that does not divide them."""
    backend = CpuBackend(CpuOptions(isa=isa), "int8" if kind == "int8" else "none")
    weight = normal(40, 64)
    packed = backend.pack("linear", weight)
    for rows in (95, 97, 385, 991, 995, 999, 1081):
        x = normal(rows, 64)
        found = backend.linear(x, packed)
        assert error(found, x.double() @ weight.double().T) < (1e-4 if kind == "float" else 0.2)


@isas
@pytest.mark.parametrize("bytes", [False, True], ids=["float", "int8"])
def test_a_nan_is_not_lost(isa: str, bytes: bool, threads: Callable[[int], None]) -> None:
    """Wherever in a context it is, in keys or in values, whoever sees it is not given a number."""
    backend, length = CpuBackend(CpuOptions(isa=isa)), 272
    group, still = CacheGroup(1, 1, 16), Rope(torch.ones(length, 8), torch.zeros(length, 8))
    kind = torch.int8 if bytes else torch.float32
    threads(2)
    for at in (0, 100, 112, 120, 124, 127, 256, 271):
        for which in (0, 1):
            (cache,) = backend.allocate(group, kind, 16, length // 16, CPU)
            kv = [normal(length, 1, 16), normal(length, 1, 16, seed=1)]
            kv[which][at, 0, 3] = torch.nan
            table = np.arange(length // 16, dtype=np.int32)[None]

            def prepare(start: int, table: np.ndarray = table) -> Meta:
                lens = np.array([length - start], np.int32)
                return backend.prepare(
                    Batch(np.array([start], np.int32), lens, (table,), np.ones(1, np.bool_), 16), CPU
                )

            backend.rope_store(kv[0][:, :1].clone(), *kv, torch.arange(length), still, cache, 0, prepare(0))
            y = backend.attention(normal(1, 16, 16), cache, 0, prepare(length - 1), 0.25, None)
            assert y.isnan().any(-1).all(), f"{('key', 'value')[which]} {at}"
