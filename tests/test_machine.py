"""Cgroup limits, of both versions, and cores, from files such as the kernel shows; who is placed on which of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework import machine
from framework.machine import Placement, plan

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


@st.composite
def masks(draw: st.DrawFn) -> list[list[int]]:
    """Cores of one to four hyper-threads of which a mask leaves some."""
    width, count = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    every = [list(range(core, width * count, count)) for core in range(count)]
    some = draw(st.sets(st.sampled_from(range(width * count)), min_size=1))
    return [left for core in every if (left := [cpu for cpu in core if cpu in some])]


@given(masks(), st.integers(1, 200), st.none() | st.integers(1, 100), st.booleans())
def test_placements(cores: list[list[int]], quota: int, wanted: int | None, part: bool) -> None:
    every = {cpu for core in cores for cpu in core}
    cpus = min(quota, len(every))
    threads, engine, server = plan(cores, cpus, wanted, part)
    assert threads == wanted or (wanted is None and 1 <= threads <= min(len(cores), cpus))
    assert engine and server and every == {*engine, *server} and list(engine) == sorted(engine)
    parted = part and cpus == len(every) and len(cores) > threads
    assert set(engine).isdisjoint(server) if parted else engine == server
    if parted:
        assert all(set(core) <= set(engine) or set(core) <= set(server) for core in cores)
        assert sum(set(core) <= set(engine) for core in cores) >= threads


def test_the_server_is_left_a_core_where_there_are_many() -> None:
    def cores(count: int) -> list[list[int]]:
        return [[core, core + count] for core in range(count)]

    assert plan(cores(1), 2, None) == Placement(1, (0, 1), (0, 1))
    assert plan(cores(7), 14, None).threads == 7
    assert plan(cores(8), 16, None) == Placement(7, (*range(7), *range(8, 15)), (7, 15))
    assert plan(cores(8), 16, 8).threads == 8
    assert plan(cores(8), 16, 3) == Placement(3, (0, 1, 2, 3, 4, 8, 9, 10, 11, 12), (5, 6, 7, 13, 14, 15))
    assert plan(cores(64), 10, None) == Placement(9, tuple(range(128)), tuple(range(128)))


@pytest.fixture
def topology(tmp_path: Path, mount: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """8 CPUs of 4 cores, without a quota; what is set as a mask is in `mask`."""
    for name in (*machine._BINDING, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "_TOPOLOGY", tmp_path / "cpu")
    for cpu in range(8):
        write(tmp_path / "cpu" / f"cpu{cpu}" / "topology", core_cpus_list=f"{cpu % 4},{cpu % 4 + 4}")
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: None, raising=False)
    return tmp_path / "cpu"


def test_cores(topology: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.cores() == [[0, 4], [1, 5], [2, 6], [3, 7]] and machine.threads() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 5, 7})
    assert machine.cores() == [[1, 5], [2], [7]]
    for cpu, siblings in ((1, "1-5"), (2, "oops"), (5, None), (7, "")):
        folder = topology / f"cpu{cpu}" / "topology"
        (folder / "core_cpus_list").unlink()
        if siblings is not None:
            write(folder, thread_siblings_list=siblings)
    assert machine.cores() == [[1, 2, 5], [7]]
    monkeypatch.setattr(machine, "_TOPOLOGY", topology / "nowhere")
    assert machine.cores() == [[1], [2], [5], [7]]


def test_who_says_where_threads_run_is_not_overruled(topology: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = tuple(range(8))
    assert machine.place(3) == Placement(3, (0, 1, 2, 4, 5, 6), (3, 7))
    for name in (*machine._BINDING, "OMP_NUM_THREADS"):
        with monkeypatch.context() as set:
            set.setattr(machine, "_AT_FIRST", list(every))
            set.setenv(name, "2")
            assert machine.place(3) == Placement(3, every, every), name
            assert machine.place(None).threads == (2 if name == "OMP_NUM_THREADS" else 4)


def test_where_masks_cannot_be_set(topology: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = tuple(range(8))

    def refused(pid: int, cpus: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    assert machine.place(3) == Placement(3, every, every)
    machine.keep_to(every)
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert machine.place(3) == Placement(3, every, every)
    machine.keep_to(every)


@given(st.sets(st.integers(0, 300), min_size=1).map(sorted))
def test_lists_of_cpus(cpus: list[int]) -> None:
    word, _, text = machine.list_cpus(cpus).partition(" ")
    assert word == ("CPU" if len(cpus) == 1 else "CPUs") and list(machine._parse_cpus(text)) == cpus


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
