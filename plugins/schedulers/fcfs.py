"""First come, first served."""

from __future__ import annotations

from collections.abc import Iterator

from framework import View, Want, hookimpl


class Fcfs:
    """Admit in order of arrival; the preempted return first. Running requests, unnamed, rank before all."""

    @hookimpl
    def admit(self, view: View) -> Iterator[Want]:
        return (Want(request) for request in view.waiting)
