"""What `framework serve` and `framework generate` show while they start: progress, then one banner."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from . import __version__
from .machine import list_cpus, size
from .messages import EngineInfo

_REASONS = {
    "set": "as set",
    "model": "the model's limit",
    "pool": "all that the KV pool holds; --kv-memory makes it larger",
}
_ORDER = ("scheduler", "kv", "kernel", "sampler", "executor", "model", "checkpoint")


class UI(Protocol):
    """How a front end reports its start-up."""

    def progress(self, stage: str, share: float) -> None:
        """`share` of `stage` is done: 0..1."""

    def banner(
        self,
        info: EngineInfo,
        url: str,
        chat: bool,
        key: str = "",
        uds: Path | None = None,
        certificate: Path | None = None,
    ) -> None:
        """Ready at `url` (such as http://127.0.0.1:8000), on the Unix socket `uds` if there is one; `chat`: it has a
        chat template; `key`: what to write where requests need one; `certificate`: of HTTPS, its own."""


class TerminalUI:
    """Progress on stderr (a bar on a terminal, else a line per stage), the banner on stdout. A context manager:
    leaving it, for whatever reason, gives the terminal back."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars: Progress | None = None
        self._stages: dict[str, TaskID | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def progress(self, stage: str, share: float) -> None:
        """See `UI`."""
        if not self._console.is_terminal:
            if stage not in self._stages:
                self._stages[stage] = None
                print(f"{stage} ...", file=sys.stderr, flush=True)
            return
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        task = self._stages.get(stage)
        if task is None:
            task = self._stages[stage] = self._bars.add_task(stage, total=1.0)
        self._bars.update(task, completed=share)

    def banner(
        self,
        info: EngineInfo,
        url: str,
        chat: bool,
        key: str = "",
        uds: Path | None = None,
        certificate: Path | None = None,
    ) -> None:
        """See `UI`."""
        self.close()
        print(banner(info, url, chat, key, uds, certificate), flush=True)


def banner(
    info: EngineInfo, url: str, chat: bool, key: str = "", uds: Path | None = None, certificate: Path | None = None
) -> str:
    """Plain lines that no terminal width breaks: the last one is to be pasted."""
    names = sorted(info.providers.items(), key=lambda item: (*_ORDER, item[0]).index(item[0]))
    tokens = info.kv_blocks * info.block_size
    fit = info.kv_blocks // -(-info.max_model_len // info.block_size)
    weights = "" if info.quantization == "none" else f", weights in {info.quantization}"
    cpus = f" on {list_cpus(info.cpus)}" if info.cpus else ""
    overlap = ", planned while the one before runs" if info.overlap else ""
    rows = [
        ("model", f"{info.model} ({info.architecture}), {info.dtype}{weights}"),
        ("device", f"{info.device}, {info.threads} thread{'s' * (info.threads != 1)}{cpus}"),
        ("plugins", ", ".join(f"{kind} {name}" for kind, name in names)),
        (
            "KV cache",
            f"{info.kv_blocks} blocks of {info.block_size} = {tokens} tokens in {info.kv_dtype or info.dtype} "
            f"({size(info.kv_blocks * info.block_bytes)}); {fit} request{'s' * (fit != 1)} of full length "
            f"fit{'s' * (fit == 1)}",
        ),
        ("preempt", _preemption(info)),
        ("length", f"at most {info.max_model_len} tokens ({_REASONS[info.max_model_len_reason]})"),
        ("step", f"at most {info.max_num_seqs} requests, {info.max_num_batched_tokens} tokens{overlap}"),
        *(("note", note) for note in info.notes),
        ("URL", f"{url}/v1" + (f" on the Unix socket {uds}" if uds else "")),
    ]
    lines = [f"  {name:<9} {text}" for name, text in rows]
    head = f"framework {__version__} is ready (loaded in {info.load_seconds:.1f} s)"
    return "\n".join(["", head, *lines, "", f"  {curl(info.model, url, chat, key, uds, certificate)}", ""])


def _preemption(info: EngineInfo) -> str:
    """What becomes of preempted requests, and why."""
    if not info.host_blocks or info.preemption == "recompute":
        text = "recompute"
    else:
        text = f"{info.preemption}, {size(info.host_blocks * info.block_bytes)} of swap space"
    rates = []
    if info.copy_rate:
        rates.append(f"moves {size(info.copy_rate)}/s")
    if info.compute_rate:
        rates.append(f"computes {info.compute_rate:.0f} tokens/s")
    return f"{text} ({', '.join(rates)})" if rates else text


def curl(
    model: str, url: str, chat: bool, key: str = "", uds: Path | None = None, certificate: Path | None = None
) -> str:
    """A first request, quoted for a POSIX shell, which puts in a `key` that is a variable's, such as $NAME."""
    ask: dict[str, object]
    if chat:
        route, ask = "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is photosynthesis?"}]}
    else:
        route, ask = "/v1/completions", {"prompt": "Photosynthesis is"}
    body = json.dumps({"model": model, **ask, "max_tokens": 64, "temperature": 0})
    bearer = f"Authorization: Bearer {key}"
    header = f' -H "{bearer}"' if key.startswith("$") else f" -H {shlex.quote(bearer)}" if key else ""
    socket = f"--unix-socket {shlex.quote(str(uds))} " if uds else ""
    trust = f"--cacert {shlex.quote(str(certificate))} " if certificate else ""
    options = f"{header} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return f"curl {socket}{trust}{shlex.quote(url + route)}{options}"
