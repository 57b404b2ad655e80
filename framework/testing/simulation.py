"""An engine without a model on virtual time, checked after every step: what the conformance kit runs plugins in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from ..defaults import Defaults
from ..engine import Engine
from ..executor import Pending
from ..hookspecs import hookimpl
from ..kv import CacheSpec, Capacity, KVCache
from ..messages import Add, TokenOutput
from ..plan import Logprobs, Plan, RequestData
from ..preemption import Costs, Limits
from ..registry import Plugins, load_plugins
from ..settings import Settings
from ..types import Mode, Request, SamplingParams, Status
from .checking import CheckingExecutor, RequestFailed, When
from .clock import VirtualClock

MakeCache = Callable[[CacheSpec, Capacity], KVCache]
STEP_SECONDS = 0.001
"""What a step takes on the virtual clock; ten times that passes when nothing ran."""


class Client(NamedTuple):
    """A request, the step before which it comes, and the one before which its client leaves (None: never)."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int | None
    arrives: int = 0
    leaves: int | None = None
    priority: int = 0
    tenant: str = ""
    ends: int = 0
    """How many of the 256 tokens are EOS."""
    n: int = 1
    """Outputs for the one prompt: each is a request, with an id of its own from the second on (see `Add.ids`)."""

    scores: int | None = None
    """As `SamplingParams.prompt_logprobs`."""

    @property
    def params(self) -> SamplingParams:
        ends = tuple(range(self.ends))
        return SamplingParams(max_tokens=self.max_tokens, eos_token_ids=ends, prompt_logprobs=self.scores)


