"""Cgroup limits, of both versions, from files such as the kernel shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from framework import machine

GIB = 2**30
NO_LIMIT = 0x7FFFFFFFFFFFF000  # what v1 says when there is none


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_MOUNT", tmp_path)
    monkeypatch.setattr(machine, "_SELF", tmp_path / "self")
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_no_cgroup(mount: Path) -> None:
    assert (machine.free_memory(), machine.cpus()) == (100 * GIB, 8)


def test_version_2(mount: Path) -> None:
    """The tightest limit on the way to the root counts; droppable file pages count as free."""
    write(mount, self="0::/user/app", cpu__max="max 100000", memory__max="max", memory__current=90 * GIB)
    write(mount / "user", memory__max=20 * GIB, memory__current=15 * GIB, cpu__max="350000 100000")
    write(
        mount / "user" / "app",
        memory__max=10 * GIB,
        memory__current=9 * GIB,
        memory__stat=f"anon 5\ninactive_file {3 * GIB}\nactive_file 7",
        cpu__max="max 100000",
    )
    assert machine.free_memory() == 4 * GIB
    assert machine.cpus() == 3
    write(mount / "user", memory__max=16 * GIB, cpu__max="50000 100000")
    assert machine.free_memory() == 1 * GIB
    assert machine.cpus() == 1


def test_version_1(mount: Path) -> None:
    write(mount, self="4:memory:/docker/x\n2:cpu,cpuacct:/\n0::/")
    write(mount / "memory", memory__limit_in_bytes=NO_LIMIT, memory__usage_in_bytes=50 * GIB)
    write(
        mount / "memory" / "docker" / "x",
        memory__limit_in_bytes=6 * GIB,
        memory__usage_in_bytes=5 * GIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {2 * GIB}",
    )
    write(mount / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert machine.free_memory() == 3 * GIB
    assert machine.cpus() == 8
    write(mount / "cpu", cpu__cfs_quota_us=250000)
    assert machine.cpus() == 2


def test_container_that_does_not_see_its_own_path(mount: Path) -> None:
    write(mount, self="0::/kubepods/pod1", memory__max=2 * GIB, memory__current=3 * GIB, cpu__max="200000 100000")
    assert machine.free_memory() == 0
    assert machine.cpus() == 2


def test_machine_has_less_than_the_cgroup_allows(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(mount, self="0::/", memory__max=50 * GIB, memory__current=0, cpu__max="1600000 100000")
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=GIB))
    assert (machine.free_memory(), machine.cpus()) == (GIB, 8)


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [
        ("processor\t: 0\nmodel name\t: A: B\nflags\t\t: fma avx2\nmodel name\t: C\n", "A: B", {"fma", "avx2"}),
        ("processor\t: 0\nFeatures\t: asimd bf16\n", None, {"asimd", "bf16"}),
        (None, None, set()),
    ],
)
def test_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, name: str | None, flags: set[str]
) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", file)
    if text is not None:
        file.write_text(text)
    assert machine.cpu_flags() == flags
    assert machine.cpu_name() == name if name else machine.cpu_name()


def test_here() -> None:
    assert machine.free_memory() > 0
    assert 1 <= machine.cpus() <= (os.cpu_count() or 1)
    assert machine.cpu_name()


def test_size() -> None:
    assert [machine.size(n) for n in (0, 1000, 1536, 3 * 2**20, 2.5 * GIB, 2**50)] == [
        *("0 bytes", "1000 bytes", "1.5 KiB", "3.0 MiB", "2.5 GiB", "1024.0 TiB")
    ]


@pytest.mark.parametrize("given", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_environment_is_prepared_but_not_overruled(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    for name in (*names, "LRU_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    if given:
        monkeypatch.setenv(given, "mine")
    machine.prepare_environment()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7" and os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
    chosen = {name: os.environ[name] for name in names[:3] if name in os.environ}
    assert chosen == ({given: "mine"} if given else {"GOMP_SPINCOUNT": "1000"})


@pytest.mark.parametrize("module", ["framework.process", "framework.llm"])
def test_the_environment_can_be_prepared_before_torch_reads_it(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
