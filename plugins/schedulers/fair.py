"""Fair shares: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from operator import attrgetter

from framework import Budget, Request, View, Want, hookimpl

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
        self._unfinished: Counter[str] = Counter()  # requests by tenant
        self._turns: dict[str, int] = {}  # of tenants with unfinished requests: breaks ties. They are on the heap
        self._heap: list[tuple[float, int, str]] = []  # (served, or less; turn; tenant), as are some who were here
        self._away: set[str] = set()  # or away: drawn by the last ranking, or with nobody waiting
        self._step = -1  # in which running requests were charged last

    @hookimpl
    def arrived(self, request: Request, view: View) -> None:
        tenant = request.tenant
        if tenant not in view.queues(tenant_of):
            self._catch_up(view)
            least = self._heap[0][2] if self._settle(view) else self._service.last
            self._service.lift(tenant, self._service.of.get(least, 0.0), self._turns)
        self._unfinished[tenant] += 1
        if self._turns.setdefault(tenant, request.order) == request.order:
            self._away.add(tenant)

    @hookimpl
    def admit(self, view: View, budget: Budget) -> Iterable[Want]:
        if not (budget.requests and view.waiting):
            return ()
        self._catch_up(view)
        return self._ranking(view)

    @hookimpl
    def request_done(self, request: Request) -> None:
        if request.admitted_at is not None:
            self._service.close(request)
        if request.finish_reason != "rejected":
            self._unfinished[request.tenant] -= 1
            if not self._unfinished[request.tenant]:
                del self._unfinished[request.tenant], self._turns[request.tenant]
                self._away.discard(request.tenant)

    def _ranking(self, view: View) -> Iterator[Want]:
        """As if each request were admitted, and its tenant charged, at once; worked out as far as the core reads."""
        ahead: list[tuple[float, int, str, Iterator[Request]]] = []
        while self._settle(view) or ahead:
            if not ahead or (self._heap and self._heap[0] < ahead[0][:3]):
                served, turn, tenant = heappop(self._heap)
                self._away.add(tenant)
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
            here = self._turns.get(tenant) == turn
            waits, now = here and tenant in view.queues(tenant_of), self._service.of.get(tenant, 0.0)
            if waits and served == now:
                return True
            heappop(self._heap)
            if waits:
                heappush(self._heap, (now, turn, tenant))
            elif here:
                self._away.add(tenant)
        return False

    def _catch_up(self, view: View) -> None:
        queues = view.queues(tenant_of)
        for tenant in [tenant for tenant in self._away if tenant in queues]:
            self._away.remove(tenant)
            heappush(self._heap, (self._service.of[tenant], self._turns[tenant], tenant))
        if view.step != self._step:
            self._step = view.step
            self._service.charge(view.running)
