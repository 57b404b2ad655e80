"""benchmarks/gpu_check.py: that it runs, here in Triton's interpreter, and what makes it fail."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PLANT = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, {folder!r})
import gpu_check, gpu_kernels
launch = gpu_kernels.kernels().launch
right = launch.silu_mul
def wrong(x):
    if x.itemsize == 2:
        raise RuntimeError("planted")
    y = right(x)
    y[-1, -1] += 1
    return y
launch.silu_mul = wrong
sys.exit(gpu_check.main(["--interpret", "--only", "swap", "kernels", "--json", {file!r}]))
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_a_wrong_kernel_is_seen(tmp_path: Path) -> None:
    """One number of one kernel, and one that raises: exit code 1, and what else there is runs."""
    file = tmp_path / "found.json"
    code = PLANT.format(folder=str(BENCHMARKS), file=str(file))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    sections = json.loads(file.read_text())["sections"]
    assert {name: one["status"] for name, one in sections.items()} == {"kernels": "FAILED", "swap": "right"}
    raised, wrong = sections["kernels"]["error"].splitlines()
    assert raised == "rmsnorm and silu x mul, bfloat16: RuntimeError: planted"
    assert wrong.startswith("silu x mul 3x100 float32: error ")
    assert "not right: kernels" in done.stdout and raised in done.stdout and wrong in done.stdout
    assert sections["kernels"]["rows"][-1]["what"].startswith("rope and store")


@pytest.mark.slow
def test_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--interpret", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert "timings mean nothing" in found["about"]["device"]
    assert {one["status"] for one in found["sections"].values()} == {"right"}
    rows = {name: one["rows"] for name, one in found["sections"].items()}
    assert all(rows.values()) and not any(one["wrong"] for one in found["sections"].values())
    assert all(row["error"] <= row["bound"] for row in rows["kernels"])
    assert sum(bool(row.get("right")) for row in rows["engine"]) >= 4


def test_only_results_decide_the_exit_code(
    benchmarks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check, common = (importlib.import_module(name) for name in ("gpu_check", "gpu_common"))
    report = common.Report(tmp_path / "found.json")
    report.begin("decode")
    report.check("a result", True, "as it ought to be")
    report.goal("a goal", False)
    report.raise_wrong()
    report.end("right", 1.0)
    report.begin("llama")
    report.end("skipped", 0.0, "skipped: packages are missing")
    assert check._summary(report, 1.0) == 0
    assert "MISSED a goal" in capsys.readouterr().out
    report.begin("swap")
    report.check("another", False, "3 instead of 4")
    with pytest.raises(common.Wrong, match="another: 3 instead of 4"):
        report.raise_wrong()
    report.end("WRONG", 1.0, "another")
    assert check._summary(report, 1.0) == 1
    written = json.loads((tmp_path / "found.json").read_text())["sections"]
    assert written["decode"]["goals"] == [{"goal": "a goal", "met": False}]


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [([1.0, 2.0], [1.0, 2.0], 0.0), ([1.0, float("nan")], [1.0, 2.0], float("inf")), ([2.0, 2.0], [1.0, 2.0], 0.387)],
)
def test_errors_are_relative(benchmarks: None, found: Any, expected: Any, error: float) -> None:
    import torch

    relative = importlib.import_module("gpu_common").relative
    assert relative(torch.tensor(found), torch.tensor(expected)) == pytest.approx(error, abs=1e-3)


def test_every_scene_of_a_gpu_has_its_reference(benchmarks: None) -> None:
    """In shapes and values: the attention of torch, request by request, is within the bounds of the section."""
    import torch
    import torch.nn.functional as F

    common, kernels = (importlib.import_module(name) for name in ("gpu_common", "gpu_kernels"))
    run = common.Run(torch.device("cpu"), False, common.Report(None), 60)
    every = list(kernels.scenes(run, (9, 0)))
    assert {scene.heads[2] for scene in every} == {64, 80, 96, 128, 256}
    assert {(scene.dtype, scene.heads[2]) for scene in every} >= {
        (dtype, size) for dtype in kernels.NEAR for size in (64, 80, 96, 128, 256)
    }
    assert {scene.kind for scene in every} == {"", *kernels.FP8} and {scene.block for scene in every} == {16, 64, 256}
    for scene in every[::4]:
        dtype, heads, spans, block, window, _, kind = scene
        given = {"block": block, "kind": kind, "window": window, "poisoned": True}
        paged, group = kernels.Paged(run, spans, heads, dtype, **given), heads[0] // heads[1]
        for request, (start, n) in enumerate(spans):
            first, length = int(paged.cu_lens[request]), start + n
            q = paged.q[first : first + n].float().transpose(0, 1)
            low = 0 if window is None else max(0, start + 1 - window) // block * block
            some = paged.tables[0][request, low // block : -(-length // block)].long()
            k, v = (
                pages[some].float().transpose(0, 1).flatten(1, 2)[:, : length - low].repeat_interleave(group, 0)
                for pages in (paged.keys, paged.values)
            )
            at = torch.arange(start, length)[:, None] - torch.arange(low, length)
            seen = (at >= 0) & (at < (window or length))
            expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).flatten(1)
            assert common.relative(expected, paged.expected(request)) < 1e-4, (scene, request)


def test_what_is_compiled_beforehand_is_what_the_backend_launches(tmp_path: Path) -> None:
    """Without a GPU: compiled once, found by the kernels of the package."""
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu_kernels
from gpu_kernels import LLAMA, Variant
variant = Variant(True, False, 4, (16, 32, 4, 2), LLAMA, 16, "bfloat16", "bfloat16")
gpu_kernels.compile_variant(variant, 90)
made = sorted(path.name for path in Path({str(tmp_path)!r}).rglob("*.cubin"))
assert made == ["attend.cubin", "combine.cubin"], made
from framework.plugins.kernels.triton import launch, tiles
gpu_kernels.kernels = lambda: __import__("types").SimpleNamespace(launch=launch, tiles=tiles)
gpu_kernels.compile_variant(variant, 90)
assert made == sorted(path.name for path in Path({str(tmp_path)!r}).rglob("*.cubin"))
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr


def test_the_package_without_an_installation(benchmarks: None, tmp_path: Path) -> None:
    package = importlib.import_module("gpu_package")
    package._link(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from importlib.metadata import distribution\n"
        "import framework\n"
        f"assert framework.__file__.startswith({str(tmp_path)!r}), framework.__file__\n"
        "from framework.registry import load_plugins\n"
        "assert {'triton', 'torch'} <= {provider.name for provider in load_plugins().providers('kernel')}\n"
        f"assert str(distribution('framework')._path).startswith({str(tmp_path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
