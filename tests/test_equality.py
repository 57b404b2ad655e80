"""Greedy output equals transformers' `generate`, token for token in float32: alone, and in ragged batches that others
join at random steps, with every chunk size. So do the log-probabilities of the chosen and of the likeliest tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from oracle import Reference, assert_equal, reference
from pydantic import BaseModel

from framework import LLM, Logprobs, Provider, SamplingParams, View, Want, hookimpl
from framework.messages import Add

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama-tied": {},
    "llama-untied-sharded": {"tie": False, "shards": 3},
    "llama-mha": {"num_key_value_heads": 4},
    "llama-rope-llama3": {"rope_parameters": LLAMA3},
    "llama-rope-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "llama-rope-yarn": {"rope_parameters": YARN},
    "mistral-window": {"architecture": "MistralForCausalLM", "sliding_window": 24, "tie": False},
    "mistral-full": {"architecture": "MistralForCausalLM"},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "tie": False, "shards": 2},
    "qwen2-window": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
}
TOKENS = 20


def _prompts(seed: int, count: int, vocab: int, longest: int = 70) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("equality")


@cache
def _checkpoint(folder: Path, name: str) -> Path:
    return tiny_checkpoint(folder / name, **MODELS[name])


@cache
def _references(folder: Path, name: str) -> list[Reference]:
    """32 of them."""
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(_checkpoint(folder, name), dtype=torch.float32).eval()
    return [reference(model, p, TOKENS) for p in _prompts(7, 32, model.config.vocab_size)]


class ChunkOptions(BaseModel):
    size: int


class ChunkedScheduler:
    """Arrival order; no prompt computes more than `size` tokens in a step."""

    def __init__(self, options: ChunkOptions) -> None:
        self.size = options.size

    @hookimpl
    def admit(self, view: View) -> Iterator[Want]:
        yield from (Want(r, self.size) for r in view.running)
        yield from (Want(r, self.size) for r in view.waiting)


class Chunked:
    @hookimpl
    def providers(self) -> list[Provider]:
        return [Provider("scheduler", "chunked", ChunkedScheduler, ChunkOptions)]


def greedy(llm: LLM, prompts: Sequence[list[int]], count: int, seed: int | None = None) -> list[list[Logprobs]]:
    """Outputs of `count` tokens; with a seed, requests join at random steps instead of all at once."""
    rng = random.Random(seed)
    waiting = list(enumerate(prompts))
    got: dict[str, list[Logprobs]] = {str(i): [] for i in range(len(prompts))}
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=3)
    while waiting or llm.engine.has_work:
        while waiting and (seed is None or rng.random() < 0.4 or not llm.engine.has_work):
            i, prompt = waiting.pop(0)
            assert not llm.engine.add(Add(str(i), prompt, params, 0))
        for output in llm.engine.step():
            assert output.index == len(got[output.id]), "a token index was lost or repeated"
            assert output.error is None, output.error
            assert [(e.token, e.rank, len(e.top)) for e in output.logprobs or ()] == [(t, 1, 3) for t in output.tokens]
            got[output.id] += output.logprobs or ()
    usage = llm.engine.kv.usage()
    assert (usage.holding, usage.reserved, usage.swapped) == (0, 0, 0)
    return list(got.values())


def assert_like(refs: Sequence[Reference], llm: LLM, seed: int | None = None) -> None:
    """What `llm` makes of the references' prompts, in one batch, equals them."""
    outputs = greedy(llm, [ref.prompt for ref in refs], len(refs[0].tokens), seed)
    assert_equal(refs, outputs, lambda prompt, count: greedy(llm, [prompt], count)[0])


def _engine(path: Path, **flags: Any) -> LLM:
    return LLM(str(path), **{"dtype": "float32", "kv_blocks": 512, "threads": 1, **flags})


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, Path]]:
    yield request.param, _checkpoint(folder, request.param)


