"""The queue: what is made ready for the engine, and what it has been sent and has given no token of yet."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from framework import FrameworkError, Rejected

from .limits import RETRY_AFTER


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
        self._prepared: dict[asyncio.Timeout, FrameworkError] = {}  # and what its end means
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._tokens)

    def check(self, requests: int = 1, tokens: int = 1) -> None:
        """Raise `Rejected` unless there is room for so many more."""
        if not self._tokens:
            return
        if len(self) + requests > self.max_requests:
            limit, waits = f"--max-queued-requests {self.max_requests}", f"{len(self)} requests"
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
    async def prepare(self, end: float, late: FrameworkError) -> AsyncIterator[None]:
        """For what comes before a request can be sent: it has one place meanwhile. What takes longer than until `end`,
        as `time.monotonic` has it, is cancelled and becomes `late`; after `cut` it is that error.

        Raises `Rejected` if there is no place.
        """
        place = f"prepared {next(self._serial)}"  # no id of a request's
        self.enter({place: 0})
        limit = asyncio.timeout(None if end == math.inf else end - time.monotonic())
        self._prepared[limit] = late
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._prepared[limit] from None
        finally:
            del self._prepared[limit]
            self.leave(place)

    def cut(self, error: FrameworkError) -> None:
        """End with this error what is made ready."""
        for limit in self._prepared:
            self._prepared[limit] = error
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def clear(self, error: FrameworkError) -> None:
        """Nothing waits any more."""
        self.cut(error)
        self._tokens.clear()
        self.tokens = 0
