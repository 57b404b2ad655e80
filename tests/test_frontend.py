"""benchmarks/frontend.py does what it says, with few streams: its figures are no test's to judge."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FRONTEND = Path(__file__).parents[1] / "benchmarks" / "frontend.py"


@pytest.mark.slow
def test_every_figure_is_printed(demo_model: Path) -> None:
    flags = ["--streams", "6", "--words", "20", "--output", "5", "--reps", "2"]
    done = subprocess.run([sys.executable, FRONTEND, *flags], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = {name: float(value) for value, name in re.findall(r"^ +([\d.]+) (.+?)  \[", done.stdout, re.MULTILINE)}
    assert figures.keys() == {
        "output tokens/s",
        "CPU time of the front end / of the engine",
        "us of the front end per output token",
        "ms, p99.9 of stalls",
    }
    assert all(value > 0 for value in figures.values())
    longest = re.search(r"([\d.]+) ms of CPU time, longest callback: <", done.stdout)
    assert longest is not None and float(longest[1]) > 0
