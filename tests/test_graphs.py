"""Decode steps as graphs, on a device that replays exactly what was captured."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import BLOCK, BLOCKS, GREEDY, Driver, build, prompt
from fake_device import CPU, FakeDevice, installed
from framework.plugins.kernels.torch_backend import TorchBackend
from hypothesis import given
from hypothesis import strategies as st

from framework import (
    Batch,
    ConfigError,
    GraphLimits,
    Meta,
    Plan,
    Provider,
    ReferenceBackend,
    SamplingParams,
    hookimpl,
)
from framework.checkpoint import open_checkpoint
from framework.engine import Engine
from framework.graphs import MOST_ROWS, ladder
from framework.messages import Add
from framework.registry import load_plugins
from framework.settings import Settings
from framework.startup import build_engine
from framework.testing import KernelConformance
from framework.worker import TorchExecutor

SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=3, logprobs=1)
MANY = {"max_num_seqs": 12}


class Graphed(ReferenceBackend):
    """Decodes without asking the host: attention over whole tables, masked by tensors."""

    name = "graphed"
    graphs = "decode"
    seen: tuple[int, ...] = ()
    """Columns and most tokens of the last decode step."""

    def attention(
        self, q: torch.Tensor, cache: Any, group: int, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        if meta.max_len > 1:
            return super().attention(q, cache, group, meta, scale, window)
        tables, lengths = meta.tables[group].long(), meta.seq_lens.long()
        self.seen = tables.shape[1], meta.max_seq
        at = torch.arange(tables.shape[1] * meta.batch.block_size, device=q.device)
        tables = tables.where(at[:: meta.batch.block_size] < lengths[:, None], tables[:, :1])  # the rest is undefined
        unseen = (at >= lengths[:, None])[:, None, :, None]
        ratio = q.shape[1] // cache.k.shape[1]
        # [rows, columns, kv heads, tokens, size] -> [rows, heads, tokens of all columns, size]
        k, v = (
            pages[tables].transpose(1, 2).flatten(2, 3).float().masked_fill(unseen, 0).repeat_interleave(ratio, 1)
            for pages in (cache.k, cache.v)
        )
        scores = (k @ q.float().unsqueeze(-1) * scale).masked_fill(unseen, float("-inf"))
        return (scores.softmax(2) * v).sum(2).flatten(1).to(q.dtype)


class Kernels:
    def __init__(self, backend: type[ReferenceBackend] = Graphed) -> None:
        self.backend = backend()

    @hookimpl
    def providers(self) -> list[Provider]:
        return [Provider("kernel", "graphed", lambda: self.backend)]


def start(model: Path, backend: type[ReferenceBackend] = Graphed, **options: Any) -> TorchExecutor:
    executor = build(model, Kernels(backend), kernel="graphed", **{**MANY, **options})  # type: ignore[arg-type]
    executor.start()
    return executor


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    device = FakeDevice()
    with installed(device):
        yield device


@pytest.fixture
def executor(tiny_llama: Path, device: FakeDevice) -> Iterator[TorchExecutor]:
    executor = start(tiny_llama)
    yield executor
    executor.stop()


def rows_of(device: FakeDevice) -> list[int]:
    """Replays of each graph, smallest first."""
    return [graph.replays for graph in reversed(device.captured)]


# Which graph


@given(st.integers(1, 3000))
def test_the_ladder(most: int) -> None:
    sizes = ladder(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == min(most, MOST_ROWS)
    assert all(after - before <= max(1, 8, after // 8) for before, after in pairwise(sizes))
    assert ladder(20) == [1, 2, 4, 8, 16, 20] and ladder(1) == [1]


def test_each_step_takes_the_smallest_graph_that_holds_it(executor: TorchExecutor, device: FakeDevice) -> None:
    """[1, 2, 4, 8, 12]; prefills, chunks and mixed steps none."""
    assert len(device.captured) == 5 and executor.notes == []
    driver = Driver(executor)
    for i in range(12):
        driver.add(f"r{i}", prompt(3 + i, i))
    driver.step({f"r{i}": 100 for i in range(12)})
    assert rows_of(device) == [0] * 5
    expected = [0] * 5
    for count, graph in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (12, 4)):
        for _ in range(2):  # the second time, inputs advance
            driver.step({f"r{i}": 1 for i in range(count)})
            expected[graph] += 1
            assert rows_of(device) == expected
    driver.add("new", prompt(9))
    driver.step({"r0": 1, "new": 4})
    driver.step({"r0": 1, "new": 1})  # one token, of a prompt that goes on
    assert rows_of(device) == expected


# Results


def test_prompts_are_scored_beside_graphs(tiny_llama: Path, executor: TorchExecutor, device: FakeDevice) -> None:
    """Steps that score are no graph's; those before and after are."""
    plain = build(tiny_llama, **MANY)
    plain.start()
    found = []
    for one in (executor, plain):
        driver = Driver(one)
        driver.add("a", prompt(6), GREEDY)
        driver.run("a", 3)
        driver.add("scored", prompt(9), SamplingParams(temperature=0, prompt_logprobs=2))
        told = [
            entry for size in (1, 4, 4) for entry in driver.step({"a": 1, "scored": size}).prompt_logprobs["scored"]
        ]
        assert [entry.token for entry in told] == prompt(9)[1:]
        driver.step({"a": 1, "scored": 1})
        found.append((driver.tokens, [(entry.token, entry.rank) for entry in told], [entry.logprob for entry in told]))
    (tokens, ranks, values), (*others, expected) = found
    assert [tokens, ranks] == others and np.allclose(values, expected, rtol=0, atol=1e-4)
    assert sum(rows_of(device)) == 3


