"""This engine and others on the same work, in turns, in one run.

    python benchmarks/peers.py --model DIR --peer PYTHON --peer-model DIR [--reps 5] [--threads 2] [--check]
        [--llama LLAMA_BENCH --llama-model FILE] [--http [--concurrency 1,4,8,16,32]] [--json FILE]
        [--dtype float32] [--quantization int8] [--kv-dtype int8] [--kernel cpu] [--peer-option KV_CACHE_PRECISION=bf16]

The first other one is OpenVINO GenAI: PYTHON is the interpreter of a virtual environment that holds `openvino-genai`,
its model is what `optimum-cli export openvino` makes of DIR. Nothing of it is needed to run anything else here.

    A    32 requests of 128 random tokens, all at once, 64 tokens each: output tokens per second
    B    one such request alone: milliseconds per token after the first, and to the first
    C    instead of A and B, with --http: load.py's closed loop of clients, 32 unless told otherwise, against `framework
         serve` and openvino_server.py: output tokens per second, milliseconds to the first token and between tokens

Greedy, ends ignored, prefix caches off. Each engine is a process of its own that sleeps while another works, and so
are the clients; they take turns, and ratios are of neighbours. Medians; in brackets the smallest and the largest.

llama.cpp is beside B as its own llama-bench measures it: tokens 129 to 192 of one sequence, without sampling. The
limit of B is memory: what the weights, keys and values that it reads for a token are of what torch's threads read.

Aims are those for the shapes of SmolLM2-135M and Qwen2.5-0.5B. With --check the exit code is 1 unless A is at least
1.1 times the other's and B at most 0.85 of it; with --http, unless the aims for 32 clients are reached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import finish, header, server, tether
from engines import BUDGET, LENGTH, OUTPUT, PROMPT, SEATS, About, Figures, Setup
from load import PATIENCE
from load import Figures as Load
from load import tokens as random_tokens

HERE = Path(__file__).parent
OURS = ("dtype", "quantization", "kv_dtype", "kernel")
AIMS = {
    "none": {"rate": ">= 1.25, 1.10", "token": "<= 0.70, 0.70", "first": "<= 0.90, 0.90"},
    "int8": {"rate": ">= 1.30, 1.40", "token": "<= 0.75, 0.75", "first": ""},
}
"""By quantization."""
AIMS_HTTP = {
    "rate": ("C, tokens per second", ">=", 1.2),
    "first": ("C, ms to the first token", "<=", 0.9),
    "gap": ("C, ms between tokens", "<=", 0.85),
}
"""For 32 clients."""
Found = dict[str, dict[str, list[Any]]]
"""By work and engine, the figures of each turn."""
Targets = list[tuple[str, bool]]


class Engine:
    """A process that answers with figures."""

    def __init__(self, python: str, name: str, setup: Setup) -> None:
        command = [python, HERE / "engines.py", name, json.dumps(setup._asdict())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=tether
        )
        self.about = About(*self._read())

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


class LlamaBench:
    """llama.cpp's own benchmark, started anew for each turn."""

    def __init__(self, program: str, model: str, threads: int) -> None:
        self._command = [program, "-m", model, "-t", str(threads), "-p", "0", "-n", str(OUTPUT), "-d", str(PROMPT)]
        self._command += ["-r", "3", "-o", "json"]
        self.about = About("llama.cpp: not run yet")

    def measure(self, seed: int) -> Figures:
        """Only `token` is a number."""
        done = subprocess.run(self._command, capture_output=True, text=True, timeout=300, preexec_fn=tether)
        if done.returncode:
            raise SystemExit(f"llama-bench failed:\n{done.stderr}")
        (found,) = json.loads(done.stdout)
        told = ("model_type", "backends", "n_threads", "type_k", "type_v", "flash_attn")
        self.about = About(f"llama.cpp: { ({name: found[name] for name in told}) }")
        nan = float("nan")
        return Figures(nan, statistics.median(found["samples_ns"]) / 1e6 / OUTPUT, nan)

    def close(self) -> None:
        pass


def spread(values: Sequence[float], digits: int) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def row(title: str, ours: Sequence[float], theirs: Sequence[float], aim: str = "") -> float:
    """Print one, and return its ratio: the median of those of neighbours."""
    each = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    columns = f"{spread(ours, 1):>24}{spread(theirs, 1):>24}{spread(each, 2):>22}"
    print(f"{title:28}{columns}  {aim}".rstrip(), flush=True)
    return statistics.median(each)


def heading(other: str) -> None:
    print(f"{'':28}{'framework':>24}{other:>24}{'ratio':>22}  aim")


def in_turns(reps: int, measures: dict[str, Callable[[int], Any]]) -> dict[str, list[Any]]:
    """Each measures once in each of `reps` rounds, with the round's seed; another begins each time."""
    names, found = list(measures), {name: [] for name in measures}
    for rep in range(reps):
        first = rep % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(measures[name](1000 * (rep + 1)))
    return found


