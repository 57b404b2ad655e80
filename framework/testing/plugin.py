"""Makes the executors of this package selectable: `--executor checking`, `--executor scripted`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from ..errors import ConfigError
from ..hookspecs import hookimpl
from ..settings import host_blocks
from ..types import Provider

if TYPE_CHECKING:
    from ..executor import Executor
    from ..model import Checkpoint
    from ..settings import Settings
    from .checking import CheckingExecutor


MAX_BLOCKS = 2**22
"""Of a tier. No memory stands behind them, so that nothing else keeps them to what can be listed."""


class ExecutorOptions(BaseModel, extra="forbid"):
    """Options of the executors without a model."""

    blocks: int = Field(1024, ge=1, description="Blocks in the pool where --kv-blocks is not set.")
    delay: float = Field(0.0, ge=0, description="Seconds each step takes.")


def _checking(options: ExecutorOptions, settings: Settings, checkpoint: Checkpoint) -> Executor:
    from .checking import CheckingExecutor

    return _make(CheckingExecutor, options, settings, checkpoint)


def _scripted(options: ExecutorOptions, settings: Settings, checkpoint: Checkpoint) -> Executor:
    from .scripted import ScriptedExecutor

    return _make(ScriptedExecutor, options, settings, checkpoint)


def _make(
    kind: type[CheckingExecutor], options: ExecutorOptions, settings: Settings, checkpoint: Checkpoint
) -> Executor:
    config = checkpoint.config  # the server still needs a checkpoint: for its tokenizer, and for these limits
    blocks = settings.kv_blocks or options.blocks
    host = host_blocks(settings.swap_space, blocks, 2**10 * settings.block_size)
    for field, count in (("--kv-blocks", blocks), ("--swap-space", host)):
        if count > MAX_BLOCKS:
            raise ConfigError(f"{field}: {count} blocks are more than the {MAX_BLOCKS} of {settings.executor!r}")
    return kind(
        blocks,
        settings.block_size,
        host_blocks=host,
        vocab_size=config["vocab_size"],
        max_model_len=config.get("max_position_embeddings", 2048),
        token_budget=settings.max_num_batched_tokens,
        seats=settings.max_num_seqs,
        cost=lambda plan: options.delay,
    )


@hookimpl
def providers() -> Iterable[Provider]:
    return [
        Provider("executor", "checking", _checking, ExecutorOptions, summary="no model: checks plans, random tokens"),
        Provider("executor", "scripted", _scripted, ExecutorOptions, summary="no model: checks plans, echoes prompts"),
    ]