def play(driver: Driver, seed: int) -> dict[str, tuple[list[int], list[Any]]]:
    """Random members, who decode for a while, join and leave; many blocks begin and fill."""
    rng = random.Random(seed)
    waiting, running = [f"r{i}" for i in range(20)], list[str]()
    while waiting or running:
        while waiting and len(running) < 12 and rng.random() < 0.9:
            running.append(waiting.pop())
            params = SEEDED if len(waiting) % 3 == 0 else GREEDY
            driver.add(running[-1], prompt(rng.randint(1, 16), len(waiting)), params, seed=len(waiting))
            driver.step({running[-1]: 100})
        chosen = [id for id in running if rng.random() < 0.9]
        for _ in range(rng.randint(1, 6)):
            if chosen:
                driver.step(dict.fromkeys(chosen, 100))
        for id in [id for id in running if len(driver.output(id)) >= 12]:
            running.remove(id)
            driver.release(id)
    return {id: (driver.output(id), driver.logprobs[id]) for id in driver.tokens}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {id: output for id, (output, _) in found.items()} == {id: output for id, (output, _) in expected.items()}
    for id, (_, entries) in found.items():
        for ours, theirs in zip(entries, expected[id][1], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_graphs_give_what_eager_steps_give(tiny_llama: Path, device: FakeDevice, seed: int) -> None:
    """Token for token, beside an executor on the CPU. The pool holds what it would hold without them: the spare block
    is behind it."""
    with installed(executor_device := FakeDevice()):
        ours = start(tiny_llama)
        found = play(Driver(ours, seed), seed)
        assert sum(rows_of(executor_device)) > 30 and all(rows_of(executor_device)[1:])
        assert len(ours._pools[0][0].k) == BLOCKS + 1
        ours.stop()
    device.graphs = False
    theirs = start(tiny_llama)
    same(found, play(Driver(theirs, seed), seed))
    theirs.stop()


def test_padding_touches_the_spare_block_only(executor: TorchExecutor, device: FakeDevice) -> None:
    """Whatever was in a larger step before: pages of who sat this one out, and free blocks, stay as they are."""
    driver = Driver(executor)
    for i in range(8):
        driver.add(f"r{i}", prompt(6 + i, i))
    everybody = {f"r{i}": 100 for i in range(8)}
    for _ in range(3):
        driver.step(everybody)
    before = [page.clone() for pool in executor._caches for page in pool]
    driver.step({f"r{i}": 1 for i in range(5)})
    written = {(driver.blocks[f"r{i}"][(driver.computed[f"r{i}"] - 1) // BLOCK]) for i in range(5)}
    assert len(written) == 5
    for old, new in zip(before, [page for pool in executor._caches for page in pool], strict=True):
        changed = {int(block) for block in (old != new).flatten(1).any(1).nonzero()}
        assert changed - {BLOCKS} == written


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_the_step_loop_with_graphs(tiny_llama: Path, overlap: str) -> None:
    """Under preemption and with a prefix cache; afterwards the pool is empty, and no table named the spare block."""
    plans: list[Plan] = []

    class Watch:
        @hookimpl
        def step_done(self, plan: Plan) -> None:
            plans.append(plan)

    def outputs(device: FakeDevice, **options: Any) -> dict[str, list[int]]:
        with installed(device):
            settings = Settings(
                model=str(tiny_llama), device="cpu", dtype="float32", threads=1, block_size=4, kernel="graphed",
                kv_blocks=24, max_num_seqs=6, max_num_batched_tokens=16, preemption="recompute", **options,
            )  # fmt: skip
            plugins = load_plugins([("kernels", Kernels()), ("watch", Watch())])
            plugins.activate(settings, engine=True)
            engine, info = build_engine(settings, plugins, open_checkpoint(settings, plugins))
            assert info.kv_blocks == 24
            found = run(engine)
            assert engine.stats().preemptions_recompute > 0
            replays.append(sum(rows_of(device)))
            engine.close()
            return found

    replays: list[int] = []
    found = outputs(FakeDevice(), overlap=overlap)
    assert {block for plan in plans for s in plan.slices for delta in s.deltas for block in delta.blocks} <= {
        *range(24)
    }
    assert found == outputs(FakeDevice(), cuda_graphs="off")
    assert replays[0] > 20 and replays[1] == 0


def run(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i in range(8):
        params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=10 + i, ignore_eos=True)
        assert not engine.add(Add(f"r{i}", prompt(5 + 2 * i, i // 2), params, 1 + i))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.id, []).extend(output.tokens)
    usage = engine.kv.usage()
    assert (usage.holding, usage.reserved, usage.swapped, usage.tokens) == (0, 0, 0, 0)
    engine.kv.check_integrity()
    return found


def test_tokens_may_be_written_where_the_graph_reads_them(executor: TorchExecutor) -> None:
    """As a step does whose tokens were sampled on the device and never came to the host."""
    driver = Driver(executor)
    for i in range(3):
        driver.add(f"r{i}", prompt(6, i))
    driver.step({f"r{i}": 100 for i in range(3)})
    step = executor._rows.build(driver.plan({f"r{i}": 1 for i in range(3)}))
    right = step.tokens.copy()
    with torch.inference_mode():
        tokens, positions, meta = inputs = executor._in_graph(step)  # type: ignore[misc]
        expected = executor._forward(inputs).clone()
        tokens.fill_(7)
        assert not torch.allclose(executor._forward(inputs), expected)
        tokens.copy_(torch.from_numpy(right))
        assert torch.equal(executor._forward(inputs), expected)
    assert (len(tokens), len(positions), meta.limits.rows) == (3, 3, 4)


# Inputs


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("groups", [1, 2])
def test_buffers_hold_what_prepare_makes(block_size: int, groups: int) -> None:
    """Step after step, at the addresses that they had; tables narrower than the buffers', and wider; in one copy."""
    with installed(device := FakeDevice()):
        backend, rng = ReferenceBackend(), np.random.default_rng(block_size)
        meta = backend.graph_buffers(GraphLimits(5, (30,) * groups, 30 * block_size, block_size, CPU))
        names = ("tokens", "positions", "seq_lens", "cu_lens", "logits_rows")
        tensors = [*(getattr(meta, name) for name in names), *meta.slots, *meta.tables]
        addresses = [x.data_ptr() for x in tensors]
        assert not any(address % 16 for address in addresses) and all(x.is_contiguous() for x in tensors)
        starts, ones = rng.integers(0, 9, 5, np.int32), np.ones(5, np.int32)
        for width in (9 // block_size + 2, 40):
            tables = tuple(rng.integers(0, 10**6, (5, width), np.int32) for _ in range(groups))
            tokens, positions = rng.integers(0, 99, 5), starts.astype(np.int64)
            batch = Batch(starts, ones, tables, ones > 0, block_size, tokens, positions)
            for step in range(4):
                moved = bool((starts % block_size == 0).any())
                before = device.copies
                found = backend.advance(batch, meta, CPU, moved) if step else backend.prepare(batch, CPU, meta)
                assert found is meta and device.copies == before + 1
                expected = backend.prepare(batch, CPU)
                for name in names:
                    assert torch.equal(getattr(meta, name), getattr(expected, name)), name
                assert all(map(torch.equal, meta.slots, expected.slots))
                used = min(width, 30)
                for ours, theirs in zip(meta.tables, expected.tables, strict=True):
                    assert torch.equal(ours[:, :used], theirs[:, :used])
                assert (meta.max_len, meta.max_seq) == (1, 30 * block_size)
                if (starts + 1 >= min(width, 30) * block_size).any():
                    break
                starts += 1
                positions += 1
                tokens[:] = rng.integers(0, 99, 5)
        assert [x.data_ptr() for x in tensors] == addresses


def test_a_backend_that_only_prepares_advances_a_graph_s_inputs_too(tiny_llama: Path, device: FakeDevice) -> None:
    class Prepares(Graphed):
        def prepare(self, batch: Batch, device: torch.device, out: Meta | None = None) -> Meta:
            return super().prepare(batch, device, out)

    ours, theirs = start(tiny_llama, Prepares), start(tiny_llama, cuda_graphs="off")
    outputs, replays = [], []
    for executor in (ours, theirs):
        driver = Driver(executor)
        driver.add("a", prompt(5))
        outputs.append(driver.run("a", 9))
        replays.append(sum(rows_of(device)))
        executor.stop()
    assert outputs[0] == outputs[1] and replays == [8, 0]


class Late(Graphed):
    """Its lengths are those of the step before."""

    def _fill(self, batch: Batch, out: Meta, tables: bool) -> Meta:
        before = out.seq_lens.clone()
        out = super()._fill(batch, out, tables)
        out.seq_lens.copy_(before)
        return out


class Moves(Graphed):
    """Its lengths are new tensors."""

    def _fill(self, batch: Batch, out: Meta, tables: bool) -> Meta:
        out = super()._fill(batch, out, tables)
        out.seq_lens = out.seq_lens.clone()
        return out


class Reads(Graphed):
    """It asks the host how long a request is."""

    def attention(self, q: Any, cache: Any, group: int, meta: Meta, *more: Any) -> torch.Tensor:
        assert meta.seq_lens[0].item()
        return super().attention(q, cache, group, meta, *more)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_kit_s_check_of_graphs(device: FakeDevice, block_size: int) -> None:
    """It can be passed, and broken backends do not pass it."""

    def check(made: type[ReferenceBackend]) -> None:
        suite = type("Suite", (KernelConformance,), {"backend": lambda self: made()})()
        suite.test_graph(block_size, None, "float32")

    check(Graphed)
    for broken in (Late, Moves, Reads):
        with pytest.raises((AssertionError, RuntimeError)):
            check(broken)


# Where there are none


def test_graphs_are_sized_for_what_the_pool_holds(tiny_llama: Path, device: FakeDevice) -> None:
    for blocks, longest in ((40, 160), (BLOCKS * 2, 512)):
        executor = start(tiny_llama, kv_blocks=blocks)
        assert executor.backend.seen == (longest // BLOCK, longest)  # type: ignore[attr-defined]
        executor.stop()


def test_they_are_off_where_they_are_not_wanted_or_cannot_be(tiny_llama: Path, device: FakeDevice) -> None:
    executor = start(tiny_llama, cuda_graphs="off")
    assert device.captured == [] and len(executor._pools[0][0].k) == BLOCKS
    plain = type("Plain", (TorchBackend,), {"name": "plain"})
    assert start(tiny_llama, plain).notes == [] and device.captured == []
    with pytest.raises(ConfigError, match="--cuda-graphs decode: kernel 'plain' has no graphs; use auto or off"):
        start(tiny_llama, plain, cuda_graphs="decode")
    device.graphs = False
    assert start(tiny_llama).notes == [] and device.captured == []
    with pytest.raises(ConfigError, match=r"--cuda-graphs decode: .* has no graphs; use auto or off"):
        start(tiny_llama, cuda_graphs="decode")


@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_cannot_be_captured_runs_without_and_the_banner_says_so(
    tiny_llama: Path, device: FakeDevice, at: int
) -> None:
    count = 0

    def refuse(known: int) -> str:
        nonlocal count
        count += 1
        return "operation not permitted when stream is capturing\nmore" if count == at + 1 else ""

    device.refuse = refuse
    executor = start(tiny_llama)
    [note] = executor.notes
    assert note == "no CUDA graphs: their capture failed: operation not permitted when stream is capturing more"
    driver = Driver(executor)
    driver.add("a", prompt(5))
    driver.run("a", 4)
    assert device.captured == []
    executor.stop()


def test_a_host_value_read_in_a_captured_step_fails_its_capture(tiny_llama: Path, device: FakeDevice) -> None:
    """The reference's attention loops over tables on the host: the device of these tests notices."""

    class Asks(Graphed):
        def attention(self, q: Any, cache: Any, group: int, meta: Meta, *args: Any) -> torch.Tensor:
            if meta.limits is not None and int(meta.seq_lens[0].item()) > 0:
                pass
            return super().attention(q, cache, group, meta, *args)

    executor = start(tiny_llama, Asks)
    assert len(executor.notes) == 1 and "not permitted" in executor.notes[0]
    executor.stop()


def test_memory_of_graphs_is_kept_from_the_pool(tiny_llama: Path) -> None:
    """By what the first two take; the spare block counts, too."""
    size = build(tiny_llama).start().block_bytes
    device = FakeDevice(total=1000 * size, graph=10 * size, first=100 * size)
    with installed(device):
        given = {"kv_blocks": None, "max_num_seqs": 5, "swap_space": "0", "kv_memory": "1.0"}
        executor = build(tiny_llama, Kernels(), kernel="graphed", **given)  # type: ignore[arg-type]
        assert executor.start().blocks["device"] == 1000 - (100 + 4 * 10) - 1  # of 1, 2, 4 and 5 requests
        assert len(device.captured) == 4
        executor.stop()


def test_progress_is_told(tiny_llama: Path, device: FakeDevice) -> None:
    stages: list[tuple[str, float]] = []
    executor = build(tiny_llama, Kernels(), kernel="graphed")  # type: ignore[arg-type]
    executor.start(lambda stage, share: stages.append((stage, share)))
    assert list(dict.fromkeys(stage for stage, _ in stages)) == [
        "load weights", "measure memory", "warm up", "capture graphs",
    ]  # fmt: skip
    shares = [share for stage, share in stages if stage == "capture graphs"]
    assert shares == [0.0, 0.25, 0.5, 0.75, 1.0]
    executor.stop()
