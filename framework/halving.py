"""Steps that do not fit in memory, computed in parts one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import accumulate

from msgspec.structs import replace

from .device import out_of_memory
from .errors import brief
from .log import get_logger
from .plan import Logprobs, Plan, Slice, StepResult

log = get_logger(__name__)
Launched = tuple[Callable[[], StepResult], Callable[[], bool]]
"""What waits for a step's result, and whether that would have to wait."""
PATIENCE = 200
"""Steps computed in parts without a failure, after which larger parts are tried: who had the memory may be gone."""


class Halving:
    """Halves a step until it fits: by requests, and a lone one's chunk by tokens. A request of which not even one token
    fits gets an error; the others go on.

    That is harmless: who computes a token's keys and values again writes the same, a request is sampled in one part
    only, and what it draws depends on its seed and position. release: gives back memory that nothing uses. most: tokens
    that are computed at once from now on, as many as did fit; None: all.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self.most: int | None = None
        self._fitted = 0  # steps in parts since a failure

    def run(self, plan: Plan, launch: Callable[[Plan], Launched]) -> tuple[*Launched, Collection[str]]:
        """launch: hands the slices of a plan to the device; whatever else is in the one given here has been done. What
        it returned, and who failed. A plan in parts is waited for, part by part."""
        failure = ""
        if self.most is None or plan.tokens <= self.most:
            try:
                return *launch(plan), ()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                failure = _text(error)
            self._release()  # not in the handler: the error holds on to the step's tensors
        result, errors = self._in_parts(plan, launch, failure)
        return lambda: result, lambda: True, errors

    def _in_parts(
        self, plan: Plan, launch: Callable[[Plan], Launched], failure: str
    ) -> tuple[StepResult, dict[str, str]]:
        """failure: why the whole plan failed; empty: it was not tried."""
        most, largest = self.most, 0
        results, errors = list[StepResult](), dict[str, str]()
        parts = self._halve(plan, errors)
        while parts:
            part = parts.pop()
            if most is None or part.tokens <= most or part.tokens == 1:
                try:
                    results.append(launch(part)[0]())
                    largest = max(largest, part.tokens)
                    continue
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    failure = _text(error)
                self._release()
            parts += self._halve(part, errors)
            parts = [one for one in parts if one.slices[0].request_id not in errors]  # no later tokens of who failed
        if failure:
            self.most, self._fitted = largest or most, 0
            log.warning(
                "out of memory: the step was computed in parts; lower --max-num-batched-tokens or --max-num-seqs, or "
                "give the KV pool less with --kv-memory",
                step=plan.step,
                tokens=plan.tokens,
                requests=len(plan.slices),
                parts=len(results),
                tokens_at_once=self.most,
                failed=list(errors),
                error=failure,
            )
        else:
            self._fitted += 1
            if self._fitted == PATIENCE and most is not None:
                self.most, self._fitted = 2 * most, 0
        return _merged(plan.step, results, errors), errors

    @staticmethod
    def _halve(plan: Plan, errors: dict[str, str]) -> list[Plan]:
        """Its halves, the first one last; or it is one token's, whose request has failed."""
        halves = halved(plan)
        if not halves:
            errors[plan.slices[0].request_id] = "out of memory: not even one token of this request can be computed"
        return list(reversed(halves))


def _text(error: Exception) -> str:
    return brief(f"{type(error).__name__}: {error}", 300)


def halved(plan: Plan) -> tuple[Plan, ...]:
    """Its slices in two halves of about as many tokens; none if it is one token."""
    slices = plan.slices
    if len(slices) > 1:
        sums = list(accumulate(s.tokens for s in slices))
        at = min(range(1, len(slices)), key=lambda at: abs(2 * sums[at - 1] - sums[-1]))
        return Plan(plan.step, slices=slices[:at]), Plan(plan.step, slices=slices[at:])
    [one] = slices
    if one.tokens == 1:
        return ()
    count = one.tokens // 2
    first = replace(one, tokens=count, samples=False)
    rest = Slice(one.request_id, one.start + count, one.tokens - count, (), one.samples)
    return Plan(plan.step, slices=(first,)), Plan(plan.step, slices=(rest,))


def _merged(step: int, results: list[StepResult], errors: dict[str, str]) -> StepResult:
    scores: dict[str, tuple[Logprobs, ...]] = {}
    for result in results:  # in the order of a request's tokens
        for id, some in result.prompt_logprobs.items():
            scores[id] = scores.get(id, ()) + some
    return StepResult(
        step,
        tokens={id: tokens for result in results for id, tokens in result.tokens.items()},
        logprobs={id: found for result in results for id, found in result.logprobs.items()},
        errors={id: why for result in results for id, why in result.errors.items()} | errors,
        stages=tuple(stage for result in results for stage in result.stages),
        prompt_logprobs=scores,
        refused=tuple(id for result in results for id in result.refused),
    )
