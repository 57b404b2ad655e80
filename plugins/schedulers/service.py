"""How much service each tenant had: the virtual token counters of the fair scheduler."""

from __future__ import annotations

from collections.abc import Iterable

from framework import Request

from . import FairOptions


class Service:
    """Counters by tenant: tokens, times their cost, over the tenant's weight. They only grow.

    Each token counts once, however often it is computed: a prompt when its request was admitted, an output token when
    it was sampled.
    """

    def __init__(self, options: FairOptions) -> None:
        self._options = options
        self._charged: dict[Request, int] = {}  # tokens counted, of unfinished requests that ran
        self._most = 1000  # counters to keep before the next look at who can be forgotten
        self.of: dict[str, float] = {}
        self.last = ""
        """The tenant of the last request that was charged for the first time: who left the queue last."""

    def due(self, request: Request) -> float:
        """What is still to be charged for the known tokens of a request."""
        charged, price, paid = self._charged.get(request), self._options, len(request.prompt)
        prompt = 0.0 if charged or request.parent else price.input_cost * paid  # a fork shares its parent's prompt
        output = price.output_cost * (request.num_tokens - (charged or paid))
        return (prompt + output) / price.weights.get(request.tenant, 1.0)

    def charge(self, requests: Iterable[Request]) -> None:
        """What they had since they were charged last; they run, so that this is asked in every step."""
        charged, weights, cost = self._charged, self._options.weights, self._options.output_cost
        for request in requests:
            known, now = charged.get(request), request.num_tokens
            if not known:
                self.last = request.tenant
                self.of[request.tenant] = self.of.get(request.tenant, 0.0) + self.due(request)
            elif known != now:
                self.of[request.tenant] += cost * (now - known) / weights.get(request.tenant, 1.0)
            charged[request] = now

    def close(self, request: Request) -> None:
        """The last charge of a request that ran."""
        self.charge((request,))
        del self._charged[request]

    def lift(self, tenant: str, floor: float, others: Iterable[str]) -> None:
        """Let a tenant start no lower than `floor`. Once there are many, whoever would be lifted anyway is forgotten,
        but for tenants of requests that run and `others`."""
        self.of[tenant] = max(self.of.get(tenant, 0.0), floor)
        if len(self.of) > self._most:
            kept = {tenant, self.last, *others, *(r.tenant for r in self._charged)}
            self.of = {name: served for name, served in self.of.items() if served > floor or name in kept}
            self._most = 2 * len(self.of) + 1000
