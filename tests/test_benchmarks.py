"""The table of benchmarks/policies.py, on a trace so small that its figures can be worked out; what asks for help runs
nothing."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Callable
from heapq import heapreplace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import policies

    return policies


@pytest.fixture
def options(policies: ModuleType, tmp_path: Path) -> Callable[..., argparse.Namespace]:
    def make(visits: list[tuple[str, int, int]], **given: Any) -> argparse.Namespace:
        """For a trace with these values of TIMESTAMP, ContextTokens and GeneratedTokens."""
        path = tmp_path / "trace.csv"
        lines = (",".join(map(str, values)) for values in [("TIMESTAMP", "ContextTokens", "GeneratedTokens"), *visits])
        path.write_text("\r\n".join(lines))
        given = {"trace": path, "divide": 1, **given}
        flags = [part for key, value in given.items() for part in ("--" + key.replace("_", "-"), str(value))]
        found: argparse.Namespace = policies.arguments(flags)
        return found

    return make


@pytest.mark.parametrize("name", ["hooks.py", "frontend.py"])
def test_help_runs_nothing(name: str) -> None:
    done = subprocess.run([sys.executable, BENCHMARKS / name, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {name}")
    assert "CPUs" not in done.stdout  # the line that every run begins with


def test_the_load_is_the_slice_of_the_trace(policies: ModuleType, options: Callable[..., Any]) -> None:
    visits = [
        ("2023-11-16 18:17:03.9799600", 9, 9),
        ("2023-11-16 23:59:59.5000000", 4808, 10),
        ("2023-11-17 00:00:00.7500000", 3, 1),
        ("2023-11-17 00:00:02.5000000", 900, 5000),
        ("2023-11-17 00:00:03.5000000", 40, 40),
    ]
    given = {"first": 1, "requests": 3, "divide": 4, "speed": 2, "max_model_len": 1000}
    load = policies.read_load(options(visits, **given), 49152)
    assert [visit.at for visit in load] == [0, 0.625, 1.5]
    assert [(len(visit.prompt), visit.output) for visit in load] == [(998, 2), (1, 1), (1, 999)]
    load = policies.read_load(options(visits, **given, max_tokens=100), 49152)
    assert [(len(visit.prompt), visit.output) for visit in load] == [(998, 2), (1, 1), (225, 100)]


def test_the_table(
    policies: ModuleType, options: Callable[..., Any], tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, slots = random.Random(3), 3
    lengths = [(rng.randint(20, 70), rng.randint(2, rng.choice((8, 48)))) for _ in range(32)]
    visits = [("2023-11-16 18:17:03.9799600", *pair) for pair in lengths]
    pool = {"block_size": 4, "max_model_len": 256, "kv_blocks": slots * 64 + 2}  # 1 % are left to those who run
    given = options(visits, model=tiny_llama, **pool, seats=32)
    table = policies.compare(given)
    assert list(table) == list(policies.ROWS)
    outputs, prompts = [visit[2] for visit in visits], sum(visit[1] for visit in visits)
    for name, row in table.items():
        assert row.rate * row.seconds == pytest.approx(sum(outputs)), name
        assert row.total_rate * row.seconds == pytest.approx(sum(outputs) + prompts), name
        assert 0 < row.first_p50 <= row.first_p99 <= row.seconds and 0 < row.gap_p50 <= row.gap_p99, name
        assert round(row.steps * row.running) >= sum(outputs), name  # more, if prompts are computed twice or in parts
        assert (row.hits > 0) == ("prefix cache" in name), name
        assert (row.idle is not None) == ("static" in name), name

    # All come at once, and the prompts of a batch fit into one step: a step for each token of the longest.
    batches = [outputs[i : i + slots] for i in range(0, len(outputs), slots)]
    static = table[policies.STATIC]
    assert static.steps == sum(map(max, batches))
    assert static.idle == pytest.approx(1 - sum(outputs) / sum(len(batch) * max(batch) for batch in batches))
    ends = [0] * slots
    for output in outputs:
        heapreplace(ends, ends[0] + output)
    assert table[policies.FCFS].steps == max(ends)
    assert table[policies.PAGED].steps < max(ends)
    for name in (policies.STATIC, policies.FCFS):
        assert table[name].running <= slots, name
        assert table[name].swapped == table[name].dropped == table[name].recomputed == 0, name

    for name, row in table.items():
        if "priority" in name:
            done, other = (row.swapped, row.dropped) if policies.SWAP in name else (row.dropped, row.swapped)
            assert done > 0 == other, name
            assert (row.recomputed > 0) == (policies.RECOMPUTE in name), name

    assert [target for target, met in policies.targets(table) if not met] == []
    table[policies.SWAP] = table[policies.SWAP]._replace(recomputed=1)
    table[policies.FCFS] = table[policies.FCFS]._replace(holding=0.5, steps=static.steps)
    assert [met for _, met in policies.targets(table)] == [True, False, False, False]
    printed = capsys.readouterr().out.splitlines()
    assert [line[: policies.WIDTH].strip() for line in printed[-len(table) :]] == list(table)
