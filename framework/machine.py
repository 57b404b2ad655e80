"""What this machine lets the process use: CPUs and free memory, within its cgroup; a cache folder. Imports no torch."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

_MOUNT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")
_CPUINFO = Path("/proc/cpuinfo")


def affinity() -> int:
    """CPUs in this process's affinity mask; where there are no masks, all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpus() -> int:
    """CPUs this process may use: the affinity mask, cut to the cgroup's quota (rounded down, at least 1)."""
    quotas = [affinity()]
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
