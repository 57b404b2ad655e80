"""The torch executor driven by plans made by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from framework import (
    Copy,
    Delta,
    Plan,
    RequestData,
    SampleBatch,
    SamplingParams,
    Slice,
    StepResult,
    hookimpl,
)
from framework.checkpoint import open_checkpoint
from framework.plan import Preempted
from framework.registry import load_plugins
from framework.settings import Settings
from framework.types import Mode
from framework.worker import TorchExecutor

BLOCK = 4
BLOCKS = 96
GREEDY = SamplingParams(temperature=0)


class Spy:
    """A logits processor that remembers its batches and does to the logits what a test says."""

    def __init__(self) -> None:
        self.change: Callable[[torch.Tensor, SampleBatch], None] = lambda logits, batch: None
        self.added: list[tuple[str, ...]] = []
        self.removed: list[tuple[str, ...]] = []
        self.seen: list[dict[str, tuple[list[int], list[int], int]]] = []

    @hookimpl
    def process_logits(self, logits: torch.Tensor, batch: SampleBatch) -> None:
        assert logits.dtype == torch.float32 and len(logits) == len(batch.owner)
        self.added.append(tuple(batch.added))
        self.removed.append(tuple(batch.removed))
        self.seen.append(
            {
                id: (batch.prompt_tokens(id).tolist(), batch.output_tokens(id).tolist(), length)
                for id, length in zip(batch.ids, batch.output_len, strict=True)
            }
        )
        self.change(logits, batch)


def build(model: Path, spy: Spy | None = None, **options: Any) -> TorchExecutor:
    settings = Settings(
        **{
            "model": str(model),
            "device": "cpu",
            "dtype": "float32",
            "threads": 1,
            "block_size": BLOCK,
            "kernel": "torch",  # blocks this small: not every backend has them
            "kv_blocks": BLOCKS,
            "max_num_seqs": 8,
            **options,
        }
    )
    plugins = load_plugins([("spy", spy)] if spy else [])
    plugins.activate(settings, engine=True)
    return TorchExecutor(settings, plugins, open_checkpoint(settings, plugins))


class Driver:
    """Makes plans by hand. Blocks come from a shuffled pool, so that no table is contiguous."""

    def __init__(self, executor: TorchExecutor, seed: int = 0) -> None:
        self.executor = executor
        self.free = list(range(BLOCKS))
        random.Random(seed).shuffle(self.free)
        self.tokens: dict[str, list[int]] = {}
        self.prompt_len: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.data: dict[str, tuple[SamplingParams, int]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.new: list[str] = []
        self.gone: list[str] = []
        self.preempted: list[str] = []
        self.steps = 0

    def add(self, id: str, prompt: Sequence[int], params: SamplingParams = GREEDY, seed: int = 0) -> None:
        self.tokens[id], self.prompt_len[id] = list(prompt), len(prompt)
        self.data[id], self.logprobs[id] = (params, seed), []
        self.resume(id)

    def resume(self, id: str) -> None:
        self.computed[id], self.blocks[id] = 0, []
        self.new.append(id)

    def release(self, id: str, preempt: bool = False) -> None:
        self.free += self.blocks.pop(id)
        (self.preempted if preempt else self.gone).append(id)

    def plan(self, wants: dict[str, int], copies: Sequence[Copy] = ()) -> Plan:
        slices = []
        for id, most in wants.items():
            start, known, table = self.computed[id], len(self.tokens[id]), self.blocks[id]
            count = min(most, known - start)
            first = len(table)
            table += [self.free.pop() for _ in range(-(-(start + count) // BLOCK) - first)]
            deltas = (Delta(0, first, tuple(table[first:])),) if len(table) > first else ()
            slices.append(Slice(id, start, count, deltas, start + count == known))
        plan = Plan(
            self.steps,
            new=tuple(RequestData(id, list(self.tokens[id]), self.prompt_len[id], *self.data[id]) for id in self.new),
            slices=tuple(slices),
            copies=tuple(copies),
            preempted=tuple(Preempted(id, Mode.RECOMPUTE) for id in self.preempted),
            finished=tuple(self.gone),
        )
        self.steps += 1
        self.new, self.gone, self.preempted = [], [], []
        return plan

    def commit(self, plan: Plan, result: StepResult) -> None:
        for s in plan.slices:
            self.computed[s.request_id] += s.tokens
            assert (s.request_id in result.tokens or s.request_id in result.errors) == s.samples
            self.tokens[s.request_id] += result.tokens.get(s.request_id, ())
            self.logprobs[s.request_id] += result.logprobs.get(s.request_id, ())

    def step(self, wants: dict[str, int], copies: Sequence[Copy] = ()) -> StepResult:
        plan = self.plan(wants, copies)
        result = self.executor.submit(plan).result()
        assert result.step == plan.step
        self.commit(plan, result)
        return result

    def output(self, id: str) -> list[int]:
        return self.tokens[id][self.prompt_len[id] :]

    def run(self, id: str, count: int, chunk: int = 10**6) -> list[int]:
        while len(self.output(id)) < count:
            self.step({id: chunk})
        return self.output(id)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100, 250), k=length)
