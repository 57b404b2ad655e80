"""Decides what a step does. Pure data: no tensor, no clock of its own, no I/O.

`plan` ranks requests (asking the scheduler), walks the ranking while the token budget lasts, gives blocks in order, and
where blocks or seats are short asks for victims among running requests that were not granted anything in this step.
Nothing granted is ever revoked, so there is no rollback. `commit` applies what the executor did; `fail` undoes a step
that raised. docs/step.md tells the rules and why each is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns

from .forking import decides, fork
from .kv import KVCache, Reservation
from .plan import Plan, Preempted, RequestData, Slice, StepResult
from .policy import Policy, Ranking, default_order
from .preemption import Limits, Preemption
from .registry import Plugins
from .types import Budget, Mode, Request, Status
from .view import LiveView

MAX_STALLED = 8  # steps without a slice, while work exists, after which the core ranks one step itself


class Planner:
    """The state of all unfinished requests, and the decisions about them. One thread calls it."""

    def __init__(
        self, plugins: Plugins, kv: KVCache, limits: Limits, seed: int = 0, ns: Callable[[], int] = monotonic_ns
    ) -> None:
        self.kv = kv
        self.limits = limits
        self.view = LiveView(kv, seed)
        self.policy = Policy(plugins, limits.strict)
        self.preemption = Preemption(kv, self.view, self.policy, limits, ns)
        self.prompt_tokens = 0  # prompt tokens computed, recomputation included
        self.recomputed_tokens = 0  # prompt or output tokens computed not for the first time
        self.hits = 0  # admissions that found tokens in the prefix cache
        self.hit_tokens = 0
        self.forced = 0  # steps that the core ranked because the policy made no progress
        self.stages: list[tuple[str, int, int]] = []  # of the current plan
        self._ns = ns
        self._step = self._stalled = 0
        self._granted: list[tuple[Request, Slice]] = []
        self._fallen = self.preemption.fallen
        self._submitted: dict[int, tuple[list[tuple[Request, Slice]], dict[Request, Mode]]] = {}  # by step, in flight
        self._wide: list[Request] = []  # took seats for children, too
        self._unsent: set[Request] = set()  # forked off since the last plan: the executor does not know them
        self._suspects: list[Request] = []  # were in two failing steps: each runs alone until it has shown which it was
        self._dropped: list[str] = []  # finished since the last plan: the executor may forget them
        self.starved: Request | None = None  # a request that the whole pool cannot hold: to be ended by the engine

    # Arrivals and departures, between steps

    def add(self, request: Request) -> None:
        """A new request. Its `children` stay hidden until they fork off."""
        self.kv.prepare(request)
        request.status = Status.WAITING
        self.view.queued.add(request)

    def hide(self, request: Request) -> None:
        request.status = Status.HIDDEN
        self.view.hidden += 1

    def unhide(self, request: Request) -> None:
        self.view.hidden -= 1
        self.add(request)

    def remove(self, request: Request) -> None:
        """Finished or aborted: its blocks are freed, and the executor is told with the next plan."""
        if request.status is Status.HIDDEN:
            self.view.hidden -= 1
        else:
            (self.view.running if request.status is Status.RUNNING else self.view.queued).remove(request)
            self._unsent.discard(request)
        if request.admitted_at is not None:
            self._dropped.append(request.id)
        request.status = Status.FINISHED
        request.num_tokens = len(request.prompt) + len(request.output)
        if any(r is request for granted, _ in self._submitted.values() for r, _ in granted):
            request.computed = min(request.computed, request.num_tokens - 1)
        else:  # else a step in flight writes to its blocks
            self.kv.release(request)

    # Planning

    def plan(self, now: float) -> Plan | None:
        """Decide the next step; None if there is nothing to do in it. `now` is in seconds.

        With steps in flight, requests count as if those were over, and nobody falls: see `Preemption.postponed`."""
        view, flying = self.view, bool(self._submitted)
        self.preemption.begin(flying)
        self._step += 1
        view.begin(self._step, now)
        self._granted, self.starved = [], None
        if self._wide:
            self._wide = [r for r in self._wide if r.children and r.status is Status.RUNNING]
        if not view.running and not view.queued:
            self._stalled = 0
            return None
        start, self.stages = self._ns(), []
        suspects = [r for r in self._suspects if r.failures and r.status is not Status.FINISHED]
        if self._stalled >= MAX_STALLED:
            self.forced += 1
            self.policy.stalled(MAX_STALLED, "" if self._stalled == MAX_STALLED else type(self.kv).__name__)
            ranking: Ranking = [*default_order(view.running), *((r, None) for r in view.waiting)]
        elif suspects:
            ranking = [(suspects[0], None), *((r, 0) for r in view.running if r is not suspects[0])]
        else:
            free = self.limits.seats - self._seats(())
            ranking = self.policy.rank(view, Budget(self.limits.tokens, max(0, free)), self.limits.watermark)
        ranked = self._ns()
        new = self._walk(ranking)
        self.stages[:0] = [("admission", start, ranked), ("kv_allocation", ranked, self._ns())]
        self.policy.step_over()
        self._stalled = 0 if self._granted or self.starved or flying else self._stalled + 1
        if suspects and not (self._granted or flying):  # it found no room: let the scheduler go on
            self._suspects = suspects[1:]
        preempted = tuple(Preempted(r.id, mode) for r, mode in self._fallen.items() if r not in self._unsent)
        for request in self._fallen:
            view.queued.add(request)
            self._unsent.discard(request)
        copies = self.kv.drain()
        if not (self._granted or copies or preempted):
            return None
        self._submitted[self._step] = self._granted, dict(self._fallen)
        finished, self._dropped = tuple(self._dropped), []
        return Plan(self._step, tuple(new), tuple(s for _, s in self._granted), copies, preempted, finished)

    def _walk(self, ranking: Ranking) -> list[RequestData]:
        view, kv, granted, flying = self.view, self.kv, self._granted, bool(self._submitted)
        left, closed = self.limits.tokens, False
        started: list[Request] = []
        new: list[RequestData] = []
        for request, tokens in ranking:
            if left <= 0:
                break
            if tokens == 0 or request in self._fallen:
                continue
            if request.status is Status.RUNNING:
                if flying and decides(request):
                    continue
                known = request.num_tokens + request.drafts - request.computed
                count = known if known <= left else left
                if tokens is not None and tokens < count:
                    count = tokens
                reservation = kv.reserve(request, upto := request.computed + count)
                if reservation is None:
                    least = request.computed + 1  # with a window, all that it knows may be more than the pool holds
                    if not self._preempt(ranking, request, upto, started) and upto > least:
                        self._preempt(ranking, request, least, started)
                    closed = closed or bool(self._fallen) or self.preemption.postponed
                    reservation = kv.reserve(request, upto) or kv.reserve(request, least)
                    if reservation is None:
                        continue
                deltas = reservation.deltas
                if (covered := reservation.length - request.computed) < count:
                    count = covered
                if request in self._unsent:
                    self._unsent.remove(request)
                    new.append(RequestData.of(request))
            elif closed:
                continue
            else:
                admitted = self._admit(ranking, request, started)
                closed = admitted is None or bool(self._fallen)
                if admitted is None:
                    if not flying and not self._others(started) and kv.missing(request, request.num_tokens):
                        self.starved = request  # the whole pool is not enough for it
                    continue
                if admitted.start > request.computed:  # else new, or swapped in
                    self.hits += 1
                    self.hit_tokens += admitted.start
                request.computed, deltas = admitted.start, admitted.deltas
                count = min(request.num_tokens, admitted.length) - request.computed
                count = min(count, left if tokens is None else min(tokens, left))
                if request.admitted_at is None:
                    request.admitted_at, request.cached_tokens = view.now, request.computed
                started.append(request)
                if request.children:
                    self._wide.append(request)
                new.append(RequestData.of(request))
            left -= count
            start = request.computed
            request.computed = start + count
            samples = request.computed >= request.num_tokens
            request.num_tokens += samples
            granted.append((request, Slice(request.id, start, count, deltas, samples)))
        for request in started:
            view.queued.remove(request)
            request.status = Status.RUNNING
            view.running.append(request)
        for request in self._fallen:
            request.status = Status.PREEMPTED
            view.running.remove(request)
        if view.running and not (granted or self._fallen or flying):
            first, *rest = sorted(view.running, key=lambda r: (r.level, r.arrival, r.order))
            if kv.missing(first, first.computed + 1, 0, rest):  # not even without the others, who may share its blocks
                self.starved = first
        return new

    def _others(self, started: Sequence[Request]) -> int:
        return len(self.view.running) + len(started) - len(self._fallen)

    def _seats(self, started: Sequence[Request]) -> int:
        """Taken by all that run, `started` included."""
        return self._others(started) + sum(len(r.children) for r in self._wide if r not in self._fallen)

    def _admit(self, ranking: Ranking, request: Request, started: list[Request]) -> Reservation | None:
        """Blocks for the whole known length: requests that reserve a chunk at a time evict one another half-way."""
        others = self._others(started)
        keep = self.limits.watermark if others else 0
        if not others or self._seats(started) + request.seats <= self.limits.seats:
            reservation = self.kv.reserve(request, request.num_tokens, keep)
            if reservation is not None:
                return reservation
        if not self._preempt(ranking, request, request.num_tokens, started):
            return None
        keep = self.limits.watermark if self._others(started) else 0
        return self.kv.reserve(request, request.num_tokens, keep)

    def _preempt(self, ranking: Ranking, beneficiary: Request, upto: int, started: list[Request]) -> bool:
        """Take blocks and seats from others until `beneficiary` fits; False: nobody fell."""
        if len(self._granted) == len(self.view.running) + len(started):
            return False  # the common case of a full house: all who run were granted, nobody can fall
        others = [r for r in (*self.view.running, *started) if r not in self._fallen and r is not beneficiary]
        taken = {r for r, _ in self._granted}
        spent = self.preemption.make_room(ranking, beneficiary, upto, taken, others)
        if spent is not None:
            self.stages.append(("preemption", *spent))
        return spent is not None

    # After the step

    def commit(self, plan: Plan, result: StepResult) -> list[tuple[Request, int, tuple[int, ...]]]:
        """Apply a result: (request, index of the first new token, new tokens) for all that got any or failed.

        Sets `finish_reason` of requests that are complete or in `result.errors`; the caller removes them.
        """
        publish, tokens_of, errors, scores = self.kv.publish, result.tokens, result.errors, result.prompt_logprobs
        produced: list[tuple[Request, int, tuple[int, ...]]] = []
        for request, part in self._submitted.pop(plan.step)[0]:
            if request.status is Status.FINISHED:  # while this step was in flight
                self.kv.release(request)
                continue
            end = (start := part.start) + part.tokens
            request.num_tokens -= part.samples  # `append` counts what came of it
            if start < len(request.prompt):
                self.prompt_tokens += min(end, len(request.prompt)) - start
            if start < request.reached:
                self.recomputed_tokens += min(end, request.reached) - start
            if end > request.reached:
                request.reached = end
            if scores and request.prompt_logprobs is not None:
                request.prompt_logprobs += scores.get(part.request_id, ())
            tokens = tokens_of.get(part.request_id)
            if tokens and request.children:
                others = sum(len(r.children) for r in self._wide if r is not request and r.status is Status.RUNNING)
                self._unsent.update(fork(request, self.view, self.kv, self.limits.seats - others))
            planned, request.computed = request.computed, start if part.request_id in errors else end  # so far
            publish(request)
            request.computed = planned
            index = len(request.output)
            if tokens:
                produced.append((request, index, request.extend(tokens)))
                request.failures = 0  # not before: who fails in a later chunk computes the first ones again and again
            elif errors and part.request_id in errors:
                request.finish_reason = "error"
                produced.append((request, index, ()))
        return produced

    def fail(self, plan: Plan, *later: Plan) -> list[Request]:
        """The step raised: release everything running and whatever the plan swapped out, to be computed again. `later`
        are all plans submitted behind it: their results, which built on its, are of no use.

        Older swaps and published blocks survive. Who was in two failing steps runs alone next, to take nobody along.
        Returns those whose third failure, alone, this is: the caller ends them.
        """
        granted, fallen = self._submitted.pop(plan.step)
        touched = [r for r, _ in granted]
        behind = [r for p in later for r, _ in self._submitted.pop(p.step)[0]]
        swapped = [r for r, mode in fallen.items() if mode is Mode.SWAP]
        for request in dict.fromkeys((*self.view.running, *swapped, *touched, *behind)):
            if request.status is Status.RUNNING:
                self.view.running.remove(request)
                request.status = Status.PREEMPTED
                self.view.queued.add(request)
                self._dropped.append(request.id)
            self.kv.release(request)
            request.computed = request.drafts = 0
            request.num_tokens = len(request.prompt) + len(request.output)
        self._unsent.clear()
        self._dropped[:0] = [id for p in (plan, *later) for id in p.finished]  # the executor may not have come to them
        for request in touched:
            request.failures += request.failures < 2 or len(touched) == 1  # only who fails alone is at fault
        self._suspects = [r for r in dict.fromkeys((*self._suspects, *touched)) if r.failures == 2]
        return [r for r in touched if r.failures >= 3 and r.status is not Status.FINISHED]
