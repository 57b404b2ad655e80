"""Who runs a plan: the seam between decisions and tensors. A simulator, a replay and a GPU worker implement it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from .kv import CacheSpec, Capacity
from .plan import Plan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .model import Checkpoint, ModelSpec


class Clock(Protocol):
    """Time as the engine sees it. A simulator's is virtual."""

    def ns(self) -> int: ...


class MonotonicClock:
    """The machine's monotonic clock, common to all processes on Linux."""

    def ns(self) -> int:
        return time.monotonic_ns()


class Pending(Protocol):
    """A submitted plan."""

    def done(self) -> bool: ...
    def result(self) -> StepResult:
        """Wait for it; raises what the step raised."""


class Done:
    """A plan that was run during `submit`: holds its result, or the exception to raise."""

    def __init__(self, result: StepResult | BaseException) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class Later:
    """A plan that was handed to the device: `finish` waits for it and makes the result. ready: whether it would have to
    wait."""

    def __init__(self, finish: Callable[[], StepResult], ready: Callable[[], bool]) -> None:
        self._finish, self._ready = finish, ready
        self._done: Done | None = None

    def done(self) -> bool:
        return self._done is not None or self._ready()

    def wait(self) -> Done:
        if self._done is None:
            try:
                self._done = Done(self._finish())
            except Exception as error:  # noqa: BLE001 - raised by `result`, whenever it is asked for
                self._done = Done(error)
        return self._done

    def result(self) -> StepResult:
        return self.wait().result()


class Executor(ABC):
    """Runs plans in the order in which they are submitted."""

    clock: Clock = MonotonicClock()
    max_in_flight: int = 1
    """1 or 2."""
    cache_spec: CacheSpec
    """Set by `start`, as are the following."""
    spec: ModelSpec
    checkpoint: Checkpoint | None = None
    """The model's, whose logits plugins may change; None: no logits are computed."""
    dtype_name: str = ""
    """Of weights and activations: a torch dtype's name."""
    device_type: str = "cpu"
    """A torch device's."""
    backend_name: str = ""
    threads: int = 1
    copy_rate: float = 0.0
    """Bytes per second that move between device and host; 0: not measured. What swapping costs."""
    compute_rate: float = 0.0
    """Prompt tokens per second; 0: not measured. What computing again costs."""
    notes: Sequence[str] = ()
    """Sentences worth a line in the start-up banner."""

    @abstractmethod
    def start(self, progress: Callable[[str, float], None] = lambda stage, share: None) -> Capacity:
        """Load the model and make the pool. `progress(stage, 0..1)` may be called at any rate."""

    @abstractmethod
    def submit(self, plan: Plan) -> Pending:
        """Begin `plan` behind those submitted before it; at most `max_in_flight` are unfinished at a time. Never raises
        for the plan's sake: what goes wrong comes out of `Pending.result`, and `Plan.new` then names the requests
        again, with all their tokens."""

    def check(self) -> None:  # noqa: B027 - optional: an executor in this process cannot die alone
        """Raise `EngineDead` if a worker died."""

    @abstractmethod
    def stop(self) -> None:
        """Free everything. Idempotent."""
