"""Asks the scheduling plugins, checks what they answer, and survives them.

A policy may raise anything or answer nonsense: the step then runs in the core's default order and admits nobody, the
fault is counted under the plugin's name, and after ten such steps in a row (or at once with --strict-plugins) the
engine stops with that message.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from .errors import PluginError
from .log import get_logger
from .types import Budget, Mode, Reject, Request, Shortage, Status, Victim, Want

if TYPE_CHECKING:
    from .registry import Plugins
    from .view import LiveView

_WAITING = (Status.WAITING, Status.PREEMPTED)
MAX_FAULTS = 10
"""Steps in a row in which a policy may fail before the engine stops."""

log = get_logger(__name__)

Ranking = list[tuple[Request, int | None]]
"""Requests, best first, each with the most tokens it may compute (None: all)."""


def report_fault(faults: dict[str, int], plugin: str, message: str, exc: BaseException | None = None) -> None:
    """Count a plugin's fault and log it the 1st, 2nd, 4th, 8th … time: one that fails every step must not flood the
    log."""
    times = faults[plugin] = faults.get(plugin, 0) + 1
    if times & (times - 1) == 0:
        log.error(message, plugin=plugin, times=times, exc_info=exc)


def checked_refusal(refused: Reject | None) -> Reject | None:
    """What `accept` answered, if it can be told to a client."""
    if refused is None:
        return None
    if not isinstance(refused, Reject):
        raise TypeError(f"accept must answer Reject or None, got {refused!r}")
    reason, retry_after, status = refused
    if not isinstance(reason, str) or not isinstance(status, int) or not 400 <= status <= 599:
        raise ValueError(f"accept must give a reason and a status of 400 to 599, got {refused!r}")
    if retry_after is not None and not (isinstance(retry_after, int | float) and 0 <= retry_after < float("inf")):
        raise ValueError(f"accept must give retry_after in seconds, or None, got {refused!r}")
    return refused._replace(reason=reason.encode("utf-8", "replace").decode())


def default_order(running: Sequence[Request], named: Container[Request] = ()) -> Ranking:
    """Running requests that are not `named`: decodes, then unfinished prefills, each in admission order."""
    decodes: Ranking = []
    prefills: Ranking = []
    for r in running:
        if not named or r not in named:
            (decodes if r.num_tokens - r.computed == 1 else prefills).append((r, None))
    return decodes + prefills if prefills else decodes


def leave_room(ranking: Ranking, view: LiveView, budget: Budget, watermark: int) -> Ranking:
    """`ranking` with limits for running prompts, so that nobody behind a long one waits until all of it is computed:
    each decode gets its token; prompts that wait, are no worse in level, can start now and fit into half of what is
    left get that.

    Limits that the policy gave stay as they are. watermark: blocks that admissions leave available.
    """
    if all([r.num_tokens - r.computed == 1 for r in view.running]):  # `remaining`, for all of them in 10 µs
        return ranking
    running, tokens = Status.RUNNING, budget.tokens
    long: list[Request] = []
    behind: list[Request] = []
    passed = False  # decodes are behind
    for request, most in ranking:
        if request.status is not running:
            if long and most is None and all(request.level <= r.level for r in long):
                behind.append(request)
        elif request.remaining == 1:
            tokens -= 1
            passed = passed or bool(long)
        elif most is None:
            long.append(request)
    kept = _kept(behind, view, budget.requests, tokens // 2, watermark)
    if not (kept or passed):
        return ranking
    limits: dict[Request, int] = {}
    left = tokens - kept - len(long)
    for request in long:  # one token at least: the one before it may lack blocks
        more = max(0, min(request.remaining - 1, left))
        limits[request] = 1 + more
        left -= more
    return [(request, limits.get(request, most)) for request, most in ranking]


def _kept(behind: Sequence[Request], view: LiveView, seats: int, most: int, blocks: int) -> int:
    """Tokens that those who are `behind` compute in this step if they are left `most`; none for the first who cannot
    start or is longer, nor for whoever is behind that. blocks: which have to stay available."""
    kept = 0
    for request in behind:
        cached = view.cached(request)
        remaining, seats = request.remaining - cached, seats - request.seats
        if seats < 0 or kept + remaining > most or view.missing(request, remaining, blocks):
            break
        kept += remaining
        usage = view.usage
        blocks += view.missing(request, remaining, usage.total) + usage.free + usage.cached - usage.total
    return kept


class Policy:
    """The `admit` and `preempt` hooks behind a check. `faults` counts by plugin name."""

    def __init__(self, plugins: Plugins, strict: bool) -> None:
        self.faults: dict[str, int] = {}
        self.last_fault = ""
        self._hook = plugins.hook
        self._blame = plugins.blame
        self._strict = strict
        self._in_row = 0
        self._faulty = False

    def rank(self, view: LiveView, budget: Budget, watermark: int = 0) -> Ranking:
        """The step's ranking; after a fault it names running requests only, so that nobody is admitted. watermark: of
        `leave_room`."""
        try:
            answer = self._hook.admit(view=view, budget=budget)
            named, running, exhausted = self._read(answer, view, min(budget.requests, budget.tokens) + 1)
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - a plugin may raise anything; counted, named and reported
            self._fault(self._blame("admit", exc), "admit", f"{type(exc).__name__}: {exc}", exc)
            return default_order(view.running)
        key, ranking = view.ranked_by, list(named.items())
        if key is not None and not exhausted:  # not reached, but `ranked` gave them their places
            rest = [r for r in view.running if r not in named]
            rest.sort(key=lambda r: (key(r), r.arrival, r.order))
            ranking += [(r, None) for r in rest]
        elif running < len(view.running):
            ranking = [*default_order(view.running, named), *ranking]
        # Else decodes are first and nobody waits: there is nothing to leave.
        return leave_room(ranking, view, budget, watermark) if named else ranking

    @staticmethod
    def _read(answer: Iterable[Want] | None, view: LiveView, most: int) -> tuple[dict[Request, int | None], int, bool]:
        """Wants by request, how many of these run, and whether the answer was read to its end.

        At most `seats + 1` waiting requests can start in a step (the last by preemption), so an iterator is not read
        beyond that: a policy may rank ten thousand requests lazily for free. Who is held back (0 tokens) can be named
        only once, too, so that an iterator that holds back one for ever is at fault.
        """
        named: dict[Request, int | None] = {}
        held: set[Request] = set()
        lazy = not isinstance(answer, (list, tuple))
        starting, exhausted, running = 0, True, Status.RUNNING
        for want in answer or ():
            if type(want) is not Want:
                raise TypeError(f"admit must give Want(request, tokens), got {want!r}")
            request, tokens = want.request, want.tokens
            if request in named or request in held:
                raise ValueError(f"request {request.id!r} is named twice")
            if tokens is not None and (not isinstance(tokens, int) or tokens < 0):
                raise ValueError(f"request {request.id!r} is given {tokens!r} tokens")
            if request.status is not running:
                if tokens == 0 or request.status not in _WAITING:
                    held.add(request)
                    continue
                if request not in view.queued:
                    raise ValueError(f"request {request.id!r} is none of this engine's")
                starting += 1
                if lazy and starting > most:
                    named[request], exhausted = tokens, False
                    break
            named[request] = tokens
        if sum(map(named.__contains__, view.running)) != (count := len(named) - starting):
            foreign = next(r for r in named if r.status is running and r not in view.running)
            raise ValueError(f"request {foreign.id!r} is none of this engine's")
        return named, count, exhausted

    def victim(
        self, view: LiveView, beneficiary: Request, shortage: Shortage, candidates: list[Request]
    ) -> Victim | None:
        try:
            victim: Victim | None = self._hook.preempt(
                view=view, beneficiary=beneficiary, shortage=shortage, candidates=tuple(candidates)
            )
            if victim is not None and victim.request not in candidates:
                raise ValueError(f"{victim.request!r} is not a candidate")
            if victim is not None and victim.mode is not None:
                victim = victim._replace(mode=Mode(victim.mode))
            return victim
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - a plugin may raise anything; counted, named and reported
            self._fault(self._blame("preempt", exc), "preempt", f"{type(exc).__name__}: {exc}", exc)
            return None

    def stalled(self, steps: int, cache: str) -> None:
        """The scheduler let nothing run although work exists; or `cache` did, if the core's own order was no better."""
        if cache:
            raise PluginError(f"KV cache {cache!r} gives nobody blocks, though it says that none are missing", cache)
        impls = [i for i in self._hook.admit.get_hookimpls() if not (i.wrapper or i.hookwrapper)]
        self._fault(str(impls[-1].plugin_name), "", f"no request ran for {steps} steps while work exists")

    def step_over(self) -> None:
        """Raise `PluginError` if this was the tenth faulty step in a row."""
        self._in_row = self._in_row + 1 if self._faulty else 0
        self._faulty = False
        if self._in_row >= MAX_FAULTS:
            raise PluginError(f"{self.last_fault} ({MAX_FAULTS} steps in a row)")

    def _fault(self, plugin: str, hook: str, message: str, exc: BaseException | None = None) -> None:
        self.last_fault = f"plugin {plugin!r} failed{f' in {hook}' if hook else ''}: {message}"
        self._faulty = True
        report_fault(self.faults, plugin, self.last_fault, exc)
        if self._strict:
            raise PluginError(self.last_fault, plugin) from exc
