"""Output tokens per second of our engine against transformers `generate` one request at a time, in one run.

    python benchmarks/throughput.py [--model PATH] [--reps 3] [--kernel cpu] [--requests 32] [--check]

Work: requests of 128 random prompt tokens and 64 output tokens, greedy, EOS ignored, distinct prompts. The two sides
alternate in this process with the same weights, dtype and threads; medians are printed. transformers runs
`--reference-requests` of the requests (each alone, so its rate does not depend on how many there are). With --check
the exit code is 1 if the median ratio is under 20.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import finish, header

PROMPT, OUTPUT = 128, 64
TARGET_RATIO = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory or .gguf file; default: the demo weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--reference-requests", type=int, default=6)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit code 1 if the target is missed")
    options = parser.parse_args()

    from framework import LLM

    header()
    llm = LLM(
        options.model,
        dtype=options.dtype,
        kernel=options.kernel,
        threads=options.threads,
        kv_blocks=options.requests * (PROMPT + OUTPUT + 16) // 16,
        max_model_len=PROMPT + OUTPUT,
        prefix_cache=False,  # every repetition has the same prompts
    )
    rng = random.Random(1)
    vocab = llm.info.vocab_size
    prompts = [[rng.randrange(300, min(vocab, 40000)) for _ in range(PROMPT)] for _ in range(options.requests)]
    reference = _reference(llm, options.dtype)  # imports torch, after `LLM` has set its environment up

    def ours() -> float:
        params = {"temperature": 0.0, "max_tokens": OUTPUT, "ignore_eos": True}
        outputs, seconds = _timed(lambda: llm.generate(prompts, params))
        assert all(len(o.token_ids) == OUTPUT for o in outputs)
        return options.requests * OUTPUT / seconds

    def theirs() -> float:
        some = prompts[: options.reference_requests]
        _, seconds = _timed(lambda: [reference(prompt) for prompt in some])
        return len(some) * OUTPUT / seconds

    ours(), reference(prompts[0])  # warm up
    rates = [(ours(), theirs()) for _ in range(options.reps)]
    us, them = (statistics.median(side) for side in zip(*rates, strict=True))
    ratio = statistics.median(a / b for a, b in rates)
    print(f"model {llm.info.model}, {options.dtype}, {options.threads} threads, kernel {llm.info.providers['kernel']}")
    print(f"{options.requests} requests x ({PROMPT} in, {OUTPUT} out), medians of {options.reps}")
    print(f"  framework             {us:8.1f} output tokens/s   {[round(r[0], 1) for r in rates]}")
    print(f"  transformers generate {them:8.1f} output tokens/s   {[round(r[1], 1) for r in rates]}")
    print(f"  ratio                 {ratio:8.2f}             {[round(a / b, 2) for a, b in rates]}")
    finish(options.check, [(f"at least {TARGET_RATIO:.0f} times the rate of transformers", ratio >= TARGET_RATIO)])


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def _reference(llm: Any, dtype: str) -> Callable[[list[int]], Any]:
    """transformers' `generate` on the same weights, written out as safetensors where they come from GGUF."""
    import json

    import torch
    import transformers
    from safetensors.torch import save_file

    checkpoint = llm.checkpoint
    with tempfile.TemporaryDirectory() as folder:
        kind = getattr(torch, dtype)
        tensors = {name: tensor.to(kind).contiguous() for name, tensor in checkpoint.tensors()}
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(checkpoint.config))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()

    @torch.inference_mode()
    def generate(prompt: list[int]) -> Any:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT,
            min_new_tokens=OUTPUT,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape[1] == PROMPT + OUTPUT
        return out

    return generate


if __name__ == "__main__":
    main()
