"""Who gives up blocks or a seat for whom, and what becomes of the blocks: copied to the host, or computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .kv import KVCache
from .policy import Policy, Ranking
from .types import Mode, Request, Shortage, Status, Victim
from .view import LiveView


class Costs(NamedTuple):
    """What the executor measured. 0: not measured.

    copy: bytes per second between device and host. compute: prompt tokens per second. block_bytes: of one KV block.
    """

    copy: float = 0.0
    compute: float = 0.0
    block_bytes: int = 0

    def choose(self, blocks: int, tokens: int) -> Mode:
        """The cheaper way to take `blocks` blocks away that hold `tokens` tokens, and to have them back."""
        if not (self.copy and self.compute):
            return Mode.SWAP  # nothing has to be computed twice
        moving = 2 * blocks * self.block_bytes / self.copy
        return Mode.SWAP if moving < tokens / self.compute else Mode.RECOMPUTE


class Limits(NamedTuple):
    """What the core enforces whatever policies say. `watermark`: blocks that admissions leave available.

    `preemption`: what becomes of victims where the policy leaves it open; None: what `costs` say is cheaper.
    """

    tokens: int
    seats: int
    watermark: int = 0
    strict: bool = False
    preemption: Mode | None = None
    costs: Costs = Costs()


class Preemption:
    """Takes blocks from running requests. `fallen` are the victims of the current step and what became of each."""

    def __init__(self, kv: KVCache, view: LiveView, policy: Policy, limits: Limits, ns: Callable[[], int]) -> None:
        self.fallen: dict[Request, Mode] = {}
        self.counts = {Mode.SWAP: 0, Mode.RECOMPUTE: 0}
        self.exhausted = 0  # victims that would have been swapped out, had there been room
        self.postponed = False  # somebody would have been asked for victims, but for a step in flight
        self._frozen = False
        self._kv, self._view, self._policy, self._limits, self._ns = kv, view, policy, limits, ns

    def begin(self, frozen: bool) -> None:
        """A new step. frozen: a step in flight writes to blocks of those who run, so that nobody can fall."""
        self.fallen.clear()
        self.postponed, self._frozen = False, frozen

    def make_room(
        self, ranking: Ranking, beneficiary: Request, upto: int, taken: set[Request], others: Sequence[Request]
    ) -> tuple[int, int] | None:
        """Ask for victims until `beneficiary` fits; preempt them together, or nobody: None. Else when it began and
        ended.

        `taken` were granted something in this step: they cannot fall. `others` will run besides the beneficiary if
        nobody falls.
        """
        running = beneficiary.status is Status.RUNNING
        candidates = [
            r
            for r, _ in ranking
            if r.status is Status.RUNNING and r not in taken and r not in self.fallen and r is not beneficiary
        ]
        if running:
            first = min(self._view.running, key=lambda r: (r.level, r.arrival, r.order))
            candidates = [r for r in candidates if r is not first]
        else:
            candidates = [r for r in candidates if r.level > beneficiary.level]
        seated = sum(r.seats for r in others)

        def short(without: Sequence[Request]) -> Shortage:
            alone = running or len(others) == len(without)
            seats = seated - sum(r.seats for r in without) + beneficiary.seats - self._limits.seats
            keep = 0 if alone else self._limits.watermark
            return Shortage(self._kv.missing(beneficiary, upto, keep, without), 0 if alone else max(0, seats))

        if not candidates or any(short(candidates)):
            return None
        if self._frozen:
            self.postponed = True
            return None
        start = self._ns()
        victims: list[Victim] = []
        while any(shortage := short([v.request for v in victims])):
            victim = self._policy.victim(self._view, beneficiary, shortage, candidates)
            if victim is None:
                return None
            victims.append(victim)
            candidates = [r for r in candidates if r is not victim.request]
        for victim in victims:
            self._evict(victim.request, victim.mode)
        return start, self._ns()

    def _evict(self, request: Request, mode: Mode | None) -> None:
        """Take a request's blocks: copied to the host where that is wanted and there is room, else dropped."""
        kv, limits = self._kv, self._limits
        wanted = mode or limits.preemption
        if wanted is None:
            wanted = limits.costs.choose(kv.peak(request, request.computed), request.computed)
        worth = wanted is Mode.SWAP and request.computed > 0 and kv.swaps
        swapped = worth and kv.swap_out(request)
        if not swapped:
            self.exhausted += worth
            kv.release(request)
            request.computed = 0
        done = Mode.SWAP if swapped else Mode.RECOMPUTE
        request.drafts = 0
        request.preemptions += 1
        self.counts[done] += 1
        self.fallen[request] = done
