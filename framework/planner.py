"""Decides what a step does. Pure data: no tensor, no clock of its own, no I/O.

`plan` ranks requests (asking the scheduler), walks the ranking while the token budget lasts, gives blocks in order, and
where blocks or seats are short asks for victims among running requests that were not granted anything in this step.
Nothing granted is ever revoked, so there is no rollback. `commit` applies what the executor did; `fail` undoes a step
that raised. docs/step.md tells the rules and why each is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple

from .errors import PluginError
from .kv import KVCache, Reservation
from .plan import Delta, Plan, Preempted, RequestData, Slice, StepResult
from .registry import Plugins
from .types import Budget, Mode, Request, Shortage, Status, Victim, Want
from .view import LiveView

MAX_FAULTS = 10
"""Steps in a row in which a policy may fail before the engine stops."""
MAX_STALLED = 8
"""Steps without a slice, while work exists, after which the core ranks one step itself."""


class Limits(NamedTuple):
    """What the core enforces whatever policies say. `watermark`: blocks that admissions leave available."""

    tokens: int
    seats: int
    watermark: int = 0
    strict: bool = False


class Ended(NamedTuple):
    """A request that `fail` or `commit` ended, and why."""

    request: Request
    error: str


class Planner:
    """The state of all unfinished requests, and the decisions about them. One thread calls it."""

    def __init__(
        self, plugins: Plugins, kv: KVCache, limits: Limits, seed: int = 0, ns: Callable[[], int] = monotonic_ns
    ) -> None:
        self.kv = kv
        self.limits = limits
        self.view = LiveView(kv, seed)
        self.faults: dict[str, int] = {}
        self.preemptions = {Mode.SWAP: 0, Mode.RECOMPUTE: 0}
        self.forced = 0  # steps that the core ranked because the policy made no progress
        self.stages: list[tuple[str, int, int]] = []  # of the current plan
        self._hook = plugins.hook
        self._blame = plugins.blame
        self._ns = ns
        self._step = 0
        self._stalled = 0
        self._faults_in_row = 0
        self._faulty = False
        self._granted: list[tuple[Request, Slice]] = []
        self._fallen: dict[Request, Mode] = {}
        self._dropped: list[str] = []  # finished since the last plan: the executor may forget them
        self.starved: Request | None = None  # a lone request that cannot grow: to be ended by the engine

    # Arrivals and departures, between steps

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        self.view.queued.add(request)

    def remove(self, request: Request) -> None:
        """Finished or aborted: its blocks are freed, and the executor is told with the next plan."""
        if request.status is Status.RUNNING:
            self.view.running.remove(request)
        else:
            self.view.queued.remove(request)
        if request.admitted_at is not None:
            self._dropped.append(request.id)
        self.kv.release(request)
        request.status = Status.FINISHED

    # Planning

    def plan(self, now: float) -> Plan | None:
        """Decide the next step; None if there is nothing to do in it. `now` is in seconds."""
        view = self.view
        self._step += 1
        view.begin(self._step, now)
        self._granted, self._fallen, self._faulty, self.starved = [], {}, False, None
        if not view.running and not view.queued:
            self._stalled = 0
            return None
        start = self._ns()
        self.stages = []
        ranking, closed = self._rank()
        ranked = self._ns()
        new = self._walk(ranking, closed)
        self.stages[:0] = [("admission", start, ranked), ("kv_allocation", ranked, self._ns())]
        self._count_faults()
        self._stalled = 0 if self._granted else self._stalled + 1
        preempted = tuple(Preempted(r.id, mode) for r, mode in self._fallen.items())
        for request in self._fallen:
            view.queued.add(request)
        copies = self.kv.drain()
        if not (self._granted or copies or preempted):
            return None
        finished, self._dropped = tuple(self._dropped), []
        return Plan(self._step, tuple(new), tuple(s for _, s in self._granted), copies, preempted, finished)

    def _rank(self) -> tuple[list[tuple[Request, int | None]], bool]:
        """The step's ranking, and whether admission is closed from the start (after a fault of the policy)."""
        if self._stalled >= MAX_STALLED:
            self.forced += 1
            self._fault(self._policy(), f"no request ran for {MAX_STALLED} steps while work exists")
            return [*self._default_order(), *((r, None) for r in self.view.waiting)], False
        view, limits = self.view, self.limits
        budget = Budget(limits.tokens, max(0, limits.seats - len(view.running)))
        try:
            answer = self._hook.admit(view=view, budget=budget)
            named, exhausted = self._read(answer, min(budget.requests, budget.tokens) + 1)
        except Exception as exc:  # a policy may raise anything; the step runs without it and the fault is counted
            self._fault(self._blame("admit", exc), f"{type(exc).__name__}: {exc}", exc)
            return self._default_order(), True
        if view.ranked_by is not None and not exhausted:
            key = view.ranked_by
            rest = [r for r in view.running if r not in named]
            rest.sort(key=lambda r: (key(r), r.arrival, r.order))
            return [*named.items(), *((r, None) for r in rest)], False
        return [*self._default_order(named), *named.items()], False

    def _read(self, answer: Iterable[Want] | None, most: int) -> tuple[dict[Request, int | None], bool]:
        """Wants by request, and whether the answer was read to its end.

        At most `seats + 1` waiting requests can start in a step (the last by preemption), so an iterator is not read
        beyond that: a policy may rank ten thousand requests lazily for free.
        """
        named: dict[Request, int | None] = {}
        lazy = not isinstance(answer, (list, tuple))
        starting = 0
        for want in answer or ():
            request, tokens = want
            if request in named:
                raise ValueError(f"request {request.id!r} is named twice")
            if tokens is not None and tokens < 0:
                raise ValueError(f"request {request.id!r} is given {tokens} tokens")
            status = request.status
            if status is Status.RUNNING:
                named[request] = tokens
            elif (status is Status.WAITING or status is Status.PREEMPTED) and tokens != 0:
                named[request] = tokens
                starting += 1
                if lazy and starting > most:
                    return named, False
        return named, True

    def _default_order(self, named: dict[Request, int | None] | None = None) -> list[tuple[Request, int | None]]:
        """Running requests that are not `named`: decodes, then unfinished prefills, each in admission order."""
        decodes: list[tuple[Request, int | None]] = []
        prefills: list[tuple[Request, int | None]] = []
        for r in self.view.running:
            if not named or r not in named:
                (decodes if r.num_tokens - r.computed == 1 else prefills).append((r, None))
        return decodes + prefills if prefills else decodes

    def _walk(self, ranking: list[tuple[Request, int | None]], closed: bool) -> list[RequestData]:
        view, kv, granted = self.view, self.kv, self._granted
        left = self.limits.tokens
        started: list[Request] = []
        new: list[RequestData] = []
        for request, tokens in ranking:
            if left <= 0:
                break
            if tokens == 0:
                continue
            if request.status is Status.RUNNING:
                known = request.num_tokens + request.drafts - request.computed
                count = known if known <= left else left
                if tokens is not None and tokens < count:
                    count = tokens
                reservation = kv.reserve(request, request.computed + count)
                if reservation is None:
                    upto = request.computed + count
                    if not self._preempt(ranking, request, upto, started):
                        self._starve(request, started)
                        continue
                    closed = True
                    reservation = kv.reserve(request, upto)
                    assert reservation is not None, "the KV cache said that the blocks fit"
                deltas = reservation.deltas
            elif closed or request in self._fallen:
                continue
            else:
                admitted = self._admit(ranking, request, started)
                closed = admitted is None or bool(self._fallen)
                if admitted is None:
                    continue
                request.computed, deltas = admitted.start, admitted.deltas
                count = min(request.num_tokens - request.computed, left)
                if tokens is not None:
                    count = min(count, tokens)
                request.admitted_at = view.now if request.admitted_at is None else request.admitted_at
                started.append(request)
                new.append(_data(request))
            left -= count
            end = request.computed + count
            granted.append((request, Slice(request.id, request.computed, count, deltas, end >= request.num_tokens)))
        for request in started:
            view.queued.remove(request)
            request.status = Status.RUNNING
            view.running.append(request)
        for request in self._fallen:
            request.status = Status.PREEMPTED
            view.running.remove(request)
        return new

    def _others(self, started: Sequence[Request]) -> int:
        return len(self.view.running) + len(started) - len(self._fallen)

    def _admit(
        self, ranking: list[tuple[Request, int | None]], request: Request, started: list[Request]
    ) -> Reservation | None:
        """Blocks for the whole known length of a waiting request, not only its first chunk: requests that reserve a
        chunk at a time evict one another half-way."""
        others = self._others(started)
        keep = self.limits.watermark if others else 0
        if others < self.limits.seats or not others:
            reservation = self.kv.reserve(request, request.num_tokens, keep)
            if reservation is not None:
                return reservation
        if not self._preempt(ranking, request, request.num_tokens, started):
            return None
        keep = self.limits.watermark if self._others(started) else 0
        return self.kv.reserve(request, request.num_tokens, keep)

    def _preempt(
        self, ranking: list[tuple[Request, int | None]], beneficiary: Request, upto: int, started: list[Request]
    ) -> bool:
        """Ask for victims until `beneficiary` fits; preempt them together, or nobody."""
        running = beneficiary.status is Status.RUNNING
        taken = {r for r, _ in self._granted}
        candidates = [
            r
            for r, _ in ranking
            if r.status is Status.RUNNING and r not in taken and r not in self._fallen and r is not beneficiary
        ]
        if running:
            first = min(self.view.running, key=lambda r: (r.level, r.arrival, r.order))
            candidates = [r for r in candidates if r is not first]
        else:
            candidates = [r for r in candidates if r.level > beneficiary.level]
        others = self._others(started) - running

        def short(without: Sequence[Request]) -> Shortage:
            rest = others - len(without)
            keep = 0 if running or not rest else self.limits.watermark
            seats = 0 if running or not rest else max(0, rest + 1 - self.limits.seats)
            return Shortage(self.kv.missing(beneficiary, upto, keep, without), seats)

        if not candidates or any(short(candidates)):
            return False
        start = self._ns()
        victims: list[Victim] = []
        while any(shortage := short([v.request for v in victims])):
            victim = self._ask(beneficiary, shortage, candidates)
            if victim is None:
                return False
            victims.append(victim)
            candidates = [r for r in candidates if r is not victim.request]
        for victim in victims:
            self._evict(victim.request, victim.mode)
        self.stages.append(("preemption", start, self._ns()))
        return True

    def _ask(self, beneficiary: Request, shortage: Shortage, candidates: list[Request]) -> Victim | None:
        try:
            victim: Victim | None = self._hook.preempt(
                view=self.view, beneficiary=beneficiary, shortage=shortage, candidates=tuple(candidates)
            )
            if victim is not None and victim.request not in candidates:
                raise ValueError(f"request {victim.request.id!r} is not a candidate")
            return victim
        except Exception as exc:  # a policy may raise anything; nobody is preempted and the fault is counted
            self._fault(self._blame("preempt", exc), f"{type(exc).__name__}: {exc}", exc)
            return None

    def _evict(self, request: Request, mode: Mode | None) -> None:
        """Take a request's blocks: copied to the host where that is wanted and there is room, else dropped."""
        if mode is not Mode.RECOMPUTE and request.computed and self.kv.swap_out(request):
            mode = Mode.SWAP
        else:
            mode = Mode.RECOMPUTE
            self.kv.release(request)
            request.computed = 0
        request.drafts = 0
        request.preemptions += 1
        self.preemptions[mode] += 1
        self._fallen[request] = mode

    def _starve(self, request: Request, started: list[Request]) -> None:
        """A request that got no blocks sits the step out; alone, it can never grow and has to end."""
        if self._others(started) == 1 and not self._granted:
            self.starved = request

    # After the step

    def commit(self, plan: Plan, result: StepResult) -> list[tuple[Request, int, tuple[int, ...]]]:
        """Apply a result: (request, index of the first new token, new tokens) for all that got any.

        Sets `finish_reason` of requests that are complete; the caller removes them, and those in `result.errors`.
        """
        publish = self.kv.publish
        tokens_of = result.tokens
        produced: list[tuple[Request, int, tuple[int, ...]]] = []
        for request, part in self._granted:
            if request.status is Status.FINISHED:  # aborted while its step was running
                continue
            request.computed = part.start + part.tokens
            publish(request)
            tokens = tokens_of.get(part.request_id)
            if tokens:
                index = len(request.output)
                for taken, token in enumerate(tokens, 1):
                    request.output.append(token)
                    request.num_tokens += 1
                    if self._ends(request, token):
                        tokens = tokens[:taken]
                        break
                produced.append((request, index, tokens))
            request.failures = 0
        self._granted = []
        return produced

    @staticmethod
    def _ends(request: Request, token: int) -> bool:
        params = request.params
        if token in request._ends and len(request.output) > params.min_tokens:
            request.finish_reason = "stop"
            request.stop_reason = token if token in params.stop_token_ids else None
        elif request.num_tokens >= request._limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def fail(self, plan: Plan) -> list[Request]:
        """The step raised: release everything running and whatever the plan swapped out, to be computed again.

        Older swaps and published blocks survive. Returns the requests whose third failure this is; the caller ends them.
        """
        touched = [r for r, _ in self._granted]
        swapped = [r for r, mode in self._fallen.items() if mode is Mode.SWAP]
        for request in [*self.view.running, *swapped]:
            if request.status is Status.RUNNING:
                self.view.running.remove(request)
                request.status = Status.PREEMPTED
                self.view.queued.add(request)
                self._dropped.append(request.id)
            self.kv.release(request)
            request.computed = 0
            request.drafts = 0
        self._granted = []
        for request in touched:
            request.failures += 1
        return [r for r in touched if r.failures >= 3]

    # Faults of policies

    def _policy(self) -> str:
        impls = [i for i in self._hook.admit.get_hookimpls() if not (i.wrapper or i.hookwrapper)]
        return str(impls[-1].plugin_name)

    def _fault(self, plugin: str, message: str, exc: BaseException | None = None) -> None:
        self.faults[plugin] = self.faults.get(plugin, 0) + 1
        self.last_fault = f"plugin {plugin!r} failed: {message}"
        self._faulty = True
        if self.limits.strict:
            raise PluginError(self.last_fault, plugin) from exc

    def _count_faults(self) -> None:
        self._faults_in_row = self._faults_in_row + 1 if self._faulty else 0
        if self._faults_in_row >= MAX_FAULTS:
            raise PluginError(f"{self.last_fault} ({MAX_FAULTS} steps in a row)")


def _data(request: Request) -> RequestData:
    return RequestData(
        request.id,
        [*request.prompt, *request.output],
        len(request.prompt),
        request.params,
        request.seed,
        request.adapter,
        dict(request.extra),
    )
