"""What benchmarks share: the header, how they fail, servers, percentiles, and the speed of reading memory."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path

COLD = 128 << 20
"""Bytes of weights that no cache holds."""


def header() -> None:
    """Where and when: one line, with how busy the machine was before."""
    from framework import __version__
    from framework.machine import cpu_name, cpus

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    machine = f"{cpu_name()}, {cpus()} CPUs, {platform.system()}, Python {platform.python_version()}"
    print(f"framework {__version__}, {date.today()}, {machine}, load {load:.1f}", flush=True)


def finish(check: bool, targets: Iterable[tuple[str, bool]]) -> None:
    """Say which targets are met; with `check` a missed one is exit code 1."""
    missed = False
    for target, met in targets:
        print(f"  {'met   ' if met else 'MISSED'} {target}")
        missed |= not met
    if check and missed:
        sys.exit(1)


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` % of the values do not exceed; NaN of none."""
    return sorted(values)[-(-len(values) * percent // 100) - 1] if values else float("nan")


def best(reps: int, works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of the fastest of `reps`, in turn; with one thread of torch's, of its CPU time."""
    import torch

    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(reps):
        for name, work in works.items():
            begin = now()
            work()
            times[name].append(now() - begin)
    return {name: min(some) for name, some in times.items()}


def bandwidth() -> float:
    """GB/s that torch's threads read from memory."""
    import torch

    big = torch.ones(COLD)
    return big.nbytes / best(5, {"read": big.sum})["read"] / 1e9


def tether() -> None:
    """In a new process, before it becomes a command (`preexec_fn`): it is told to end if this one dies. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def server(command: Sequence[str], patience: float = 120.0) -> Iterator[tuple[str, str]]:
    """Run a server that prints `URL http://.../v1` once it is ready: (its URL without /v1, all it printed by then)."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        with output.open("w") as file:
            start = time.perf_counter()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=tether,
            )
        try:
            while (found := re.search(r"URL +(http://\S+)/v1", text := output.read_text())) is None:
                if process.poll() is not None or time.perf_counter() - start > patience:
                    sys.exit(f"the server did not start:\n{text}")
                time.sleep(0.01)
            yield found[1], text
        finally:
            process.send_signal(signal.SIGINT)  # its engine process ends with it
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
