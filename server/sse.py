"""Sending a generation: as one JSON body or as server-sent events. A client that goes away ends it at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from framework import FrameworkError
from framework.detokenizer import Delta
from framework.log import get_logger

from .generation import Ask, Choice, Generation
from .limits import INLINE_SCORES

log = get_logger(__name__)
T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Dialect(Protocol):
    """How one route spells what is generated."""

    done: bytes
    """What ends a stream, failed ones included; may be empty."""

    def ask(self) -> Ask:
        """What is asked for. Raises `InvalidRequest`."""

    async def prompts(self) -> Sequence[list[int]]:
        """Token ids of each prompt. Raises `InvalidRequest`."""

    def body(self) -> Any:
        """The whole response, once everything is generated."""

    def headers(self) -> Mapping[str, str]:
        """Further headers: of a stream at its start, else once there is the body."""

    def events(self, choice: Choice, delta: Delta) -> Iterable[Any]:
        """What to send for one piece."""

    def closing(self) -> Iterable[Any]:
        """What to send after the last piece."""


def _event(data: Any) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


class Reply(Response):
    """Runs a generation and sends it. An error before the first byte is an HTTP error, a later one an event."""

    def __init__(self, generation: Generation, dialect: Dialect, stream: bool) -> None:
        super().__init__()
        generation.record.stream = stream
        self._generation = generation
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await attended(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        generation, dialect = self._generation, self._dialect
        async with generation, aclosing(generation.run(dialect.ask(), dialect.prompts)) as news:
            if generation.record.stream:
                await self._stream(news, send)
            else:
                async for _ in news:
                    pass
                await self._send_body(send)

    def _events(self, pieces: Sequence[tuple[Choice, Delta]]) -> bytes:
        return b"".join(_event(e) for choice, delta in pieces for e in self._dialect.events(choice, delta))

    async def _spelt(self, work: Callable[[], bytes], choices: Sequence[Choice]) -> bytes:
        """`work`, which spells these choices or pieces of them: in a thread if it may be long."""
        scores = len(choices) + sum(len(choice.prompt_logprobs or ()) for choice in choices)
        if not self._generation.record.stream:
            scores += sum(len(choice.logprobs) for choice in choices)
        return work() if scores <= INLINE_SCORES else await asyncio.to_thread(work)

    async def _send_body(self, send: Send) -> None:
        begin = time.monotonic_ns()
        body = await self._spelt(lambda: _encode(self._dialect.body()), self._generation.choices)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._start(headers, send)
        await send({"type": "http.response.body", "body": body})
        self._generation.record.stages.append(("http.send", begin, time.monotonic_ns()))

    async def _start(self, headers: Iterable[tuple[bytes, bytes]], send: Send) -> None:
        more = [(name.encode(), value.encode()) for name, value in self._dialect.headers().items()]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *more]})

    async def _stream(self, news: AsyncIterator[list[tuple[Choice, Delta]]], send: Send) -> None:
        pieces = await anext(news)
        await self._start(_HEADERS, send)
        try:
            while pieces:
                begin = time.monotonic_ns()
                data = await self._spelt(partial(self._events, pieces), [choice for choice, _ in pieces])
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                pieces = await anext(news, [])
            data = b"".join(map(_event, self._dialect.closing()))
        except Exception as error:  # the status line is out: whatever went wrong, this client is told by an event
            if not isinstance(error, FrameworkError):
                log.exception("stream failed")
            begin = time.monotonic_ns()
            data = _event(self._generation.failed(error))
        await send({"type": "http.response.body", "body": data + self._dialect.done})
        self._generation.record.stages.append(("http.send", begin, time.monotonic_ns()))


async def attended(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, which is cancelled when the client goes away: then raises `ClientDisconnect`."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait((working, gone))
    if working.cancelled():
        raise ClientDisconnect
    return working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
