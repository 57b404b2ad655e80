"""Schedulers: who runs next."""

from __future__ import annotations

from collections.abc import Iterable

from framework import Provider, hookimpl


def _fcfs() -> object:
    from .fcfs import Fcfs

    return Fcfs()


@hookimpl
def providers() -> Iterable[Provider]:
    return [Provider("scheduler", "fcfs", _fcfs, summary="first come, first served; preempted requests return first")]