def test_alone(model: tuple[str, Path], folder: Path) -> None:
    name, path = model
    with _engine(path) as llm:
        for ref in _references(folder, name)[:6]:
            assert_like([ref], llm)


RAGGED = [("cpu", 8, "on"), ("cpu", 7, "off"), ("cpu", 40, "on"), ("cpu", 4096, "off"), ("torch", 7, "on")]


@pytest.mark.parametrize(("kernel", "budget", "overlap"), [*RAGGED, ("torch", 4096, "off")])
def test_ragged_batch(model: tuple[str, Path], folder: Path, kernel: str, budget: int, overlap: str) -> None:
    """32 requests that join at random steps. A small budget cuts prompts into chunks of every length up to it."""
    name, path = model
    with _engine(path, kernel=kernel, max_num_batched_tokens=budget, overlap=overlap) as llm:
        assert llm.engine.executor.max_in_flight == 1 + (overlap == "on")
        assert_like(_references(folder, name), llm, seed=budget)


@pytest.mark.parametrize(("kernel", "overlap"), [("cpu", "off"), ("cpu", "on"), ("torch", "off")])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted(model: tuple[str, Path], folder: Path, preemption: str, kernel: str, overlap: str) -> None:
    """On a pool that holds few of them: blocks go to the host and come back elsewhere, or are computed again."""
    name, path = model
    blocks = 12 if name == "mistral-window" else 24  # what lies before the window is given back as they go
    flags = {"kv_blocks": blocks, "swap_space": "1.0", "preemption": preemption, "max_num_seqs": 16}
    with _engine(path, kernel=kernel, overlap=overlap, **flags) as llm:
        assert_like(_references(folder, name), llm, seed=3)
        stats = llm.engine.stats()
    assert (stats.preemptions_swap if preemption == "swap" else stats.preemptions_recompute) >= 3


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunk_sizes(model: tuple[str, Path], folder: Path, chunk: int) -> None:
    """A scheduler that bounds each prompt's chunk exactly, budget left over or not."""
    name, path = model
    with _engine(path, scheduler="chunked", scheduler_opt={"size": chunk}, plugins=[("chunked", Chunked())]) as llm:
        assert_like(_references(folder, name), llm, seed=chunk)


DEMO_TOKENS = 16


@pytest.fixture(scope="module")
def demo_references(demo_model: Path) -> list[Reference]:
    import transformers

    from framework.checkpoint import open_checkpoint
    from framework.registry import load_plugins
    from framework.settings import Settings

    checkpoint = open_checkpoint(Settings(model=str(demo_model)), load_plugins())
    config = {k: v for k, v in checkpoint.config.items() if k not in ("architectures", "model_type", "dtype")}
    torch.set_num_threads(1)  # two that share cores with other work spend their time waiting for each other
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float().eval()
    weights = {name: tensor.float() for name, tensor in checkpoint.tensors()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    tokenizer = checkpoint.tokenizer()
    prompts = [tokenizer.encode(text) for text in _texts()]
    return [reference(model, prompt, DEMO_TOKENS) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["alone", "whole", "chunks of 1", "chunks of 7", "chunks of 16"])
def test_demo(demo_model: Path, demo_references: list[Reference], case: str) -> None:
    """The demo weights in float32: a real model, whose best logits are often close."""
    flags: dict[str, Any] = {"kernel": "cpu", "kernel_opt": {"gguf": "widened"}}
    if case.startswith("chunks"):
        flags |= {"scheduler": "chunked", "scheduler_opt": {"size": int(case.split()[-1])}}
        flags["plugins"] = [("chunked", Chunked())]
    with _engine(demo_model, **flags) as llm:
        if case == "alone":
            for ref in demo_references[:4]:
                assert_like([ref], llm)
        else:
            assert_like(demo_references, llm, seed=1)


def _texts() -> list[str]:
    """32 prompts of 3 to about 25 tokens."""
    from checkpoints import CORPUS

    return [" ".join(CORPUS[i % len(CORPUS)].split(" ")[: 2 + i // 2]) for i in range(32)]
