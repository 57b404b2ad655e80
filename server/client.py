"""The server's side of the engine process: starts it, sends requests, hands out tokens, notices its death."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

import msgspec
import zmq
import zmq.asyncio

from framework import (
    ConfigError,
    Delivery,
    EngineDead,
    FrameworkError,
    InvalidRequest,
    PluginError,
    Rejected,
    ResponseRecord,
)
from framework.log import get_logger
from framework.messages import (
    Abort,
    Add,
    EngineInfo,
    EngineStats,
    Fatal,
    FromEngine,
    Outputs,
    Progress,
    Ready,
    TokenOutput,
)
from framework.process import spawn
from framework.registry import Plugins
from framework.settings import Settings

log = get_logger(__name__)

LAST_WORDS = 0.3
"""Seconds to wait for the engine's own account of why it ended, once its process is gone."""
STALLED_AFTER = 120.0
"""Seconds without a message, while requests wait for one, after which the engine counts as stalled."""


class Spawned(Protocol):
    """A started engine process (see `framework.process`)."""

    process: subprocess.Popen[bytes]
    address: str

    def end(self, patience: float = 2.0) -> None: ...


class _Sequence:
    """One request of the engine's: which response it belongs to, and when its last tokens came."""

    __slots__ = ("index", "last", "stream")

    def __init__(self, stream: Stream, index: int) -> None:
        self.stream = stream
        self.index = index
        self.last = 0


class Stream:
    """The outputs of one response, as they come: an async context manager, and inside it an async iterator of lists of
    (index of the sequence, output). Leaving it early aborts what is unfinished.

    Iterating raises `Rejected` for an output that is an error, and `EngineDead`.
    """

    def __init__(self, client: EngineClient, record: ResponseRecord, ids: Sequence[str]) -> None:
        self.record = record
        self._client = client
        self._open = dict(enumerate(ids))
        self._queue: asyncio.Queue[tuple[int, TokenOutput] | FrameworkError] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.abort(list(self._open.values()), "abort")
        self._open.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[tuple[int, TokenOutput]]:
        ready: list[tuple[int, TokenOutput]] = []
        while self._open and not ready:
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            for item in items:
                if isinstance(item, FrameworkError):
                    raise item
                index, output = item
                if index not in self._open:
                    continue
                if output.finish_reason is not None:
                    del self._open[index]
                if output.finish_reason == "error":
                    raise Rejected(output.error or "the engine gave no reason", output.status, output.retry_after)
                ready.append(item)
        if not ready:
            raise StopAsyncIteration
        return ready

    def stop(self, index: int) -> None:
        """End one sequence, because a stop string was found in its text."""
        id = self._open.pop(index, None)  # None: the engine ended it in the meantime
        if id is not None:
            self._client.abort([id], "stop")

    def put(self, item: tuple[int, TokenOutput] | FrameworkError) -> None:
        self._queue.put_nowait(item)


