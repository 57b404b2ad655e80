"""The library of `--kernel cpu`: compiled once, kept whole, declined where it cannot be had; and its kernels, without
torch, under sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from framework.plugins.kernels.cpu import CpuOptions, backend, build
from framework.plugins.kernels.cpu.backend import CpuBackend

from framework import LLM, ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and sources that compile in a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "ops.cpp").write_text("int answer() { return 42; }\n")
    (sources / "isa.cpp").write_text("namespace ISA { int width() { return 1; } }\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    return tmp_path / "framework" / "kernels"


def test_it_is_compiled_once(cache: Path) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(4) as pool:  # as four processes would: the lock is on an open file
        found = list(pool.map(lambda _: build.library(said.append), range(4)))
    assert len(set(found)) == 1 and found[0].is_file() and found[0].is_relative_to(cache)
    assert len(said) == 1 and "once" in said[0]
    assert sorted(p.suffix for p in cache.iterdir()) == ["", ".lock"], "nothing is left of the build"


def test_what_it_depends_on_makes_another(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library()
    (build.SOURCES / "isa.cpp").write_text("namespace ISA { int width() { return 2; } }\n")
    second = build.library()
    monkeypatch.setattr(build, "supported", lambda: ("portable",))
    third = build.library()
    assert len({first, second, third}) == 3 and first.is_file()


@pytest.mark.parametrize("damage", ["cut short", "changed", "no checksum", "no library"])
def test_a_broken_entry_is_made_again(cache: Path, damage: str) -> None:
    library = build.library()
    whole = library.read_bytes()
    if damage == "no library":
        library.unlink()
    elif damage == "no checksum":
        library.with_name("sha256").unlink()
    else:
        library.write_bytes(whole[: len(whole) // 2] if damage == "cut short" else whole[:-1] + b"x")
    said: list[str] = []
    assert build.library(said.append) == library and len(said) == 1
    assert len(library.read_bytes()) == len(whole)


def test_a_failed_build_says_why_and_leaves_nothing(cache: Path) -> None:
    (build.SOURCES / "isa.cpp").write_text("namespace ISA { int width() { return nonsense; } }\n")
    with pytest.raises(build.BuildError, match=r"cannot compile the kernels: .*error: .*nonsense"):
        build.library()
    assert [p.suffix for p in cache.iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match=r"cannot be used: .*; set XDG_CACHE_HOME"):
        build.library()


def test_without_a_compiler_auto_takes_torch(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_isas", lambda: build.compiler() and [])
    flags = {"dtype": "float32", "kv_blocks": 16}
    for path, cxx, reason in (("", None, "no C++ compiler; install g++"), ("", "odd-cc", "compiler odd-cc, which")):
        monkeypatch.setenv("PATH", path)
        monkeypatch.delenv("CXX", raising=False)
        if cxx:
            monkeypatch.setenv("CXX", cxx)
        with pytest.raises(ConfigError, match=rf"--kernel cpu: .*{reason.replace('+', '.')}"):
            LLM(str(tiny_llama), kernel="cpu", **flags)
        with LLM(str(tiny_llama), **flags) as llm:
            assert llm.info.providers["kernel"] == "torch"
            note, *others = llm.info.notes
            assert [other.split(":")[0].split()[-1] for other in others] == ["triton", "flash"]
            assert note.startswith("--kernel auto passed over cpu: ") and reason in note


def test_what_cannot_be_compiled_is_tried_once(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each operation: it may take minutes. What has not begun when the first part fails is left."""
    compiler, calls = tmp_path / "odd-cc", tmp_path / "calls"
    compiler.write_text(
        f"#!/bin/sh\necho $1 >> {calls}\n[ $1 = --version ] && exit\necho 'error: no room' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "cpus", lambda: 1)
    monkeypatch.setattr(build, "load", lambda say: [str(build.library(say))])
    monkeypatch.setattr(backend, "load", build.load)
    backend._loaded.cache_clear()
    try:
        with LLM(str(tiny_llama), dtype="float32", kv_blocks=16) as llm:
            assert (
                llm.info.providers["kernel"] == "torch"
                and "cannot compile the kernels: error: no room" in llm.info.notes[0]
            )
    finally:
        backend._loaded.cache_clear()
    first, *others = calls.read_text().split()
    assert first == "--version" and 1 <= len(others) <= 2


def test_auto_takes_cpu(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), dtype="float32", kv_blocks=16) as llm:
        assert llm.info.providers["kernel"] == "cpu" and not llm.info.notes
    with LLM(str(tiny_llama), dtype="float32", kv_blocks=16, block_size=8) as llm:
        assert llm.info.providers["kernel"] == "torch" and "cpu: block size 8 is not one of 16, 32" in llm.info.notes[0]
    with LLM(str(tiny_llama), dtype="float16", kv_blocks=16) as llm:
        assert llm.info.providers["kernel"] == "torch" and "torch.float16 is not one of" in llm.info.notes[0]


