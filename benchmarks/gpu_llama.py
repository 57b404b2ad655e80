"""gpu_check.py, sections `llama` and `memory`: steps of a model of the shape of Llama-3.1-8B, with random weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from engines import held
from gpu_common import Run, Skip
from gpu_engine import TINY, add, failed_steps, prompts, start

import framework.worker as worker

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
PROMPT, PROFILING = 512, 12
GOALS = {1: 0.80, 64: 0.70}
"""Shares of the least time that reading weights, keys and values takes, by how many requests decode."""


class Mode(NamedTuple):
    graphs: bool
    overlap: bool

    def __str__(self) -> str:
        return f"{'graphs' if self.graphs else 'eager'}{', overlap' if self.overlap else ''}"


MODES = (Mode(True, True), Mode(True, False), Mode(False, True), Mode(False, False))


class Big:
    """The engine, its executor, and how it is told to work."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.pick(SHAPE, TINY)
        self.seen: dict[str, int] = {}
        begin = time.monotonic()
        with _watched(self.seen):
            self.engine, self.info = start(
                run, self.config, run.pick("bfloat16", "float32"), overlap="on", max_num_seqs=run.pick(256, 2),
                max_model_len=run.pick(131072, 256), **run.pick({}, {"kv_blocks": 40, "max_num_batched_tokens": 32}),
            )  # fmt: skip
        self.seconds = time.monotonic() - begin
        self.executor: Any = self.engine.executor
        self.graphs = self.executor._graphs

    @property
    def modes(self) -> tuple[Mode, ...]:
        return MODES if self.graphs is not None else tuple(mode for mode in MODES if not mode.graphs)

    def use(self, mode: Mode) -> None:
        """From the next steps on; there may be a step in flight, which is not disturbed."""
        self.executor.max_in_flight = 2 if mode.overlap else 1
        self.executor._graphs = self.graphs if mode.graphs else None
        self.executor._inputs = None

    def weights(self) -> int:
        """Bytes that a step reads of them: all but the embedding's rows."""
        model = self.executor.model
        parts = (model._decoder.layers, model._norm, model._head)
        return sum(t.numel() * t.element_size() for part in parts for t in held(part))

    def multiplied(self) -> float:
        """Numbers in the matrices."""
        return self.weights() / next(held(self.executor.model._norm)).element_size()

    def token(self) -> float:
        """Bytes of one token's keys and values in all layers."""
        return float(self.info.block_bytes / self.info.block_size)

    def close(self) -> None:
        self.engine.close()
        self.executor = self.engine = self.graphs = None
        gc.collect()


@contextmanager
def _watched(seen: dict[str, int]) -> Iterator[None]:
    """While an executor starts: what its steps and graphs are measured to take, and what graphs then do, in bytes."""
    kind = worker.TorchExecutor
    estimate, memory, capture = kept = worker.graph_memory, kind._memory, kind._capture

    def graph_memory(*given: Any) -> int:
        seen["graphs, estimated"] = estimate(*given)
        return seen["graphs, estimated"]

    def measured(self: Any, *given: Any) -> Any:
        found = memory(self, *given)
        seen.update({"device": found.whole, "taken by weights, steps and graphs": found.taken})
        return found

    def captured(self: Any, *given: Any) -> None:
        self.device.release_memory()
        before = self.device.free_memory()
        capture(self, *given)
        self.device.release_memory()
        seen["graphs, taken"] = before - self.device.free_memory()

    worker.graph_memory, kind._memory, kind._capture = graph_memory, measured, captured  # type: ignore[method-assign]
    try:
        yield
    finally:
        worker.graph_memory, kind._memory, kind._capture = kept  # type: ignore[method-assign]


def big(run: Run) -> Big:
    if run.cuda and run.free_memory() < 30 << 30:
        raise Skip(f"skipped: the model takes 30 GiB, {run.free_memory() >> 30} GiB are free")
    if run.big is None:
        run.big = Big(run)
    found: Big = run.big
    return found


