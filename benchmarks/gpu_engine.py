"""gpu_check.py, sections `backend`, `engine` and `swap`: what surrounds the kernels, and the step loop on top of them,
on a checkpoint that is nothing but a config: its weights are drawn on the device."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_common import Run

from framework import Batch, CacheGroup, Checkpoint, ReferenceBackend, SamplingParams, Tokenizer
from framework.messages import Add
from framework.registry import load_plugins
from framework.settings import Settings
from framework.startup import build_engine

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
SEED = 7


class RandomCheckpoint(Checkpoint):
    """Weights of a Llama's config, normally distributed, made on `device` as they are asked for."""

    path = "random weights"

    def __init__(self, config: dict[str, Any], device: torch.device, dtype: torch.dtype, scale: float) -> None:
        self._config, self._device, self._dtype, self._scale = config, device, dtype, scale

    @classmethod
    def opens(cls, path: Path) -> bool:
        return False

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def generation_config(self) -> dict[str, Any]:
        return {}

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        c = self._config
        hidden, inner, head_dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        q, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
        yield from ((f"{name}.weight", (c["vocab_size"], hidden)) for name in ("model.embed_tokens", "lm_head"))
        yield "model.norm.weight", (hidden,)
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{layer}.{name}.weight", (hidden,)
            for name, rows, columns in (
                ("self_attn.q_proj", q, hidden), ("self_attn.k_proj", kv, hidden), ("self_attn.v_proj", kv, hidden),
                ("self_attn.o_proj", hidden, q), ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden),
                ("mlp.down_proj", hidden, inner),
            ):  # fmt: skip
                yield f"{layer}.{name}.weight", (rows, columns)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        drawn = torch.Generator(self._device).manual_seed(SEED)
        for name, shape in self._shapes():
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device).normal_(generator=drawn)
            if len(shape) == 1:
                yield name, 1 + 0.1 * tensor
            else:  # layers loud, embeddings quiet: the next token is not the last one again
                yield name, tensor.mul_(self._scale if "layers" in name else 0.1)

    @property
    def num_tensors(self) -> int:
        return sum(1 for _ in self._shapes())

    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError("these prompts are token ids")


def start(
    run: Run, config: dict[str, Any], dtype: str, plugins: Sequence[tuple[str, object]] = (), **flags: Any
) -> tuple[Any, Any]:
    """An engine in this process, and what it says of itself."""
    flags = {"device": str(run.device), "dtype": dtype, "kernel": "triton", "prefix_cache": False, **flags}
    settings = Settings.load(None, **flags)
    loaded = load_plugins(plugins)
    loaded.activate(settings, engine=True)
    kind = getattr(torch, dtype)
    scale = 0.25 if config is TINY else 0.02
    return build_engine(settings, loaded, RandomCheckpoint(config, run.device, kind, scale))


