"""The queue: what is made ready for the engine, and what it has been sent and has given no token of yet."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass

from framework import FrameworkError, Rejected

from .limits import RETRY_AFTER


def called(id: str, names: Set[str]) -> Set[str]:
    """Those of `names` that mean the response with this id: it goes by that, and by what follows the prefix of it, the
    id of the HTTP request."""
    return {id, id.partition("-")[2]} & names


@dataclass(eq=False)
class _Prepared:
    """A response that is made ready. error: what it becomes when its time is over."""

    id: str
    tenant: str
    limit: asyncio.Timeout
    error: FrameworkError

    def end(self, error: FrameworkError) -> None:
        self.error = error
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())


class Waiting:
    """Requests of the engine's, by id, with the prompt tokens that each stands for; bounded in both.

    Checking and taking a place are one call of the event loop, so no two requests take the same place; giving it back
    is by id, so it happens once however often it is asked for. What is larger than a whole limit is taken when nothing
    else waits: it is refused for now, not for ever.
    """

    def __init__(self, max_requests: int, max_tokens: int | None) -> None:
        self.tokens = 0
        self._tokens: dict[str, int] = {}
        self.max_requests = max_requests
        self._max_tokens = max_tokens
        self._prepared: set[_Prepared] = set()
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._tokens)

    def check(self, requests: int = 1, tokens: int = 1) -> None:
        """Raise `Rejected` unless there is room for so many more."""
        if not self._tokens:
            return
        if len(self) + requests > self.max_requests:
            limit, waits = f"--max-queued-requests {self.max_requests}", f"{len(self)} sequences"
        elif self._max_tokens is not None and self.tokens + tokens > self._max_tokens:
            limit, waits = f"--max-queued-tokens {self._max_tokens}", f"{self.tokens} tokens"
        else:
            return
        raise Rejected(f"the queue is full: {waits} wait, {limit}; come again later", 429, RETRY_AFTER)

    def enter(self, requests: Mapping[str, int]) -> None:
        """Take places. Raises `Rejected`, and then takes none."""
        self.check(len(requests), sum(requests.values()))
        self._tokens.update(requests)
        self.tokens += sum(requests.values())

    def leave(self, id: str) -> None:
        """Give a place back: it has its first token, or it has ended."""
        self.tokens -= self._tokens.pop(id, 0)

    @property
    def preparing(self) -> int:
        """Requests that are made ready."""
        return len(self._prepared)

    @asynccontextmanager
    async def prepare(self, id: str, tenant: str, end: float, late: FrameworkError) -> AsyncIterator[None]:
        """For what comes before the requests of a response can be sent: it has one place meanwhile. What takes longer
        than until `end`, as `time.monotonic` has it, is cancelled and becomes `late`; after `cut` or `cancel` it is
        their error.

        Raises `Rejected` if there is no place.
        """
        place = f"prepared {next(self._serial)}"  # no id of a request's
        self.enter({place: 0})
        limit = asyncio.timeout(None if end == math.inf else end - time.monotonic())
        prepared = _Prepared(id, tenant, limit, late)
        self._prepared.add(prepared)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise prepared.error from None
        finally:
            self._prepared.remove(prepared)
            self.leave(place)
        if prepared.error is not late:  # it was done in the moment in which it was told to end
            raise prepared.error

    def cut(self, error: FrameworkError) -> None:
        """End with this error what is made ready."""
        for prepared in self._prepared:
            prepared.end(error)

    def cancel(self, names: Set[str], tenant: str | None, error: FrameworkError) -> Set[str]:
        """End with this error what is made ready and named: see `EngineClient.cancel`. Returns the names found."""
        found: set[str] = set()
        for prepared in self._prepared:
            named = called(prepared.id, names)
            if named and tenant in (None, prepared.tenant):
                found |= named
                prepared.end(error)
        return found

    def clear(self, error: FrameworkError) -> None:
        """Nothing waits any more."""
        self.cut(error)
        self._tokens.clear()
        self.tokens = 0
