"""Every tile of `--kernel triton` compiled for the parts it is for, without one: registers, spills, shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from framework.plugins.kernels.triton import tiles

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB that a program may have (CUDA C++ Programming Guide, Compute Capabilities)."""
SCRAP = 16
"""Bytes that variants may spill: some registers, which the assembler prefers to another step down in occupancy."""
DTYPES = {2: "bf16", 4: "fp32"}
EXHAUSTIVE = "EXHAUSTIVE" in os.environ
ELEMENTWISE = [
    ["combine", "bf16", {"HEADS": 32, "D": 128, "DP": 128, "SPLITS": 64, "MIXED": True}, 4],
    ["combine", "bf16", {"HEADS": 16, "D": 256, "DP": 256, "SPLITS": 64, "MIXED": True}, 8],
    [
        "rope_store",
        "bf16",
        {
            "HEADS": 32, "KV_HEADS": 8, "D": 128, "DP": 128, "HALF": 48, "HP": 64, "BLOCK": 16, "ROWS": 32, "LIMIT": 0.0
        },
        4,
    ],
    ["add_rmsnorm", "bf16", {"HEADS": 1, "N": 4096, "NP": 4096, "ROWS": 1, "ADD": True}, 4],
    ["add_rmsnorm", "bf16", {"HEADS": 32, "N": 128, "NP": 128, "ROWS": 16, "ADD": False}, 4],
    ["silu_mul", "bf16", {"ROWS": 1, "COLUMNS": 1024}, 4],
]  # fmt: skip


def attend(
    arch: int, itemsize: int, head_dim: int, ones: bool, *, kind: str = "", cache: str = "", group: int = 4, **more: Any
) -> list[Any]:
    tile = tiles.attend_tiles((arch // 10, arch % 10), itemsize, head_dim, group)[not ones]
    dtype = kind or DTYPES[itemsize]
    constants = {
        "KV_HEADS": 8, "GROUP": group, "D": head_dim, "DP": tiles.padded(head_dim), "BLOCK": 16,
        "M": tile.rows, "N": tile.columns, "SPLITS": 8 if ones else 1, "ONES": ones, "MIXED": True,
        "WINDOWED": False, "CAP": 0.0,
    } | more  # fmt: skip
    return [arch, "attend", dtype, cache or dtype, constants, tile.warps, tile.stages]


def elementwise(arch: int) -> list[list[Any]]:
    return [[arch, name, dtype, dtype, constants, warps, 3] for name, dtype, constants, warps in ELEMENTWISE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("triton")


def build(cases: list[list[Any]], folder: Path, scrap: int = 0) -> None:
    """Compile them, print what they take, and fail on what a part does not have, or on more than `scrap` bytes of
    spilled registers."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("triton_aot.py")
    done = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(cases), env=env | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert len(reports) == len(cases)
    wrong = []
    print("\nsm   kernel       types        D   M   N  warps stages  registers  spills  shared")
    for (arch, name, dtype, cache, constants, warps, stages), found in zip(cases, reports, strict=True):
        shape = [constants.get(key, "") for key in "DMN"]
        line = f"{arch:<4} {name:12} {dtype + ' ' + cache:11} {shape[0]:>3} {shape[1]:>3} {shape[2]:>4} {warps:>5} "
        line += f"{stages:>6} {found['registers']:>10} {found['spills']:>7} {found['shared']:>7}"
        print(line)
        if found["spills"] > scrap or found["shared"] > SHARED[arch] * 1024:
            wrong.append(f"{line}  {constants}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("arch", [80, 90, 100, pytest.param(120, marks=pytest.mark.slow)])
def test_every_tile(arch: int, folder: Path) -> None:
    cases = [attend(arch, size, head, ones) for size in (2, 4) for head in (64, 128, 256) for ones in (True, False)]
    build(cases + (elementwise(arch) if arch == 90 else []), folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", SHARED)
def test_variants(arch: int, folder: Path) -> None:
    """What the constants and types change: padding, windows, the soft cap, 8-bit caches, groups, blocks. Each on one of
    the parts, by turns; with EXHAUSTIVE set in the environment on all of them, which takes a quarter of an hour."""
    e4m3 = ["fp8e4nv"] if arch >= 89 else []
    cases = elementwise(arch)
    for head in (64, 80, 96, 128, 256):
        for ones in (True, False):
            cases.append(attend(arch, 2, head, ones, WINDOWED=True, CAP=30.0))
            cases.append(attend(arch, 2, head, ones, kind="fp16", BLOCK=64, MIXED=False))
            cases += [attend(arch, 2, head, ones, cache=cache) for cache in ["fp8e5", *e4m3]]
        cases.append(attend(arch, 2, head, True, group=7, SPLITS=1))
        cases.append(attend(arch, 2, head, True, group=32))
        cases.append(attend(arch, 2, head, True, group=64))
        cases.append(attend(arch, 4, head, True, cache="fp8e5", WINDOWED=True))
        cases.append(attend(arch, 4, head, False, cache="fp8e5", group=1))
    turn = list(SHARED).index(arch)
    build(cases if EXHAUSTIVE else cases[turn :: len(SHARED)], folder, SCRAP)
