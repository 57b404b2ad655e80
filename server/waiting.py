"""The queue: what the engine has been sent and has given no token of yet."""

from __future__ import annotations

from collections.abc import Mapping

from framework import Rejected

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

    def clear(self) -> None:
        """Nothing waits any more."""
        self._tokens.clear()
        self.tokens = 0
