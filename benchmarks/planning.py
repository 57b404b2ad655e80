"""What planning costs per step: medians over many steps in which everybody decodes and no model runs.

    python benchmarks/planning.py [--scheduler fcfs] [--running 256] [--steps 300] [--check]

plan: ranking, walk and block allocation. commit: tokens appended, stops checked, outputs made. step: all of
`Engine.step`, around an executor that takes next to no time. stats: `Engine.stats`, which the engine process reports
after every step. All in microseconds. With --check the exit code is 1 if plan and commit together take 500 µs or more,
or if a step is slower with a queue of 10,000.
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
WAITING = (0, 10_000)
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


def measure(scheduler: str, running: int, context: int, waiting: int, steps: int) -> Costs:
    warm_up, block_size = 20, 16
    longest = context + steps + warm_up + 10
    executor = NullExecutor(running * (longest // block_size + 1), block_size)
    plugins = load_plugins()
    kv = plugins.create("kv", "paged", cache_spec=executor.cache_spec, capacity=executor.start())
    stages = Stages()
    plugins.add(plugins.create("scheduler", scheduler), scheduler)
    plugins.add(stages, "stages")
    engine = Engine(plugins, executor, kv, Limits(running * context, running), longest)
    prompt = list(range(context))
    params = SamplingParams(max_tokens=steps + warm_up + 5)
    for i in range(running + waiting):
        engine.add(Add(f"request-{i}", prompt, params, arrival=i + 1))
    for _ in range(warm_up):
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
    print(
        f"{'context':>8}{'waiting':>9}{'plan':>8}{'commit':>8}{'step':>8}{'stats':>8}{'plan+commit':>13}{'step+stats':>12}"
    )
    targets = []
    for context in (64, 8192):
        alone, queued = (measure(args.scheduler, args.running, context, waiting, args.steps) for waiting in WAITING)
        for waiting, costs in zip(WAITING, (alone, queued), strict=True):
            row = "".join(f"{cost:8.0f}" for cost in costs)
            print(f"{context:8}{waiting:9}{row}{costs.planning:13.0f}{costs.total:12.0f}", flush=True)
        worst = max(alone.planning, queued.planning)
        targets += [
            (f"plan and commit under {TARGET_MICROSECONDS} µs at context {context}", worst < TARGET_MICROSECONDS),
            (f"as fast with {WAITING[1]} waiting", queued.total < TOLERANCE * alone.total),
        ]
    finish(args.check, targets)


if __name__ == "__main__":
    main()
