"""What schedulers and KV caches make of one load: a slice of a request trace, served by one combination after another.

    python benchmarks/policies.py --trace PATH [--requests 200] [--first 0] [--divide 4] [--speed 2] [--check]

PATH is a CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens: Azure's LLM inference trace
(https://github.com/Azure/AzurePublicDataset) has them. Requests come when the trace says, `--speed` times as fast,
whether or not the engine keeps up. Prompts are random tokens; the first half of each is the beginning of one of four
texts, so that a prefix cache has something to find. Priorities are 0, 1 or 2 at random. All rows get the same load.

Requests set no max_tokens unless --max-tokens says so, and each is ended at its length in the trace, as a stop string
would: before its end nobody knows how long an answer gets, so `contiguous` reserves --max-model-len tokens for each.
Pool and --seats, the limit of running requests, are the same in all rows: eight requests of full length fit into the
default pool, so `contiguous` never runs more.

    output, all    tokens generated per second; and with those of the prompts
    running        requests in a step, mean; idle: share of a static batch's slots whose request has ended
    TTFT           seconds from the arrival to the first token; urgent: of the requests of priority 0, median
    ITL            milliseconds between two tokens of a request
    KV             share of the allocated memory that holds tokens, after each step, weighted by the step's time
    swap, drop     preemptions by what became of the blocks; again: tokens computed not for the first time
    hits           tokens found in the prefix cache

With --check the exit code is 1 unless paged holds tokens in over 95% of what it allocates and contiguous in under 40%,
static takes 1.5 times the steps of fcfs with the same cache, and swapping computes nothing again.
"""

from __future__ import annotations

import argparse
import csv
import gc
import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common import finish, header, percentile

from framework import LLM, SamplingParams
from framework.machine import size
from framework.messages import Add

STATIC, FCFS, PAGED = "static, contiguous", "fcfs, contiguous", "fcfs, paged"
SWAP, RECOMPUTE = "priority, paged, swap", "priority, paged, recompute"
ROWS: dict[str, dict[str, Any]] = {
    STATIC: {"scheduler": "static", "kv": "contiguous"},
    FCFS: {"scheduler": "fcfs", "kv": "contiguous"},
}
for _name, _flags in {
    PAGED: {"scheduler": "fcfs", "kv": "paged"},
    SWAP: {"scheduler": "priority", "kv": "paged", "preemption": "swap"},
    RECOMPUTE: {"scheduler": "priority", "kv": "paged", "preemption": "recompute"},
}.items():
    ROWS |= {_name: {**_flags, "prefix_cache": False}, f"{_name}, prefix cache": {**_flags, "prefix_cache": True}}
WIDTH = max(map(len, ROWS))


class Visit(NamedTuple):
    """One request of the load: seconds after the first one, its prompt, and how many tokens it gets."""

    at: float
    prompt: list[int]
    output: int
    priority: int


class Figures(NamedTuple):
    """A row of the table. Times are in seconds, shares 0..1, rates in tokens per second."""

    rate: float
    total_rate: float
    seconds: float
    steps: int
    running: float
    idle: float | None
    """None: the scheduler is not static."""
    first_p50: float
    first_p99: float
    first_urgent: float
    gap_p50: float
    gap_p99: float
    holding: float
    swapped: int
    dropped: int
    recomputed: int
    hits: int


COLUMNS: tuple[tuple[str, int, Callable[[Figures], str]], ...] = (
    ("output/s", 9, lambda f: f"{f.rate:.1f}"),
    ("all/s", 8, lambda f: f"{f.total_rate:.0f}"),
    ("seconds", 8, lambda f: f"{f.seconds:.1f}"),
    ("steps", 7, lambda f: f"{f.steps}"),
    ("running", 8, lambda f: f"{f.running:.1f}"),
    ("idle", 6, lambda f: "-" if f.idle is None else f"{f.idle:.0%}"),
    ("TTFT p50", 9, lambda f: f"{f.first_p50:.2f}"),
    ("p99", 7, lambda f: f"{f.first_p99:.2f}"),
    ("urgent", 7, lambda f: f"{f.first_urgent:.2f}"),
    ("ITL p50", 8, lambda f: f"{1e3 * f.gap_p50:.0f}"),
    ("p99", 6, lambda f: f"{1e3 * f.gap_p99:.0f}"),
    ("KV", 7, lambda f: f"{f.holding:.1%}"),
    ("swap", 5, lambda f: f"{f.swapped}"),
    ("drop", 5, lambda f: f"{f.dropped}"),
    ("again", 7, lambda f: f"{f.recomputed}"),
    ("hits", 7, lambda f: f"{f.hits}"),
)