def in_process(options: argparse.Namespace, ours: Setup, theirs: Setup) -> tuple[Found, Targets]:
    """A and B: all figures, and the targets."""
    engines: dict[str, Engine | LlamaBench] = {}
    try:
        engines["framework"] = Engine(sys.executable, "framework", ours)
        engines["openvino"] = Engine(options.peer, "openvino", theirs)
        if options.llama:
            engines["llama.cpp"] = LlamaBench(options.llama, options.llama_model, options.threads)
        found = in_turns(options.reps, {name: engine.measure for name, engine in engines.items()})
    finally:
        for engine in engines.values():
            engine.close()
    for engine in engines.values():
        print(engine.about.settings)
    mine, other = found["framework"], found["openvino"]
    heading("openvino")
    aims = AIMS["none" if options.quantization in (None, "none") else "int8"]
    titles = {"rate": "A, tokens per second", "token": "B, ms per token", "first": "B, ms to the first token"}
    ratio = {
        name: row(title, *([getattr(f, name) for f in some] for some in (mine, other)), aims[name])
        for name, title in titles.items()
    }
    if options.llama:
        heading("llama.cpp")
        row(titles["token"], [f.token for f in mine], [f.token for f in found["llama.cpp"]], "<= 0.85, none")
    read = engines["framework"].about.read
    rates, limits = [read / f.token / 1e6 for f in mine], [f.bandwidth for f in mine]
    shares = [100 * rate / limit for rate, limit in zip(rates, limits, strict=True)]
    print(f"B reads {read / 1e6:.1f} MB a token, {spread(rates, 1)} GB/s; memory gives {spread(limits, 1)} GB/s: "
          f"{spread(shares, 0)} %  aim in 16 bits >= 60, 80")  # fmt: skip
    targets = [
        ("A at least 1.1 times the other's", ratio["rate"] >= 1.1),
        ("B at most 0.85 of the other's", ratio["token"] <= 0.85),
    ]
    return {"A, B": found}, targets


def clients(url: str, concurrency: int, vocab: int) -> Callable[[int], Load]:
    def measure(seed: int) -> Load:
        command = [sys.executable, HERE / "load.py", url, f"--concurrency={concurrency}", f"--seed={seed}"]
        command.append(f"--vocab={vocab}")
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE + 60, check=True, preexec_fn=tether
        )
        return Load(**json.loads(done.stdout))

    return measure


def over_http(options: argparse.Namespace, ours: Setup, theirs: Setup) -> tuple[Found, Targets]:
    """C: all figures, and the targets."""
    flags = {"threads": ours.threads, "max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET, "max_model_len": LENGTH}
    command = [sys.executable, "-m", "framework", "serve", "--model", ours.model, "--port=0", "--no-prefix-cache"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in (flags | ours.flags).items()]
    stand_in = [options.peer, str(HERE / "openvino_server.py"), json.dumps(theirs._asdict())]
    figures: Found = {}
    targets: Targets = []
    with server(command) as mine, server(stand_in) as other:
        for _, output in (mine, other):
            banner = output.partition("URL ")[0].splitlines()
            print(*(line for line in banner if line.startswith("  ") and line.strip()), sep="\n")
        for concurrency in options.concurrency:
            measures = {
                name: clients(url, concurrency, ours.tokens[1])
                for name, (url, _) in (("framework", mine), ("openvino", other))
            }
            in_turns(1, measures)  # warms up
            found = figures[f"C, {concurrency} clients"] = in_turns(options.reps, measures)
            heading(f"openvino, {concurrency} client{'s' * (concurrency != 1)}")
            for name, (title, sign, aim) in AIMS_HTTP.items():
                some = ([getattr(f, name) for f in found[which]] for which in ("framework", "openvino"))
                if concurrency != 32:
                    row(title, *some)
                    continue
                ratio = row(title, *some, f"{sign} {aim:.2f}")
                met = ratio >= aim if sign == ">=" else ratio <= aim
                targets.append((f"{title} {sign} {aim} of the other's, {concurrency} clients", met))
    return figures, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--peer", required=True, help="OpenVINO's Python")
    parser.add_argument("--peer-model", required=True, help="the same model as OpenVINO reads it")
    parser.add_argument("--peer-option", action="append", default=[], metavar="KEY=VALUE", help="for OpenVINO")
    parser.add_argument("--llama", help="llama.cpp's llama-bench")
    parser.add_argument("--llama-model", help="the same model in GGUF")
    parser.add_argument("--http", action="store_true", help="C instead of A and B")
    parser.add_argument("--concurrency", type=_integers, default=[32], help="clients of C; several: 1,4,8")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--reps", type=int, default=5)
    for name in OURS:
        parser.add_argument(f"--{name.replace('_', '-')}", help="of this engine; default: its own")
    parser.add_argument("--json", type=Path, help="write the figures of every turn here")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a target is missed")
    options = parser.parse_args()
    if bool(options.llama) != bool(options.llama_model):
        parser.error("--llama and --llama-model go together")
    vocab = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]
    known = random_tokens(vocab)
    flags = {name: value for name in OURS if (value := getattr(options, name))}
    ours = Setup(options.model, options.threads, flags, (known.start, known.stop))
    other = dict(entry.split("=", 1) for entry in options.peer_option)
    theirs = ours._replace(model=options.peer_model, flags=other)
    header()
    figures, targets = (over_http if options.http else in_process)(options, ours, theirs)
    if options.json:
        plain = {
            work: {
                name: [{key: value for key, value in f._asdict().items() if value == value} for f in some]
                for name, some in each.items()
            }
            for work, each in figures.items()
        }
        options.json.write_text(json.dumps(plain, indent=1))
    finish(options.check, targets)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
