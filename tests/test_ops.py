"""Every operation of the reference and of the torch backend, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from framework.plugins import kernels
from framework.plugins.kernels import torch_backend
from framework.plugins.kernels.torch_backend import TorchBackend
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Batch, CacheGroup, Meta, ReferenceBackend, Rope
from framework.kernels import OPS

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BACKENDS: list[ReferenceBackend] = [ReferenceBackend(), TorchBackend()]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[dtype] * scale
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def batch(
    starts: list[int], lens: list[int], tables: list[np.ndarray[Any, Any]], size: int, samples: list[bool]
) -> Batch:
    return Batch(
        np.array(starts, np.int32),
        np.array(lens, np.int32),
        tuple(t.astype(np.int32) for t in tables),
        np.array(samples, np.bool_),
        size,
    )


# Weights


@backends
@dtypes
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 64, 96), (5, 20, 7), (33, 96, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(
    backend: ReferenceBackend, dtype: torch.dtype, rows: int, inner: int, outer: int, with_bias: bool
) -> None:
    x, weight = normal(rows, inner, dtype=dtype), normal(outer, inner, dtype=dtype, seed=1)
    bias = normal(outer, dtype=dtype, seed=2) if with_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    for op in ("linear", "qkv", "gate_up", "logits"):
        packed = backend.pack(op, weight.clone(), bias)
        if op == "qkv":
            sizes = (outer - 4, 2, 2)
            parts = backend.qkv(x, packed, sizes)
            assert tuple(p.shape[1] for p in parts) == sizes
            result = torch.cat(parts, 1)
        else:
            result = getattr(backend, op)(x, packed)
        close(result, expected, dtype, scale=inner**0.5)


@backends
@dtypes
def test_logits_of_no_rows(backend: ReferenceBackend, dtype: torch.dtype) -> None:
    packed = backend.pack("logits", normal(50, 16, dtype=dtype))
    assert backend.logits(normal(0, 16, dtype=dtype), packed).shape == (0, 50)


@backends
@dtypes
def test_embed(backend: ReferenceBackend, dtype: torch.dtype) -> None:
    weight = normal(30, 8, dtype=dtype)
    tokens = torch.tensor([3, 0, 29, 3])
    torch.testing.assert_close(
        backend.embed(tokens, backend.pack("embed", weight.clone())), weight[tokens], rtol=0, atol=0
    )


# Element-wise


@backends
@dtypes
def test_silu_mul(backend: ReferenceBackend, dtype: torch.dtype) -> None:
    x = normal(5, 40, dtype=dtype) * 4
    gate, up = x.double().chunk(2, -1)
    close(backend.silu_mul(x), gate / (1 + (-gate).exp()) * up, dtype, scale=4)


@backends
@dtypes
@pytest.mark.parametrize("shape", [(5, 48), (5, 3, 20)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_rmsnorm(
    backend: ReferenceBackend, dtype: torch.dtype, shape: tuple[int, ...], with_residual: bool
) -> None:
    # Large enough that squares overflow float16: statistics have to be taken in float32.
    x = normal(*shape, dtype=dtype) * 500
    residual = normal(*shape, dtype=dtype, seed=1) * 500 if with_residual else None
    weight = normal(shape[-1], dtype=dtype, seed=2)
    total = x.double() + (residual.double() if residual is not None else 0)
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    normed, summed = backend.add_rmsnorm(x.clone(), residual, weight, 1e-5)
    close(summed, total, dtype, scale=10)
    close(normed, expected, dtype)


@backends
def test_all_reduce_of_one_rank(backend: ReferenceBackend) -> None:
    x = normal(3, 4)
    assert torch.equal(backend.all_reduce(x), x)


# Preparing a batch


@backends
@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_prepare(backend: ReferenceBackend, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 4, 16]))
    spans = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=8))
    starts, lens = [s for s, _ in spans], [n for _, n in spans]
    samples = data.draw(st.lists(st.booleans(), min_size=len(spans), max_size=len(spans)))
    columns = max(-(-(s + n) // size) for s, n in spans) + 2
    tables = [np.random.default_rng(g).integers(0, 10**6, (len(spans), columns)) for g in range(2)]
    meta = backend.prepare(batch(starts, lens, tables, size, samples), CPU)

    row, slots, sampled = 0, [[], []], []  # type: tuple[int, list[list[int]], list[int]]
    for i, (start, n) in enumerate(spans):
        assert meta.cu_lens[i : i + 2].tolist() == [row, row + n]
        for position in range(start, start + n):
            for group in range(2):
                slots[group].append(int(tables[group][i, position // size]) * size + position % size)
        row += n
        if samples[i]:
            sampled.append(row - 1)
    assert meta.seq_lens.tolist() == [s + n for s, n in spans]
    assert [s.tolist() for s in meta.slots] == slots
    assert meta.logits_rows.tolist() == sampled
    assert (meta.max_len, meta.max_seq) == (max(lens), max(s + n for s, n in spans))
    dtypes = (meta.cu_lens, meta.seq_lens, meta.slots[0], meta.tables[0], meta.logits_rows)
    assert [t.dtype for t in dtypes] == [torch.int32, torch.int32, torch.int64, torch.int32, torch.int64]


# Cache pages


@backends
@dtypes
def test_block_bytes_is_what_allocate_takes(backend: ReferenceBackend, dtype: torch.dtype) -> None:
    group = CacheGroup(layers=3, kv_heads=2, head_dim=20)
    pool = backend.allocate(group, dtype, 4, 7, CPU)
    assert len(pool) == 3
    assert sum(pages.nbytes for cache in pool for pages in cache) == 7 * backend.block_bytes(group, dtype, 4)


@backends
@given(pairs=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda p: p[0] != p[1]), max_size=12))
@settings(deadline=None, max_examples=60)
def test_copy_blocks_as_if_one_after_the_other(backend: ReferenceBackend, pairs: list[tuple[int, int]]) -> None:
    caches = backend.allocate(CacheGroup(2, 2, 3), torch.float32, 4, 8, CPU)
    for layer, cache in enumerate(caches):
        for pages in cache:
            pages.copy_(torch.arange(8.0).view(8, 1, 1, 1) + 100 * layer)
    expected = list(range(8))
    for src, dst in pairs:
        expected[dst] = expected[src]
    src, dst = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    backend.copy_blocks(caches, src, dst)
    for layer, cache in enumerate(caches):
        for pages in cache:
            wanted = (torch.tensor(expected) + 100.0 * layer).view(8, 1, 1, 1).expand(pages.shape)
            assert torch.equal(pages, wanted)


@backends
@dtypes
@pytest.mark.parametrize("rotary", [20, 12])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_rope_store(backend: ReferenceBackend, dtype: torch.dtype, rotary: int, size: int) -> None:
    heads, kv_heads, head_dim = 6, 3, 20
    starts, lens = [0, 9, 3], [5, 1, 2]
    angle = torch.arange(16)[:, None] * (0.7 ** torch.arange(rotary // 2))
    rope = Rope(angle.cos().float(), angle.sin().float())
    tables = np.random.default_rng(0).permutation(60).reshape(3, 20)
    meta = backend.prepare(batch(starts, lens, [tables], size, [True] * 3), CPU)
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lens, strict=True)])
    # As `qkv` gives them: strided views of one tensor.
    flat = normal(8, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    q, k, v = torch.split(flat.unflatten(-1, (-1, head_dim)), [heads, kv_heads, kv_heads], 1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        x, half = x.double(), rotary // 2
        turned = torch.complex(x[..., :half], x[..., half:rotary])
        turned = turned * torch.polar(torch.ones_like(angle).double(), angle.double())[positions, None]
        return torch.cat((turned.real, turned.imag, x[..., rotary:]), -1)

    expected_q, expected_k, expected_v = rotated(q), rotated(k), v.double()
    (cache,) = backend.allocate(CacheGroup(1, kv_heads, head_dim), dtype, size, 60, CPU)
    close(backend.rope_store(q, k, v, positions, rope, cache, 0, meta), expected_q, dtype)
    block, offset = meta.slots[0] // size, meta.slots[0] % size
    close(cache.k[block, :, offset], expected_k, dtype)
    close(cache.v[block, :, offset], expected_v, dtype)
    untouched = torch.ones(60 * size, dtype=torch.bool).index_fill(0, meta.slots[0], False)
    assert not cache.k.transpose(1, 2).reshape(60 * size, -1)[untouched].any()


# Attention


class Scene:
    """Requests whose context is stored through the backend, in a pool that starts full of NaN.

    spans: (start, new tokens) per request. shared: leading blocks that every request takes from the first one.
    """

    def __init__(
        self,
        backend: ReferenceBackend,
        spans: list[tuple[int, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        size: int = 4,
        dtype: torch.dtype = torch.float32,
        shared: int = 0,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.backend, self.spans, self.size, self.dtype = backend, spans, size, dtype
        self.scale = head_dim**-0.5
        lengths = [s + n for s, n in spans]
        assert all(s >= shared * size for s, _ in spans)
        needed = [-(-length // size) for length in lengths]
        free = rng.permutation(sum(needed) + 3)
        # What lies beyond a request's blocks is undefined: give it numbers that would fail if they were used.
        self.table = np.full((len(spans), max(needed) + 1), 10**9)
        for i, count in enumerate(needed):
            self.table[i, :count], free = free[:count], free[count:]
            self.table[i, :shared] = self.table[0, :shared]
        (self.cache,) = backend.allocate(CacheGroup(1, kv_heads, head_dim), dtype, size, sum(needed) + 3, CPU)
        for pages in self.cache:
            pages.fill_(float("nan"))
        self.keys = [normal(n, kv_heads, head_dim, dtype=dtype, seed=seed + 3 * i) for i, n in enumerate(lengths)]
        self.values = [normal(n, kv_heads, head_dim, dtype=dtype, seed=seed + 3 * i + 1) for i, n in enumerate(lengths)]
        for kept in (self.keys, self.values):
            for own in kept[1:]:
                own[: shared * size] = kept[0][: shared * size]
        self.q = normal(sum(n for _, n in spans), heads, head_dim, dtype=dtype, seed=seed + 2)
        past = [(i, 0, s) for i, (s, _) in enumerate(spans) if s]
        if past:
            self.store(past)
        self.meta = self.store([(i, s, s + n) for i, (s, n) in enumerate(spans)])

    def store(self, parts: list[tuple[int, int, int]]) -> Meta:
        meta = self.backend.prepare(
            batch(
                [a for _, a, _ in parts],
                [b - a for _, a, b in parts],
                [self.table[[i for i, _, _ in parts]]],
                self.size,
                [True] * len(parts),
            ),
            CPU,
        )
        k, v = (torch.cat([kept[i][a:b] for i, a, b in parts]) for kept in (self.keys, self.values))
        half = k.shape[-1] // 2
        still = Rope(torch.ones(1000, half), torch.zeros(1000, half))
        positions = torch.cat([torch.arange(a, b) for _, a, b in parts])
        self.backend.rope_store(k[:, :1].clone(), k, v, positions, still, self.cache, 0, meta)
        return meta

    def expected(self, window: int | None) -> torch.Tensor:
        """One query, one head at a time, in float64."""
        rows, row = [], 0
        for (start, n), k, v in zip(self.spans, self.keys, self.values, strict=True):
            for position in range(start, start + n):
                low = 0 if window is None else max(0, position + 1 - window)
                heads = []
                for head, x in enumerate(self.q[row].double()):
                    kv = head // (self.q.shape[1] // k.shape[1])
                    scores = k[low : position + 1, kv].double() @ x * self.scale
                    heads.append(scores.softmax(0) @ v[low : position + 1, kv].double())
                rows.append(torch.cat(heads))
                row += 1
        return torch.stack(rows)

    def check(self, window: int | None = None) -> None:
        result = self.backend.attention(self.q.clone(), self.cache, 0, self.meta, self.scale, window)
        close(result, self.expected(window), self.dtype)


KINDS = {
    "one token": [(0, 1)],
    "prefill": [(0, 40), (0, 7), (0, 1), (0, 17)],
    "decode": [(50, 1), (1, 1), (16, 1), (31, 1)],
    "mixed": [(20, 1), (0, 33), (5, 6), (16, 20), (63, 1), (8, 6)],
    "far apart": [(200, 1), (3, 1), (90, 1), (4, 1), (201, 1)],
}


@backends
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 6, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(backend: ReferenceBackend, kind: str, window: int | None, size: int) -> None:
    Scene(backend, KINDS[kind], size=size).check(window)


@backends
@dtypes
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 64), (9, 3, 64), (6, 1, 20), (4, 4, 6), (14, 2, 80)]
)
def test_attention_shapes(
    backend: ReferenceBackend, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    scene = Scene(backend, KINDS["mixed"], heads=heads, kv_heads=kv_heads, head_dim=head_dim, size=16, dtype=dtype)
    scene.check()
    scene.check(window=9)


@backends
@pytest.mark.parametrize("size", [4, 16])
def test_attention_after_a_prefix_hit(backend: ReferenceBackend, size: int) -> None:
    Scene(backend, [(48, 1), (32, 25), (33, 3), (32, 1)], size=size, shared=32 // size).check()


@backends
def test_one_meta_serves_layers_of_different_windows(backend: ReferenceBackend) -> None:
    scene = Scene(backend, KINDS["mixed"])
    for window in (None, 5, None, 20):
        scene.check(window)


@backends
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_attention_of_any_batch(backend: ReferenceBackend, data: st.DataObject) -> None:
    spans = data.draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 24)), min_size=1, max_size=6))
    kv_heads, ratio = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2, 3]))
    scene = Scene(
        backend,
        spans,
        heads=kv_heads * ratio,
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([2, 6, 16])),
        size=data.draw(st.sampled_from([1, 4, 16])),
        seed=data.draw(st.integers(0, 1000)),
    )
    scene.check(data.draw(st.none() | st.integers(1, 40)))


def test_groups_are_split_to_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "GATHER_ELEMENTS", 3 * 5 * 4 * 2 * 16)  # three requests of five blocks
    scene = Scene(BACKENDS[1], [(17, 1)] * 10 + [(300, 1)])
    scene.check()
    assert isinstance(scene.meta, torch_backend.TorchMeta)
    (parts,) = scene.meta.parts.values()
    assert [part.bias.shape[0] for part in parts if isinstance(part, torch_backend.Group)] == [3, 3, 3, 1, 1]


# Selection


def test_the_torch_provider_makes_the_torch_backend() -> None:
    provider = next(p for p in kernels.providers() if p.name == "torch")
    assert provider.kind == "kernel"
    assert type(provider.factory()) is TorchBackend


@backends
def test_supports(backend: ReferenceBackend) -> None:
    for op in OPS:
        for dtype in DTYPES:
            assert backend.supports(op, dtype, CPU).ok
    assert "int8" in backend.supports("linear", torch.int8, CPU).reason
    assert not backend.supports("convolution", torch.float32, CPU).ok
