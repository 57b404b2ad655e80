"""`--kernel triton`: every kernel against float64. Without a GPU in Triton's interpreter, with one on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import interpreter
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from framework.plugins.kernels.triton import launch, tiles
from framework.plugins.kernels.triton.backend import TritonBackend, TritonMeta
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from framework import Batch, CacheGroup
from framework.kernels import GraphLimits
from framework.ops import Pages
from framework.testing.pool import Shape, close

DEVICE = interpreter.device()
CUDA = DEVICE.type == "cuda"
NEAR = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
DTYPES = list(NEAR)
FP8 = {"fp8_e5m2": torch.float8_e5m2, "fp8_e4m3": torch.float8_e4m3fn}
FEW = settings(
    max_examples=30 if CUDA else 6,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # interpreted, looking for the smallest failure would take an hour
    suppress_health_check=[HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=40)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What is allocated and not filled holds NaN, or the largest integers: outputs and scratch memory, too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).new_empty(5).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


# The interpreter


@triton.jit
def _every(x, y, out, cast, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(x + at)
    b = tl.load(y + at)
    tl.store(out + at, a + b)
    tl.store(out + N + at, a * b)
    tl.store(cast + at, a.to(tl.float32) * 1.001)


@triton.jit
def _product(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@triton.jit
def _convert(x, out, back, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    y = tl.load(x + at).to(out.dtype.element_ty)
    tl.store(out + at, y)
    tl.store(back + at, y.to(tl.float32))


def test_bfloat16_is_rounded_once() -> None:
    """Sums, products and conversions, against float64."""
    x, y = (normal(1024, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    out, cast = x.new_empty(2048), x.new_empty(1024)
    _every[(1,)](x, y, out, cast, 1024)
    a, b = x.double(), y.double()
    expected = torch.cat((a + b, a * b, (x.float() * 1.001).double()))
    assert torch.equal(torch.cat((out, cast)).cpu(), expected.to(torch.bfloat16).cpu())
    x, y = (normal(32, 32, dtype=torch.bfloat16, seed=seed) for seed in (3, 4))
    out = torch.empty(32, 32, device=DEVICE)
    _product[(1,)](x, y, out, 32)
    close(out, (x.double() @ y.double()).cpu(), torch.float32, 1e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, *FP8.values()], ids=str)
def test_conversions_are_those_of_torch(kind: torch.dtype) -> None:
    """Of every number of the type, of what lies halfway between neighbours, and of what lies next to that."""
    size = 256 if kind.itemsize == 1 else 65536
    bits = torch.arange(size, dtype=torch.int32).to(torch.uint8 if size == 256 else torch.uint16)
    each = bits.view(kind).float()
    each = each[each.isfinite()].sort().values
    between = (each[1:] + each[:-1]) / 2
    near = torch.cat((each, between, between.nextafter(each[1:]), between.nextafter(each[:-1])))
    x = torch.zeros(tiles.padded(len(near)))
    x[: len(near)] = near
    x = x.to(DEVICE)
    out, back = x.new_empty(len(x), dtype=kind), torch.empty_like(x)
    _convert[(len(x) // 1024,)](x, out, back, 1024)
    assert torch.equal(back, x.to(kind).float()) and torch.equal(out.float(), back)


# Attention


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def attend_both(
    spans: Sequence[tuple[int, int]], shape: Shape, dtype: torch.dtype, block_size: int, *, window: int | None = None,
    cap: float = 0.0, processors: int = 8, spare: int = 0, seed: int = 0, kind: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of random queries, and what it ought to be, float64. Slots and blocks that no request owns hold NaN,
    and tables name such a block where nothing is to be read."""
    random = torch.Generator().manual_seed(seed)
    heads, kv_heads, head_dim = shape
    needed = [-(-(start + n) // block_size) for start, n in spans]
    blocks = sum(needed) + 2
    free = torch.randperm(blocks - 1, generator=random).tolist()
    pages = [torch.full((blocks, kv_heads, block_size, head_dim), torch.nan, dtype=kind or dtype) for _ in range(2)]
    tables = np.full((len(spans), max(needed) + spare), blocks - 1, np.int32)
    x = torch.randn(sum(n for _, n in spans), heads + 3, head_dim, generator=random).to(dtype)
    q, rows, row = x[:, 2 : 2 + heads], [], 0
    for i, (start, n) in enumerate(spans):
        own = [free.pop() for _ in range(needed[i])]
        low = 0 if window is None else max(0, start + 1 - window)
        tables[i, low // block_size : needed[i]] = own[low // block_size :]
        length = start + n
        given = []
        for side in pages:
            some = torch.randn(kv_heads, length, head_dim, generator=random).to(dtype).to(kind or dtype)
            padded = torch.full((kv_heads, needed[i] * block_size, head_dim), torch.nan, dtype=some.dtype)
            padded[:, low:length] = some[:, low:]
            for at, block in enumerate(own):
                side[block] = padded[:, at * block_size : (at + 1) * block_size]
            given.append(some.double().repeat_interleave(heads // kv_heads, 0))
        scores = q[row : row + n].double().transpose(0, 1) @ given[0].mT * head_dim**-0.5
        if cap:
            scores = cap * (scores / cap).tanh()
        distance = torch.arange(start, length)[:, None] - torch.arange(length)
        unseen = (distance < 0) | (distance >= (window or length))
        rows.append((scores.masked_fill(unseen, -torch.inf).softmax(-1) @ given[1]).transpose(0, 1).flatten(1))
        row += n
    lens = np.array(spans, np.int32)
    batch = Batch(lens[:, 0].copy(), lens[:, 1].copy(), (tables,), np.ones(len(spans), np.bool_), block_size)
    meta = TritonBackend().prepare(batch, DEVICE)
    assert isinstance(meta, TritonMeta)
    device = launch.device_of(DEVICE)._replace(processors=processors)
    room = tables.shape[1] * block_size
    parts = launch.plan(device, row, len(spans), room, meta.kinds, (heads, kv_heads, head_dim), dtype.itemsize)
    keys, values = (side.to(DEVICE) for side in pages)
    found = launch.attention(
        parts, q.to(DEVICE), keys, values, meta.tables[0], meta.cu_lens, meta.seq_lens, head_dim**-0.5, window, cap
    )
    return found, torch.cat(rows)


spans_of = st.lists(
    st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=4
)  # fmt: skip
shapes = st.tuples(
    st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3, 7, 17]), st.sampled_from([16, 64, 80, 96, 128, 256])
).map(lambda x: Shape(x[0] * x[1], x[0], x[2]))
attended = given(
    spans=spans_of,
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([16, 32, 48, 256]),
    window=st.sampled_from([None, 1, 7, 33]),
    cap=st.sampled_from([0.0, 3.0]),
    processors=st.sampled_from([1, 200]),
    spare=st.sampled_from([0, 300]),
    seed=st.integers(0, 99),
)


def _attention(spans: Any, shape: Shape, dtype: torch.dtype, **scene: Any) -> None:
    found, expected = attend_both(spans, shape, dtype, **scene)
    close(found, expected, dtype, NEAR[dtype])


test_attention_of_ragged_batches = FEW(attended(_attention))
test_attention_of_many_ragged_batches = pytest.mark.slow(MANY(attended(_attention)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_context_in_parts(dtype: torch.dtype) -> None:
    """Of which most have nothing for the shorter contexts."""
    found, expected = attend_both([(1100, 1), (0, 1), (64, 1)], Shape(4, 2, 64), dtype, 16, processors=200)
    close(found, expected, dtype, NEAR[dtype])


def test_nobody_is_no_launch() -> None:
    empty = normal(0, 4, 16)
    page = normal(2, 2, 16, 16)
    table = torch.zeros(1, 1, dtype=torch.int32)
    assert launch.attention([], empty, page, page, table, table[0], table[0], 1.0, None).shape == (0, 64)
    assert launch.silu_mul(normal(0, 8)).shape == (0, 4)
    assert launch.add_rmsnorm(normal(0, 8), None, normal(8), 1e-5)[0].shape == (0, 8)
    assert launch.rope_store(
        empty, empty, empty, table[0, :0].long(), normal(2, 8), normal(2, 8), table[0, :0].long(), page, page
    ).shape == (0, 4, 16)  # fmt: skip


def test_a_nan_of_the_model_is_seen() -> None:
    """It must not be taken for a part without tokens."""
    page, table = normal(8, 1, 16, 64), torch.arange(8, dtype=torch.int32, device=DEVICE)[None]
    page[:] = torch.nan
    ends = torch.tensor([0, 1, 128], dtype=torch.int32, device=DEVICE)
    part = launch.plan(launch.Device((8, 0), 99), 1, 1, 1024, (True, False), (2, 1, 64), 4)
    assert part[0].splits == 8
    found = launch.attention(part, normal(1, 2, 64), page, page, table, ends[:2], ends[2:], 1.0, None)
    assert found.isnan().all()


# Storing


stored = given(
    tokens=st.integers(1, 40), heads=st.sampled_from([(4, 2), (9, 3), (1, 1)]),
    head_dim=st.sampled_from([16, 64, 80, 96, 256]), share=st.sampled_from([1.0, 0.5, 0.25]),
    block_size=st.sampled_from([16, 48]), dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from([None, *FP8.values()]), seed=st.integers(0, 99),
)  # fmt: skip


def _rotate_and_store(
    tokens: int, heads: tuple[int, int], head_dim: int, share: float, block_size: int, dtype: torch.dtype,
    kind: torch.dtype | None, seed: int,
) -> None:  # fmt: skip
    """Partly rotated heads, too; nothing but the tokens' slots is written; 8-bit floats saturate."""
    count, kv_heads = heads
    x = normal(tokens, count + 2 * kv_heads, head_dim, dtype=dtype, seed=seed) * (1 if kind is None else 100)
    x[0] *= 9
    q, k, v = (part.clone() for part in torch.split(x, [count, kv_heads, kv_heads], 1))
    half = int(head_dim * share) // 2
    angle = torch.arange(64, dtype=torch.float64)[:, None] * 0.7 ** torch.arange(half, dtype=torch.float64)
    cos, sin = angle.cos().float().to(DEVICE), angle.sin().float().to(DEVICE)
    random = torch.Generator().manual_seed(seed)
    positions = torch.randint(64, (tokens,), generator=random)
    slots = torch.randperm(4 * block_size, generator=random)[:tokens]

    def rotated(y: torch.Tensor) -> torch.Tensor:
        y, turn = y.double().cpu(), angle[positions, None]
        a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        return torch.cat((a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin(), rest), -1)

    pages = [torch.full((4, kv_heads, block_size, head_dim), 7.0, device=DEVICE).to(kind or dtype) for _ in range(2)]
    views = torch.split(x, [count, kv_heads, kv_heads], 1)
    turned = launch.rope_store(*views, positions.to(DEVICE), cos, sin, slots.to(DEVICE), *pages)
    close(turned, rotated(q), dtype, NEAR[dtype])
    limit = launch.LIMITS.get(kind, torch.inf) if kind is not None else torch.inf
    step = {None: NEAR[dtype], torch.float8_e5m2: 2**-3, torch.float8_e4m3fn: 2**-4}[kind]
    for side, expected in zip(pages, (rotated(k), v.double().cpu()), strict=True):
        found = side.float().cpu().transpose(1, 2).flatten(0, 1)
        expected = expected.clamp(-limit, limit)
        far = (found[slots] - expected).abs() > step * expected.abs() + 1e-2
        assert not far.any(), (found[slots][far], expected[far])
        rest = torch.ones(len(found), dtype=torch.bool)
        rest[slots] = False
        assert (found[rest] == 7).all()


test_rotate_and_store = FEW(stored(_rotate_and_store))
test_rotate_and_store_of_many = pytest.mark.slow(MANY(stored(_rotate_and_store)))


def test_a_pool_of_more_elements_than_32_bits_count() -> None:
    """Its last block is written and read where it is."""
    heads, kv_heads, size, head_dim, tokens = 16, 8, 256, 256, 5
    group, block = CacheGroup(1, kv_heads, head_dim), 2**31 // (kv_heads * size * head_dim)
    keys, values = TritonBackend().allocate(group, torch.float8_e5m2, size, block + 1, DEVICE)[0]
    assert keys[block:].storage_offset() >= 2**31
    q, k, v = (normal(tokens, count, head_dim, seed=count) for count in (heads, kv_heads, kv_heads))
    cos, slots = normal(1, head_dim // 2) * 0 + 1, torch.arange(tokens) + block * size
    positions = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    launch.rope_store(q, k, v, positions, cos, cos * 0, slots.to(DEVICE), keys, values)
    batch = Batch(np.zeros(1, np.int32), np.array([tokens], np.int32), (np.array([[block]]),), np.ones(1, bool), size)
    backend, cache = TritonBackend(), Pages(keys, values)
    found = backend.attention(q, cache, 0, backend.prepare(batch, DEVICE), head_dim**-0.5, None)
    k, v = (x.to(keys.dtype).double().cpu().repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
    scores = q.double().cpu().transpose(0, 1) @ k.mT * head_dim**-0.5
    unseen = torch.ones(tokens, tokens).triu(1).bool()
    expected = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v
    close(found, expected.transpose(0, 1).flatten(1), torch.float32, NEAR[torch.float32])


# Row by row


normed = given(
    rows=st.integers(1, 30), heads=st.sampled_from([0, 1, 3]), size=st.sampled_from([1, 20, 64, 576, 1100, 5000]),
    add=st.booleans(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip


def _norm_of_sum(rows: int, heads: int, size: int, add: bool, dtype: torch.dtype, seed: int) -> None:
    shape = (rows, heads, size) if heads else (rows, size)
    x = normal(rows, max(heads, 1) * size + 8, dtype=dtype, seed=seed)[:, 8:].view(shape)
    other, weight = normal(*shape, dtype=dtype, seed=seed + 1), normal(size, dtype=dtype, seed=seed + 2)
    total = (x.double() + other.double() if add else x.double()).cpu()
    before = x.clone()
    normed, summed = launch.add_rmsnorm(x, other.clone() if add else None, weight, 1e-5)
    close(summed, total, dtype, NEAR[dtype])
    total = summed.double().cpu()  # as it is kept
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double().cpu()
    close(normed, expected, dtype, NEAR[dtype])
    assert torch.equal(x, before)


test_norm_of_sum = FEW(normed(_norm_of_sum))
test_norm_of_sum_of_many = pytest.mark.slow(MANY(normed(_norm_of_sum)))


gated = given(
    rows=st.integers(1, 30), size=st.sampled_from([20, 64, 1024, 1100, 5000]),
    scale=st.sampled_from([1, 60]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip


def _gated_activation(rows: int, size: int, scale: int, dtype: torch.dtype, seed: int) -> None:
    x = normal(rows, 2 * size + 8, dtype=dtype, seed=seed)[:, 8:] * scale
    gate, up = x.double().cpu().chunk(2, -1)
    close(launch.silu_mul(x), gate / (1 + (-gate).exp()) * up, dtype, NEAR[dtype])


test_gated_activation = FEW(gated(_gated_activation))
test_gated_activation_of_many = pytest.mark.slow(MANY(gated(_gated_activation)))


# The step


def test_a_captured_launch_depends_on_no_context() -> None:
    """What the host decides is known before there is a batch."""
    backend = TritonBackend()
    meta = backend.graph_buffers(GraphLimits(3, (80,), 1280, 16, DEVICE))
    assert isinstance(meta, TritonMeta) and meta.kinds == (True, False)
    lens = np.ones(3, np.int32)
    batch = Batch(lens, lens, (np.zeros((3, 2), np.int32),), lens > 0, 16)
    fresh = backend.prepare(batch, DEVICE)
    assert isinstance(fresh, TritonMeta) and fresh.kinds == (True, False)
    for starts, found in (([1, 2], (True, True)), ([2, 3], (False, True))):
        lens = np.array(starts, np.int32)
        batch = Batch(lens, lens, (np.zeros((2, 2), np.int32),), lens > 0, 16)
        assert isinstance(mixed := backend.prepare(batch, DEVICE), TritonMeta) and mixed.kinds == found


def test_splits() -> None:
    """Powers of two that fill the device, of shares worth a program."""
    assert tiles.splits(8, 10**6, 132) == 64 and tiles.splits(1024, 10**6, 132) == 1
    assert tiles.splits(8, 100, 132) == 1 and tiles.splits(8, 1024, 132) == 8
    for programs in (1, 3, 40, 500):
        for tokens in (16, 300, 5000, 10**5):
            count = tiles.splits(programs, tokens, 108)
            assert count == 1 or (programs * count < 4 * 108 and tokens // count >= tiles.LEAST_SHARE)


@pytest.mark.parametrize(("name", "most"), [("fp8_e5m2", 0.1), ("fp8_e4m3", 0.05)])
def test_what_8_bit_caches_cost(name: str, most: float) -> None:
    """Of attention over normally distributed keys and values, in bfloat16: the root mean square of the error, against
    float64 of what was given; and against float64 of what the cache holds, no more than without."""
    scene: dict[str, Any] = {"spans": [(150, 1), (90, 20), (0, 60)], "shape": Shape(4, 2, 64), "block_size": 16}
    exact, expected = attend_both(dtype=torch.bfloat16, **scene)
    close(exact, expected, torch.bfloat16, NEAR[torch.bfloat16])
    found, held = attend_both(dtype=torch.bfloat16, kind=FP8[name], **scene)
    close(found, held, torch.bfloat16, NEAR[torch.bfloat16])
    error = float((held - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    print(f"{name}: error {error:.4f} of the root mean square")
    assert most / 4 < error < most
