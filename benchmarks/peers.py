"""This engine and another one on the same work, in turns, in one run.

    python benchmarks/peers.py --model DIR --peer PYTHON --peer-model DIR [--reps 5] [--threads 2] [--check]
        [--dtype float32] [--quantization int8] [--peer-option INFERENCE_PRECISION_HINT=f32]

The other one is OpenVINO GenAI: PYTHON is the interpreter of a virtual environment that holds `openvino-genai`, its
model is what `optimum-cli export openvino` makes of DIR. Nothing of it is needed to run anything else here.

    A    32 requests of 128 random tokens, all at once, 64 tokens each: output tokens per second
    B    one such request alone: milliseconds per token after the first, and to the first

Greedy, ends ignored, prefix caches off. Each engine is a process of its own that sleeps while the other works; they
take turns, and ratios are of neighbours. Medians; in brackets the smallest and the largest. With --check the exit code
is 1 unless A is at least 1.1 times the other's and B at most 0.85 of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

REQUESTS, PROMPT, OUTPUT = 32, 128, 64
TOKENS = range(300, 40000)
"""Random prompts are made of these: of every vocabulary, and no special ones."""
Run = Callable[[list[list[int]]], tuple[float, float]]
"""Serves prompts together: seconds to the last token, and to the first."""


class Figures(NamedTuple):
    """rate: tokens per second of A. token, first: milliseconds of B."""

    rate: float
    token: float
    first: float


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(TOKENS, k=PROMPT) for _ in range(count)]


def framework(options: argparse.Namespace) -> tuple[Run, str]:
    from framework import LLM, SamplingParams
    from framework.messages import Add

    flags = {name: getattr(options, name) for name in ("dtype", "quantization", "kernel") if getattr(options, name)}
    llm = LLM(
        options.model,
        threads=options.threads,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        max_model_len=2048,
        prefix_cache=False,
        **flags,
    )
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)

    def run(some: list[list[int]]) -> tuple[float, float]:
        engine, first, got = llm.engine, 0.0, 0
        begin = time.perf_counter()
        for i, prompt in enumerate(some):
            assert not engine.add(Add(str(i), prompt, params, engine.clock.ns()))
        while engine.has_work:
            outputs = engine.step()
            first = first or time.perf_counter() - begin
            got += sum(len(output.tokens) for output in outputs)
        seconds = time.perf_counter() - begin
        assert got == OUTPUT * len(some), f"{got} tokens"
        return seconds, first

    info = llm.info
    return run, f"framework: {info.dtype}, kernel {info.providers['kernel']}, {info.threads} threads, {flags}"


def openvino(options: argparse.Namespace) -> tuple[Run, str]:
    import numpy as np  # type: ignore[import-not-found,unused-ignore]
    import openvino as ov  # type: ignore[import-not-found,unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found,unused-ignore]

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = 2, 64
    scheduler.max_num_batched_tokens = 4096
    scheduler.enable_prefix_caching = False
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
    settings |= dict(entry.split("=", 1) for entry in options.peer_option)
    pipe = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", settings)
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = OUTPUT
    config.ignore_eos, config.do_sample = True, False

    def run(some: list[list[int]]) -> tuple[float, float]:
        first = 0.0
        begin = time.perf_counter()
        handles = [
            pipe.add_request(i, ov.Tensor(np.array([prompt], dtype=np.int64)), config) for i, prompt in enumerate(some)
        ]
        while pipe.has_non_finished_requests():
            pipe.step()
            first = first or time.perf_counter() - begin
        seconds = time.perf_counter() - begin
        lengths = [len(output.generated_ids) for handle in handles for output in handle.read_all()]
        assert lengths == [OUTPUT] * len(some), f"{lengths} tokens"
        return seconds, first

    return run, f"openvino-genai {genai.__version__}: {settings}"


ENGINES = {"framework": framework, "openvino": openvino}


def work(options: argparse.Namespace) -> None:
    """In a process of its own: a line with what it is, then for each line read (a seed), a line of figures."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    run, settings = ENGINES[options.work](options)
    run(prompts(0, 2))
    run(prompts(0, REQUESTS))
    print(json.dumps(settings), file=answers, flush=True)
    for line in sys.stdin:
        seed = int(line)
        seconds, _ = run(prompts(seed, REQUESTS))
        alone = [run(prompts(seed + 1 + i, 1)) for i in range(3)]
        token = statistics.median((total - first) / (OUTPUT - 1) for total, first in alone)
        first = statistics.median(first for _, first in alone)
        print(json.dumps((REQUESTS * OUTPUT / seconds, 1e3 * token, 1e3 * first)), file=answers, flush=True)


class Engine:
    """A process that answers with figures."""

    def __init__(self, python: str, name: str, model: str, options: argparse.Namespace) -> None:
        given = [f"--{key}={value}" for key in ("dtype", "quantization", "kernel") if (value := getattr(options, key))]
        given += [f"--peer-option={entry}" for entry in options.peer_option]
        command = [python, __file__, "--work", name, "--model", model, f"--threads={options.threads}", *given]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.settings: str = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine ended: see above")
        return json.loads(line)

    def measure(self, seed: int) -> Figures:
        assert self._process.stdin is not None
        print(seed, file=self._process.stdin, flush=True)
        return Figures(*self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def spread(values: Sequence[float], digits: int) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def compare(options: argparse.Namespace) -> None:
    from common import finish, header

    header()
    engines = [
        Engine(sys.executable, "framework", options.model, options),
        Engine(options.peer, "openvino", options.peer_model, options),
    ]
    for engine in engines:
        print(engine.settings)
    found: list[list[Figures]] = [[], []]
    try:
        for rep in range(options.reps):
            for which in (0, 1) if rep % 2 else (1, 0):
                found[which].append(engines[which].measure(1000 * rep))
    finally:
        for engine in engines:
            engine.close()
    ours, theirs = found
    print(f"{'':28}{'framework':>26}{'openvino':>26}{'ratio':>22}")
    ratios = {}
    titles = {"rate": "A, tokens per second", "token": "B, ms per token", "first": "B, ms to the first token"}
    for at, (name, title) in enumerate(titles.items()):
        digits = 1 if name == "token" else 0
        columns = [spread([figures[at] for figures in some], digits) for some in found]
        each = [mine[at] / other[at] for mine, other in zip(ours, theirs, strict=True)]
        ratios[name] = statistics.median(each)
        print(f"{title:28}{columns[0]:>26}{columns[1]:>26}{spread(each, 2):>22}", flush=True)
    finish(
        options.check,
        [
            ("A at least 1.1 times the other's", ratios["rate"] >= 1.1),
            ("B at most 0.85 of the other's", ratios["token"] <= 0.85),
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--peer", help="the other engine's Python")
    parser.add_argument("--peer-model", help="the same model as the other engine reads it")
    parser.add_argument("--peer-option", action="append", default=[], metavar="KEY=VALUE", help="for the other engine")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--dtype", help="of this engine; default: auto")
    parser.add_argument("--quantization", help="of this engine")
    parser.add_argument("--kernel", help="of this engine")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a target is missed")
    parser.add_argument("--work", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
    elif not (options.peer and options.peer_model):
        parser.error("--peer and --peer-model say whom to compare with")
    else:
        compare(options)


if __name__ == "__main__":
    main()