def read_load(options: argparse.Namespace, vocab: int) -> list[Visit]:
    """The slice of the trace, lengths divided by `--divide`; a prompt too long for --max-model-len is cut."""
    with options.trace.open(newline="") as file:
        rows = list(islice(csv.DictReader(file), options.first, options.first + options.requests))
    if not rows:
        raise SystemExit(f"{options.trace} has no row {options.first}: give a smaller --first")
    rng = random.Random(1)
    token = range(min(300, vocab // 2), min(vocab, 40000))
    texts = [rng.choices(token, k=options.max_model_len) for _ in range(4)]
    begin = datetime.fromisoformat(rows[0]["TIMESTAMP"])
    load = []
    for row in rows:
        at = (datetime.fromisoformat(row["TIMESTAMP"]) - begin).total_seconds() / options.speed
        output = max(1, int(row["GeneratedTokens"]) // options.divide)
        output = min(output, options.max_tokens or output, options.max_model_len - 1)
        length = min(max(1, int(row["ContextTokens"]) // options.divide), options.max_model_len - output)
        prompt = [*rng.choice(texts)[: length // 2], *rng.choices(token, k=length - length // 2)]
        load.append(Visit(at, prompt, output, rng.randrange(3)))
    return load


def serve(llm: LLM, load: Sequence[Visit], max_tokens: int | None) -> Figures:
    """Serve the load, step by step."""
    engine, ns = llm.engine, llm.engine.clock.ns
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    coming = list(enumerate(load))[::-1]
    left = {str(i): visit.output for i, visit in enumerate(load)}
    last: dict[str, float] = {}  # when the latest token of each request came
    firsts: list[tuple[float, int]] = []  # and the request's priority
    gaps: list[float] = []
    ran = slots = slot_steps = 0
    token_seconds = room_seconds = 0.0
    start = ns()
    while coming or engine.has_work:
        before = (ns() - start) / 1e9
        while coming and coming[-1][1].at <= before:
            i, visit = coming.pop()
            arrival = start + round(visit.at * 1e9)
            for refusal in engine.add(Add(str(i), visit.prompt, params, arrival, visit.priority)):
                raise SystemExit(refusal.error)
        if not engine.has_work:
            time.sleep(coming[-1][1].at - before)
            continue
        outputs = engine.step()
        now = (ns() - start) / 1e9
        for output in outputs:
            if output.error is not None:
                raise SystemExit(output.error)
            visit = load[int(output.id)]
            if output.index == 0:
                firsts.append((now - visit.at, visit.priority))
            else:
                gaps.append(now - last[output.id])
            last[output.id] = now
            left[output.id] -= len(output.tokens)
        ended = [output.id for output in outputs if not left[output.id]]
        engine.abort(ended, "stop")
        stats = engine.stats()
        running = stats.running + len(ended)  # in the step
        slots = max(slots, running)
        ran, slot_steps = ran + running, slot_steps + slots
        if not stats.running:
            slots = 0  # the batch is over
        token_seconds += (now - before) * stats.kv_tokens
        room_seconds += (now - before) * (stats.kv_holding + stats.kv_reserved) * llm.info.block_size
    assert not any(left.values()), "requests got other lengths than the load says"
    seconds = max(last.values())
    generated, prompts = sum(visit.output for visit in load), sum(len(visit.prompt) for visit in load)
    return Figures(
        generated / seconds,
        (generated + prompts) / seconds,
        seconds,
        stats.step,
        ran / stats.step,
        1 - ran / slot_steps if llm.settings.scheduler == "static" else None,
        percentile([first for first, _ in firsts], 50),
        percentile([first for first, _ in firsts], 99),
        percentile([first for first, priority in firsts if priority == 0], 50),
        percentile(gaps, 50),
        percentile(gaps, 99),
        token_seconds / room_seconds,
        stats.preemptions_swap,
        stats.preemptions_recompute,
        stats.recomputed_tokens,
        stats.prefix_hit_tokens,
    )


def compare(options: argparse.Namespace) -> dict[str, Figures]:
    """Serve the load in every way, each with an engine of its own; the table is printed as it grows."""
    table: dict[str, Figures] = {}
    for name, flags in ROWS.items():
        with LLM(
            options.model,
            kv_blocks=options.kv_blocks,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            max_num_seqs=options.seats,
            max_num_batched_tokens=options.max_num_batched_tokens,
            swap_space="1.0",
            **flags,
        ) as llm:
            load = read_load(options, llm.info.vocab_size)
            if not table:
                info, limit = llm.info, options.max_tokens or "none"
                prompts, outputs = sum(len(visit.prompt) for visit in load), sum(visit.output for visit in load)
                print(f"model {info.model}, {info.dtype}, {info.threads} threads")
                print(
                    f"{options.trace.name} from row {options.first}, lengths / {options.divide}: {len(load)} requests, "
                    f"{prompts} tokens in, {outputs} out, within {load[-1].at:.1f} s ({options.speed:g} times as fast)"
                )
                print(
                    f"at most {info.max_num_seqs} run, {info.max_num_batched_tokens} tokens a step, "
                    f"{info.kv_blocks} blocks of {info.block_size} tokens ({size(info.kv_blocks * info.block_bytes)}), "
                    f"max_model_len {info.max_model_len}, max_tokens {limit}"
                )
                print(" " * WIDTH + "".join(f"{title:>{width}}" for title, width, _ in COLUMNS))
            table[name] = figures = serve(llm, load, options.max_tokens)
        print(f"{name:<{WIDTH}}" + "".join(f"{cell(figures):>{width}}" for _, width, cell in COLUMNS), flush=True)
        del llm
        gc.collect()  # the pool, before the next one is made
    return table


def targets(table: dict[str, Figures]) -> list[tuple[str, bool]]:
    paged = min(figures.holding for name, figures in table.items() if "paged" in name)
    contiguous = max(table[name].holding for name in (STATIC, FCFS))
    ratio = table[STATIC].steps / table[FCFS].steps
    swaps = [figures for name, figures in table.items() if SWAP in name]
    return [
        (f"paged holds tokens in over 95% of what it allocates: {paged:.1%} or more", paged > 0.95),
        (f"contiguous in under 40%: {contiguous:.1%} or less", contiguous < 0.4),
        (f"static needs at least 1.5 times the steps of fcfs: {ratio:.2f}", ratio >= 1.5),
        (
            f"swapping computes nothing again: {[figures.recomputed for figures in swaps]} tokens after "
            f"{[figures.swapped for figures in swaps]} preemptions",
            all(figures.swapped and not figures.recomputed for figures in swaps),
        ),
    ]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="the CSV file")
    parser.add_argument("--first", type=int, default=0, help="row of the trace to begin with")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--divide", type=int, default=4, help="what lengths are divided by")
    parser.add_argument("--speed", type=float, default=2.0, help="how many times as fast requests come")
    parser.add_argument("--max-tokens", type=int, help="what requests set; default: nothing")
    parser.add_argument("--model", help="checkpoint directory or .gguf file; default: the demo weights")
    parser.add_argument("--seats", type=int, default=32, help="most requests running at once")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-blocks", type=int, default=4160, help="the pool; 1%% is left to those who run")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a target is missed")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    header()
    finish(options.check, targets(compare(options)))


if __name__ == "__main__":
    main()