def check_llama(run: Run) -> None:
    limit, products, model = run.bandwidth, run.flops, big(run)
    notes = "; ".join(note for note in model.info.notes if "graphs" in note)
    kernel = model.info.providers["kernel"]
    run.report.row(
        "start", f"{model.seconds:.1f} s, {model.info.kv_blocks} blocks, kernel {kernel} {notes}",
        seconds=model.seconds, blocks=model.info.kv_blocks, notes=model.info.notes,
    )  # fmt: skip
    if run.cuda:
        run.report.check("decode steps are captured", model.graphs is not None, notes or "yes")
    batches, found = run.pick((1, 64, 8, 256), (2,)), dict[int, dict[Mode, float]]()
    for at, batch in enumerate(batches):
        if run.left() < 3:
            run.report.row(f"{batch} requests", "left out: no time is left")
            continue
        budget = (run.left() - PROFILING) / (len(batches) - at)
        with run.report.part(f"{batch} requests"), _decoding(run, model, batch):
            end, found[batch] = time.monotonic() + budget, {}
            for number, mode in enumerate(model.modes):
                share = max(0.3, (end - time.monotonic()) / (len(model.modes) - number))
                found[batch][mode] = _decode(run, model, batch, mode, min(share, 3.0), limit, products)
    for batch in found:  # last: a profiler may leave traces
        if run.cuda and batch in GOALS and run.left() > 1:
            with run.report.part(f"profile of {batch} requests"), _decoding(run, model, batch):
                _profile(run, model, batch, found[batch])
    failed_steps(run, model.engine)
    run.report.raise_wrong()


@contextmanager
def _decoding(run: Run, model: Big, batch: int) -> Iterator[None]:
    """While so many requests have their prompts computed, and decode."""
    engine, length = model.engine, run.pick(PROMPT, 20)
    model.use(model.modes[0])
    ids = add(engine, prompts(model.config["vocab_size"], [length] * batch), run.pick(2048, 64))
    try:
        run.synchronize()
        begin, first = time.perf_counter(), set[str]()
        while len(first) < batch:
            first.update(output.id for output in _stepped(engine))
            if run.left() < -15:
                raise RuntimeError(f"{len(first)} of {batch} requests have a token, and no time is left")
        spent = time.perf_counter() - begin
        run.report.row(
            f"{batch} prompts of {length}", f"{batch * length / spent:9.0f} tokens/s, {spent * 1e3:.0f} ms",
            seconds=spent, tokens=batch * length,
        )  # fmt: skip
        yield
    finally:
        engine.abort(ids)
        model.use(model.modes[0])


def _stepped(engine: Any) -> list[Any]:
    outputs: list[Any] = engine.step()
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
    return outputs


def _decode(run: Run, model: Big, batch: int, mode: Mode, budget: float, limit: float, products: float) -> float:
    """Seconds of a step, beside what reading weights and context takes, and what the products take."""
    engine = model.engine
    model.use(mode)
    for _ in range(run.pick(4, 1)):
        _stepped(engine)
    run.synchronize()
    before, begin, steps, tokens = _context(engine), time.perf_counter(), 0, 0
    while steps < run.pick(200, 2) and (steps < 2 or time.perf_counter() - begin < budget):
        tokens += sum(len(output.tokens) for output in _stepped(engine))
        steps += 1
    run.synchronize()
    spent = (time.perf_counter() - begin) / steps
    context = (before + _context(engine)) / 2
    read = model.weights() + model.token() * context
    least, product = read / limit, model.multiplied() * 2 * batch / products
    share = least / spent
    run.report.row(
        f"{batch} decodes, {mode}",
        f"{spent * 1e3:8.2f} ms {tokens / spent / steps:8.0f} tokens/s {share:5.0%} of {least * 1e3:.2f} ms to read "
        f"{read / 1e9:.1f} GB ({product * 1e3:.2f} ms to multiply)",
        seconds=spent, tokens=tokens, steps=steps, share=share, read=read, least=least, products=product,
        context=context / batch,
    )  # fmt: skip
    if batch in GOALS and mode == MODES[0] and not run.interpret:
        text = f"{batch} decodes, {mode}: {share:.0%} of the speed of reading, at least {GOALS[batch]:.0%}"
        run.report.goal(text, share >= GOALS[batch])
    return spent


