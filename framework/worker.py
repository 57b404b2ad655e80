"""The torch executor: loads the model, owns the KV pool, and runs plans in this process."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from . import machine
from .batch import Array, RowBatch, Rows, Step
from .defaults import model_class
from .errors import ConfigError, ModelError, PluginError
from .executor import Done, Executor, Pending
from .kernels import Batch, KernelBackend, Meta, Quantized
from .kv import KV_DTYPES, Capacity
from .model import Checkpoint, Model
from .plan import Copy, Logprobs, Plan, StepResult
from .registry import Plugins
from .settings import DEFAULT_KV_MEMORY, Settings, host_blocks, parse_memory

Inputs = tuple[torch.Tensor, torch.Tensor, Meta]
MEASURE_SECONDS = 0.05
MEASURE_TOKENS = 128
"""A prefill that takes longer, of at least so many tokens, tells how fast the model is: a short one reads all weights
for few tokens."""
MEASURE_BLOCKS = 64
"""Blocks moved to tell how fast blocks move."""


class TorchExecutor(Executor):
    """Runs each plan during `submit`: copies, one ragged forward pass, logits hooks, `sample`.

    After `start`: `spec`, `backend`, `model`, `cache_spec`, `dtype_name`, `device_name`, `threads`, `backend_name`.
    A step that raises leaves everything known of the requests in place; whoever ran is expected again in `Plan.new`.
    """

    backend: KernelBackend
    device_name: str

    def __init__(self, settings: Settings, plugins: Plugins, checkpoint: Checkpoint) -> None:
        self.settings = settings
        self.plugins = plugins
        self.checkpoint = checkpoint
        self.model: Model | None = None
        self.device = torch.device("cpu")
        self._pools: list[list[Any]] = []
        self._host: list[list[Any]] = []  # made when something is first swapped out
        self._host_blocks = 0
        self._caches: list[Any] = []
        self._rows = Rows(0, 1)
        self._inputs: Inputs | None = None  # of the last step

    # Start

    @torch.inference_mode()
    def start(self, progress: Callable[[str, float], None] = lambda stage, share: None) -> Capacity:
        settings, config = self.settings, self.checkpoint.config
        self.device = resolve_device(settings.device)
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
        dtype = resolve_dtype(settings.dtype, self.device)
        self.dtype_name = _name(dtype)
        call, known = self.plugins.call, {"dtype": dtype, "device": self.device}
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

        tensors = map(seen, self.checkpoint.stored(self.model.formats))  # unlike a generator, it holds none
        self.model.load(tensors, lambda: progress("load weights", min(1.0, next(loaded) / total)))
        if packed:
            self.notes += [f"weights stay quantised, as the file has them: {', '.join(sorted(packed))}"]
        spec = self.model.cache_spec(settings.block_size)
        if settings.kv_dtype != "auto":
            spec = replace(spec, dtype=KV_DTYPES[settings.kv_dtype])
        self.cache_spec = spec
        cache_dtype: torch.dtype = getattr(torch, spec.dtype)
        block_bytes = sum(self.backend.block_bytes(g, cache_dtype, spec.block_size) for g in spec.groups)
        blocks = self._blocks(block_bytes)
        self._host_blocks = self._swap_blocks(blocks, block_bytes)
        self._pools = self._allocate(blocks, self.device)
        self._caches = [cache for pool in self._pools for cache in pool]
        self._rows = Rows(len(spec.groups), spec.block_size, settings.max_num_seqs)
        progress("warm up", 0.0)
        self._warm_up(blocks, block_bytes)
        progress("warm up", 1.0)
        cuda = self.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(self.device) if cuda else machine.cpu_name()
        return Capacity({"device": blocks, "host": self._host_blocks}, block_bytes, self.device_name)

    def _allocate(self, blocks: int, device: torch.device) -> list[list[Any]]:
        """A pool on `device`; on the host of a GPU, in memory that the GPU can copy to and from by itself."""
        spec = self.cache_spec
        pinned = {"pinned": True} if device.type != self.device.type else {}
        dtype: torch.dtype = getattr(torch, spec.dtype)
        try:
            return [self.backend.allocate(g, dtype, spec.block_size, blocks, device, **pinned) for g in spec.groups]
        except OSError as error:
            size = machine.size(blocks * sum(self.backend.block_bytes(g, dtype, spec.block_size) for g in spec.groups))
            raise ConfigError(
                f"a KV pool of {size} cannot be had ({error.strerror}); give less with --kv-memory, --kv-blocks or "
                "--swap-space"
            ) from error

    def _swap_blocks(self, blocks: int, block_bytes: int) -> int:
        """Size of the host tier. Raises `ConfigError`, with the numbers, where it does not fit."""
        space = self.settings.swap_space
        count = host_blocks(space, blocks, block_bytes)
        free = machine.free_memory() - (0 if self.device.type == "cuda" else blocks * block_bytes)
        if space is None:  # nobody relies on it
            return min(count, max(0, free) // block_bytes)
        if count * block_bytes > free:
            raise ConfigError(
                f"--swap-space {space}: {machine.size(count * block_bytes)} are more than the {machine.size(free)} of "
                "host memory that are free; give less, or 0"
            )
        return count

    def _blocks(self, block_bytes: int) -> int:
        """Size of the pool. Raises `ConfigError`, with the numbers, where it does not fit."""
        settings, block_size = self.settings, self.settings.block_size
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else machine.free_memory()
        if settings.kv_blocks is not None:
            blocks, field = settings.kv_blocks, f"--kv-blocks {settings.kv_blocks}"
        else:
            memory = settings.kv_memory or DEFAULT_KV_MEMORY
            amount, field = parse_memory(memory), f"--kv-memory {memory}"
            budget = int(amount * free) if isinstance(amount, float) else amount
            blocks = budget // block_bytes
            if blocks < 1:
                raise ConfigError(
                    f"{field}: {machine.size(budget)} do not hold one KV block of {block_size} tokens "
                    f"({machine.size(block_bytes)}); give at least {block_bytes} bytes"
                )
            if settings.kv_memory is None:  # take no more than could ever be used
                longest = min(settings.max_model_len or self.spec.max_model_len, self.spec.max_model_len)
                blocks = min(blocks, settings.max_num_seqs * -(-longest // block_size))
        if blocks * block_bytes > free:
            raise ConfigError(
                f"{field}: a KV pool of {machine.size(blocks * block_bytes)} ({blocks} blocks of "
                f"{machine.size(block_bytes)}) is more than the {machine.size(free)} free; give less"
            )
        return blocks

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
        batch = Batch(np.zeros(1, np.int32), lens, (table,) * len(self.cache_spec.groups), samples, size)
        begin = self._now()
        self._forward(self._prepare(batch, np.zeros(count, np.int64), np.arange(count, dtype=np.int64)))
        return max(self._now() - begin, 1e-9)

    def _now(self) -> float:
        """Seconds, once all that was asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def stop(self) -> None:
        self.model, self._pools, self._host, self._caches, self._inputs = None, [], [], [], None
        self._rows = Rows(0, 1)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # Steps

    def submit(self, plan: Plan) -> Pending:
        try:
            return Done(self._run(plan))
        except Exception as error:  # noqa: BLE001 - raised again by `result`: the engine decides who is retried
            return Done(error)

    @torch.inference_mode()
    def _run(self, plan: Plan) -> StepResult:
        ns = self.clock.ns
        begin, rows = ns(), self._rows
        rows.update(plan)
        self._copy(plan.copies)
        copied = tuple(copy.ticket for copy in plan.copies if copy.ticket)
        if not plan.slices:
            return StepResult(plan.step, copied=copied, stages=(("batch_build", begin, ns()),))
        step = rows.build(plan)
        inputs = self._inputs = self._advance(step) or self._prepare(step.batch, step.tokens, step.positions)
        built = ns()
        logits = self._forward(inputs)
        forwarded = ns()  # on a GPU only launched: the wait for it shows under sampling
        tokens: dict[str, tuple[int, ...]] = {}
        logprobs: dict[str, tuple[Logprobs, ...]] = {}
        errors: dict[str, str] = {}
        if step.sampled is not None:
            ids = step.sampled.ids
            chosen, bad, details = self._sample(logits, step.sampled)
            rows.commit(step, chosen, bad)
            tokens = dict(zip(ids, zip(chosen, strict=True), strict=True))
            for at in bad:
                del tokens[ids[at]]
                errors[ids[at]] = "the model's logits are not finite (NaN, or nothing left to choose from)"
            logprobs = {ids[at]: (found,) for at, found in details.items() if ids[at] in tokens}
        stages = (
            ("batch_build", begin, built),
            ("forward", built, forwarded),
            ("sampling", forwarded, ns()),
        )
        return StepResult(plan.step, tokens=tokens, logprobs=logprobs, copied=copied, errors=errors, stages=stages)

    def _copy(self, copies: Iterable[Copy]) -> None:
        """In order; neighbours within one group and pair of tiers go together."""
        for (group, *tiers), some in itertools.groupby(copies, lambda c: (c.group, c.src_tier, c.dst_tier)):
            pairs = [(c.src, c.dst) for c in some]
            if tiers == ["device", "device"]:
                src, dst = torch.tensor(pairs, dtype=torch.int64).to(self.device).T.contiguous()
                self.backend.copy_blocks(self._pools[group], src, dst)
                continue
            if not self._host and self._host_blocks:
                self._host = self._allocate(self._host_blocks, torch.device("cpu"))
            if not self._host or sorted(tiers) != ["device", "host"]:
                raise RuntimeError(f"cannot copy KV blocks from {tiers[0]} to {tiers[1]}: there is no such pool")
            pools = {"device": self._pools[group], "host": self._host[group]}
            self.backend.move_blocks(pools[tiers[0]], pools[tiers[1]], pairs)

    def _prepare(self, batch: Batch, tokens: Array, positions: Array) -> Inputs:
        meta = self.backend.prepare(batch, self.device)
        return (
            torch.from_numpy(tokens).to(self.device, non_blocking=True),
            torch.from_numpy(positions).to(self.device, non_blocking=True),
            meta,
        )

    def _advance(self, step: Step) -> Inputs | None:
        """The inputs of the step before, one token further, where `step` is that."""
        if not step.advanced or self._inputs is None:
            return None
        tokens, positions, meta = self._inputs
        if self.device.type != "cpu":  # else they are the step's own arrays
            tokens.copy_(torch.from_numpy(step.tokens), non_blocking=True)
            positions.copy_(torch.from_numpy(step.positions), non_blocking=True)
        return tokens, positions, self.backend.advance(step.batch, meta, self.device, step.moved)

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        assert self.model is not None
        tokens, positions, meta = inputs
        return self.model.forward(tokens, positions, self._caches, meta)

    def _sample(self, logits: torch.Tensor, batch: RowBatch) -> tuple[list[int], list[int], dict[int, Logprobs]]:
        """(tokens, rows whose logits are not finite, log-probabilities of the rows that asked)."""
        asked = batch.asked
        logits = logits.float()
        unmodified = torch.log_softmax(logits[asked], -1) if asked else None
        self.plugins.call("process_logits", logits=logits, batch=batch)
        batch.likeliest, best = self.backend.argmax(logits)  # NaN if any is, infinite if all are masked
        values, bad = best.tolist(), []
        if not math.isfinite(sum(values)):  # in float64, where finite ones stay so
            bad = [row for row, value in enumerate(values) if not math.isfinite(value)]
            logits[bad] = 0.0  # keep samplers out of it
        sampled = self.plugins.call("sample", logits=logits, batch=batch)
        tokens = getattr(sampled, "tokens", None)
        rows, vocab = logits.shape
        if not isinstance(tokens, torch.Tensor) or tokens.shape != (rows,) or tokens.dtype != torch.int64:
            raise self._fault("sample", f"answered {sampled!r}, not Sampled(int64 [{rows}])")
        chosen: list[int] = tokens.tolist()
        if min(chosen) < 0 or max(chosen) >= vocab:
            raise self._fault("sample", f"chose a token outside 0..{vocab - 1}")
        details: dict[int, Logprobs] = {}
        if unmodified is not None:
            counts = [batch.params[row].logprobs or 0 for row in asked]
            details = dict(zip(asked, log_probabilities(unmodified, tokens[asked], counts), strict=True))
        return chosen, bad, details

    def _fault(self, hook: str, what: str) -> PluginError:
        name = self.settings.sampler
        return PluginError(f"plugin {name!r}: {hook}: {what}", name)


