"""Fair shares: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import takewhile
from operator import attrgetter

from framework import Budget, Request, Status, View, Want, hookimpl

from . import FairOptions
from .service import Service

tenant_of = attrgetter("tenant")


class Fair:
    """Admit for the tenant served least; a tenant's own requests in order of arrival, the preempted first.

    Nobody saves service up: a tenant of whom nobody waits starts again no lower than the least served of those who
    wait, or than the one who left the queue last. Running requests keep the core's order, whatever their tenants had.
    """

    def __init__(self, options: FairOptions) -> None:
        self._service = Service(options)
        self._heap: list[
            tuple[float, int, str]
        ] = []  # (served, or less; turn; tenant) of all who wait, and of some more
        self._turns: dict[str, int] = {}  # of tenants on the heap, or drawn from it by the last ranking:
        self._drawn: list[str] = []
        self._step = -1  # in which running requests were charged last

    @hookimpl
    def arrived(self, request: Request, view: View) -> None:
        if request.tenant not in view.queues(tenant_of):
            self._catch_up(view)
            least = self._heap[0][2] if self._settle(view) else self._service.last
            self._service.lift(request.tenant, self._service.of.get(least, 0.0), self._turns)
            self._enter(request)

    @hookimpl
    def admit(self, view: View, budget: Budget) -> Iterable[Want]:
        if not (budget.requests and view.waiting):
            return ()
        self._catch_up(view)
        for request in takewhile(lambda r: r.status is Status.PREEMPTED, view.waiting):
            self._enter(request)
        return self._ranking(view)

    @hookimpl
    def request_done(self, request: Request) -> None:
        if request.admitted_at is not None:
            self._service.close(request)

    def _ranking(self, view: View) -> Iterator[Want]:
        """As if each request were admitted, and its tenant charged, at once; worked out as far as the core reads."""
        ahead: list[tuple[float, int, str, Iterator[Request]]] = []
        while self._settle(view) or ahead:
            if not ahead or (self._heap and self._heap[0] < ahead[0][:3]):
                served, turn, tenant = heappop(self._heap)
                self._drawn.append(tenant)
                requests = iter(view.queues(tenant_of)[tenant])
            else:
                served, turn, tenant, requests = heappop(ahead)
            if request := next(requests, None):
                heappush(ahead, (served + self._service.due(request), turn, tenant, requests))
                yield Want(request)

    def _settle(self, view: View) -> bool:
        """Put the least served of those who wait at the head of the heap. As counters only grow, that takes a look at
        whoever is there: a tenant with none waiting leaves, one served since then sinks."""
        while self._heap:
            served, turn, tenant = self._heap[0]
            waits, now = tenant in view.queues(tenant_of), self._service.of[tenant]
            if waits and served == now:
                return True
            heappop(self._heap)
            if waits:
                heappush(self._heap, (now, turn, tenant))
            else:
                del self._turns[tenant]
        return False

    def _enter(self, request: Request) -> None:
        if request.tenant not in self._turns:
            self._turns[request.tenant] = request.order
            heappush(self._heap, (self._service.of[request.tenant], request.order, request.tenant))

    def _catch_up(self, view: View) -> None:
        for tenant in self._drawn:
            heappush(self._heap, (self._service.of[tenant], self._turns[tenant], tenant))
        self._drawn = []
        if view.step != self._step:
            self._step = view.step
            for request in view.running:
                self._service.charge(request)
