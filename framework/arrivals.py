"""A message of the server as requests, one for each output that was asked for; and what they wait for before they may
run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from .errors import InvalidRequest, Rejected
from .messages import Add, TokenOutput, seed_of
from .types import Reject, Request

if TYPE_CHECKING:
    from .registry import Plugins


def requests_of(message: Add, order: int, limit: int, now: int, seed: int) -> Iterator[Request]:
    """order: the first one's place among all that were ever accepted. limit: the most tokens each may come to have.
    now: nanoseconds, where the message does not say when it arrived. seed: of the seeds of those that bring none."""
    given = message.params.seed
    for k, id in enumerate(message.ids):
        yield Request(
            id,
            message.prompt,
            message.params,
            arrival=(message.arrival or now) / 1e9,
            order=order + k,
            priority=message.priority,
            tenant=message.tenant,
            adapter=message.adapter,
            cache_salt=message.cache_salt,
            parent=message.id if k else None,
            extra=message.extra,
            trace=message.trace,
            seed=seed_of(seed, order + k) if given is None else seed_of(given, k),
            limit=limit,
        )


def refusal(id: str, reason: str, status: int, retry_after: float | None = None) -> TokenOutput:
    return TokenOutput(id, 0, [], finish_reason="error", error=reason, status=status, retry_after=retry_after)


class Preparing:
    """Requests for which plugins prepare something: see the hook `prepare`. `fault`: told plugin, hook and error."""

    def __init__(self, plugins: Plugins, fault: Callable[[str, str, BaseException], None]) -> None:
        self._plugins = plugins
        self._fault = fault
        self._waits: dict[Request, list[tuple[str, Future[Any]]]] = {}

    def begin(self, request: Request) -> bool:
        """Whether it has to wait."""
        waits: list[tuple[str, Future[Any]]] = []
        for plugin, answer in self._plugins.each("prepare", request=request):
            if not isinstance(answer, Future):
                wrong = answer if isinstance(answer, Exception | SystemExit) else None
                answer = Future()
                answer.set_exception(wrong or TypeError("prepare must answer a concurrent.futures.Future or None"))
            waits.append((plugin, answer))
        if all(wait.done() and _error(wait) is None for _, wait in waits):
            return False
        self._waits[request] = waits
        return True

    def over(self) -> Iterator[tuple[Request, Reject | None]]:
        """Those that need not wait any more, each once, and what is told to clients if something went wrong."""
        for request, waits in list(self._waits.items()):
            if all(wait.done() for _, wait in waits):
                del self._waits[request]
                told = [self._told(plugin, error) for plugin, wait in waits if (error := _error(wait)) is not None]
                yield request, told[0] if told else None

    def _told(self, plugin: str, error: BaseException) -> Reject:
        """What the client is told. What is not meant for clients is the log's alone."""
        match error:
            case InvalidRequest():
                return Reject(str(error), status=400)
            case Rejected():
                return Reject(str(error), error.retry_after, error.status)
        self._fault(plugin, "prepare", error)
        return Reject("the request could not be prepared; the server's log has the details", status=500)

    def leave(self, request: Request, heir: Request | None) -> bool:
        """`request` ends; `heir` waits in its place. Whether it did wait."""
        waits = self._waits.pop(request, None)
        if waits is not None and heir is not None:
            self._waits[heir] = waits
        return waits is not None


def _error(wait: Future[Any]) -> BaseException | None:
    """Of one that is done."""
    try:
        return wait.exception()
    except CancelledError as error:
        return error