def log_probabilities(logprobs: torch.Tensor, chosen: torch.Tensor, counts: list[int]) -> list[Logprobs]:
    """For each row of log-probabilities [rows, vocab]: of the token chosen, and of the counts[row] likeliest.

    Equal ones are listed by token id, so the list does not depend on who shares the batch.
    """
    own = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    most = min(max(counts), logprobs.shape[1])
    tops: list[list[tuple[int, float]]] = [[] for _ in counts]
    if most:
        # A row's k-th value is its threshold; ties at it make more than k candidates, cut after sorting.
        kth = torch.tensor([max(0, min(k, most) - 1) for k in counts], device=logprobs.device)
        least = logprobs.topk(most).values.gather(1, kth[:, None])
        at = (logprobs >= least).nonzero(as_tuple=True)
        row, token, value = (x.cpu().numpy() for x in (*at, logprobs[at]))
        for entry in np.lexsort((token, -value, row)):
            if len(tops[row[entry]]) < counts[row[entry]]:
                tops[row[entry]].append((int(token[entry]), float(value[entry])))
    return [
        Logprobs(token, value, rank, tuple(top))
        for token, value, rank, top in zip(chosen.tolist(), own[:, 0].tolist(), ranks.tolist(), tops, strict=True)
    ]


def resolve_device(name: str) -> torch.device:
    """The device of `--device`. Raises `ConfigError` for one that cannot be used here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            reason = "this build of torch has no CUDA" if torch.version.cuda is None else "no CUDA device is usable"
            raise ConfigError(f"--device {name}: {reason}; use --device cpu or auto")
        found = torch.cuda.device_count()
        if (device.index or 0) >= found:
            raise ConfigError(f"--device {name}: this machine has cuda:0 to cuda:{found - 1}")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of `--dtype`. auto: bfloat16 where the hardware computes in it, else float32."""
    if name == "auto":
        name = "bfloat16" if _has_bfloat16(device) else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware computes in bfloat16, by torch's own account of it: emulation is slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Which of these exist differs between versions of torch; what it cannot tell counts as missing.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    features = ("avx512_bf16", "amx_bf16", "bf16")
    return any(bool(capabilities.get(f) or getattr(torch.cpu, f"_is_{f}_supported", bool)()) for f in features)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
