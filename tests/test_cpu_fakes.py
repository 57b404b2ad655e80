"""The operations of `--kernel cpu` as torch's compilers see them: schemas and fakes, by torch's own check of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ggml
import numpy as np
import pytest
import torch
from framework.plugins.kernels.cpu import fakes
from framework.plugins.kernels.cpu.backend import CpuBackend
from test_cpu_blocks import part
from test_cpu_kernels import LONG, Scene, normal

from framework import Rope

DTYPES = (torch.float32, torch.bfloat16)
CHECKS = ("test_schema", "test_faketensor")
Calls = Iterator[tuple[Any, ...]]


def weights(dtype: torch.dtype, rows: int, columns: int, bias: bool) -> Iterator[tuple[Any, ...]]:
    """words, scales, rows, bias: plain, in bytes, and in blocks of 4 and 8 bits."""
    plain, own = normal(rows, columns, dtype=dtype), normal(rows, dtype=dtype) if bias else None
    packed = [CpuBackend(quantization=kind).pack("linear", plain, own) for kind in ("none", "int8")]
    if columns % 32 == 0:
        for kind in ("Q4_0", "Q8_0"):
            packed.append(CpuBackend().pack_quantized("linear", [part(rows, columns, kind)[0]], dtype, own))
    for one in packed:
        yield one.words, one.scales, one.rows, one.bias


def pack() -> Calls:
    for dtype in DTYPES:
        for rows, columns in ((33, 20), (16, 7)):
            per = 4 // dtype.itemsize
            yield (
                normal(rows, columns, dtype=dtype),
                torch.empty(-(-rows // 16), -(-columns // per), 16, per, dtype=dtype),
            )


def pack_int8() -> Calls:
    for dtype in DTYPES:
        for rows, columns in ((33, 20), (16, 7)):
            words = torch.empty(-(-rows // 16), -(-columns // 4), 16, 4, dtype=torch.int8)
            yield normal(rows, columns, dtype=dtype), words


def pack_blocks() -> Calls:
    data = torch.from_numpy(ggml.quantize(normal(20, 64).numpy(), "Q4_0"))
    for words, count in ((torch.zeros(2, 8, 16, 4, dtype=torch.uint8), 2), (torch.zeros(2, 16, 16, 4).char(), 1)):
        yield data, 2, 3, words, torch.zeros(2, 2, count, 16, dtype=torch.float16)


def embed() -> Calls:
    for dtype in DTYPES:
        for words, scales, rows, _ in weights(dtype, 40, 64, False):
            if scales is None or scales.dtype == torch.float16:  # rows of bytes are not read
                for tokens in (torch.tensor([3, 0, 39]), torch.empty(0, dtype=torch.int64)):
                    yield tokens, words, scales, rows, dtype


def linear() -> Calls:
    for dtype in DTYPES:
        for m, rows, columns, bias in ((3, 40, 64, True), (0, 16, 64, False), (17, 5, 30, False)):
            for weight in weights(dtype, rows, columns, bias):
                for wide in (False, True):
                    yield normal(m, columns, dtype=dtype), *weight, wide
    yield normal(64, 3).T, *next(weights(torch.float32, 16, 64, False)), False


def rmsnorm() -> Calls:
    for dtype in DTYPES:
        for shape in ((5, 48), (5, 3, 20), (0, 16)):
            weight = normal(shape[-1], dtype=dtype)
            yield normal(*shape, dtype=dtype), None, weight, 1e-5
            yield normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1), weight, 1e-5
        yield normal(5, 100, dtype=dtype)[:, :60].view(5, 3, 20), None, normal(20, dtype=dtype), 1e-5


def silu_mul() -> Calls:
    for dtype in DTYPES:
        for shape in ((5, 42), (0, 8)):
            yield (normal(*shape, dtype=dtype),)


def scenes() -> Iterator[Scene]:
    for dtype in DTYPES:
        yield Scene(CpuBackend(), LONG, 6, 2, 32, dtype)
        yield Scene(CpuBackend(), [(5, 2)], 3, 1, 20, dtype)


def rope_store() -> Calls:
    for scene in scenes():
        positions = torch.cat([torch.arange(s, s + n) for s, n in scene.spans])
        tokens, heads, size = scene.q.shape
        angle = torch.arange(1100)[:, None] * 0.5 ** torch.arange(size // 2)
        rope = Rope(angle.cos(), angle.sin())
        kv = scene.k.shape[1]
        flat = normal(tokens, (heads + 2 * kv) * size, dtype=scene.q.dtype)
        for views in (flat.view(tokens, -1, size).split([heads, kv, kv], 1),):
            yield *(x.clone() for x in views), positions, *rope, scene.meta.slots[0], *scene.cache


def plan() -> Calls:
    for scene in scenes():
        for window in (0, 40):
            yield scene.meta.cu_lens, scene.meta.seq_lens, scene.q.shape[1], scene.k.shape[1], window


def attention() -> Calls:
    for scene in scenes():
        meta, sizes = scene.meta, (scene.q.shape[1], scene.k.shape[1])
        made = torch.ops.framework_cpu.plan(meta.cu_lens, meta.seq_lens, *sizes, 0)
        yield scene.q, *scene.cache, meta.tables[0], meta.cu_lens, meta.seq_lens, *made, scene.scale, 0


def argmax() -> Calls:
    for shape in ((3, 70), (0, 5)):
        yield (normal(*shape),)


def largest() -> Calls:
    for rows, vocab in ((3, 70), (5, 3000), (0, 5)):
        yield normal(rows, vocab), torch.full((rows,), 7), torch.zeros(rows)


CALLS = {
    one.__name__: one
    for one in (
        pack, pack_int8, pack_blocks, embed, linear, rmsnorm, silu_mul, rope_store, plan, attention, argmax, largest,
    )
}  # fmt: skip


@pytest.fixture(autouse=True)
def loaded() -> None:
    CpuBackend()._load()


@pytest.mark.parametrize("name", CALLS)
def test_schema_and_fake(name: str) -> None:
    """What a call changes, gives and aliases is what its schema says; shapes, strides and types, what the fake says."""
    operation, count = getattr(torch.ops.framework_cpu, name).default, 0
    with torch.no_grad():
        for arguments in CALLS[name]():
            isa = () if name == "plan" else (0,)
            torch.library.opcheck(operation, (*arguments, *isa), test_utils=CHECKS)
            count += 1
    assert count


def test_every_operation_is_among_them() -> None:
    """One that is added needs a fake, and the check above."""
    space = "framework_cpu::"
    names = {name.removeprefix(space) for name in torch._C._dispatch_get_all_op_names() if name.startswith(space)}
    schemas = {name: str(getattr(torch.ops.framework_cpu, name).default._schema) for name in names}
    with_tensors = {name for name, schema in schemas.items() if "Tensor" in schema}
    assert with_tensors == CALLS.keys() and names - with_tensors == {"isas"}


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an operation whose fake or schema lies."""
    with torch.library._scoped_library("framework_test_fakes", "DEF") as library:
        library.define("short(Tensor x) -> Tensor")
        library.define("changes(Tensor x) -> Tensor")
        for name, real in (("short", lambda x: x.new_empty(3)), ("changes", lambda x: x.add_(1).clone())):
            library.impl(name, real, "CPU")
        torch.library.register_fake("framework_test_fakes::short", lambda x: x.new_empty(2), lib=library)
        torch.library.register_fake("framework_test_fakes::changes", lambda x: torch.empty_like(x), lib=library)
        for name in ("short", "changes"):
            with pytest.raises(Exception, match=r"opcheck|mutat|shape"):
                torch.library.opcheck(
                    getattr(torch.ops.framework_test_fakes, name).default, (torch.ones(4),), test_utils=CHECKS
                )


def test_a_graph_of_them() -> None:
    """An exported function of products, norm and activation computes the same, for any number of rows."""
    cpu = CpuBackend()
    packed = cpu.pack("linear", normal(64, 48))

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ops = torch.ops.framework_cpu
            y = ops.rmsnorm(x, None, torch.ones(48), 1e-5, 0)
            y = ops.linear(y, packed.words, packed.scales, packed.rows, packed.bias, False, 0)
            return ops.silu_mul(y, 0) + 1

    block, rows = Block(), torch.export.Dim("rows", min=2, max=100)
    graph = torch.export.export(block, (normal(3, 48),), dynamic_shapes=({0: rows},)).module()
    for count in (3, 70):
        x = normal(count, 48, seed=count)
        assert torch.equal(graph(x), block(x))


def test_a_task_is_as_wide_as_said() -> None:
    scene = next(scenes())
    found = torch.ops.framework_cpu.plan(scene.meta.cu_lens, scene.meta.seq_lens, 6, 2, 0)
    assert found[0].shape[1] == fakes.TASK and np.prod(found[0].shape)
