"""What planning costs per step: medians over many steps in which everybody decodes and no model runs.

    python benchmarks/planning.py [--scheduler fcfs] [--running 256] [--steps 300] [--check]

plan: ranking, walk and block allocation. commit: tokens appended, stops checked, outputs made. step: all of
`Engine.step`, around an executor that takes next to no time. stats: `Engine.stats`, which the engine process reports
after every step. All in microseconds. "full": no seat is free; "free": seats are, but the head of the queue finds no
memory. With --check the exit code is 1 if plan and commit together take 500 µs or more, or if a step with a full house
is slower with a queue of 10,000.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from common import finish, header

from framework import CacheGroup, CacheSpec, Capacity, Executor, Plan, SamplingParams, StepResult, Timings, hookimpl
from framework.engine import Engine
from framework.executor import Done
from framework.messages import Add
from framework.preemption import Limits
from framework.registry import load_plugins

TARGET_MICROSECONDS = 500
WAITING = 10_000
TOLERANCE = 1.15
"""Medians of two runs of the same work differ by as much on a shared machine."""


class NullExecutor(Executor):
    """Answers every sampled slice with the same token."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.cache_spec = CacheSpec(block_size, "bfloat16", (CacheGroup(30, 3, 64),))
        self._capacity = Capacity({"device": blocks, "host": 0})
        self._tokens: dict[str, tuple[int, ...]] = {}

    def start(self, progress: Callable[[str, float], None] = lambda stage, share: None) -> Capacity:
        return self._capacity

    def submit(self, plan: Plan) -> Done:
        if len(self._tokens) != len(plan.slices):
            self._tokens = {s.request_id: (7,) for s in plan.slices}
        return Done(StepResult(plan.step, self._tokens))

    def stop(self) -> None:
        pass


class Stages:
    """Microseconds of each stage, summed up per step."""

    def __init__(self) -> None:
        self.plan: list[float] = []
        self.commit: list[float] = []

    @hookimpl
    def step_done(self, timings: Timings) -> None:
        spent = dict.fromkeys(("admission", "kv_allocation", "commit"), 0)
        for stage, start, end in timings.stages:
            if stage in spent:
                spent[stage] += end - start
        self.plan.append((spent["admission"] + spent["kv_allocation"]) / 1e3)
        self.commit.append(spent["commit"] / 1e3)


class Costs(NamedTuple):
    """Medians in microseconds."""

    plan: float
    commit: float
    step: float
    stats: float

    @property
    def planning(self) -> float:
        return self.plan + self.commit

    @property
    def total(self) -> float:
        """All that a step costs beside the model."""
        return self.step + self.stats


def measure(scheduler: str, running: int, context: int, waiting: int, free: int, steps: int) -> Costs:
    """`free`: seats that stay empty because the watermark keeps who waits from all memory."""
    warm_up, block_size = 20, 16
    longest = context + steps + warm_up + 10
    executor = NullExecutor(running * (longest // block_size + 1), block_size)
    plugins = load_plugins()
    kv = plugins.create("kv", "paged", cache_spec=executor.cache_spec, capacity=executor.start())
    stages = Stages()
    plugins.add(plugins.create("scheduler", scheduler), scheduler)
    plugins.add(stages, "stages")
    limits = Limits(running * context, running)
    engine = Engine(plugins, executor, kv, limits, longest)
    prompt = list(range(context))
    params = SamplingParams(max_tokens=steps + warm_up + 5)
    for i in range(running + waiting):
        engine.add(Add(f"request-{i}", prompt, params, arrival=i + 1))
    engine.step()  # all that shall run are admitted
    engine.planner.limits = limits._replace(seats=running + free, watermark=kv.usage().total if free else 0)
    for _ in range(warm_up - 1):
        engine.step()
    stages.plan.clear()
    stages.commit.clear()
    gc.collect()
    step, stats = [], []
    for _ in range(steps):
        start = time.perf_counter_ns()
        outputs = engine.step()
        stepped = time.perf_counter_ns()
        engine.stats()
        stats.append((time.perf_counter_ns() - stepped) / 1e3)
        step.append((stepped - start) / 1e3)
        assert len(outputs) == running
    return Costs(*map(statistics.median, (stages.plan, stages.commit, step, stats)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", default="fcfs")
    parser.add_argument("--running", type=int, default=256, help="requests that decode in every step")
    parser.add_argument("--steps", type=int, default=300, help="steps measured per line")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a target is missed")
    args = parser.parse_args()
    header()
    print(f"{args.scheduler}, {args.running} decodes per step, medians of {args.steps} steps, in µs")
    heads = ("plan", "commit", "step", "stats", "plan+commit", "step+stats")
    print(f"{'context':>8}{'seats':>6}{'waiting':>8}" + "".join(f"{head:>{len(head) + 3}}" for head in heads))
    targets = []
    for context in (64, 8192):
        found: list[Costs] = []
        for waiting, free in ((0, 0), (WAITING, 0), (WAITING, 8)):
            costs = measure(args.scheduler, args.running, context, waiting, free, args.steps)
            found.append(costs)
            figures = (*costs, costs.planning, costs.total)
            row = "".join(f"{cost:{len(head) + 3}.0f}" for head, cost in zip(heads, figures, strict=True))
            print(f"{context:8}{'free' if free else 'full':>6}{waiting:8}{row}", flush=True)
        worst = max(costs.planning for costs in found)
        targets += [
            (f"plan and commit under {TARGET_MICROSECONDS} µs at context {context}", worst < TARGET_MICROSECONDS),
            (f"as fast with {WAITING} waiting", found[1].total < TOLERANCE * found[0].total),
        ]
    finish(args.check, targets)


if __name__ == "__main__":
    main()
