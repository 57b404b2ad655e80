"""Compiles csrc/ into a library of torch operations: once per machine, kept in the user's cache folder.

A cache entry is a folder named by all that the library depends on: sources, flags, compiler, torch, instruction sets.
It is made beside its place and renamed into it, under a lock, so that whoever finds an entry finds it whole; one that
was damaged since is made again. `python -m framework.plugins.kernels.cpu.build` compiles ahead of the first use.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from framework.kept import locked
from framework.machine import cache_folder, cpu_flags, cpus

from . import fakes

SOURCES = Path(__file__).with_name("csrc")
_AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mprefer-vector-width=512"
_NEEDS512 = "avx512f avx512bw avx512dq avx512vl avx2 fma f16c"
ISAS = {
    "avx512_bf16": (f"{_AVX512} -mavx512bf16 -mavx512vnni", f"{_NEEDS512} avx512_bf16 avx512_vnni"),
    "avx512_vnni": (f"{_AVX512} -mavx512vnni", f"{_NEEDS512} avx512_vnni"),
    "avx512": (_AVX512, _NEEDS512),
    "avx2": ("-mavx2 -mfma -mf16c", "avx2 fma f16c"),
    "portable": ("", ""),
}
"""Instruction sets, best first: (compiler flags, CPU flags as Linux names them)."""
KERNEL_FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
TIMEOUT = 600
"""Seconds that one call of the compiler may take."""


class BuildError(Exception):
    """The library cannot be had here; the message says why and what to do."""


def supported() -> tuple[str, ...]:
    """Names of the instruction sets that this CPU has, best first."""
    flags = cpu_flags()
    return tuple(name for name, (_, needs) in ISAS.items() if flags.issuperset(needs.split()))


def compiler() -> str:
    """Path of the C++ compiler: $CXX, or g++ or c++. Raises `BuildError`."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "c++"]:
        if path := shutil.which(name):
            return path
    if asked:
        raise BuildError(f"the C++ compiler {asked}, which $CXX names, is not found")
    raise BuildError("there is no C++ compiler; install g++ (Debian, Ubuntu: apt install g++) or set CXX")


def load(say: Callable[[str], None]) -> list[str]:
    """Load the operations as `torch.ops.framework_cpu`, compiling them if need be; `say` is told before that. Gives the
    names of the instruction sets compiled, by index. Raises `BuildError`."""
    if not hasattr(torch.ops.framework_cpu, "isas"):
        try:
            torch.ops.load_library(str(library(say)))  # type: ignore[no-untyped-call]
            fakes.register()
        except (OSError, RuntimeError) as error:
            raise BuildError(f"the compiled library cannot be loaded: {error}") from error
    names: list[str] = torch.ops.framework_cpu.isas()
    return names


def library(say: Callable[[str], None] = lambda line: None) -> Path:
    """The library for this machine, compiled if it is not in the cache, or not whole. Raises `BuildError`."""
    cxx, isas = compiler(), supported()
    entry = cache_folder("kernels") / _key(cxx, isas)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        if not _whole(entry):
            with locked(entry.with_suffix(".lock")):
                if not _whole(entry):  # nobody else made it meanwhile
                    say(f"compiling the kernels of --kernel cpu for this machine ({', '.join(isas)}): once, minutes")
                    _build(cxx, isas, entry)
    except OSError as error:
        raise BuildError(f"the cache folder {entry.parent} cannot be used: {error}; set XDG_CACHE_HOME") from error
    return entry / "kernels.so"


def compile_kernels(cxx: str, isa: str, out: Path, *extra: str, name: str = "") -> None:
    """The torch-free kernels for one instruction set, as an object file; in C++ they are called `name`, or like the
    set. Raises `BuildError`."""
    flags = (*_base(), *KERNEL_FLAGS, *ISAS[isa][0].split(), f"-DISA={name or isa}")
    call(cxx, *flags, *extra, "-c", SOURCES / "isa.cpp", "-o", out)


def call(cxx: str, *arguments: str | Path) -> None:
    """Run the compiler. Raises `BuildError` with the first error that it reports."""
    try:
        done = subprocess.run(
            [cxx, *map(str, arguments)], capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{cxx} cannot be run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        said = next((line for line in lines if "error" in line), lines[-1])
        raise BuildError(f"{cxx} cannot compile the kernels: {said[:300]}")


def _build(cxx: str, isas: tuple[str, ...], entry: Path) -> None:
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix="build-", dir=entry.parent) as name:
        folder = Path(name)
        made = folder / "entry"
        made.mkdir()
        ops = folder / "ops.o"
        with ThreadPoolExecutor(max(1, min(cpus(), 8))) as pool:
            jobs = [pool.submit(call, cxx, *_ops_flags(root, isas), "-c", SOURCES / "ops.cpp", "-o", ops)]
            jobs += [pool.submit(compile_kernels, cxx, isa, folder / f"{isa}.o") for isa in isas]
            try:
                for job in jobs:
                    job.result()
            finally:
                pool.shutdown(cancel_futures=True)  # after the first that failed, those that have not begun are in vain
        objects = [ops, *(folder / f"{isa}.o" for isa in isas)]
        # No OpenMP library is named: a process may have several, and this finds the one that torch itself is bound to,
        # whose threads the operations must run on. Bound at once, so that a missing one shows when it is loaded.
        libraries = (f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", "-Wl,-z,now")
        call(cxx, "-shared", *objects, *libraries, "-o", made / "kernels.so")
        (made / "sha256").write_text(_digest(made / "kernels.so"))
        shutil.rmtree(entry, ignore_errors=True)
        made.rename(entry)


def _base() -> tuple[str, ...]:
    return ("-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden")


def _ops_flags(root: Path, isas: tuple[str, ...]) -> tuple[str, ...]:
    # Optimising costs this file seconds and saves nothing: it only calls.
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return (*_base(), "-O1", "-w", abi, f"-isystem{root / 'include'}", f"-DISAS={' '.join(f'X({i})' for i in isas)}")


def _key(cxx: str, isas: tuple[str, ...]) -> str:
    try:
        version = subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{cxx} cannot be run: {error}") from error
    parts = [cxx, version, torch.__version__, torch.__file__, platform.machine(), *isas, *KERNEL_FLAGS]
    digest = hashlib.sha256("\n".join([*parts, Path(__file__).read_text("utf-8")]).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return f"cpu-{digest.hexdigest()[:24]}"


def _whole(entry: Path) -> bool:
    """Whether the entry is as it was made: a library cut short would end the process that loads it."""
    try:
        return (entry / "sha256").read_text() == _digest(entry / "kernels.so")
    except OSError:
        return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    began = time.perf_counter()
    try:
        print(f"{library(print)} ({time.perf_counter() - began:.0f} s)")
    except BuildError as error:  # no reason to fail: without it, --kernel auto takes another backend
        print(f"--kernel cpu cannot be used: {error}")
