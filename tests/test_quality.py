"""What the demo model predicts in 8 bits, and in bfloat16, is within the bounds that docs/quantization.md states."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "quality.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quality(demo_model: Path) -> None:
    """On 2,048 predictions: fewer say less about a percent of perplexity."""
    line = [sys.executable, str(SCRIPT), "--model", str(demo_model), "--tokens", "2049", "--check"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0 and done.stdout.count("  met ") == 12, done.stdout + done.stderr