def prompts(vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(SEED)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def add(engine: Any, some: Sequence[Sequence[int]], tokens: int) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    ids = [f"r{i}" for i in range(len(some))]
    for id, prompt in zip(ids, some, strict=True):
        if refused := engine.add(Add(id, list(prompt), params, engine.clock.ns())):
            raise RuntimeError(f"refused: {refused[0].error}")
    return ids


def served(run: Run, some: Sequence[Sequence[int]], tokens: int, **flags: Any) -> tuple[dict[str, list[int]], Any]:
    engine, info = start(run, TINY, "float32", **flags)
    found: dict[str, list[int]] = {}
    try:
        add(engine, some, tokens)
        end = time.monotonic() + max(1.0, run.left())
        while engine.has_work and time.monotonic() < end:
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                found.setdefault(output.id, []).extend(output.tokens)
        if engine.has_work:
            raise RuntimeError(f"no time is left, and {len(engine.requests)} of {len(some)} requests are not done")
        stats = engine.stats()
        failed_steps(run, engine)
    finally:
        engine.close()
    return found, (info, stats)


def failed_steps(run: Run, engine: Any) -> None:
    """A row only if there are any: their requests are computed again, and nothing else shows them."""
    if count := engine.stats().failed_steps:
        run.report.check("steps that failed", False, f"{count}; see the log above")


def check_engine(run: Run) -> None:
    """In float32, where kernels differ by so little that no token changes; a pool so small that requests are swapped
    and computed again."""
    lengths = run.pick((5, 70, 33, 128, 1, 90, 16, 64), (15, 31))
    tokens, some = run.pick(40, 3), prompts(TINY["vocab_size"], lengths)
    flags = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    flags |= run.pick({"max_model_len": 256, "kv_blocks": 64}, {"max_model_len": 48, "kv_blocks": 16})
    expected, _ = served(run, some, tokens, kernel="torch", cuda_graphs="off", overlap="off", **flags)
    if {len(found) for found in expected.values()} != {tokens}:
        raise RuntimeError(f"kernel torch gave {[len(found) for found in expected.values()]} tokens, not {tokens} each")
    for cuda_graphs in ("off", "auto") if run.cuda else ("off",):
        for overlap in ("off", "on"):
            name = f"triton, graphs {cuda_graphs}, overlap {overlap}"
            with run.report.part(name):
                found, (info, _) = served(run, some, tokens, cuda_graphs=cuda_graphs, overlap=overlap, **flags)
                _same(run, name, found, expected)
                if run.cuda:
                    why = [note for note in info.notes if "CUDA graphs" in note]
                    run.report.check(f"{name}, as asked", not why, "; ".join(why) or "yes")
    for preemption in run.pick(("swap", "recompute"), ("swap",)):
        name, small = f"triton, a small pool, {preemption}", flags | {"kv_blocks": run.pick(18, 3)}
        small |= {"preemption": preemption} | ({"swap_space": "64MiB"} if preemption == "swap" else {})
        with run.report.part(name):
            found, (_, stats) = served(run, some, tokens, overlap="on", **small)
            _same(run, name, found, expected)
            happened = getattr(stats, f"preemptions_{preemption}")
            run.report.check(f"requests were preempted by {preemption}", happened > 0, str(happened))
    run.report.raise_wrong()


def _same(run: Run, name: str, found: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    wrong = [id for id in expected if found.get(id) != expected[id]]
    text = "the tokens of torch" if not wrong else f"other tokens for {len(wrong)} of {len(expected)} requests"
    if wrong:
        at = next((i for i, (a, b) in enumerate(zip(found.get(wrong[0], []), expected[wrong[0]])) if a != b), None)  # noqa: B905
        text += f", {wrong[0]} from token {at} on"
    run.report.check(name, not wrong, text)


# Backend


def check_backend(run: Run) -> None:
    from framework.plugins.kernels.triton.backend import TritonBackend

    backend, plain, report = TritonBackend(), ReferenceBackend(), run.report
    rng = np.random.default_rng(SEED)
    for name, starts, lens in (
        ("decodes", [40, 0, 15, 16], [1, 1, 1, 1]), ("prompts", [0, 16, 7], [20, 33, 2]), ("both", [5, 300], [1, 9]),
    ):  # fmt: skip
        with report.part(f"inputs of {name}"):
            ours, theirs = (one.prepare(_batch(rng, starts, lens), run.device) for one in _twice(backend, plain, rng))
            fields = ("cu_lens", "seq_lens", "logits_rows")
            right = all(torch.equal(getattr(ours, field), getattr(theirs, field)) for field in fields)
            right &= all(torch.equal(a, b) for a, b in zip(ours.slots, theirs.slots, strict=True))
            for a, b, length in zip(ours.tables[0], theirs.tables[0], ours.seq_lens.tolist(), strict=True):
                used = -(-length // 16)
                right &= torch.equal(a[:used], b[:used])
            text = "those of the reference" if right else "others than the reference's"
            report.check(f"inputs of {name}", right, text)
    with report.part("argmax and largest"):
        _picks(run, backend)
    for name in ("bfloat16", "float32", "float8_e5m2"):
        with report.part(f"copies of blocks, {name}"):
            _copies(run, backend, name)
    report.raise_wrong()


def _twice(backend: Any, plain: Any, rng: np.random.Generator) -> Iterator[Any]:
    """Both, each with the generator as it was."""
    state = rng.bit_generator.state
    for one in (backend, plain):
        rng.bit_generator.state = state
        yield one


def _batch(rng: np.random.Generator, starts: Sequence[int], lens: Sequence[int]) -> Batch:
    table = rng.permutation(400).astype(np.int32)[: 20 * len(starts)].reshape(len(starts), 20)
    asked = np.arange(len(starts)) % 3 != 1
    return Batch(np.array(starts, np.int32), np.array(lens, np.int32), (table,), asked, 16)


def _picks(run: Run, backend: Any) -> None:
    vocab = run.pick(128256, 1000)
    x = torch.randn(7, vocab, generator=torch.Generator().manual_seed(SEED))
    x[0, 5], x[0, 900], x[1, 17] = 9.0, 9.0, torch.nan
    tokens, values = backend.argmax(x.to(run.device).clone())
    expected = x[2:].numpy().argmax(-1)
    right = bool((tokens[2:].cpu().numpy() == expected).all()) and int(tokens[0]) == 5 and bool(values[1].isnan())
    report = run.report
    report.check("argmax: the first of equals, NaN seen", right, "right" if right else "not numpy's")
    x[1, 17] = 0.0
    counts = torch.tensor([1, 2, 50, 0, 1000, vocab + 5, 3])
    least = torch.tensor([-torch.inf, -torch.inf, -torch.inf, 2.5, 0.0, 3.0, 100.0])
    found = [part.cpu() for part in backend.largest(*(part.to(run.device) for part in (x, counts, least)))]
    columns, values, each = [], [], []
    for row, count, low in zip(x, counts.tolist(), least.tolist(), strict=True):
        kth = row.sort(descending=True).values[count - 1].item() if 0 < count < vocab else -torch.inf
        some = torch.nonzero(row >= max(kth, low))[:, 0]
        columns.append(some)
        values.append(row[some])
        each.append(len(some))
    right = torch.equal(found[0], torch.cat(columns)) and torch.equal(found[1], torch.cat(values))
    right &= found[2].tolist() == each
    report.check("largest: top-k and thresholds, equals kept", right, "right" if right else "not a sort's")


def _copies(run: Run, backend: Any, name: str) -> None:
    """Copies as if one after the other; blocks to page-locked memory and back."""
    group, cpu = CacheGroup(2, 2, 64), torch.device("cpu")
    dtype = getattr(torch, name)
    pool = backend.allocate(group, dtype, 16, 40, run.device)
    host = backend.allocate(group, dtype, 16, 12, cpu, **({"pinned": True} if run.cuda else {}))
    for at, pages in enumerate(pages for cache in pool for pages in cache):
        drawn = torch.randn(pages.shape, generator=torch.Generator().manual_seed(at))
        pages.copy_(drawn.to(dtype))
    before = [pages.cpu().view(torch.uint8).clone() for cache in pool for pages in cache]
    src, dst = [3, 5, 5, 7], [5, 9, 30, 3]
    backend.copy_blocks(pool, torch.tensor(src), torch.tensor(dst))
    for pages in before:
        for s, d in zip(src, dst, strict=True):
            pages[d] = pages[s].clone()
    right = _holds(pool, before)
    run.report.check(f"copy_blocks, {name}", right, "right" if right else "other blocks than expected")
    out = [(30, 4), (2, 5), (17, 0), (18, 1), (39, 11)]
    backend.move_blocks(pool, host, out)
    back = [(d, s) for (s, d), s in zip(out, (10, 11, 0, 20, 21), strict=True)]
    backend.move_blocks(host, pool, back)
    run.synchronize()
    for pages in before:
        kept = [pages[s].clone() for s, _ in out]
        for block, (_, to) in zip(kept, back, strict=True):
            pages[to] = block
    right = _holds(pool, before)
    text = "right" if right else "other blocks than expected"
    run.report.check(f"move_blocks, there and back, {name}", right, text)


def _holds(pool: Any, expected: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.equal(pages.cpu().view(torch.uint8), other)
        for pages, other in zip((pages for cache in pool for pages in cache), expected, strict=True)
    )


# Swap


def check_swap(run: Run) -> None:
    """Of blocks of Llama-3.1-8B, 2 MiB each in 64 tensors, beside one copy of as many bytes of page-locked memory."""
    backend, cpu, pinned = ReferenceBackend(), torch.device("cpu"), {"pinned": True} if run.cuda else {}
    group = run.pick(CacheGroup(32, 8, 128), CacheGroup(2, 2, 64))
    count, blocks = run.pick((256, 1024), (4, 16))
    pool = backend.allocate(group, torch.bfloat16, 16, blocks, run.device)
    host = backend.allocate(group, torch.bfloat16, 16, count, cpu, **pinned)
    size = count * backend.block_bytes(group, torch.bfloat16, 16)
    here = torch.empty(size, dtype=torch.uint8, **({"pin_memory": True} if run.cuda else {})).fill_(1)
    there = torch.empty(size, dtype=torch.uint8, device=run.device).fill_(2)
    order = np.random.default_rng(SEED).permutation(blocks)[:count].tolist()
    mixed = np.random.default_rng(SEED + 1).permutation(count).tolist()
    plain = list(range(count))
    for way, source, target in (("to the host", there, here), ("to the device", here, there)):
        limit = size / _best(run, lambda s=source, t=target: t.copy_(s, non_blocking=True))  # type: ignore[misc]
        run.report.row(f"a copy {way}", f"{limit / 1e9:6.1f} GB/s", rate=limit)
        for what, pairs in (
            ("neighbours", list(zip(plain, plain, strict=True))),
            ("scattered blocks, neighbours at the host", list(zip(order, plain, strict=True))),
            ("scattered blocks on both sides", list(zip(order, mixed, strict=True))),
        ):
            ends = (pool, host, pairs) if way == "to the host" else (host, pool, [(d, s) for s, d in pairs])
            rate = size / _best(run, lambda e=ends: backend.move_blocks(*e))  # type: ignore[misc]
            shown = f"{rate / 1e9:6.1f} GB/s {rate / limit:5.0%}"
            run.report.row(f"{what} {way}", shown, rate=rate, share=rate / limit)
    for pages in (pages for cache in pool for pages in cache):
        pages.normal_()
    kept = pool[-1][1].clone()
    backend.move_blocks(pool, host, list(zip(order, mixed, strict=True)))
    run.synchronize()
    pool[-1][1].fill_(0)
    backend.move_blocks(host, pool, list(zip(mixed, order, strict=True)))
    run.synchronize()
    right = torch.equal(pool[-1][1][order], kept[order])
    run.report.check("blocks that were there and back", right, "what they were" if right else "other than they were")
    run.report.raise_wrong()


def _best(run: Run, work: Any) -> float:
    """Seconds of the fastest of a few, by the host's clock, until the device is done."""
    found = []
    end = time.monotonic() + min(0.6, run.left() / 8)
    while not found or (time.monotonic() < end and len(found) < 20):
        run.synchronize()
        begin = time.perf_counter()
        work()
        run.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found)
