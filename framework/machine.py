"""What this machine lets the process use: CPUs and free memory, within its cgroup; a cache folder. Imports no torch."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

_MOUNT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
SERVER_FROM = 8
"""Cores from which one is left to the server."""


class Placement(NamedTuple):
    """Where a server and its engine run."""

    threads: int
    """Of the engine."""
    engine: tuple[int, ...]
    """CPUs, ascending."""
    server: tuple[int, ...]
    """CPUs of other cores than the engine's; or the same CPUs, where both share what there is."""


def plan(cores: Sequence[Sequence[int]], cpus: int, threads: int | None, part: bool = True) -> Placement:
    """Place a server and an engine of `threads` threads (None: as many as is best).

    cores: CPUs of each physical core, at least one, those this process may not use left out. cpus: how many of them
    the cgroup's quota is worth. part: whether the two may be given cores of their own.
    """
    every = tuple(sorted(cpu for core in cores for cpu in core))
    usable = max(1, min(len(cores), cpus))
    count = threads or (usable - 1 if usable >= SERVER_FROM else usable)
    spare = len(cores) - count
    # A quota says that others run on the same CPUs, which we cannot see: the system spreads all better than we can.
    if not part or spare < 1 or cpus < len(every):
        return Placement(count, every, every)
    # Half of what is left over is the engine's to move in: it may not be the only one on this machine.
    split = len(cores) - (spare + 1) // 2
    engine, server = (tuple(sorted(cpu for core in some for cpu in core)) for some in (cores[:split], cores[split:]))
    return Placement(count, engine, server)


def place(threads: int | None) -> Placement:
    """The plan for this process as a server, and for the engine that it starts; threads: what `--threads` says.

    Who has set an OpenMP variable that places threads or says how many there are has a plan of their own: then, and
    where the system has no affinity masks or does not let us set them, nobody is kept anywhere.
    """
    part = not (_bound() or os.environ.get("OMP_NUM_THREADS")) and hasattr(os, "sched_setaffinity")
    if part:
        try:
            os.sched_setaffinity(0, os.sched_getaffinity(0))
        except OSError:
            part = False
    return plan(cores(), cpus(), threads or _told(), part)


def keep_to(cpus: Iterable[int]) -> None:
    """Keep the calling thread, and those that it starts from now on, to `cpus`."""
    chosen = set(cpus)
    if chosen != set(allowed()):  # never true of a placement where masks cannot be set
        os.sched_setaffinity(0, chosen)


def threads() -> int:
    """Threads of an engine without a server: OMP_NUM_THREADS, else one for each core, within the cgroup's quota."""
    return _told() or min(len(cores()), cpus())


def _told() -> int:
    """OMP_NUM_THREADS: who sets it has a reason, other processes on the same cores mostly. 0: not set."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(told), 1024) if told.isdecimal() else 0


def _bound() -> bool:
    """Whether the user has OpenMP keep its threads in places."""
    return any(map(os.environ.get, _BINDING))


def allowed() -> list[int]:
    """CPUs in the calling thread's affinity mask, ascending; where there are no masks, all.

    OpenMP that binds its threads leaves the one that loads it a single CPU: then, what there was before.
    """
    return _AT_FIRST if _bound() else _mask()


def _mask() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


_AT_FIRST = _mask()


def cores() -> list[list[int]]:
    """The physical cores of `allowed`: their CPUs (hyper-threads), each in one core, ascending. Where the system does
    not tell, every CPU is a core."""
    left, found = allowed(), []
    while left:
        folder = _TOPOLOGY / f"cpu{left[0]}" / "topology"
        siblings = _read(folder / "core_cpus_list") or _read(folder / "thread_siblings_list")
        core = {left[0], *_parse_cpus(siblings)}
        found.append([cpu for cpu in left if cpu in core])
        left = [cpu for cpu in left if cpu not in core]
    return found


def list_cpus(cpus: Sequence[int]) -> str:
    """For people: [0, 1, 2, 5] -> 'CPUs 0-2,5'."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return f"CPU{'s' * (len(cpus) != 1)} {','.join('-'.join(map(str, part)) for part in parts)}"


def _parse_cpus(text: str) -> Iterator[int]:
    """'0-2,5' -> 0, 1, 2, 5."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            yield from range(int(first), int(last or first) + 1)


def cpus() -> int:
    """CPUs this process may use: the affinity mask, cut to the cgroup's quota (rounded down, at least 1)."""
    quotas = [len(allowed())]
    for folder, controller in _cgroups("cpu"):
        if controller:
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        else:
            quota, period = _number(folder / "cpu.max"), _number(folder / "cpu.max", 1)
        if quota and period and quota > 0:
            quotas.append(max(1, quota // period))
    return min(quotas)


def free_memory() -> int:
    """Bytes this process may still take: what the machine has available, or less where a cgroup limits it.

    File pages that the kernel would drop count as free, so that memory-mapped weights do not.
    """
    free = [psutil.virtual_memory().available]
    for folder, controller in _cgroups("memory"):
        if controller:
            limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
            reclaimable = _stat(folder / "memory.stat", "total_inactive_file")
        else:
            limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
            reclaimable = _stat(folder / "memory.stat", "inactive_file")
        if limit is not None and used is not None:
            free.append(max(0, limit - max(0, used - reclaimable)))
    return min(free)


def cpu_name() -> str:
    """Readable name of the CPU."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction sets as Linux names them; empty elsewhere."""
    return frozenset(_cpuinfo("flags", "Features").split())


def cache_folder(name: str) -> Path:
    """Where this user's files of one kind are kept between starts; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "framework" / name


def size(count: float) -> str:
    """Bytes for people: 1536 -> '1.5 KiB'."""
    power = min(4, int(math.log(max(count, 1), 1024)))
    return f"{count / 1024**power:.{1 if power else 0}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _cpuinfo(*keys: str) -> str:
    """The value of the first line with one of `keys`; empty where there is none."""
    for line in _read(_CPUINFO).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def _cgroups(controller: str) -> Iterator[tuple[Path, str]]:
    """The folders of this process's cgroup and of those around it; the controller's name for v1, "" for v2."""
    for line in _read(_SELF).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root, version = _MOUNT / controller, controller
        elif not controllers:
            root, version = _MOUNT, ""
        else:
            continue
        # In a container the path may be the host's and not exist here; its root then is the container's own.
        inner = root / path.strip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(root):
                yield folder, version


def _read(path: Path) -> str:
    """Empty where there is no such file: other systems, other cgroup versions."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path, field: int = 0) -> int | None:
    """None for a missing file and for "max"."""
    fields = _read(path).split()
    return int(fields[field]) if len(fields) > field and fields[field].lstrip("-").isdigit() else None


def _stat(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def prepare_environment() -> None:
    """Set what native libraries read from the environment, unless it is set already. Only works before torch is
    imported.

    - OpenMP threads that wait for one another spin only briefly before they sleep. With libgomp's default, one other
      busy process costs a factor of ten, since who waits keeps off the one waited for; without any spinning, a
      machine of our own loses a third. docs/performance.md has the figures.
    - oneDNN keeps a compiled kernel for each shape it has seen, and a ragged batch has ever new ones: with its default
      capacities a process grows by hundreds of MB.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
