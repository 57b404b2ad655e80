"""From settings to a running engine: load, measure, check, in the order that the contract promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from . import machine
from .checkpoint import display_name, open_checkpoint
from .defaults import Defaults
from .engine import Engine
from .errors import ConfigError
from .executor import Executor
from .kv import KVCache
from .messages import EngineInfo
from .model import Checkpoint
from .preemption import Costs, Limits
from .registry import Plugins
from .settings import Settings
from .types import Mode, Request, SamplingParams

Progress = Callable[[str, float], None]
WATERMARK = 0.01
"""Share of the pool that admissions leave available, so that running requests can grow a little before they evict."""


def build_engine(
    settings: Settings,
    plugins: Plugins,
    checkpoint: Checkpoint | None = None,
    progress: Progress = lambda stage, share: None,
) -> tuple[Engine, EngineInfo]:
    """Start the executor and make the engine. `plugins` must be activated.

    Raises `ConfigError`, `ModelError` or `PluginError`, each saying what to change.
    """
    began = time.monotonic()
    checkpoint = checkpoint or open_checkpoint(settings, plugins)
    for plugin in plugins.active(Defaults):
        plugin.checkpoint = checkpoint
    executor = plugins.call("executor", Executor, settings=settings)
    try:
        capacity = executor.start(progress)
        kv: KVCache = plugins.call(
            "kv_cache", KVCache, settings=settings, cache_spec=executor.cache_spec, capacity=capacity
        )
        spec = executor.spec
        max_model_len, reason = _max_model_len(settings, kv, spec.max_model_len)
        blocks = kv.usage().total
        host_blocks = capacity.blocks.get("host", 0) if kv.swaps else 0
        if settings.preemption == "swap" and not kv.swaps:
            raise ConfigError(f"--preemption swap: --kv {settings.kv} does not swap; use recompute or auto")
        preemption = "recompute" if settings.preemption == "auto" and not host_blocks else settings.preemption
        limits = Limits(
            tokens=settings.max_num_batched_tokens,
            seats=settings.max_num_seqs,
            watermark=int(blocks * WATERMARK),
            strict=settings.strict_plugins,
            preemption=None if preemption == "auto" else Mode(preemption),
            costs=Costs(executor.copy_rate, executor.compute_rate, capacity.block_bytes),
        )
        engine = Engine(plugins, executor, kv, limits, max_model_len, settings.seed)
    except BaseException:
        executor.stop()
        raise
    overlapped = executor.max_in_flight > 1
    takes = f"--executor {settings.executor} takes one plan at a time"
    ignored = [f"--overlap on has no effect: {takes}"] if settings.overlap == "on" and not overlapped else []
    info = EngineInfo(
        model=display_name(settings),
        architecture=spec.architecture,
        dtype=executor.dtype_name,
        device=capacity.device,
        device_type=executor.device_type,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        max_model_len_reason=reason,
        block_size=executor.cache_spec.block_size,
        kv_blocks=blocks,
        block_bytes=capacity.block_bytes,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        threads=executor.threads,
        providers={
            "scheduler": settings.scheduler,
            "kv": settings.kv,
            "kernel": executor.backend_name or settings.kernel,
            "sampler": settings.sampler,
            "executor": settings.executor,
        },
        manifest=dict(plugins.manifest),
        load_seconds=time.monotonic() - began,
        notes=[*executor.notes, *ignored],
        uses=sorted(set(_used(settings, plugins))),
        host_blocks=host_blocks,
        preemption=preemption,
        copy_rate=executor.copy_rate,
        compute_rate=executor.compute_rate,
        quantization=settings.quantization,
        kv_dtype=executor.cache_spec.dtype,
        cpus=machine.allowed(),
        overlap=overlapped,
        logits=executor.checkpoint is not None,
    )
    return engine, info


def _used(settings: Settings, plugins: Plugins) -> Iterator[str]:
    yield from plugins.get("scheduler", settings.scheduler).uses
    for name in settings.plugin:
        yield from plugins.get("plugin", name).uses


def _max_model_len(settings: Settings, kv: KVCache, model_limit: int) -> tuple[int, str]:
    """The longest prompt plus output, and what decided it: "set", "model" or "pool"."""
    pool = _longest(kv, model_limit)
    wanted = settings.max_model_len
    if pool < 2:
        raise ConfigError(
            f"the KV pool of {kv.usage().total} blocks of {settings.block_size} tokens cannot hold one request; "
            "raise --kv-memory or --kv-blocks"
        )
    if wanted is None:
        return (model_limit, "model") if pool >= model_limit else (pool, "pool")
    if wanted > model_limit:
        raise ConfigError(f"--max-model-len {wanted} is over the model's limit of {model_limit} tokens; lower it")
    if wanted > pool:
        raise ConfigError(
            f"--max-model-len {wanted} does not fit: the KV pool of {kv.usage().total} blocks of {settings.block_size} "
            f"tokens holds {pool} tokens; lower it, or raise --kv-memory or --kv-blocks"
        )
    return wanted, "set"


def _longest(kv: KVCache, most: int) -> int:
    """The longest request, up to `most` tokens, that the empty pool can hold: by bisection, as peak may be capped by
    a window."""
    probe = Request("probe", [0], SamplingParams())
    total = kv.usage().total
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if kv.peak(probe, middle) <= total:
            low = middle
        else:
            high = middle - 1
    return low
