"""The torch executor: loads the model, owns the KV pool, and runs plans in this process."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from . import machine
from .batch import RowBatch, Rows, Scores, Step
from .defaults import model_class
from .device import Device, lost, make_device, out_of_memory, resolve_device, resolve_dtype
from .errors import ConfigError, EngineDead, ModelError, PluginError, one_line
from .executor import Done, Executor, Later, Pending
from .graphs import Graphs, Inputs, graph_memory, ladder
from .halving import Halving, Launched
from .kernels import Batch, GraphLimits, KernelBackend, Meta, Quantized
from .kv import KV_DTYPES, Capacity
from .model import Checkpoint, Model
from .plan import Copy, Logprobs, Plan, StepResult
from .registry import Plugins
from .scoring import log_probabilities, score
from .settings import DEFAULT_DEVICE_MEMORY, DEFAULT_KV_MEMORY, Settings
from .sizing import Memory, largest_step, pool_blocks, swap_blocks


class Drawn(NamedTuple):
    """What a step sampled, on the device. tokens: int64 [R]; best: float32 [R], the largest logit that each could have
    had; unmodified: float32 [len(asked), vocab], log-probabilities of the rows that asked for them."""

    tokens: torch.Tensor
    best: torch.Tensor
    asked: list[int]
    unmodified: torch.Tensor | None


NOT_FINITE = "the model's logits are not finite"
RULED_OUT = "no token is left to choose from: allowed_token_ids, bad_words, a grammar or a plugin rule out every one"
MEASURE_SECONDS = 0.05
MEASURE_TOKENS = 128
"""A prefill that takes longer, of at least so many tokens, tells how fast the model is: a short one reads all weights
for few tokens."""
MEASURE_BLOCKS = 64
"""Blocks moved to tell how fast blocks move."""


class TorchExecutor(Executor):
    """Runs each plan during `submit`: copies, one ragged forward pass, logits hooks, `sample`.

    With two plans in flight, what one has sampled stays on the device, where the next one's inputs take it from.

    After `start`: `spec`, `backend`, `model`, `cache_spec`, `dtype_name`, `device_type`, `device_name`, `threads`,
    `backend_name`.
    A step that raises leaves everything known of the requests in place; whoever ran is expected again in `Plan.new`.
    """

    checkpoint: Checkpoint
    backend: KernelBackend
    device_name: str

    def __init__(self, settings: Settings, plugins: Plugins, checkpoint: Checkpoint) -> None:
        self.settings = settings
        self.plugins = plugins
        self.checkpoint = checkpoint
        self.max_in_flight = 2 if settings.overlap == "on" else 1
        self.model: Model | None = None
        self.device: Device = make_device(torch.device("cpu"))
        self._pools: list[list[Any]] = []
        self._host: list[list[Any]] = []  # made when something is first swapped out
        self._host_blocks = 0
        self._caches: list[Any] = []
        self._rows = Rows(0, 1)
        self._inputs: Inputs | None = None  # of the last step
        self._halving = Halving(self._release)
        self._graphs: Graphs | None = None

    # Start

    @torch.inference_mode()
    def start(self, progress: Callable[[str, float], None] = lambda stage, share: None) -> Capacity:
        settings, config = self.settings, self.checkpoint.config
        self.device = make_device(resolve_device(settings.device))
        self.device.begin()
        cpus = machine.cpus()
        self.threads = settings.threads or machine.threads()
        self.notes: list[str] = []
        if self.threads > cpus:
            self.notes += [f"{self.threads} threads on {cpus} CPUs: fewer are faster; --threads sets their number"]
        torch.set_num_threads(self.threads)
        architecture = next(iter(config.get("architectures") or ()), None)
        if architecture is None:
            raise ModelError(f"{self.checkpoint.path}: config.json names no architecture (key 'architectures')")
        self.spec = model_class(self.plugins, settings, architecture).spec(config)
        dtype = resolve_dtype(settings.dtype, self.device.torch)
        self.dtype_name, self.device_type = _name(dtype), self.device.torch.type
        call, known = self.plugins.call, {"dtype": dtype, "device": self.device.torch}
        self.backend = call("kernel_backend", KernelBackend, settings=settings, spec=self.spec, **known)
        self.backend_name = self.backend.name
        self.notes += [f"--kernel auto passed over {reason}" for reason in self.backend.declined]
        self.model = call("model", Model, settings=settings, spec=self.spec, backend=self.backend, **known)
        assert self.model is not None
        loaded, total = itertools.count(1), max(1, self.checkpoint.num_tensors)
        progress("load weights", 0.0)
        packed: set[str] = set()

        def seen(item: tuple[str, torch.Tensor | Quantized]) -> tuple[str, torch.Tensor | Quantized]:
            packed.update({item[1].format} if isinstance(item[1], Quantized) else ())
            return item

        tensors = map(seen, self.checkpoint.stored(self.model.formats, dtype))  # unlike a generator, it holds none
        self.model.load(tensors, lambda: progress("load weights", min(1.0, next(loaded) / total)))
        if packed:
            self.notes += [f"weights stay quantised, as the file has them: {', '.join(sorted(packed))}"]
        spec = self.model.cache_spec(settings.block_size)
        if settings.kv_dtype != "auto":
            spec = replace(spec, dtype=KV_DTYPES[settings.kv_dtype])
        self.cache_spec = spec
        cache_dtype: torch.dtype = getattr(torch, spec.dtype)
        block_bytes = sum(self.backend.block_bytes(g, cache_dtype, spec.block_size) for g in spec.groups)
        self._rows = Rows(len(spec.groups), spec.block_size, settings.max_num_seqs)
        sizes = self._graph_sizes()
        room = self._memory(sizes, progress)
        spare = 1 if sizes else 0  # a block for the padding of graphs
        blocks = pool_blocks(settings, self.spec.max_model_len, block_bytes, room, spare)
        # Torch takes page-locked memory in powers of two, up to twice what is asked for.
        free = machine.free_memory() // 2 if self.device.dedicated else machine.free_memory() - blocks * block_bytes
        self._host_blocks = swap_blocks(settings, blocks, block_bytes, free)
        self._use_pools(blocks + spare)
        progress("warm up", 0.0)
        self._warm_up(blocks, block_bytes)
        progress("warm up", 1.0)
        if sizes:
            self._capture(blocks, sizes, progress)
        self.device_name = self.device.name
        return Capacity({"device": blocks, "host": self._host_blocks}, block_bytes, self.device_name)

    def _allocate(self, blocks: int, device: torch.device) -> list[list[Any]]:
        """A pool on `device`; on the host of a GPU, in memory that the GPU can copy to and from by itself."""
        spec = self.cache_spec
        pinned = {"pinned": True} if device.type != self.device.torch.type else {}
        dtype: torch.dtype = getattr(torch, spec.dtype)
        try:
            return [self.backend.allocate(g, dtype, spec.block_size, blocks, device, **pinned) for g in spec.groups]
        except Exception as error:
            if not (isinstance(error, OSError) or out_of_memory(error)):
                raise
            size = machine.size(blocks * sum(self.backend.block_bytes(g, dtype, spec.block_size) for g in spec.groups))
            why = getattr(error, "strerror", None) or one_line(error)
            raise ConfigError(
                f"a KV pool of {size} cannot be had ({why}); give less with --kv-memory, --kv-blocks or --swap-space"
            ) from error

    def _memory(self, sizes: list[int], progress: Callable[[str, float], None]) -> Memory:
        """What there is for a pool. On a GPU, once the largest step that the settings allow has shown what it takes,
        and the first graphs; `sizes`, of all graphs, is empty after a failure. Raises `ConfigError` where a step does
        not fit."""
        device, settings, spec = self.device, self.settings, self.cache_spec
        if not device.dedicated:
            return Memory(device.free_memory(), 0, DEFAULT_KV_MEMORY)
        progress("measure memory", 0.0)
        plan = largest_step(settings, self.spec.max_model_len, len(spec.groups))
        self._use_pools(2)
        self._rows.update(plan)
        try:
            taken = device.peak(lambda: self._step(plan, self.clock.ns())[0]())
            if sizes:
                with self._eager_on_failure(sizes):
                    taken += graph_memory(device, self._new_graphs(1, sizes), sizes)
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise ConfigError(
                f"a step of --max-num-batched-tokens {settings.max_num_batched_tokens} and --max-num-seqs "
                f"{settings.max_num_seqs} does not fit in the {machine.size(device.total_memory())} of {device.name} "
                f"beside the weights; lower them ({error})"
            ) from None
        finally:
            self._pools, self._caches, self._inputs = [], [], None
        self._rows = Rows(len(spec.groups), spec.block_size, settings.max_num_seqs)
        self._rows.removed.update((data.id, None) for data in plan.new)  # which the sampler is yet to be told
        device.release_memory()
        total = device.total_memory()
        progress("measure memory", 1.0)
        return Memory(total, total - device.free_memory() + taken, DEFAULT_DEVICE_MEMORY)

    def _graph_sizes(self) -> list[int]:
        """Of the decode steps to be captured, ascending; none where there are no graphs."""
        settings, asked = self.settings, self.settings.cuda_graphs
        able = self.device.graphs and self.backend.graphs != "none"
        if asked == "decode" and not able:
            what = f"kernel {self.backend.name!r} has" if self.device.graphs else f"{self.device.name} has"
            raise ConfigError(f"--cuda-graphs decode: {what} no graphs; use auto or off")
        most = min(settings.max_num_seqs, settings.max_num_batched_tokens)
        return ladder(most) if able and asked != "off" else []

    def _new_graphs(self, spare: int, sizes: list[int], pool: int | None = None) -> Graphs:
        """spare: the block behind the pool. pool: tokens that it holds."""
        spec, limit = self.cache_spec, self.spec.max_model_len
        longest = min(self.settings.max_model_len or limit, limit)
        if pool is not None and all(group.window is None for group in spec.groups):
            longest = min(longest, pool)
        columns = (-(-longest // spec.block_size),) * len(spec.groups)
        limits = GraphLimits(sizes[-1], columns, longest, spec.block_size, self.device.torch)
        return Graphs(self.device, self.backend, self._eager, limits, spare)

    def _capture(self, blocks: int, sizes: list[int], progress: Callable[[str, float], None]) -> None:
        progress("capture graphs", 0.0)
        graphs = self._new_graphs(blocks, sizes, blocks * self.cache_spec.block_size)
        with self._eager_on_failure(sizes):
            for done, size in enumerate(reversed(sizes), 1):
                graphs.capture(size)
                progress("capture graphs", done / len(sizes))
            self._graphs = graphs

    @contextmanager
    def _eager_on_failure(self, sizes: list[int]) -> Iterator[None]:
        """What cannot be captured runs without graphs, says the banner."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a kernel or the driver raises: all of it works without
            sizes.clear()
            self.notes += [f"no CUDA graphs: their capture failed: {one_line(error)}"]

    def _use_pools(self, blocks: int) -> None:
        self._pools = self._allocate(blocks, self.device.torch)
        self._caches = [cache for pool in self._pools for cache in pool]

    def _warm_up(self, blocks: int, block_bytes: int) -> None:
        """One forward pass over one block, so that the first request doesn't pay for what libraries set up lazily;
        then measure what preemption has to weigh up: computing tokens, and moving blocks to the host and back."""
        size = self.cache_spec.block_size
        most = min(blocks * size, self.settings.max_num_batched_tokens, self.spec.max_model_len)
        count = min(size, most)
        self._prefill(count)
        while True:
            spent = self._prefill(count)
            self.compute_rate = max(self.compute_rate, count / spent)
            if count == most or (spent >= MEASURE_SECONDS and count >= MEASURE_TOKENS):
                break
            count = min(2 * count, most)
        if not self._host_blocks:
            return
        count = min(MEASURE_BLOCKS, blocks, self._host_blocks)
        host, pairs = self._allocate(count, torch.device("cpu")), [(block, block) for block in range(count)]
        for _ in range(4):  # the best: at first, memory is touched for the first time; later, others may interfere
            begin = self._now()
            for pool, copy in zip(self._pools, host, strict=True):
                self.backend.move_blocks(pool, copy, pairs)
                self.backend.move_blocks(copy, pool, pairs)
            self.copy_rate = max(self.copy_rate, 2 * count * block_bytes / max(self._now() - begin, 1e-9))

    def _prefill(self, count: int) -> float:
        """Seconds that it takes to compute a prompt of `count` tokens, in the first blocks of the pool."""
        size = self.cache_spec.block_size
        table = np.arange(-(-count // size), dtype=np.int32)[None]
        lens, samples = np.array([count], np.int32), np.ones(1, np.bool_)
        tables, tokens, positions = (table,) * len(self.cache_spec.groups), *np.zeros((2, count), np.int64)
        positions += np.arange(count)
        batch = Batch(np.zeros(1, np.int32), lens, tables, samples, size, tokens, positions)
        begin = self._now()
        self._forward(self._prepare(batch))
        return max(self._now() - begin, 1e-9)

    def _now(self) -> float:
        """Seconds, once all that was asked of the device is done."""
        self.device.synchronize()
        return time.perf_counter()

    def stop(self) -> None:
        self.model, self._pools, self._host, self._caches = None, [], [], []
        self._inputs, self._graphs = None, None
        self._rows = Rows(0, 1)
        self.device.release_memory()

    # Steps

    def submit(self, plan: Plan) -> Pending:
        try:
            with self._device_lives():
                finish, ready = self._launch(plan)
        except Exception as error:  # noqa: BLE001 - raised again by `result`: the engine decides who is retried
            return Done(error)
        later = Later(self._device_lives()(finish), ready)
        if self.max_in_flight == 1:  # nothing else to do meanwhile
            later.wait()
        return later

    @contextmanager
    def _device_lives(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if lost(error):
                raise EngineDead(f"{self.device.name} does nothing more in this process: {one_line(error)}") from error
            raise

    @torch.inference_mode()
    def _launch(self, plan: Plan) -> Launched:
        """Hand a step to the device. Returns what waits for it, and whether that would have to wait."""
        ns = self.clock.ns
        begin, rows = ns(), self._rows
        rows.update(plan)
        self._copy(plan.copies)
        copied = tuple(copy.ticket for copy in plan.copies if copy.ticket)
        if not plan.slices:
            result = StepResult(plan.step, copied=copied, stages=(("batch_build", begin, ns()),))
            return lambda: result, lambda: True

        def launch(part: Plan) -> Launched:
            if part is not plan and rows.unknown is not None:  # what the device alone knows, one step could take
                rows.learn(rows.unknown)
            return self._step(part, begin if part is plan else ns())

        finish, ready, failed = self._halving.run(plan, launch)
        for part in plan.slices:
            if part.samples and part.request_id in failed:  # a plan in flight behind this one counts on a token
                rows.append(np.array([rows.index[part.request_id]]), np.zeros(1, np.int64))
        return (lambda: replace(finish(), copied=copied)) if copied else finish, ready

    def _step(self, plan: Plan, begin: int) -> Launched:
        """Hand the slices to the device, all at once. begin: when the step began, nanoseconds."""
        ns, rows = self.clock.ns, self._rows
        step = rows.build(plan)
        inputs = self._inputs = self._advance(step) or self._in_graph(step) or self._prepare(step.batch)
        self._feed(step, inputs[0])
        built = ns()
        scores = dict[str, tuple[Logprobs, ...]]()
        if step.scores is None:
            logits = self._forward(inputs)
        else:
            logits, scores = self._scored(inputs, step.scores)
        unscored = [id for id, some in scores.items() if any(math.isnan(one.logprob) for one in some)]
        forwarded = ns()  # on a GPU only launched: the wait for it shows under sampling
        stages = (("batch_build", begin, built), ("forward", built, forwarded))
        if step.sampled is None:
            times, errors = (*stages, ("sampling", forwarded, ns())), dict.fromkeys(unscored, NOT_FINITE)
            result = StepResult(plan.step, stages=times, errors=errors, prompt_logprobs=scores)
            return lambda: result, lambda: True
        drawn = self._sample(logits, step.sampled)
        fetched = self.device.fetch([drawn.tokens, drawn.best])
        vocab = logits.shape[1]
        sampling = rows.sampled(step, drawn.tokens, lambda: self._checked(fetched.wait()[0], vocab))
        ids, params, reasons = step.sampled.ids, step.sampled.params, step.sampled.errors

        def finish() -> StepResult:
            chosen = rows.learn(sampling)
            tokens = dict(zip(ids, zip(chosen, strict=True), strict=True))
            errors = {ids[at]: why for at, why in not_finite(fetched.wait()[1]).items()}
            errors |= dict.fromkeys(unscored, NOT_FINITE) | {id: reasons[id] for id in errors if id in reasons}
            for id in errors:
                tokens.pop(id, None)
            logprobs: dict[str, tuple[Logprobs, ...]] = {}
            if drawn.unmodified is not None:
                counts = [params[row].logprobs or 0 for row in drawn.asked]
                with torch.inference_mode():
                    found = log_probabilities(drawn.unmodified, drawn.tokens[drawn.asked], counts)
                logprobs = {ids[at]: (one,) for at, one in zip(drawn.asked, found, strict=True) if ids[at] in tokens}
            times = (*stages, ("sampling", forwarded, ns()))
            result = StepResult(plan.step, tokens=tokens, logprobs=logprobs, errors=errors, stages=times)
            refused = tuple(id for id, why in errors.items() if why == RULED_OUT or id in reasons)
            return replace(result, prompt_logprobs=scores, refused=refused) if scores or refused else result

        return finish, fetched.ready

    def _feed(self, step: Step, tokens: torch.Tensor) -> None:
        """Fill in the tokens that only the device knows so far."""
        if self._rows.unknown is None:
            return
        known = self._rows.unknown.tokens.clamp(0, self.spec.vocab_size - 1)
        if step.advanced:
            tokens.copy_(known)
        elif step.fed is not None:
            [(at, source)] = self.device.send([step.fed])
            tokens[at] = known[source]

    def _release(self) -> None:
        self._inputs = None
        self.device.release_memory()

    def _copy(self, copies: Iterable[Copy]) -> None:
        """In order within each group, whose pools are its own; neighbours of one pair of tiers go together."""
        copies = sorted(copies, key=lambda copy: copy.group)
        for (group, *tiers), some in itertools.groupby(copies, lambda c: (c.group, c.src_tier, c.dst_tier)):
            pairs = [(c.src, c.dst) for c in some]
            if tiers == ["device", "device"]:
                src, dst = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
                self.backend.copy_blocks(self._pools[group], src, dst)
                continue
            if not self._host and self._host_blocks:
                self._host = self._allocate(self._host_blocks, torch.device("cpu"))
            if not self._host or sorted(tiers) != ["device", "host"]:
                raise RuntimeError(f"cannot copy KV blocks from {tiers[0]} to {tiers[1]}: there is no such pool")
            pools = {"device": self._pools[group], "host": self._host[group]}
            self.backend.move_blocks(pools[tiers[0]], pools[tiers[1]], pairs)

    def _prepare(self, batch: Batch) -> Inputs:
        return self._with_tokens(batch, self.backend.prepare(batch, self.device.torch))

    def _advance(self, step: Step) -> Inputs | None:
        """The inputs of the step before, one token further, where `step` is that."""
        if not step.advanced or self._inputs is None:
            return None
        meta = self._inputs[2]
        if meta.limits is not None:
            assert self._graphs is not None
            return self._graphs.advance(step.batch, step.longest, meta, step.moved)
        return self._with_tokens(step.batch, self.backend.advance(step.batch, meta, self.device.torch, step.moved))

    def _in_graph(self, step: Step) -> Inputs | None:
        """The inputs of the graph that serves `step`, if one does."""
        if self._graphs is None or step.counters is None:
            return None
        return self._graphs.prepare(step.batch, step.longest)

    def _with_tokens(self, batch: Batch, meta: Meta) -> Inputs:
        tokens, positions = meta.tokens, meta.positions
        if tokens is None or positions is None:  # the backend left them to us
            assert batch.tokens is not None and batch.positions is not None
            tokens, positions = self.device.send([batch.tokens, batch.positions])
        return tokens, positions, meta

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        tokens, _, meta = inputs
        if meta.limits is None:
            return self._eager(inputs)
        assert self._graphs is not None
        return self._graphs.replay(meta, len(tokens))

    def _eager(self, inputs: Inputs) -> torch.Tensor:
        assert self.model is not None
        tokens, positions, meta = inputs
        return self.model.forward(tokens, positions, self._caches, meta)

    def _scored(self, inputs: Inputs, scores: Scores) -> tuple[torch.Tensor, dict[str, tuple[Logprobs, ...]]]:
        """`_forward` where log-probabilities of prompts are wanted, and those."""
        assert self.model is not None
        tokens, positions, meta = inputs
        sampled = np.cumsum(meta.batch.lens)[meta.batch.samples] - 1
        rows = np.sort(np.concatenate((scores.rows, sampled)))
        places = [np.searchsorted(rows, some) for some in (scores.rows, sampled)]
        meta.logits_rows, following, *at = self.device.send([rows, scores.tokens, *places])
        states = self.model.states(tokens, positions, self._caches, meta)
        scored, last = (states.index_select(0, some) for some in at)
        return self.model.logits(last), score(self.model.logits, scored, following, scores)

    def _sample(self, logits: torch.Tensor, batch: RowBatch) -> Drawn:
        logits = logits.float()
        unmodified = torch.log_softmax(logits[batch.asked], -1) if batch.asked else None
        self.plugins.call("process_logits", logits=logits, batch=batch)
        batch.largest = self.backend.largest
        batch.likeliest, best = self.backend.argmax(logits)  # NaN if any is, infinite if all are masked
        if self.device.asynchronous:  # keep samplers out of what is not finite
            logits.masked_fill_(~best.isfinite()[:, None], 0.0)
        elif bad := not_finite(best):
            logits[list(bad)] = 0.0
        sampled = self.plugins.call("sample", logits=logits, batch=batch)
        tokens = getattr(sampled, "tokens", None)
        rows = len(logits)
        if not isinstance(tokens, torch.Tensor) or tokens.shape != (rows,) or tokens.dtype != torch.int64:
            raise self._fault("sample", f"answered {sampled!r}, not Sampled(int64 [{rows}])")
        empty = getattr(sampled, "empty", None)
        if empty is not None:
            best = best.masked_fill(empty, -math.inf)
        return Drawn(tokens, best, batch.asked, unmodified)

    def _checked(self, tokens: torch.Tensor, vocab: int) -> list[int]:
        chosen: list[int] = tokens.tolist()
        if min(chosen) < 0 or max(chosen) >= vocab:
            raise self._fault("sample", f"chose a token outside 0..{vocab - 1}")
        return chosen

    def _fault(self, hook: str, what: str) -> PluginError:
        name = self.settings.sampler
        return PluginError(f"plugin {name!r}: {hook}: {what}", name)


def not_finite(best: torch.Tensor) -> dict[int, str]:
    """Rows whose largest logit [rows] is NaN or infinite, and what that means."""
    values = best.tolist()
    if math.isfinite(sum(values)):  # in float64, where finite ones stay so
        return {}
    wrong = {row: value for row, value in enumerate(values) if not math.isfinite(value)}
    return {row: RULED_OUT if value == -math.inf else NOT_FINITE for row, value in wrong.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
