"""Every hook of the framework: when it is called, in which process, with what, what it returns, what it costs.

A plugin implements hooks with `@hookimpl` and names only the arguments that it wants. Names carry no prefix. An
argument added later breaks nobody; a changed meaning is a new hook. Per-step hooks are free (about 1 µs each, see
docs/performance.md).

Kinds: *collect*: every implementation is called; *first result*: the first that returns something other than None
wins; *event*: every implementation is called, nothing is returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pluggy

from .types import Budget, Provider, Reject, Request, Shortage, Victim, View, Want

if TYPE_CHECKING:
    import torch
    from fastapi import APIRouter
    from starlette.middleware import Middleware

    from .executor import Executor
    from .kernels import KernelBackend
    from .kv import CacheSpec, Capacity, KVCache
    from .model import Model, ModelSpec
    from .plan import Plan, StepResult, Timings
    from .records import Delivery, ResponseRecord
    from .sampling import SampleBatch, Sampled
    from .settings import Settings

PROJECT = "framework"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """The specifications. Never instantiated; pluggy reads signatures only, so each body just says that it is none."""

    @hookspec
    def providers(self) -> Iterable[Provider]:
        """All processes, once, when plugins are loaded. *Collect.* The names this plugin makes available.

        Being listed costs nothing: a factory is called only when its name is selected::

            @hookimpl
            def providers(self):
                return [Provider("scheduler", "sjf", ShortestFirst, summary="least work first")]
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def kernel_backend(
        self, settings: Settings, spec: ModelSpec, dtype: torch.dtype, device: torch.device
    ) -> KernelBackend | None:
        """Worker, once, at start-up. *First result.* The kernel backend; default: the provider of `--kernel`::

        @hookimpl
        def kernel_backend(self, settings, spec):
            return MyBackend() if spec.head_dim == 80 else None
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def model(
        self,
        settings: Settings,
        spec: ModelSpec,
        backend: KernelBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Model | None:
        """Worker, once, at start-up. *First result.* The model without weights; default: the provider that lists
        the checkpoint's architecture::

            @hookimpl
            def model(self, spec, backend, dtype, device):
                return MyLlama(spec, backend, dtype, device) if spec.architecture == "LlamaForCausalLM" else None
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def executor(self, settings: Settings) -> Executor | None:
        """Engine, once, at start-up. *First result.* Default: the provider of `--executor`::

        @hookimpl
        def executor(self, settings):
            return Simulator(settings)
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def kv_cache(self, settings: Settings, cache_spec: CacheSpec, capacity: Capacity) -> KVCache | None:
        """Engine, once, after the executor has measured its capacity. *First result.* Default: provider of `--kv`::

        @hookimpl
        def kv_cache(self, cache_spec, capacity):
            return MyCache(cache_spec.block_size, capacity.blocks["device"])
        """
        raise NotImplementedError

    @hookspec
    def routes(self, client: Any) -> Iterable[APIRouter | Middleware]:
        """Server, once, at start-up. *Collect.* FastAPI routers to mount, and middleware; `client`: the engine client.

        A `starlette.middleware.Middleware` sees the requests of every route, those of other plugins too, once they have
        a known API key (where there are any), and under the prefix of `--root-path`. The first one named is outermost.
        What it raises is answered as any other error, with 500::

            @hookimpl
            def routes(self, client):
                return [my_router, Middleware(Timed, clock=time.monotonic)]
        """
        raise NotImplementedError

    @hookspec
    def started(self, engine: Any) -> None:
        """Engine, once, before the first step. *Event*::

        @hookimpl
        def started(self, engine):
            self.blocks = engine.kv.usage().total
        """
        raise NotImplementedError

    @hookspec
    def stopping(self, engine: Any) -> None:
        """Engine, once, after the last step; `engine` is None in the server process. *Event*::

        @hookimpl
        def stopping(self, engine):
            self.file.close()
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def accept(self, request: Request, view: View) -> Reject | None:
        """Engine, once per request, on arrival. *First result.* Refuse it with a `Reject`, or None::

        @hookimpl
        def accept(self, request, view):
            return Reject("queue is full", retry_after=1.0) if view.total > 1000 else None
        """
        raise NotImplementedError

    @hookspec
    def arrived(self, request: Request, view: View) -> None:
        """Engine, once per accepted request. *Event.* The only place where `request.level` may be set::

        @hookimpl
        def arrived(self, request):
            request.level = request.extra.get("deadline", float("inf"))
        """
        raise NotImplementedError

    @hookspec
    def prepare(self, request: Request) -> Future[Any] | None:
        """Engine, once per accepted message, with its first request. *Collect.* What has to be done before it can run,
        by a thread of the plugin's, or None. Until then policies do not see the request. It ends with what the future
        raises: status 400 for an `InvalidRequest`, that of a `Rejected`, else 500, a fault of the plugin's, and the log
        has what it was. Where nothing else runs, more than `--step-timeout` is taken for a hang of the engine::

        @hookimpl
        def prepare(self, request):
            return self.pool.submit(self.load, request.adapter) if request.adapter else None
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def admit(self, view: View, budget: Budget) -> Iterable[Want] | None:
        """Engine, every step. *First result.* Rank requests; say how many tokens each may compute.

        Policies rank and pick; the core enforces budget, seats, blocks and state. Running requests that are not
        named rank first: decodes, then unfinished prefills, each in admission order. May be a generator, which the
        core stops reading when nothing more can be admitted (so name running requests before waiting ones, or use
        `view.ranked`)::

            @hookimpl
            def admit(self, view):
                return (Want(r) for r in view.queue(key=lambda r: r.remaining))
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def preempt(
        self, view: View, beneficiary: Request, shortage: Shortage, candidates: Sequence[Request]
    ) -> Victim | None:
        """Engine, when `beneficiary` lacks blocks or a seat and all candidates together would cover it. *First result.*

        Called once per victim until the shortage is covered; then they fall together. Candidates are running requests
        not granted anything in this step, best-ranked first; for a waiting beneficiary only those of strictly worse
        `level`. None leaves it to the core: the last candidate falls for a running beneficiary, nobody for a waiting
        one::

            @hookimpl
            def preempt(self, candidates):
                return Victim(max(candidates, key=lambda r: (r.priority, r.arrival)))
        """
        raise NotImplementedError

    @hookspec
    def process_logits(self, logits: torch.Tensor, batch: SampleBatch) -> None:
        """Worker, every step, before sampling. *Collect.* Change `logits` float32 [rows, vocab] in place.

        State kept between steps is a cache of a function of a request's output tokens: keyed by id, rebuilt when
        `batch.output_len` is not the one it knows, dropped for `batch.removed`::

            @hookimpl
            def process_logits(self, logits, batch):
                logits[:, self.banned] = float("-inf")
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled | None:
        """Worker, every step. *First result.* One token per row of `logits` float32 [rows, vocab]::

        @hookimpl
        def sample(self, logits, batch):
            return Sampled(logits.argmax(-1))
        """
        raise NotImplementedError

    @hookspec
    def step_done(self, plan: Plan, result: StepResult, timings: Timings) -> None:
        """Engine, after every committed step. *Event*::

        @hookimpl
        def step_done(self, plan, timings):
            self.seconds += (timings.end - timings.start) / 1e9
        """
        raise NotImplementedError

    @hookspec
    def request_done(self, request: Request) -> None:
        """Engine, exactly once for every request shown to `accept`, rejected and aborted ones included. *Event*::

        @hookimpl
        def request_done(self, request):
            self.by_reason[request.finish_reason] += 1
        """
        raise NotImplementedError

    @hookspec
    def tokens_delivered(self, deliveries: Sequence[Delivery]) -> None:
        """Server, once per message from the engine: which responses got tokens. *Event*::

        @hookimpl
        def tokens_delivered(self, deliveries):
            self.tokens += sum(d.tokens for d in deliveries)
        """
        raise NotImplementedError

    @hookspec
    def response_done(self, record: ResponseRecord) -> None:
        """Server, exactly once per generation request, when its last byte was handed over or it failed. *Event.* Such
        a request is every POST on a route that generates, one that is refused at sight (400, 404, 413) included. It
        runs in the server's event loop: while it works, every other request and stream waits, so hand what takes long
        (a file, a network) to a thread or a queue::

        @hookimpl
        def response_done(self, record):
            print(record.id, record.finish_reasons)
        """
        raise NotImplementedError


HOOKS = tuple(name for name in vars(Hooks) if not name.startswith("_"))
EVENTS = tuple(name for name in HOOKS if "*Event" in (getattr(Hooks, name).__doc__ or ""))