def test_what_it_declines() -> None:
    assert "not on cuda" in CpuBackend().supports("linear", torch.float32, torch.device("cuda")).reason
    assert build.supported()[-1] == "portable"
    for isa in sorted({"avx512_bf16", "avx512", "avx2"} - set(build.supported())):
        reason = CpuBackend(CpuOptions(isa=isa)).supports("linear", torch.float32, CPU).reason
        assert reason == f"isa {isa}: this CPU has {', '.join(build.supported())}"
    for isa in build.supported():
        assert CpuBackend(CpuOptions(isa=isa)).supports("linear", torch.float32, CPU).ok


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_it_shares_the_threads_of_torch() -> None:
    """Even where another package has brought an OpenMP library of its own, as sentencepiece does."""
    code = """
import sentencepiece, torch, os
from framework.plugins.kernels.cpu.backend import CpuBackend
torch.set_num_threads(3)
count = lambda: len(os.listdir("/proc/self/task"))
backend, x = CpuBackend(), torch.randn(300, 300)
ours = lambda: backend.linear(x, backend.pack("linear", x))
theirs = lambda: torch.mm(x, x)
before = count()
for one in FIRST:
    one()
    print(count() - before)
"""
    for order in ("ours, theirs", "theirs, ours"):
        done = subprocess.run(
            [sys.executable, "-c", code.replace("FIRST", f"({order})")], capture_output=True, text=True, timeout=120,
            env=os.environ | {"MKL_THREADING_LAYER": "GNU"},
        )  # fmt: skip
        assert done.stdout.split() == ["2", "2"], done.stdout + done.stderr


# Under sanitizers

PATHS = {
    "pairs": ("portable", "-DWIDTH=16", "-DPAIRS=1"),  # what AVX-512 BF16 computes, of what this CPU has
    "wide": ("portable", "-DWIDTH=16"),  # AVX-512
    **{isa: (isa,) for isa in build.supported()},
}
SANITIZE = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def sanitized(folder: Path, paths: list[str], *planted: str) -> subprocess.CompletedProcess[str]:
    """The main program over some of PATHS, compiled and run."""
    cxx = build.compiler()
    program, objects = folder / "kernels", [folder / f"{path}.o" for path in paths]

    def compile_main() -> None:
        isas = f"-DISAS={' '.join(f'X({path})' for path in paths)}"
        source = Path(__file__).with_name("cpu_kernels.cpp")
        build.call(cxx, "-std=c++20", "-Wno-psabi", *SANITIZE, f"-I{build.SOURCES}", isas, "-c", source, "-o",
                   folder / "main.o")  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(compile_main)]
        for path, out in zip(paths, objects, strict=True):
            isa, *defines = PATHS[path]
            jobs.append(pool.submit(build.compile_kernels, cxx, isa, out, *SANITIZE, *planted, *defines, name=path))
        for job in jobs:
            job.result()
    build.call(cxx, "-fopenmp", *SANITIZE, folder / "main.o", *objects, "-o", program)
    return subprocess.run([program], capture_output=True, text=True, timeout=880, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_path_under_sanitizers(tmp_path: Path) -> None:
    """Every operation, against plain loops in double precision, on buffers that end where they must."""
    done = sanitized(tmp_path, list(PATHS))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(PATHS)


@pytest.mark.slow
def test_a_planted_overflow_is_caught(tmp_path: Path) -> None:
    done = sanitized(tmp_path, ["portable"], "-DPLANTED_OVERFLOW")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stdout + done.stderr[-3000:]
