"""Seconds from `framework serve` on the command line to the first token in a client's hands, cold each time.

    python benchmarks/startup.py [--reps 5] [--check] [-- --model PATH ...]

ready: the server prints its URL. first token: the first text of a streamed completion asked for right then. What
follows `--` goes to `framework serve`. Every process starts anew; files stay in the system's page cache, as they do on
a machine that has just installed them. With --check the exit code is 1 if the median of the first token is over 15 s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import httpx
from common import finish, header, server

TARGET_SECONDS = 15.0


def measure(flags: list[str], patience: float = 120.0) -> tuple[float, float]:
    """Seconds to readiness and to the first token of one cold start."""
    start = time.perf_counter()
    with server([sys.executable, "-m", "framework", "serve", "--port", "0", *flags], patience) as (url, _):
        ready = time.perf_counter() - start
        body = {"prompt": "Photosynthesis is", "max_tokens": 8, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=patience) as response:
            next(line for line in response.iter_lines() if '"text":"' in line and '"text":""' not in line)
            return ready, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit code 1 if the target is missed")
    parser.add_argument("serve", nargs="*", metavar="-- FLAG", help="flags of framework serve")
    options = parser.parse_args()
    header()
    runs = [measure(options.serve) for _ in range(options.reps)]
    ready, first = (statistics.median(times) for times in zip(*runs, strict=True))
    print(f"medians of {options.reps} starts, in seconds")
    print(f"  ready       {ready:6.2f}   {[round(run[0], 2) for run in runs]}")
    print(f"  first token {first:6.2f}   {[round(run[1], 2) for run in runs]}")
    finish(options.check, [(f"first token within {TARGET_SECONDS:.0f} s", first <= TARGET_SECONDS)])


if __name__ == "__main__":
    main()