def random_clients(rng: Random, count: int, most: int, *, aborts: bool = False) -> list[Client]:
    """`count` requests that need at most `most` tokens each. Half of them begin like others."""
    shared = [tuple(rng.randrange(97) for _ in range(most)) for _ in range(2)]
    found = []
    for i in range(count):
        prompt = tuple(rng.randrange(97) for _ in range(rng.randint(1, max(1, most // rng.choice((2, 4))))))
        if rng.random() < 0.5:
            prompt = (*rng.choice(shared)[: rng.randint(0, len(prompt) - 1)], *prompt)[: len(prompt)]
        arrives = rng.choice((0, rng.randint(0, 40)))
        leaves = arrives + rng.randint(0, 30) if aborts and rng.random() < 0.4 else None
        tokens = rng.choice((1, rng.randint(1, most - len(prompt)), rng.randint(1, most - len(prompt))))
        ends = rng.choice((0, 0, 20))
        tenant, n = rng.choice(("", "a", "b")), rng.choice((1, 1, 1, 2, 3))
        scores = (None, None, None, 0, 2)[i % 5]
        found.append(Client(f"r{i}", prompt, tokens, arrives, leaves, rng.randint(-2, 2), tenant, ends, n, scores))
    return found


def failures(rng: Random) -> Callable[[Plan], When | None]:
    """For `fail` of `CheckingExecutor`: three of the first 60 steps raise, before their writes or after."""
    steps: dict[int, When] = {rng.randint(1, 60): rng.choice(("before", "after")) for _ in range(3)}
    return lambda plan: steps.get(plan.step)


class _Recorder(CheckingExecutor):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plans: list[Plan] = []

    def submit(self, plan: Plan) -> Pending:
        self.plans.append(plan)
        return super().submit(plan)


class _Observer:
    """Knows who was taken in, and of whom the end was told."""

    def __init__(self) -> None:
        self.accepted: set[str] = set()
        self.done: Counter[str] = Counter()
        self.twice: set[str] = set()

    @hookimpl
    def accept(self, request: Request) -> None:
        self.accepted.add(request.id)

    @hookimpl
    def request_done(self, request: Request) -> None:
        self.done[request.id] += 1
        if self.done[request.id] > 1:  # to be found by `check`: what a hook raises is only counted
            self.twice.add(request.id)


class Simulation:
    """`add`, `abort`, `step` and `run`, or `play` for a list of clients. After every step all is checked, by
    assertions: what the executor read, the cache's books, who is where, and the order of outputs.

    scheduler: an object with the hooks of a scheduler, or a provider's name; None: the core's defaults.
    kv: name of a KV cache provider, or what makes one of a cache spec and a capacity.
    prefix_cache: False: a cache given by name is made without one; any has to share nothing but what forks share.
    tokens, seats, watermark, strict, preemption, costs: limits of the engine (`framework.preemption.Limits`).
    plugins: more objects with hooks. Further options are those of `CheckingExecutor`.
    """

    def __init__(
        self,
        scheduler: object | None = None,
        kv: str | MakeCache = "paged",
        *,
        blocks: int = 64,
        block_size: int = 4,
        tokens: int = 64,
        seats: int = 8,
        watermark: int = 0,
        strict: bool = False,
        preemption: Mode | None = None,
        costs: Costs = Costs(),
        prefix_cache: bool = True,
        max_model_len: int = 1000,
        plugins: Sequence[object] = (),
        **executor: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.executor = _Recorder(
            blocks,
            block_size,
            token_budget=tokens,
            seats=seats,
            clock=self.clock,
            cost=lambda plan: STEP_SECONDS,
            **executor,
        )
        make = make_cache(kv, prefix_cache=prefix_cache, max_num_batched_tokens=tokens) if isinstance(kv, str) else kv
        self.kv = make(self.executor.cache_spec, self.executor.start())
        self.plugins = Plugins()
        self.plugins.add(Defaults(self.plugins), "core")
        for i, plugin in enumerate(plugins):
            self.plugins.add(plugin, f"plugin{i}")
        if isinstance(scheduler, str):
            scheduler = load_plugins().create("scheduler", scheduler, settings=Settings())
        if scheduler is not None:
            self.plugins.add(scheduler, "scheduler")
            if not any(impl.plugin is scheduler for impl in self.plugins.hook.admit.get_hookimpls()):
                raise TypeError(f"scheduler: {scheduler!r} has no hook admit (is @hookimpl missing, or is it a class?)")
        self._observer = _Observer()
        self.plugins.add(self._observer, "observer")  # last, so called first: nobody can keep `accept` from it
        limits = Limits(tokens, seats, watermark, strict, preemption, costs)
        self.engine = Engine(self.plugins, self.executor, self.kv, limits, max_model_len)
        self.view = self.engine.planner.view
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        """How each request ended, in the order in which they did."""
        self.errors: dict[str, str] = {}
        self.scores: dict[str, list[Logprobs | None]] = {}
        """`TokenOutput.prompt_logprobs`, by the id under which they came."""
        self._left: set[str] = set()
        self._prefix_cache = prefix_cache

    @property
    def plans(self) -> list[Plan]:
        """Of all steps so far."""
        return self.executor.plans

    @property
    def running(self) -> list[str]:
        """Ids, in the order of `view.running`."""
        return [r.id for r in self.view.running]

    @property
    def waiting(self) -> list[str]:
        """Ids, in the order of `view.waiting`."""
        return [r.id for r in self.view.waiting]

    @property
    def done(self) -> Mapping[str, int]:
        """How often `request_done` came, by id."""
        return self._observer.done

    @property
    def faults(self) -> dict[str, int]:
        """What plugins did wrong, counted by name; `fault` describes the last of the scheduler's."""
        return self.engine.planner.policy.faults

    @property
    def fault(self) -> str:
        return self.engine.planner.policy.last_fault

    @property
    def forced(self) -> int:
        """Steps that the core ranked itself, because the scheduler let nothing run although there was work."""
        return self.engine.planner.forced

    def add(self, client: Client) -> TokenOutput | None:
        """Returns the refusal, or None if the request was taken in."""
        prompt, now = list(client.prompt), self.clock.ns() + 1
        return self.send(Add(client.id, prompt, client.params, now, client.priority, client.tenant, n=client.n))

    def send(self, message: Add) -> TokenOutput | None:
        """As `add`, with all that one can say."""
        refusals = self.engine.add(message)
        if refusals:
            (refusal,) = refusals
            assert refusal.id == message.id and refusal.finish_reason == "error", f"{refusal} refuses {message}"
            return refusal
        for id in message.ids:
            self.requests[id] = self.engine.requests[id]
            self.outputs[id] = []
        return None

    def abort(self, *ids: str, reason: str = "abort") -> None:
        """Their clients leave, or found a stop string: that is reason "stop"."""
        self._left.update(ids)
        self._take(self.engine.abort(ids, reason))
        self.check()

    def step(self) -> Plan | None:
        """One step; its plan, or None if nothing was submitted."""
        before = len(self.plans)
        self._take(self.engine.step())
        self.check()
        if len(self.plans) > before:
            return self.plans[-1]
        self.clock.advance(10 * STEP_SECONDS)
        return None

    def run(self, most: int = 5000) -> None:
        """Until nobody is left; then check that each got what it gets alone, and that everything is free."""
        self.play((), most)

    def play(self, clients: Iterable[Client], most: int = 5000) -> None:
        """The same, while clients come and go."""
        by_step: dict[int, list[Client]] = {}
        leaving: dict[int, list[str]] = {}
        for client in clients:
            by_step.setdefault(client.arrives, []).append(client)
            if client.leaves is not None:
                leaving.setdefault(client.leaves, []).append(client.id)  # the first of several: the others go on
        last = max([*by_step, *leaving], default=-1)
        step = 0
        while step <= last or self.engine.has_work:
            assert step < most, f"no end after {most} steps: {self.view.running} run, {self.waiting} wait"
            for client in by_step.get(step, ()):
                self.add(client)
            self.abort(*leaving.get(step, ()))
            self.step()
            step += 1
        for id, request in self.requests.items():
            expected, output, reason = self.alone(id), self.outputs[id], self.reasons[id]
            whole = id not in self._left and reason != "error" and request.params.max_tokens is not None
            assert output == (expected if whole else expected[: len(output)]), f"{id}: other tokens"
            self.check_scores(id)
        usage = self.kv.usage()
        rest = (usage.holding, usage.reserved, usage.swapped, usage.tokens)
        assert rest == (0, 0, 0, 0), f"everybody has left, and the cache says {usage}"
        assert self.kv.available == usage.total, f"{self.kv.available} of {usage.total} blocks came back"

    def check_scores(self, id: str) -> None:
        """What was told of the prompt is what is told alone, and of one of those that share it."""
        request = self.requests[id]
        wanted = request.params.prompt_logprobs is not None
        group = [other for other in self.requests if other.partition("/")[0] == id.partition("/")[0]]
        told = [other for other in group if other in self.scores]
        started = wanted and any(self.outputs[other] for other in group)
        assert len(told) == started, f"{group}: told of their prompt under {told}"
        if id in told:
            data = RequestData(id, list(request.prompt), len(request.prompt), request.params, request.seed)
            alone = [None, *(self.executor.score(data, at) for at in range(1, len(request.prompt)))]
            assert self.scores[id] == alone, f"{id}: other log-probabilities of its prompt"

    def check(self) -> None:
        """What has to hold between any two steps."""
        self.executor.check()
        self.kv.check_integrity()
        self._check_requests()
        self._check_usage()

    def _check_requests(self) -> None:
        """Everybody who was taken in is in one place, or has ended."""
        view = self.view
        shown = [*view.running, *view.waiting]
        waiting = [r for r in self.engine.requests.values() if r.status is Status.HIDDEN and r.parent is None]
        alive = {one.id for r in (*shown, *waiting) for one in (r, *r.children)}
        assert len(alive) == len(view.running) + len(view.waiting) + view.hidden == view.total, f"{shown}"
        assert alive == set(self.engine.requests), f"{alive} are in the queues, {set(self.engine.requests)} in all"
        ended = self._observer.accepted - alive
        assert set(self.done) == ended, f"{ended} have ended, and that was told of {set(self.done)}"
        assert not self._observer.twice, f"request_done came twice for {self._observer.twice}"

    def _check_usage(self) -> None:
        """The cache's figures are true, as far as can be told from outside."""
        spec, view, usage = self.executor.cache_spec, self.view, self.kv.usage()
        total = self.executor.capacity.blocks["device"]
        assert usage.total == total, f"{usage} does not add up to {total} blocks"
        assert min(usage) >= 0, f"{usage}"
        assert self.kv.available == usage.free + usage.cached, f"{self.kv.available} blocks available, {usage}"
        windowed = any(group.window is not None for group in spec.groups)
        away = sum(-(-r.computed // spec.block_size) for r in view.waiting)
        # Only who was swapped out waits with computed tokens; blocks out of the window stay behind.
        assert usage.swapped <= away if windowed else usage.swapped == away, f"{usage}, but {away} were swapped out"
        holders = [*view.running, *self._leaving()]
        held = sum(r.computed for r in holders)
        forked = sum(r.parent is not None for r in holders)  # each begins one token before its parent
        assert usage.tokens <= held + forked, f"{usage}, but those who run have computed {held} tokens"
        assert usage.holding * spec.block_size >= usage.tokens, f"{usage}: more tokens than places"
        if not self._prefix_cache:
            assert usage.cached == 0, f"{usage}, without a prefix cache"
            assert usage.tokens == held or forked or windowed, f"{usage}, but those who run have computed {held} tokens"
        if not holders:
            assert (self.kv.available, usage.tokens) == (total, 0), f"nobody runs, and the cache says {usage}"

    def _leaving(self) -> list[Request]:
        """Those who have ended, but not a step in flight that writes to their blocks."""
        ids = dict.fromkeys(part.request_id for plan in self.engine.in_flight for part in plan.slices)
        return [self.requests[id] for id in ids if self.requests[id].status is Status.FINISHED]

    def alone(self, id: str) -> list[int]:
        """What the output of a request is when nobody disturbs it; ends where `next_token` fails it."""
        request = self.requests[id]
        params, tokens, output = request.params, list(request.prompt), list[int]()
        data = RequestData(id, list(request.prompt), len(request.prompt), params, request.seed)
        while len(output) < (params.max_tokens or 1000):
            try:
                output.append(self.executor.next_token(data, tokens))
            except RequestFailed:
                break
            tokens.append(output[-1])
            if output[-1] in params.ends and len(output) > params.min_tokens:
                break
        return output

    def _take(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            known = self.outputs[output.id]
            assert output.id not in self.reasons, f"{output.id} had ended already: {output}"
            assert output.index == len(known), f"{output.id}: index {output.index} after {len(known)} tokens"
            known += output.tokens
            if output.prompt_logprobs is not None:
                assert output.id not in self.scores and output.tokens, f"{output.id}: told of its prompt again"
                self.scores[output.id] = output.prompt_logprobs
            if output.finish_reason is not None:
                self.reasons[output.id] = output.finish_reason
                if output.error:
                    self.errors[output.id] = output.error


def make_cache(name: str, options: dict[str, Any] | None = None, **settings: Any) -> MakeCache:
    """What makes the KV cache of a provider."""
    plugins = load_plugins()

    def make(cache_spec: CacheSpec, capacity: Capacity) -> KVCache:
        context = {"settings": Settings(**settings), "plugins": plugins, "cache_spec": cache_spec, "capacity": capacity}
        cache: KVCache = plugins.create("kv", name, options, **context)
        return cache

    return make
