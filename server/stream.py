"""What one response gets of the engine, kept until it is read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from framework import FrameworkError, Rejected, ResponseRecord
from framework.messages import TokenOutput

from .limits import INLINE_TOKENS

if TYPE_CHECKING:
    from .client import EngineClient


class Stream:
    """The outputs of one response, as they come: an async context manager, and inside it an async iterator of lists of
    (index of the sequence, output), at most one for each sequence and about `INLINE_TOKENS` tokens in all. Leaving it
    early aborts what is unfinished.

    What comes while nobody reads is merged: a slow reader costs the token ids of its own sequences, nothing else.
    Iterating raises `Rejected` for an output that is an error, and `EngineDead`.
    """

    def __init__(self, client: EngineClient, record: ResponseRecord, ids: Sequence[str], tenant: str) -> None:
        self.record = record
        self.tenant = tenant
        self._client = client
        self._open = dict(enumerate(ids))
        self._news: dict[int, TokenOutput] = {}
        self._error: FrameworkError | None = None
        self._wake = asyncio.Event()
        self.limit: asyncio.TimerHandle | None = None
        self.cause: FrameworkError | None = None  # why it was cut off

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.limit is not None:
            self.limit.cancel()
        self._client.abort(list(self._open.values()), "abort")
        self._open.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[tuple[int, TokenOutput]]:
        if not self._open:
            raise StopAsyncIteration
        if self._news:  # the rest of what came: others first
            await asyncio.sleep(0)
        await self._wake.wait()
        if self._error is not None:
            raise self._error
        news, size = {}, 0
        for index in list(self._news):
            news[index] = output = self._news.pop(index)
            size += max(1, len(output.tokens))
            if size >= INLINE_TOKENS:
                break
        if not self._news:
            self._wake.clear()
        for index, output in news.items():
            if output.finish_reason == "error":
                raise Rejected(output.error or "the engine gave no reason", output.status, output.retry_after)
            if output.finish_reason is not None:
                del self._open[index]
        return list(news.items())

    def stop(self, index: int) -> None:
        """End one sequence, because a stop string was found in its text."""
        id = self._open.pop(index, None)  # None: the engine ended it in the meantime
        if id is not None:
            self._client.abort([id], "stop")
            if index in self.record.times:  # the engine's own account of the end comes too late
                self.record.times[index].finished = time.monotonic_ns()

    def put(self, index: int, output: TokenOutput) -> None:
        """Keep an output until it is read."""
        before = self._news.get(index)
        if before is not None:
            before.tokens += output.tokens
            output.index, output.tokens = before.index, before.tokens
            output.cached_tokens += before.cached_tokens
            output.prompt_logprobs = before.prompt_logprobs or output.prompt_logprobs
            if before.logprobs is not None:
                before.logprobs += output.logprobs or ()
                output.logprobs = before.logprobs
        self._news[index] = output
        self._wake.set()

    def fail(self, error: FrameworkError) -> None:
        """End the whole response with this error."""
        self._error = error
        self._wake.set()

    def cut(self, error: FrameworkError) -> None:
        """End the response here: with what there is of it and the finish reason "abort"; with this error if that is
        nothing. The engine is told, not asked: it may hang."""
        self.cause = error
        ended = {*self._client.abort(list(self._open.values()), "abort")}
        if not self.record.first_token:
            self.fail(error)
            return
        for index, id in self._open.items():
            if id in ended:
                self.put(index, TokenOutput(id, 0, [], finish_reason="abort"))
