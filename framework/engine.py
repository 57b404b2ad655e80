"""The step loop: plan, run, commit, tell. Everything that decides is in the planner, everything that computes in the
executor; this file moves requests between them and stamps what happened when. An executor that takes two plans gets
step N+1 before N's result is asked for: what ended a request in N is then seen one step late."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from .arrivals import Preparing, refusal, requests_of
from .errors import EngineDead, PluginError
from .executor import Done, Executor, Pending
from .kv import KVCache
from .log import get_logger
from .messages import Add, EngineStats, RequestTimes, TokenOutput
from .plan import Plan, StepResult, Timings
from .planner import Planner
from .policy import checked_refusal, report_fault
from .preemption import Limits
from .registry import Plugins
from .types import Reject, Request, Status

log = get_logger(__name__)


class _Interrupted(Exception):
    """By Ctrl-C or a signal to stop: nobody need be told."""


class Engine:
    """Owns all unfinished requests. Single-threaded: arrivals and aborts are applied between steps.

    `max_model_len` bounds prompt plus output of every request, in tokens.
    """

    def __init__(
        self, plugins: Plugins, executor: Executor, kv: KVCache, limits: Limits, max_model_len: int, seed: int = 0
    ) -> None:
        self.plugins = plugins
        self.executor = executor
        self.kv = kv
        self.clock = executor.clock
        self.max_model_len = max_model_len
        self.planner = Planner(plugins, kv, limits, seed, self.clock.ns)
        self._preparing = Preparing(plugins, self._fault)
        self.requests: dict[str, Request] = {}
        self._flying: deque[tuple[Plan, Pending, Timings]] = deque()
        self._blocks = kv.usage().total
        self._seed = seed
        self._accepted = 0
        self.steps = 0
        self._failed_steps = 0
        self._generated = 0
        self._closing = False
        self._notify("started", engine=self)

    # Arrivals and departures

    def add(self, message: Add) -> list[TokenOutput]:
        """Take a request in. The answer is empty, or says why it was refused: nothing else will come of it then."""
        prompt, params = message.prompt, message.params
        taken = next((id for id in message.ids if id in self.requests), None)
        if taken is not None:
            return [refusal(message.id, f"request id {taken!r} is in use by an unfinished request", 409)]
        limit = self.max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        if not prompt or limit > self.max_model_len or limit <= len(prompt):
            reason = f"prompt of {len(prompt)} tokens and max_tokens {params.max_tokens} do not fit 1 to "
            return [refusal(message.id, f"{reason}{self.max_model_len} tokens", 400)]
        requests = list(requests_of(message, self._accepted + 1, limit, self.clock.ns(), self._seed))
        self._accepted += len(requests)
        # The last token is never read again, so its key and value need no place. Without max_tokens a request that
        # outgrows the pool ends with "length".
        needed = self.kv.peak(requests[0], len(prompt) if params.max_tokens is None else limit - 1)
        if needed > self._blocks:
            reason = f"{len(prompt)} prompt tokens and {params.max_tokens or 0} of output need {needed} KV blocks"
            return [refusal(message.id, f"{reason}, the whole pool has {self._blocks}", 400)]
        for at, request in enumerate(requests):
            refused = self._accept(request)
            if refused is not None:  # all or none
                for shown in requests[: at + 1]:
                    shown.finish_reason = "rejected"
                    self._done(shown)
                return [refusal(message.id, refused.reason, refused.status, refused.retry_after)]
        for request in requests:
            self._notify("arrived", request=request, view=self.planner.view)  # may set its level, which orders queues
            self._check_level(request)
        self.requests.update((request.id, request) for request in requests)
        for child in requests[1:]:
            self.planner.hide(child)
        requests[0].children = requests[1:]
        (self.planner.hide if self._preparing.begin(requests[0]) else self.planner.add)(requests[0])
        return []

    def _accept(self, request: Request) -> Reject | None:
        try:
            refused: Reject | None = self.plugins.hook.accept(request=request, view=self.planner.view)
            return checked_refusal(refused)
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - a plugin may raise anything; it fails this request, counted and named
            plugin = self.plugins.blame("accept", exc)
            self._fault(plugin, "accept", exc)
            return Reject(f"plugin {plugin!r} failed on this request: {type(exc).__name__}: {exc}", status=500)

    def _check_level(self, request: Request) -> None:
        level = request.level
        if not isinstance(level, int | float) or level != level:  # the planner compares the levels of any two
            request.level = request.priority
            who = ", ".join(str(impl.plugin_name) for impl in self.plugins.hook.arrived.get_hookimpls())
            self._fault(who, "arrived", ValueError(f"request.level must be a number, got {level!r}"))

    def abort(self, ids: Iterable[str], reason: str = "abort") -> list[TokenOutput]:
        """End requests now and free what they hold. Unknown ids are ignored: they ended by themselves."""
        ids = [id for id in ids if id in self.requests]
        outputs = self._land() if ids else []
        for id in ids:
            request = self.requests.get(id)
            if request is not None:
                outputs.append(self._finish(request, reason))
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._flying)

    @property
    def in_flight(self) -> list[Plan]:
        return [plan for plan, *_ in self._flying]

    # One step

    def step(self) -> list[TokenOutput]:
        """Plan a step and submit it; commit all in flight but what the executor takes beside another. Empty if nothing
        could run; ask again within 10 ms while there is work. Raises `EngineDead` if the executor is gone,
        `PluginError` if a policy failed too often."""
        outputs = self._prepared()
        outputs += self._land() if self.planner.preemption.postponed else []
        if not self._submit(outputs) and self._flying:  # what is in flight decides how it goes on
            outputs += self._land()
            self._submit(outputs)
        return outputs + self._land(self.executor.max_in_flight - 1)

    def _prepared(self) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        for request, refused in self._preparing.over():
            if refused is None:
                self.planner.unhide(request)
                continue
            for one in (*request.children, request):
                outputs.append(self._finish(one, "error", error=refused.reason))
                outputs[-1].status, outputs[-1].retry_after = refused.status, refused.retry_after
        return outputs

    def _submit(self, outputs: list[TokenOutput]) -> bool:
        """False if there is nothing to do in a step. Adds to `outputs`."""
        timings = Timings(self.clock.ns())
        plan = self.planner.plan(timings.start / 1e9)
        if self.planner.starved is not None:
            log.warning("request ended: the KV pool has no block left for it", request_id=self.planner.starved.id)
            outputs.append(self._finish(self.planner.starved, "length"))
        if plan is None:
            return False
        self.steps += 1
        timings.stages = self.planner.stages
        pending: Pending = Done(_Interrupted())
        try:
            pending = self.executor.submit(plan)
        except EngineDead:
            raise
        except Exception as exc:  # noqa: BLE001 - it should not; as if `result` did
            pending = Done(exc)
        finally:
            self._flying.append((plan, pending, timings))
        return True

    def _land(self, most: int = 0) -> list[TokenOutput]:
        """Wait for plans in flight and commit them, until `most` are left."""
        outputs: list[TokenOutput] = []
        while len(self._flying) > most:
            plan, pending, timings = self._flying.popleft()
            try:
                result = pending.result()
            except EngineDead:
                raise
            except Exception as exc:  # noqa: BLE001 - whatever a model or kernel raises: the step's requests are retried
                outputs += self._failed(plan, exc)
                continue
            except BaseException:
                self._flying.appendleft((plan, Done(_Interrupted()), timings))
                raise
            committing = self.clock.ns()
            outputs += self._commit(plan, result, committing)
            timings.end = self.clock.ns()
            timings.stages = [*timings.stages, *result.stages, ("commit", committing, timings.end)]
            self._notify("step_done", plan=plan, result=result, timings=timings)
        return outputs

    def _commit(self, plan: Plan, result: StepResult, now: int) -> list[TokenOutput]:
        outputs, logprobs = list[TokenOutput](), result.logprobs
        for request, index, tokens in self.planner.commit(plan, result):
            self._generated += len(tokens)
            output = TokenOutput(request.id, index, list(tokens))
            if index == 0 and tokens:
                request.first_token_at = now / 1e9
                output.begin(request)
            if logprobs:
                found = logprobs.get(request.id)
                output.logprobs = list(found[: len(tokens)]) if found else None
            if request.finish_reason is not None:
                output.status = 400 if request.id in result.refused else 500
                self._finish(request, request.finish_reason, output, result.errors.get(request.id))
            outputs.append(output)
        self.kv.copied(result.copied)
        return outputs

    def _failed(self, plan: Plan, exc: Exception) -> list[TokenOutput]:
        self._failed_steps += 1
        message = f"{type(exc).__name__}: {exc}"
        if isinstance(exc, PluginError) and exc.plugin:
            message = str(exc)
            report_fault(self.planner.policy.faults, exc.plugin, message, exc)
        if not isinstance(exc, _Interrupted):
            log.error("step failed; its requests are computed again", step=plan.step, error=message, exc_info=exc)
        later = [self._flying.popleft() for _ in range(len(self._flying))]
        for behind, pending, _ in later:
            try:
                pending.result()
            except EngineDead:
                raise
            except Exception as exc:  # noqa: BLE001 - it built on what never was
                log.debug("the step behind a failed one failed, too", step=behind.step, error=repr(exc))
        ended = self.planner.fail(plan, *(behind for behind, *_ in later))
        return [self._finish(r, "error", error=f"the step failed three times: {message}") for r in ended]

    def _finish(
        self, request: Request, reason: str, output: TokenOutput | None = None, error: str | None = None
    ) -> TokenOutput:
        self._part(request)
        self.planner.remove(request)
        del self.requests[request.id]
        request.finish_reason = reason
        self._done(request)
        if output is None:
            output = TokenOutput(request.id, len(request.output), [])
        output.finish_reason = reason
        output.stop_reason = request.stop_reason if isinstance(request.stop_reason, int) else None
        output.error = error
        output.times = RequestTimes.of(request)
        return output

    def _part(self, request: Request) -> None:
        """One of several that share a prompt ends before they forked: the others go on without it."""
        if request.status is Status.HIDDEN and request.parent is not None:
            self.requests[request.parent].children.remove(request)
        elif request.children:
            heir, *rest = request.children
            request.children, heir.children, heir.parent = [], rest, None
            for child in rest:
                child.parent = heir.id
            if not self._preparing.leave(request, heir):
                self.planner.unhide(heir)
        else:
            self._preparing.leave(request, None)

    def _done(self, request: Request) -> None:
        request.finished_at = self.clock.ns() / 1e9
        self._notify("request_done", request=request)

    # Plugins and figures

    def _notify(self, hook: str, **arguments: Any) -> None:
        self.plugins.notify(hook, self._fault, **arguments)

    def _fault(self, plugin: str, hook: str, exc: BaseException) -> None:
        message = f"plugin {plugin!r} failed in {hook}: {type(exc).__name__}: {exc}"
        report_fault(self.planner.policy.faults, plugin, message, exc)
        if self.planner.limits.strict and not self._closing:
            raise PluginError(message, plugin) from exc

    def stats(self) -> EngineStats:
        return EngineStats.of(self.planner, self.kv.usage(), self.steps, self._failed_steps, self._generated)

    def close(self) -> None:
        """Abort what is left, tell plugins, stop the executor."""
        self._closing = True
        with suppress(EngineDead):
            self._land()
        self._flying.clear()  # of a dead engine
        self.abort(list(self.requests))
        self._notify("stopping", engine=self)
        self.executor.stop()