def _context(engine: Any) -> int:
    """Tokens that the next step reads, of all requests."""
    return sum(request.num_tokens for request in engine.requests.values())


def _profile(run: Run, model: Big, batch: int, measured: dict[Mode, float]) -> None:
    """Where the device's time goes, in ten lines; and of each mode's step, how long the device waits for the host."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _ in range(4):
        _stepped(model.engine)
    run.synchronize()
    steps = 8
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(steps):
                _stepped(model.engine)
            run.synchronize()
        events = [event for event in recorded.key_averages() if event.device_type == DeviceType.CUDA]
        found = [(event.self_device_time_total / steps, event.count / steps, event.key) for event in events]
    except Exception as error:  # noqa: BLE001 - no profiler here: times of steps were taken without
        run.report.row(f"{batch} decodes, device busy", f"not told: {type(error).__name__}: {str(error)[:120]}")
        return
    found = sorted((one for one in found if one[0]), reverse=True)
    busy = sum(spent for spent, _, _ in found) / 1e6
    if not found:
        run.report.row(f"{batch} decodes, device busy", "not told: the profiler saw nothing on the device")
        return
    run.report.row(
        f"{batch} decodes, device busy", f"{busy * 1e3:8.2f} ms a step",
        seconds=busy, kernels=[{"us": spent, "calls": calls, "name": name} for spent, calls, name in found[:40]],
    )  # fmt: skip
    for spent, calls, name in found[:10]:
        run.report.row(f"  {name[:42]}", f"{spent:9.1f} us {spent / busy / 1e6:5.0%}  {calls:5.0f} calls")
    for mode, spent in measured.items():
        alone = spent - busy
        run.report.row(f"{batch} decodes, {mode}, host alone", f"{alone * 1e3:8.2f} ms a step", seconds=alone)


# Memory


def check_memory(run: Run) -> None:
    """What the start measured, and then a step as large as the settings allow."""
    model = big(run)
    if not run.cuda:
        run.report.row("memory", "not the device's own: nothing is measured")
        return
    seen = model.seen
    for what, size in seen.items():
        run.report.row(what, f"{size / 2**30:8.2f} GiB", bytes=size)
    if {"graphs, taken", "graphs, estimated"} <= seen.keys():
        taken, estimate = seen["graphs, taken"], seen["graphs, estimated"]
        run.report.goal(f"graphs take {taken >> 20} MiB, estimated {estimate >> 20}", taken <= estimate + (256 << 20))
    run.report.row("free beside the pool", f"{run.free_memory() / 2**30:8.2f} GiB", bytes=run.free_memory())
    run.synchronize()
    torch.cuda.reset_peak_memory_stats(run.device)
    before, engine = torch.cuda.memory_allocated(run.device), model.engine
    settings = model.info
    ids = add(engine, prompts(model.config["vocab_size"], [settings.max_num_batched_tokens // 16] * 64), 8)
    try:
        while engine.has_work and run.left() > 0:
            _stepped(engine)
    finally:
        engine.abort(ids)
    peak = torch.cuda.max_memory_allocated(run.device) - before
    run.report.row("peak of full prefills and decodes", f"{peak / 2**30:8.2f} GiB", bytes=peak)
    reserved = torch.cuda.memory_reserved(run.device) - torch.cuda.memory_allocated(run.device)
    run.report.row("kept by torch for the next step", f"{reserved / 2**30:8.2f} GiB", bytes=reserved)
    failed_steps(run, engine)
    run.report.raise_wrong()
