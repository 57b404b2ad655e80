"""An engine without a model on virtual time, checked after every step: what the conformance kit runs plugins in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

from ..defaults import Defaults
from ..engine import Engine
from ..executor import Done
from ..kv import CacheSpec, Capacity, KVCache
from ..messages import Add, TokenOutput
from ..plan import Plan, RequestData
from ..preemption import Limits
from ..registry import Plugins, load_plugins
from ..settings import Settings
from ..types import Request, SamplingParams
from .checking import CheckingExecutor
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

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, eos_token_ids=tuple(range(self.ends)))


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
        found.append(Client(f"r{i}", prompt, tokens, arrives, leaves, rng.randint(-2, 2), tenant, ends, n))
    return found


class _Recorder(CheckingExecutor):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plans: list[Plan] = []

    def submit(self, plan: Plan) -> Done:
        self.plans.append(plan)
        return super().submit(plan)


class Simulation:
    """`add`, `abort` and `step`, or `play` for a list of clients. After every step all is checked, by assertions.

    scheduler: an object with the hooks of a scheduler; None: the core's defaults.
    kv: name of a KV cache provider, or what makes one of a cache spec and a capacity.
    tokens, seats, watermark: limits of the engine. Further options are those of `CheckingExecutor`.
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
        make = make_cache(kv) if isinstance(kv, str) else kv
        self.kv = make(self.executor.cache_spec, self.executor.start())
        self.plugins = Plugins()
        self.plugins.add(Defaults(self.plugins), "core")
        for i, plugin in enumerate(plugins):
            self.plugins.add(plugin, f"plugin {i}")
        if scheduler is not None:
            self.plugins.add(scheduler, "scheduler")
        self.engine = Engine(self.plugins, self.executor, self.kv, Limits(tokens, seats, watermark), max_model_len)
        self.view = self.engine.planner.view
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        """How each request ended, in the order in which they did."""

    @property
    def plans(self) -> list[Plan]:
        """Of all steps so far."""
        return self.executor.plans

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
        message = Add(client.id, prompt, client.params, now, client.priority, client.tenant, n=client.n)
        refusals = self.engine.add(message)
        if refusals:
            return refusals[0]
        for id in message.ids:
            self.requests[id] = self.engine.requests[id]
            self.outputs[id] = []
        return None

    def abort(self, *ids: str) -> None:
        self._take(self.engine.abort(ids))
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

    def play(self, clients: Iterable[Client], most: int = 5000) -> None:
        """Let clients come and go until nobody is left, and check that each got what it gets alone."""
        by_step: dict[int, list[Client]] = {}
        leaving: dict[int, list[str]] = {}
        for client in clients:
            by_step.setdefault(client.arrives, []).append(client)
            if client.leaves is not None:
                leaving.setdefault(client.leaves, []).append(client.id)  # the first of several: the others go on
        last = max([*by_step, *leaving], default=0)
        step = 0
        while step <= last or self.engine.has_work:
            waiting = [r.id for r in self.view.waiting]
            assert step < most, f"no end after {most} steps: {self.view.running} run, {waiting} wait"
            for client in by_step.get(step, ()):
                self.add(client)
            self.abort(*leaving.get(step, ()))
            self.step()
            step += 1
        for id, request in self.requests.items():
            expected = self.alone(request)
            whole = self.reasons[id] not in ("abort", "error") and request.params.max_tokens is not None
            assert self.outputs[id] == (expected if whole else expected[: len(self.outputs[id])]), f"{id}: other tokens"
        usage = self.kv.usage()
        rest = (usage.holding, usage.reserved, usage.swapped, usage.tokens)
        assert rest == (0, 0, 0, 0), f"everybody has left, and the cache says {usage}"
        assert self.kv.available == usage.total, f"{self.kv.available} of {usage.total} blocks came back"

    def check(self) -> None:
        self.executor.check()
        self.kv.check_integrity()
        usage, total = self.kv.usage(), self.executor.capacity.blocks["device"]
        assert usage.total == total, f"{usage} does not add up to {total} blocks"
        assert min(usage) >= 0, f"{usage}"
        assert self.kv.available == usage.free + usage.cached, f"{self.kv.available} blocks available, {usage}"

    def alone(self, request: Request) -> list[int]:
        """What the request's output is when nobody disturbs it."""
        params, tokens, output = request.params, list(request.prompt), list[int]()
        data = RequestData(request.id, list(request.prompt), len(request.prompt), params, request.seed)
        while len(output) < (params.max_tokens or 1000):
            output.append(self.executor.next_token(data, tokens))
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
            if output.finish_reason is not None:
                self.reasons[output.id] = output.finish_reason


def make_cache(name: str, options: dict[str, Any] | None = None) -> MakeCache:
    """What makes the KV cache of a provider."""
    plugins = load_plugins()

    def make(cache_spec: CacheSpec, capacity: Capacity) -> KVCache:
        context = {"settings": Settings(), "plugins": plugins, "cache_spec": cache_spec, "capacity": capacity}
        cache: KVCache = plugins.create("kv", name, options, **context)
        return cache

    return make
