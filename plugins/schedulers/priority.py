"""The most urgent first, at the cost of whoever is less so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from framework import Request, Victim, View, Want, hookimpl

from . import PriorityOptions


class Priority:
    """Rank running and waiting requests together: smaller level first, then by arrival, then in order of acceptance; of
    equals, those who ran before.

    A request's level is its `priority`, unless a plugin set another when it arrived. It never moves, and a waiting
    request preempts only those of strictly worse level: equals, and whoever has aged, wait until there is room. Ageing
    needs no clock: if all gain a level every `aging` seconds, the distance between two requests never changes.
    """

    def __init__(self, options: PriorityOptions) -> None:
        rate = options.aging
        self._key = (lambda r: r.level) if rate is None else (lambda r: r.level + r.arrival / rate)

    @hookimpl
    def admit(self, view: View) -> Iterator[Want]:
        return map(Want, view.ranked(self._key))

    @hookimpl
    def preempt(self, candidates: Sequence[Request]) -> Victim:
        """The last in rank; for a waiting request the core offers those of strictly worse level only."""
        return Victim(candidates[-1])