class EngineClient:
    """Lives in the event loop that calls `start`.

    `info` is None until the engine is ready. `dead` says why the engine is gone; then `generate` raises `EngineDead`.
    """

    def __init__(self, settings: Settings, plugins: Plugins, spawn: Callable[[Settings], Spawned] = spawn) -> None:
        self.info: EngineInfo | None = None
        self.dead: str | None = None
        self._settings = settings
        self._plugins = plugins
        self._spawn = spawn
        self._engine: Spawned | None = None
        self._stats = EngineStats()
        self._faults: dict[str, int] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._serial = itertools.count()
        self._heard = time.monotonic()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    # Life of the process

    async def start(self, progress: Callable[[str, float], None] = lambda stage, share: None) -> EngineInfo:
        """Start the engine and wait until it is ready. Raises what stopped it, as one `FrameworkError`."""
        self._loop = asyncio.get_running_loop()
        self._progress = progress
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._engine = self._spawn(self._settings)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(self._engine.address)
        self._reader = self._loop.create_task(self._read())
        threading.Thread(target=self._watch, args=(self._engine.process,), daemon=True).start()
        info = await self._ready
        if info.manifest != self._plugins.manifest:
            raise PluginError(
                f"the engine process loaded other plugins ({info.manifest}) than the server "
                f"({self._plugins.manifest}); start again once the installation is finished"
            )
        self.info = info
        return info

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with suppress(RuntimeError):  # the loop is closed: the server is ending too
            self._loop.call_soon_threadsafe(self._exited, code)

    def _exited(self, code: int) -> None:
        if code < 0:
            self._die(EngineDead(f"the engine process was ended by {_signal(-code)}"))
        else:
            error = EngineDead(f"the engine process ended with exit code {code}")
            self._loop.call_later(LAST_WORDS, self._die, error)

    def _die(self, error: FrameworkError) -> None:
        if self.dead is not None:
            return
        self.dead = str(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        else:
            log.error("the engine is gone", reason=self.dead)
        self.fail(EngineDead(self.dead))

    def fail(self, error: FrameworkError) -> None:
        """End every unfinished response with this error."""
        for stream in {sequence.stream for sequence in self._sequences.values()}:
            stream.put(error)
        self._sequences.clear()

    async def close(self) -> None:
        """End the engine process, and whatever still waits for it. Idempotent."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        self.dead = self.dead or "the server is shutting down"
        self.fail(EngineDead(self.dead))
        await asyncio.to_thread(engine.end)
        self._reader.cancel()
        await asyncio.wait((self._reader,))
        self._context.destroy(linger=0)

    # State

    @property
    def alive(self) -> bool:
        """True once the engine is ready and as long as its process lives."""
        return self.info is not None and self.dead is None

    @property
    def stalled(self) -> bool:
        """True if requests wait and the engine has been silent for `STALLED_AFTER` seconds."""
        return bool(self._sequences) and time.monotonic() - self._heard > STALLED_AFTER

    @property
    def stats(self) -> EngineStats:
        """As of the engine's last message; `plugin_faults` counts those of this process too."""
        if not self._faults:
            return self._stats
        faults = dict(self._stats.plugin_faults)
        for plugin, count in self._faults.items():
            faults[plugin] = faults.get(plugin, 0) + count
        return msgspec.structs.replace(self._stats, plugin_faults=faults)

    # Requests

    def generate(self, adds: Sequence[Add], record: ResponseRecord) -> Stream:
        """Send the requests of one response; their ids are made unique here. Sequences are numbered in their order,
        `Add.n` for each.

        Raises `EngineDead`, and `InvalidRequest` for values that cannot be sent.
        """
        if self.dead is not None:
            raise EngineDead(self.dead)
        for add in adds:
            add.id = f"{add.id}-{next(self._serial)}"
        try:
            encoded = [self._encoder.encode(add) for add in adds]
        except (OverflowError, RecursionError, TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("extra", f"extra: cannot be passed on: {error}") from error
        if not self._sequences:
            self._heard = time.monotonic()
        ids = [id for add in adds for id in add.ids]
        stream = Stream(self, record, ids)
        for index, id in enumerate(ids):
            self._sequences[id] = _Sequence(stream, index)
        for message in encoded:
            self._socket.send(message)
        return stream

    def abort(self, ids: Sequence[str], reason: str) -> None:
        """End requests now. Those that have ended by themselves are no matter."""
        ids = [id for id in ids if self._sequences.pop(id, None) is not None]
        if ids and self.dead is None:
            self._socket.send(self._encoder.encode(Abort(list(ids), reason)))

    async def _read(self) -> None:
        while True:
            message = self._decoder.decode(await self._socket.recv())
            self._heard = time.monotonic()
            match message:
                case Outputs():
                    self._deliver(message)
                case Progress():
                    self._progress(message.stage, message.share)
                case Ready():
                    if not self._ready.done():
                        self._ready.set_result(message.info)
                case Fatal():
                    if message.traceback:
                        log.error("the engine failed", error=message.message, traceback=message.traceback)
                    self._die((ConfigError if message.user else EngineDead)(message.message))
            await asyncio.sleep(0)  # receiving does not suspend while messages are there: let others run

    def _deliver(self, message: Outputs) -> None:
        self._stats = message.stats
        now = time.monotonic_ns()
        deliveries = []
        for output in message.outputs:
            sequence = self._sequences.get(output.id)
            if sequence is None:
                continue
            if output.tokens:
                record, last = sequence.stream.record, sequence.last
                sequence.last = record.last_token = now
                record.first_token = record.first_token or now
                gap, ttft = ((now - last) / 1e9, None) if last else (None, (now - record.start) / 1e9)
                deliveries.append(Delivery(record, len(output.tokens), gap, ttft))
            if output.finish_reason is not None:
                del self._sequences[output.id]
            sequence.stream.put((sequence.index, output))
        if deliveries:
            self.notify("tokens_delivered", deliveries=deliveries)

    def notify(self, hook: str, **arguments: object) -> None:
        """Call an event hook of the plugins in this process; their faults are counted and logged."""
        self._plugins.notify(hook, self._fault, **arguments)

    def _fault(self, plugin: str, hook: str, error: Exception) -> None:
        count = self._faults[plugin] = self._faults.get(plugin, 0) + 1
        if count & (count - 1) == 0:  # powers of two: a hook that always fails must not flood the log
            log.error("plugin failed", plugin=plugin, hook=hook, error=repr(error), faults=count, exc_info=error)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
