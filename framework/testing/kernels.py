"""What every kernel backend must do, as tests: each operation against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from ..kernels import OPS, Batch, Decoder, DecoderLayer, KernelBackend, Rope
from ..kv import KV_DTYPES, CacheGroup
from ..model import ModelSpec
from ..registry import load_plugins
from ..settings import Settings
from .choices import Choices
from .graphs import check_graph
from .pool import Part, Pool, Shape, close, make_batch, normal

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
KINDS = {
    "one token": [(0, 1)],
    "prefill": [(0, 40), (0, 7), (0, 1), (0, 17)],
    "decode": [(50, 1), (1, 1), (16, 1), (31, 1)],
    "mixed": [(20, 1), (0, 33), (5, 6), (16, 20), (63, 1), (8, 6)],
    "far apart": [(200, 1), (3, 1), (90, 1), (4, 1), (201, 1)],
    "long": [(0, 300), (1100, 1), (70, 130), (0, 1)],
}
"""Batches: tokens in the cache, and new ones, of each request."""
PRODUCTS = ((1, 64, 96), (5, 20, 7), (33, 96, 64), (0, 16, 50), (150, 300, 270))
"""Rows, in, out."""
Spans = Sequence[tuple[int, int]]


class KernelConformance(Choices):
    """Subclass it in a test module, and pytest runs the tests below on your kernel backend::

        from framework.testing import KernelConformance

        class TestMine(KernelConformance):
            provider = "mine"
            block_sizes = (16, 32)

    For one that is not installed, override `backend`. What its `supports` or `block_sizes` declines is skipped, one
    test for each case, with the reason; something has to be left.
    """

    provider: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    settings: ClassVar[Mapping[str, Any]] = {}
    """Of the run that the backend is made for, such as `quantization`. `kv_dtype` is that of the pools, too."""
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16", "float16")
    block_sizes: ClassVar[Sequence[int]] = (1, 4, 16)
    windows: ClassVar[Sequence[int | None]] = (None, 1, 6, 30)
    shapes: ClassVar[Sequence[tuple[int, int, int]]] = (
        (4, 2, 16), (9, 3, 64), (14, 2, 80), (6, 1, 20), (4, 4, 6), (1, 1, 128),
    )  # fmt: skip
    """Query heads, key and value heads, head size; most tests use the first."""
    batches: ClassVar[int] = 30
    """How many random batches it is tried with."""

    def backend(self) -> KernelBackend:
        """A new one."""
        (heads, kv_heads, head_dim), dtype = self.shapes[0], self.dtypes[0]
        spec = ModelSpec(
            "LlamaForCausalLM", 1000, 1024, 1, heads * head_dim, heads, kv_heads, head_dim, dtype, (None,), {}
        )
        known = {"spec": spec, "dtype": getattr(torch, dtype), "device": torch.device(self.device)}
        created: KernelBackend = load_plugins().create(
            "kernel", self.provider, self.options, settings=Settings(**self.settings), **known
        )
        return created

    def tolerance(self, op: str, dtype: torch.dtype) -> float:
        """How far a result of `op` may be from float64, relative to each number and to their root mean square.
        Override it for a backend that stores weights, keys or values in fewer bits."""
        return 0.0 if op == "embed" else TOLERANCE[_name(dtype)]

    def axes(self) -> dict[str, Sequence[Any]]:
        """What the arguments of the tests go through."""
        return {
            "dtype": self.dtypes,
            "block_size": self.block_sizes,
            "window": self.windows,
            "shape": self.shapes,
            "kind": tuple(KINDS),
            "op": ("linear", "qkv", "gate_up", "logits"),
            "bias": (False, True),
            "residual": (False, True),
            "rotary": ("all", "some"),
            "number": range(self.batches),
        }

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name, values in self.axes().items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=[f"{name}={value}" for value in values])

    def _ready(
        self, dtype: str, *ops: str, head_dim: int = 0, window: int | None = None, block_size: int | None = None
    ) -> tuple[KernelBackend, torch.dtype, torch.device]:
        """The backend, or the end of the test if it declines one of these operations."""
        backend, device = self.backend(), torch.device(self.device)
        kind: torch.dtype = getattr(torch, dtype)
        head_dim = head_dim or self.shapes[0][2]
        if block_size and backend.block_sizes and block_size not in backend.block_sizes:
            pytest.skip(f"{backend.name} declines block size {block_size}: it serves {backend.block_sizes}")
        for op in ops:
            support = backend.supports(op, kind, device, head_dim=head_dim, window=window)
            if not support.ok:
                assert support.reason, f"{backend.name} declines {op} and does not say why"
                pytest.skip(
                    f"{backend.name} declines {op} in {dtype}, head_dim {head_dim}, window {window}: {support.reason}"
                )
        return backend, kind, device

    @property
    def _kv_dtype(self) -> torch.dtype | None:
        name = KV_DTYPES.get(self.settings.get("kv_dtype", "auto"))
        return None if name is None else getattr(torch, name)

    def _pool(
        self,
        dtype: str,
        block_size: int,
        shape: tuple[int, int, int],
        blocks: int,
        *windows: int | None,
        layers: int = 1,
        seed: int = 0,
        spread: float = 1.0,
    ) -> Pool:
        """For attention under each of these windows."""
        size = Shape(*shape)
        for window in windows or (None,):
            ops = "rope_store", "attention", "copy_blocks"
            ready = self._ready(dtype, *ops, head_dim=size.head_dim, window=window, block_size=block_size)
        given: dict[str, Any] = {"blocks": blocks, "layers": layers, "seed": seed, "spread": spread}
        return Pool(*ready, block_size=block_size, shape=size, kv_dtype=self._kv_dtype, **given)

    def test_some_model_can_run(self) -> None:
        """There is a dtype, a head size and a block size for which it declines nothing."""
        backend, device = self.backend(), torch.device(self.device)
        assert not backend.block_sizes or set(backend.block_sizes) & set(self.block_sizes), (
            f"it serves blocks of {backend.block_sizes} tokens, and is tried with {self.block_sizes}"
        )
        declined = {
            f"{op} in {dtype}, head_dim {head_dim}": [support.reason]
            for dtype in self.dtypes
            for _, _, head_dim in self.shapes
            for op in OPS
            if not (support := backend.supports(op, getattr(torch, dtype), device, head_dim=head_dim)).ok
        }
        cases = [f" in {dtype}, head_dim {shape[2]}" for dtype in self.dtypes for shape in self.shapes]
        assert any(all(op + case not in declined for op in OPS) for case in cases), f"it serves nothing: {declined}"

    # Weights

    @torch.inference_mode()
    def test_products(self, op: str, bias: bool, dtype: str) -> None:
        """x @ weight.T, and the bias; for any number of rows, and none."""
        backend, kind, device = self._ready(dtype, op)
        for rows, inner, outer in PRODUCTS:
            x, weight, b = (normal(kind, i, *size) for i, size in enumerate(((rows, inner), (outer, inner), (outer,))))
            expected = x.double() @ weight.double().T + (b.double() if bias else 0)
            packed = backend.pack(op, weight.to(device, copy=True), b.to(device, copy=True) if bias else None)
            for x_again in (x, x.flip(0)):  # packed once, used often
                if op == "qkv":
                    parts = backend.qkv(x_again.to(device), packed, sizes := (outer - 4, 2, 2))
                    assert tuple(part.shape[1] for part in parts) == sizes, "q, k and v are as wide as asked"
                    found = torch.cat(parts, 1)
                else:
                    found = getattr(backend, op)(x_again.to(device), packed)
                wide = op == "logits" and found.dtype == torch.float32
                again = expected if x_again is x else expected.flip(0)
                close(found, again, torch.float32 if wide else kind, self.tolerance(op, kind))

    @torch.inference_mode()
    def test_embed(self, dtype: str) -> None:
        backend, kind, device = self._ready(dtype, "embed")
        weight, tokens = normal(kind, 0, 30, 8), torch.tensor([3, 0, 29, 3])
        one, other = (weight.to(device, copy=True) for _ in range(2))
        for packed in (backend.pack("embed", one), backend.pack_tied(other)[0]):
            found = backend.embed(tokens.to(device), packed)
            close(found, weight[tokens].double(), kind, self.tolerance("embed", kind))

    # Element-wise

    @torch.inference_mode()
    def test_silu_mul(self, dtype: str) -> None:
        """Also where the exponential overflows."""
        backend, kind, device = self._ready(dtype, "silu_mul")
        for scale in (4, 60):
            x = normal(kind, scale, 5, 42) * scale
            gate, up = x.double().chunk(2, -1)
            found = backend.silu_mul(x.to(device, copy=True))
            close(found, gate / (1 + (-gate).exp()) * up, kind, self.tolerance("silu_mul", kind))

    @torch.inference_mode()
    def test_add_rmsnorm(self, residual: bool, dtype: str) -> None:
        """Rows of large numbers, whose squares overflow float16, and of small ones, where eps counts; strided views of
        heads, too. x is left as it is."""
        backend, kind, device = self._ready(dtype, "add_rmsnorm")
        for shape in ((5, 48), (5, 3, 20)):
            for scale in (500, 1e-3):
                flat, width = normal(kind, 0, shape[0], prod(shape[1:]) + 40) * scale, prod(shape[1:])
                x = flat[:, 4 : 4 + width].view(shape)
                other = normal(kind, 1, *shape) * scale if residual else None
                weight = normal(kind, 2, shape[-1])
                total = x.double() + (0 if other is None else other.double())
                expected = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
                given = flat.to(device, copy=True)[:, 4 : 4 + width].view(shape)
                rest = None if other is None else other.to(device, copy=True)
                normed, summed = backend.add_rmsnorm(given, rest, weight.to(device), 1e-5)
                tolerance = self.tolerance("add_rmsnorm", kind)
                close(summed, total, kind, tolerance)
                close(normed, expected, kind, tolerance)
                assert torch.equal(given.cpu(), x), "x was changed"

    def test_all_reduce_of_one_rank(self, dtype: str) -> None:
        backend, kind, device = self._ready(dtype, "all_reduce")
        x = normal(kind, 0, 3, 4)
        assert torch.equal(backend.all_reduce(x.to(device)).cpu(), x)

    # The batch, and memory

    def test_prepare(self, block_size: int) -> None:
        """`Meta` says what its documentation says, and the batch is left as it is."""
        backend, _, device = self._ready(self.dtypes[0], block_size=block_size)
        rng = np.random.default_rng(block_size)
        for _ in range(30):
            count = int(rng.integers(1, 9))
            starts, lens = rng.integers(0, 40, count, np.int32), rng.integers(1, 20, count, np.int32)
            columns = -(-int((starts + lens).max()) // block_size) + 2
            tables = tuple(rng.integers(0, 10**6, (count, columns), np.int32) for _ in range(2))
            batch = Batch(starts, lens, tables, rng.random(count) < 0.6, block_size)
            given = [array.copy() for array in (starts, lens, *tables, batch.samples)]
            meta = backend.prepare(batch, device)
            ends = np.cumsum(lens)
            slots: list[list[int]] = [[], []]
            for i, (start, n) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
                for position in range(start, start + n):
                    for group, table in enumerate(tables):
                        slots[group].append(int(table[i, position // block_size]) * block_size + position % block_size)
            assert meta.cu_lens.tolist() == [0, *ends.tolist()]
            assert meta.seq_lens.tolist() == (starts + lens).tolist()
            assert [some.tolist() for some in meta.slots] == slots
            assert meta.logits_rows.tolist() == (ends[batch.samples] - 1).tolist()
            assert (meta.max_len, meta.max_seq) == (lens.max(), (starts + lens).max())
            for table, own in zip(tables, meta.tables, strict=True):
                for row, theirs, end in zip(table, own.tolist(), starts + lens, strict=True):
                    needed = -(-int(end) // block_size)
                    assert theirs[:needed] == row[:needed].tolist()
            found = (meta.cu_lens, meta.seq_lens, meta.slots[0], meta.tables[0], meta.logits_rows)
            assert [x.dtype for x in found] == [torch.int32, torch.int32, torch.int64, torch.int32, torch.int64]
            now = (starts, lens, *tables, batch.samples)
            assert all(np.array_equal(a, b) for a, b in zip(given, now, strict=True)), "the batch was changed"

    def test_block_bytes(self, block_size: int, dtype: str) -> None:
        """What the tensors of a pool grow by, block by block."""
        pools = [self._pool(dtype, block_size, self.shapes[0], blocks, layers=3) for blocks in (32, 64)]
        assert all(len(pool.caches) == 3 for pool in pools), "one cache for each layer"
        small, large = (pool.nbytes() for pool in pools)
        if not small:
            pytest.skip("its caches are no tensors: what they take cannot be measured")
        group = CacheGroup(3, *self.shapes[0][1:])
        said = pools[0].backend.block_bytes(group, self._kv_dtype or pools[0].dtype, block_size)
        assert (large - small) / 32 == said, f"a block takes {(large - small) / 32} bytes, not {said}"

    # The cache

    @torch.inference_mode()
    def test_rope_store(self, rotary: str, shape: tuple[int, int, int], block_size: int, dtype: str) -> None:
        """Queries and keys are turned by their positions, as far as the table is wide; keys and values arrive, and
        nothing else changes. Their tensors are strided views, as those of `qkv` are."""
        pool = self._pool(dtype, block_size, shape, 30)
        heads, kv_heads, head_dim = shape
        half = head_dim // 2 if rotary == "all" else max(1, head_dim * 3 // 10)
        angle = torch.arange(16)[:, None] * (0.7 ** torch.arange(half, dtype=torch.float64))
        rope = Rope(angle.cos().float().to(pool.device), angle.sin().float().to(pool.device))
        pool.fill()
        free = torch.randperm(30, generator=pool.random).view(3, 10).tolist()
        parts = [Part(start, n, free[i]) for i, (start, n) in enumerate(((0, 5), (9, 1), (3, 2)))]
        flat = pool.normal(8, (heads + 2 * kv_heads) * head_dim)
        position = pool.positions(parts)

        def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.split(x.view(len(x), -1, head_dim), [heads, kv_heads, kv_heads], 1)

        def rotated(x: torch.Tensor) -> torch.Tensor:
            x = x.double()
            turned = torch.complex(x[..., :half], x[..., half : 2 * half])
            turned = turned * torch.polar(torch.ones_like(angle), angle)[position, None]
            return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)

        q, k, v = views(flat)
        pool.wrote(parts, rotated(k), v.double())
        expected, meta = rotated(q), pool.prepare(parts)
        q, k, v = views(flat.to(pool.device, copy=True))
        found = pool.backend.rope_store(q, k, v, position.to(pool.device), rope, pool.caches[0], 0, meta)
        close(found, expected, pool.dtype, self.tolerance("rope_store", pool.dtype))
        pool.check(self.tolerance("attention", pool.dtype))

    @torch.inference_mode()
    def test_copy_blocks(self, block_size: int, dtype: str) -> None:
        """As if one after the other, in every layer: a block may be copied to, and then copied from."""
        pool = self._pool(dtype, block_size, self.shapes[0], 8, layers=2)
        pool.fill()
        rng = Random(block_size)
        lists = [[(rng.randrange(8), rng.randrange(8)) for _ in range(rng.randint(1, 12))] for _ in range(6)]
        for pairs in ([(0, 1), (1, 2), (2, 0), (3, 0)], [], *lists):
            pairs = [(s, d) for s, d in pairs if s != d]
            for s, d in pairs:
                for pages in (pool.k, pool.v):
                    pages[:, d] = pages[:, s]
            src, dst = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous()
            pool.backend.copy_blocks(pool.caches, src, dst)
            pool.check(self.tolerance("attention", pool.dtype))

    @torch.inference_mode()
    def test_copy_on_write(self, block_size: int, dtype: str) -> None:
        """A fork goes on in a copy of the block that both had begun, and neither notices the other."""
        pool = self._pool(dtype, block_size, self.shapes[0], 10, layers=2)
        length = block_size + max(1, block_size // 2)
        parts = [Part(0, length, [5, 2])]
        pool.store(parts, pool.prepare(parts))
        pool.backend.copy_blocks(pool.caches, *(torch.tensor([block]) for block in (2, 7)))
        for pages in (pool.k, pool.v):
            pages[:, 7] = pages[:, 2]
        for step in range(3):
            fork = [Part(length + step, 1, [5, 2, 0, 1, 8]), Part(length + step, 1, [5, 7, 3, 4, 9])]
            self._attend(pool, fork, store=True)

    @torch.inference_mode()
    def test_move_blocks(self, block_size: int, dtype: str) -> None:
        """What goes to the host and comes back, in whatever order and to whichever block, is what it was."""
        pool = self._pool(dtype, block_size, self.shapes[0], 8, layers=2)
        group, pinned = CacheGroup(2, *self.shapes[0][1:]), {"pinned": True} if pool.device.type != "cpu" else {}
        host = pool.backend.allocate(group, self._kv_dtype or pool.dtype, block_size, 6, torch.device("cpu"), **pinned)
        pool.fill()
        k, v = pool.k.clone(), pool.v.clone()
        out, back = [(1, 0), (2, 1), (3, 2), (7, 5), (5, 3)], [(5, 0), (0, 7), (1, 1), (2, 2), (3, 6)]
        pool.backend.move_blocks(pool.caches, host, out)
        pool.poison()
        pool.backend.move_blocks(host, pool.caches, back)
        left = {there: block for block, there in out}
        for there, block in back:
            pool.k[:, block], pool.v[:, block] = k[:, left[there]], v[:, left[there]]
        pool.check(self.tolerance("attention", pool.dtype))

    # Attention

    def _attend(
        self, pool: Pool, parts: Sequence[Part], *windows: int | None, store: bool = False, group: int = 0
    ) -> None:
        """One step in which each layer has the next of these windows."""
        some = windows or (None,)
        # The softmax is of float32 numbers up to four times the spread, less the largest: each may be half a unit off.
        tolerance = self.tolerance("attention", pool.dtype) + 8 * pool.spread * 2**-24
        meta = pool.prepare(parts, window=some[0] if len(some) == 1 else None)
        if store:
            pool.store(parts, meta)
        for layer in range(max(len(some), len(pool.caches))):
            window = some[layer % len(some)]
            found, expected = pool.attend(parts, meta, window, layer % len(pool.caches))
            close(found, expected, pool.dtype, tolerance)

    def _check(self, spans: Spans, dtype: str, *windows: int | None, **scene: Any) -> None:
        """Requests that have come so far, and one step of all of them."""
        block_size, shape = scene.pop("block_size", self.block_sizes[-1]), scene.pop("shape", self.shapes[0])
        shared, chunks = scene.pop("shared", 0), scene.pop("chunks", 1)
        needed = [-(-(start + n) // block_size) for start, n in spans]
        pool = self._pool(dtype, block_size, shape, sum(needed) + 3, *windows, **scene)
        free = torch.randperm(sum(needed) + 3, generator=pool.random).tolist()
        tables = [[free.pop() for _ in range(count)] for count in needed]
        tables = [tables[0][: shared // block_size] + table[shared // block_size :] for table in tables]
        parts = [Part(start, n, table) for (start, n), table in zip(spans, tables, strict=True)]
        first = [0, *[shared] * (len(parts) - 1)]  # whoever comes later finds what is shared in the cache
        for chunk in range(chunks):
            past = []
            for begin, part in zip(first, parts, strict=True):
                a, b = (begin + (part.start - begin) * at // chunks for at in (chunk, chunk + 1))
                past += [Part(a, b - a, part.blocks)] if b > a else []
            if past:
                pool.store(past, pool.prepare(past))
        self._attend(pool, parts, *windows, store=True)

    @torch.inference_mode()
    def test_attention(self, kind: str, window: int | None, block_size: int, dtype: str) -> None:
        """Every new token sees its request's tokens up to itself, as far back as the window: nothing of what else is in
        the pool (NaN), nor what a table says behind its request's blocks."""
        self._check(KINDS[kind], dtype, window, block_size=block_size)

    @torch.inference_mode()
    def test_attention_of_large_scores(self, dtype: str) -> None:
        """Whose exponentials overflow: the softmax has to take off the largest first."""
        self._check(KINDS["mixed"], dtype, block_size=self.block_sizes[-1], spread=80.0)

    @torch.inference_mode()
    def test_attention_of_shapes(self, shape: tuple[int, int, int], window: int | None, dtype: str) -> None:
        """Query head h reads key and value head h // (heads / kv_heads)."""
        self._check(KINDS["mixed"], dtype, window, shape=shape)

    @torch.inference_mode()
    def test_attention_after_a_prefix_hit(self, block_size: int, dtype: str) -> None:
        """Requests share their first blocks."""
        shared = -(-32 // block_size) * block_size
        spans = [(shared + start, tokens) for start, tokens in ((16, 1), (0, 25), (1, 3), (0, 1))]
        self._check(spans, dtype, block_size=block_size, shared=shared)

    @torch.inference_mode()
    def test_one_meta_serves_layers_of_different_windows(self, dtype: str) -> None:
        windows = [*self.windows, *self.windows[:2]]
        self._check(KINDS["mixed"], dtype, *windows, layers=len(windows))

    @torch.inference_mode()
    def test_groups_have_blocks_of_their_own(self, dtype: str) -> None:
        """Two groups of layers in one step, with tables and numbers of heads of their own."""
        heads, kv_heads, head_dim = self.shapes[0]
        size, parts = self.block_sizes[-1], []
        pools = [self._pool(dtype, size, (heads, count, head_dim), 8, seed=count) for count in (kv_heads, heads)]
        for order in ([0, 1, 2, 3], [6, 4, 7, 1]):
            parts.append([Part(0, size + 1, order[:2]), Part(0, 2, order[2:3]), Part(0, size, order[3:])])
        meta = pools[0].backend.prepare(make_batch(size, *parts), pools[0].device)
        for group, pool in enumerate(pools):
            pool.store(parts[group], meta, group=group)
        for group, pool in enumerate(pools):
            found, expected = pool.attend(parts[group], meta, group=group)
            close(found, expected, pool.dtype, self.tolerance("attention", pool.dtype))

    @torch.inference_mode()
    def test_graph(self, block_size: int, window: int | None, dtype: str) -> None:
        """Decode steps by inputs that stay where they are, captured and replayed where the device has graphs."""
        pool = self._pool(dtype, block_size, self.shapes[0], 400 // block_size + 9, window)
        check_graph(pool, window, self.tolerance("attention", pool.dtype))

    @torch.inference_mode()
    def test_decoder(self, window: int | None, shape: tuple[int, int, int], dtype: str) -> None:
        """All layers at once are what they are one operation after the other, in a prompt and in the steps after it."""
        (heads, kv_heads, head_dim), hidden, inner, normed = shape, 40, 56, window is not None
        pools = [self._pool(dtype, self.block_sizes[-1], shape, 12, window, None, layers=2) for _ in range(2)]
        backend, device, kind = pools[0].backend, pools[0].device, pools[0].dtype
        seeds = iter(range(100))

        def weight(op: str, rows: int, columns: int, bias: bool = False) -> Any:
            some = (normal(kind, next(seeds), rows, columns) * columns**-0.5).to(device)
            return backend.pack(op, some, normal(kind, next(seeds), rows).to(device) if bias else None)

        layers = [DecoderLayer(window), DecoderLayer(None)]
        for layer in layers:
            sizes = (hidden, hidden, *(head_dim, head_dim) * normed)
            norms = [(1 + normal(kind, next(seeds), size) / 8).to(device) for size in sizes]
            layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm = (*norms, None, None)[:4]
            layer.qkv = weight("qkv", (heads + 2 * kv_heads) * head_dim, hidden, bias=not normed)
            layer.o, layer.down = weight("linear", hidden, heads * head_dim), weight("linear", hidden, inner)
            layer.gate_up = weight("gate_up", 2 * inner, hidden)
        angle = torch.arange(64)[:, None] * (0.7 ** torch.arange(head_dim // 2, dtype=torch.float64))
        rope = Rope(angle.cos().float().to(device), angle.sin().float().to(device))
        free = torch.randperm(12, generator=pools[0].random).tolist()
        for spans in ([(0, 17), (0, 1), (0, 30)], [(17, 1), (1, 6), (30, 1)], [(18, 1), (7, 1), (31, 1)]):
            parts = [Part(start, n, free[4 * i : 4 * i + 4]) for i, (start, n) in enumerate(spans)]
            position = pools[0].positions(parts).to(device)
            x = normal(kind, next(seeds), len(position), hidden).to(device)
            results = []
            runs: tuple[Any, ...] = (backend.decoder, partial(KernelBackend.decoder, backend))
            for pool, run in zip(pools, runs, strict=True):
                decoder = Decoder(layers, heads, kv_heads, head_dim, 1e-5, head_dim**-0.5)
                y, residual = run(x.clone(), decoder, pool.caches, position, rope, 0, pool.prepare(parts))
                results.append(y.double() + (0 if residual is None else residual.double()))
            close(results[0].to(kind), results[1], kind, self.tolerance("attention", kind))

    @torch.inference_mode()
    def test_any_batch(self, number: int) -> None:
        """Random requests, whose contexts were computed in chunks."""
        rng = Random(number)
        spans = [(rng.randint(0, 50), rng.choice((1, rng.randint(1, 24)))) for _ in range(rng.randint(1, 6))]
        block_size, dtype = rng.choice(self.block_sizes), rng.choice(self.dtypes)
        shared = rng.randint(0, min(start for start, _ in spans)) // block_size * block_size
        scene = {"shape": rng.choice(self.shapes), "shared": shared, "chunks": rng.randint(1, 3)}
        window = rng.choice((None, rng.choice(self.windows)))
        self._check(spans, dtype, window, block_size=block_size, seed=number, **scene)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
