"""What every benchmark prints, and how it fails."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from datetime import date

from framework import __version__
from framework.machine import cpu_name, cpus


def header() -> None:
    """Where and when: one line, with how busy the machine was before."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    machine = f"{cpu_name()}, {cpus()} CPUs, {platform.system()}, Python {platform.python_version()}"
    print(f"framework {__version__}, {date.today()}, {machine}, load {load:.1f}", flush=True)


def finish(check: bool, targets: Iterable[tuple[str, bool]]) -> None:
    """Say which targets are met; with `check` a missed one is exit code 1."""
    missed = False
    for target, met in targets:
        print(f"  {'met   ' if met else 'MISSED'} {target}")
        missed |= not met
    if check and missed:
        sys.exit(1)
