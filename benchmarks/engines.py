"""The engines that peers.py compares, each in a process of its own that sleeps while another works.

    python benchmarks/engines.py framework|openvino SETUP

SETUP is a `Setup` in JSON. Standard output: a line of JSON that describes the engine, then for each line read, a seed,
one of `Figures`. It ends with its standard input. This file runs under the other engine's Python too: beside the
standard library it imports that engine only.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

REQUESTS, PROMPT, OUTPUT = 32, 128, 64
SEATS, BUDGET, LENGTH = 64, 4096, 512
"""Of both engines: requests that run at once, tokens of a step, tokens of a request."""
Run = Callable[[list[list[int]]], tuple[float, float]]
"""Serves prompts together: seconds to the last token, and to the first."""


class Setup(NamedTuple):
    """flags: of `LLM` for this engine, properties of the device for OpenVINO. tokens: prompts are made of these."""

    model: str
    threads: int
    flags: dict[str, str]
    tokens: tuple[int, int]


class Figures(NamedTuple):
    """rate: tokens per second of A. token, first: milliseconds of B. bandwidth: GB/s that as many threads read from
    memory just before B or after it, the better; 0: not measured."""

    rate: float
    token: float
    first: float
    bandwidth: float = 0.0


class About(NamedTuple):
    """settings: for people. read: bytes of weights, keys and values that B reads for a token; 0: not known."""

    settings: str
    read: float = 0.0


def prompts(setup: Setup, seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(*setup.tokens), k=PROMPT) for _ in range(count)]


def framework(setup: Setup) -> tuple[Run, About, Callable[[], float]]:
    from common import bandwidth

    from framework import LLM, SamplingParams
    from framework.messages import Add

    llm = LLM(
        setup.model,
        threads=setup.threads,
        max_num_seqs=SEATS,
        max_num_batched_tokens=BUDGET,
        max_model_len=LENGTH,
        prefix_cache=False,
        **setup.flags,
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

    info, model = llm.info, llm.engine.executor.model  # type: ignore[attr-defined]
    weights = sum(
        t.numel() * t.element_size() for part in (model._decoder.layers, model._norm, model._head) for t in held(part)
    )
    read = weights + info.block_bytes / info.block_size * (PROMPT + OUTPUT / 2)
    settings = f"{info.dtype}, kernel {info.providers['kernel']}, weights {info.quantization}, keys and values "
    settings += f"{info.kv_dtype or info.dtype}, {info.threads} threads"
    return run, About(f"framework: {settings}", read), bandwidth


def held(part: Any) -> Iterator[Any]:
    """The tensors of a layer, or of what a backend packed."""
    if hasattr(part, "element_size"):
        yield part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from held(item)
    elif fields := getattr(part, "__dataclass_fields__", None):
        for name in fields:
            yield from held(getattr(part, name))


def pipeline(setup: Setup) -> tuple[Any, str]:
    """OpenVINO GenAI's engine of continuous batches, and its settings."""
    import openvino as ov  # type: ignore[import-not-found,unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found,unused-ignore]

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = SEATS, BUDGET
    scheduler.enable_prefix_caching = False
    flags: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads, **setup.flags}
    made = genai.ContinuousBatchingPipeline(setup.model, scheduler, "CPU", flags)
    core, told = ov.Core(), dict(flags)
    for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"):  # the device's own, unless set
        told.setdefault(name, core.get_property("CPU", name).to_string())
    return made, f"openvino-genai {genai.__version__}: {told}"


def enqueue(pipe: Any, id: int, prompt: list[int], output: int) -> Any:
    """The handle of a request: greedy, of exactly `output` tokens."""
    import numpy as np  # type: ignore[import-not-found,unused-ignore]
    import openvino as ov  # type: ignore[import-not-found,unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found,unused-ignore]

    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = output
    config.ignore_eos, config.do_sample = True, False
    return pipe.add_request(id, ov.Tensor(np.array([prompt], dtype=np.int64)), config)


def openvino(setup: Setup) -> tuple[Run, About, Callable[[], float]]:
    pipe, settings = pipeline(setup)

    def run(some: list[list[int]]) -> tuple[float, float]:
        first = 0.0
        begin = time.perf_counter()
        handles = [enqueue(pipe, i, prompt, OUTPUT) for i, prompt in enumerate(some)]
        while pipe.has_non_finished_requests():
            pipe.step()
            first = first or time.perf_counter() - begin
        seconds = time.perf_counter() - begin
        lengths = [len(output.generated_ids) for handle in handles for output in handle.read_all()]
        assert lengths == [OUTPUT] * len(some), f"{lengths} tokens"
        return seconds, first

    return run, About(settings), lambda: 0.0


ENGINES = {"framework": framework, "openvino": openvino}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    setup = Setup(**json.loads(sys.argv[2]))
    run, about, bandwidth = ENGINES[sys.argv[1]](setup)
    run(prompts(setup, 0, 2))
    run(prompts(setup, 0, REQUESTS))
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        seed = int(line)
        seconds, _ = run(prompts(setup, seed, REQUESTS))
        before = bandwidth()
        alone = [run(prompts(setup, seed + 1 + i, 1)) for i in range(3)]
        token = statistics.median((total - first) / (OUTPUT - 1) for total, first in alone)
        first = statistics.median(first for _, first in alone)
        figures = Figures(REQUESTS * OUTPUT / seconds, 1e3 * token, 1e3 * first, max(before, bandwidth()))
        print(json.dumps(figures), file=answers, flush=True)


if __name__ == "__main__":
    main()
