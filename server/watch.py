"""Whether a silent engine computes or does nothing."""

from __future__ import annotations

import psutil

IDLE_SHARE = 0.001
"""CPU time per second below which a process does nothing: an engine that asks its policies every 10 ms uses more."""


class Activity:
    """Of a process and its descendants, since the last `restart`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._begin = 0.0
        self._waited_for_disk = False

    def restart(self) -> None:
        self._begin, self._waited_for_disk = self._spent()

    def none_in(self, seconds: float) -> bool:
        """True if nothing was computed or read from disk in the `seconds` since `restart`. To be asked about once a
        second: waiting for a disk is seen only while it happens."""
        spent, waits = self._spent()
        self._waited_for_disk |= waits
        return not self._waited_for_disk and spent - self._begin < IDLE_SHARE * seconds

    def _spent(self) -> tuple[float, bool]:
        """(CPU seconds so far, whether a process waits for a disk now)."""
        seconds, waits = 0.0, False
        try:
            main = psutil.Process(self._pid)
            for process in (main, *main.children(recursive=True)):
                times = process.cpu_times()
                seconds += times.user + times.system
                waits |= process.status() == psutil.STATUS_DISK_SLEEP
        except psutil.Error:
            pass  # it ended just now: its parent is told
        return seconds, waits
