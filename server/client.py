"""The server's side of the engine process: starts it, sends requests, hands out tokens, notices its death."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

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
)
from framework.process import spawn
from framework.registry import Plugins
from framework.settings import Settings

from .grammars import Grammars
from .limits import LAST_WORDS, MAX_SENT, STALLED_AFTER
from .stream import Stream
from .waiting import Waiting, called
from .watch import Activity

log = get_logger(__name__)

TICK = 1.0
"""Seconds between looks at a silent engine."""
SHUTTING_DOWN = "the server is shutting down"


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


class EngineClient:
    """Of one engine process. Lives in the event loop that calls `start`.

    `info` is None until the engine is ready. `dead` says why the engine is gone, which `gone` waits for; `stalled` why
    it is given up until it is heard again: as long as one of them is set, `generate` raises `EngineDead`. `waiting` is
    the queue; `grammars` knows which ones are good.
    """

    def __init__(self, settings: Settings, plugins: Plugins, spawn: Callable[[Settings], Spawned] = spawn) -> None:
        self.info: EngineInfo | None = None
        self.dead: str | None = None
        self.stalled: str | None = None
        self.gone = asyncio.Event()
        self.waiting = Waiting(settings.max_queued_requests, settings.max_queued_tokens)
        self.grammars = Grammars(settings.grammar_timeout)
        self._settings = settings
        self._plugins = plugins
        self._spawn = spawn
        self._engine: Spawned | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._stats = EngineStats()
        self._faults: dict[str, int] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._serial = itertools.count()
        self._heard = False  # anything, since the last look
        self._asked = False  # for anything, since the engine's last outputs
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    # Life of the process

    async def start(self, progress: Callable[[str, float], None] = lambda stage, share: None) -> EngineInfo:
        """Start the engine and wait until it is ready. Raises what stopped it, as one `FrameworkError`."""
        self._loop = asyncio.get_running_loop()
        self._progress = progress
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._context = zmq.asyncio.Context()
        self._engine = self._spawn(self._settings)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        try:
            self._socket.bind(self._engine.address)
        except zmq.ZMQError as error:
            path, why = self._engine.address.removeprefix("ipc://"), os.strerror(error.errno or 0)
            message = f"TMPDIR: cannot make the socket {path}: {why}; set TMPDIR to a writable folder"
            raise ConfigError(message) from None
        self._tasks = [self._loop.create_task(self._read()), self._loop.create_task(self._watch())]
        threading.Thread(target=self._wait, args=(self._engine.process,), daemon=True).start()
        info = await self._ready
        if info.manifest != self._plugins.manifest:
            raise PluginError(
                f"the engine process loaded other plugins ({info.manifest}) than the server "
                f"({self._plugins.manifest}); start again once the installation is finished"
            )
        self.info = info
        return info

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with suppress(RuntimeError):  # the loop is closed: the server is ending too
            self._loop.call_soon_threadsafe(self._exited, code)

    def _exited(self, code: int) -> None:
        if code < 0:
            why = ", as when memory runs out" if -code == signal.SIGKILL else ""
            self._die(EngineDead(f"the engine process was ended by {_signal(-code)}{why}"))
        else:
            error = EngineDead(f"the engine process ended with exit code {code}")
            self._loop.call_later(LAST_WORDS, self._die, error)

    def _die(self, error: FrameworkError) -> None:
        if self.dead is not None:
            return
        self.dead = str(error)
        self.gone.set()
        self._stats = msgspec.structs.replace(
            self._stats, running=0, waiting=0, kv_holding=0, kv_reserved=0, kv_cached=0, kv_swapped=0, kv_tokens=0
        )
        if not self._ready.done():
            self._ready.set_exception(error)
        else:
            log.error("the engine is gone", reason=self.dead)
        self.fail(EngineDead(self.dead))

    def fail(self, error: FrameworkError) -> None:
        """End every unfinished response with this error."""
        for stream in {sequence.stream for sequence in self._sequences.values()}:
            stream.fail(error)
        self._sequences.clear()
        self.waiting.clear(error)
        self.grammars.fail(error)

    def cut(self, error: FrameworkError) -> None:
        """End every unfinished response: see `Stream.cut`."""
        for stream in {sequence.stream for sequence in self._sequences.values()}:
            stream.cut(error)
        self.waiting.cut(error)

    async def close(self) -> None:
        """End the engine process, and whatever still waits for it. Idempotent; goes on if its caller is cancelled."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self.dead = self.dead or SHUTTING_DOWN
            self.fail(EngineDead(self.dead))
            own = ThreadPoolExecutor(1)  # the one of all may be busy for long, with texts of clients
            self._closing = asyncio.ensure_future(self._close(self._loop.run_in_executor(own, engine.end)))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self, ended: asyncio.Future[None]) -> None:
        await self.grammars.close()
        await ended
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._context.destroy(linger=0)

    # State

    @property
    def alive(self) -> bool:
        """True once the engine is ready and as long as its process lives."""
        return self.info is not None and self.dead is None

    @property
    def stats(self) -> EngineStats:
        """As of the engine's last message; `plugin_faults` counts those of this process too."""
        if not self._faults:
            return self._stats
        faults = dict(self._stats.plugin_faults)
        for plugin, count in self._faults.items():
            faults[plugin] = faults.get(plugin, 0) + count
        return msgspec.structs.replace(self._stats, plugin_faults=faults)

    @property
    def load(self) -> int:
        """Unfinished responses, also those that wait or are made ready."""
        return len({sequence.stream for sequence in self._sequences.values()}) + self.waiting.preparing

    # Requests

    def check(self) -> None:
        """Raise what a request would meet now: `EngineDead`, or `Rejected` if the queue is full."""
        gone = self.dead or self.stalled
        if gone is not None:
            raise EngineDead(gone)
        self.waiting.check()

    def prepare(self, id: str, tenant: str, start: int) -> AbstractAsyncContextManager[None]:
        """For what comes before `generate`: it counts as the response, which came at `start` (`time.monotonic_ns`), and
        ends as that does. See `Waiting.prepare`."""
        return self.waiting.prepare(id, tenant, *self._limit(start))

    def _limit(self, start: int) -> tuple[float, Rejected]:
        """When the time of a response is over, and the error that it is then."""
        limit = self._settings.request_timeout
        late = Rejected(f"the request took longer than {limit} s (--request-timeout)", 504)
        return math.inf if limit is None else start / 1e9 + limit, late

    def generate(self, adds: Sequence[Add], record: ResponseRecord) -> Stream:
        """Send the requests of one response; their ids are made unique here. Sequences are numbered in their order,
        `Add.n` for each.

        Raises `EngineDead`, `Rejected` if the queue is full or the time over, `InvalidRequest` beyond `MAX_SENT` bytes.
        """
        self.check()
        end, late = self._limit(record.start)
        if time.monotonic() > end:
            raise late
        encoded, size = [], 0
        for add in adds:
            add.id = f"{add.id}-{next(self._serial)}"
            encoded.append(self._encoder.encode(add))
            size += len(encoded[-1])
            if size > MAX_SENT:
                raise InvalidRequest(
                    "",
                    f"the request becomes {len(adds)} messages of about {len(encoded[-1])} bytes each (prompt, "
                    f"sampling parameters and extra), over {MAX_SENT} bytes in all; ask for fewer at once",
                )
        # Each prompt counts once: the sequences of one prompt share it.
        self.waiting.enter({id: 0 if i else len(add.prompt) for add in adds for i, id in enumerate(add.ids)})
        stream = Stream(self, record, ids := [id for add in adds for id in add.ids], adds[0].tenant if adds else "")
        if end < math.inf:
            stream.limit = self._loop.call_later(end - time.monotonic(), stream.cut, late)
        self._asked = True
        for index, id in enumerate(ids):
            self._sequences[id] = _Sequence(stream, index)
        if encoded:
            self._socket.send_multipart(encoded)  # comes as so many messages, which by themselves would cost more
        return stream

    def abort(self, ids: Sequence[str], reason: str) -> list[str]:
        """End requests now; returns which. Those that have ended by themselves are no matter."""
        ids = [id for id in ids if self._sequences.pop(id, None) is not None]
        for id in ids:
            self.waiting.leave(id)
        if ids and self.dead is None:
            self._socket.send(self._encoder.encode(Abort(ids, reason)))
        return ids

    def cancel(self, names: Set[str], tenant: str | None = None) -> int:
        """Have the engine end every unfinished response that is `called` so: whoever waits for it gets what there is,
        with the finish reason "abort", or an error if it was not sent yet. Returns how many of the names were found.

        tenant: whose responses alone are looked at; None: everybody's.
        """
        error = Rejected("the request was aborted", 499)
        found, ids = {*self.waiting.cancel(names, tenant, error)}, []
        for id, sequence in self._sequences.items():
            named = called(sequence.stream.record.id, names)
            if named and tenant in (None, sequence.stream.tenant):
                found |= named
                ids.append(id)
                sequence.stream.cause = sequence.stream.cause or error
        if ids:
            self._socket.send(self._encoder.encode(Abort(ids, "abort")))
        return len(found)

    async def _read(self) -> None:
        try:
            while self.dead is None:
                self._take(self._decoder.decode(await self._socket.recv()))
                await asyncio.sleep(0)  # receiving does not suspend while messages are there: let others run
        except Exception as error:  # whatever it is, nobody would be answered any more: everybody is told
            log.exception("a message of the engine cannot be handled")
            self._die(EngineDead(f"a message of the engine cannot be handled: {type(error).__name__}: {error}"))
            if self._engine is not None:
                self._engine.process.terminate()

    def _take(self, message: FromEngine) -> None:
        if self.dead is not None:
            return
        self._heard = True
        if self.stalled is not None:
            self.stalled = None
            log.info("the engine answers again")
        match message:
            case Outputs():
                self._deliver(message)
            case Progress():
                self._progress(message.stage, message.share)
            case Ready():
                if not self._ready.done():
                    self._stats = EngineStats(kv_blocks=message.info.kv_blocks)  # all free, until it tells more
                    self._ready.set_result(message.info)
            case Fatal():
                if message.traceback:
                    log.error("the engine failed", error=message.message, traceback=message.traceback)
                self._die((ConfigError if message.user else EngineDead)(message.message))

    async def _watch(self) -> None:
        """A step may take long. An engine that is silent and does not compute either is given up until it is heard
        again; one that is silent for longer than any step takes is dead, whatever it does."""
        assert self._engine is not None
        activity = Activity(self._engine.process.pid)
        silent = 0.0  # counted, not measured: if this process was suspended, the engine may have been too
        while self.dead is None:
            await asyncio.sleep(TICK)
            if self._heard or not self._owing:
                self._heard, silent = False, 0.0
                continue
            if silent == 0.0:
                activity.restart()
            silent += TICK
            idle = activity.none_in(silent)
            if silent > self._settings.step_timeout:
                limit = f"{self._settings.step_timeout:g} s (--step-timeout)"
                self._die(EngineDead(f"the engine has finished no step for {limit} while requests waited"))
            elif idle and silent > STALLED_AFTER and self.stalled is None:
                self._give_up()

    @property
    def _owing(self) -> bool:
        """Whether the engine has something to do; also if nobody waits for it any more."""
        return bool(self._sequences or self._asked or self._stats.running or self._stats.waiting)

    def _give_up(self) -> None:
        self.stalled = f"the engine is alive, but has done nothing for {STALLED_AFTER} s while requests waited"
        log.error("the engine has stalled", reason=self.stalled, requests=len(self._sequences))
        self._socket.send(self._encoder.encode(Abort(list(self._sequences), "abort")))
        self.fail(EngineDead(self.stalled))

    def _deliver(self, message: Outputs) -> None:
        self._stats, self._asked = message.stats, False
        now = time.monotonic_ns()
        deliveries = []
        for output in message.outputs:
            sequence = self._sequences.get(output.id)
            if sequence is None:
                continue
            if output.tokens or output.finish_reason is not None:
                self.waiting.leave(output.id)
            if output.times is not None and output.times.first_token:
                sequence.stream.record.times[sequence.index] = output.times
            if output.tokens:
                record, last = sequence.stream.record, sequence.last
                sequence.last = record.last_token = now
                record.first_token = record.first_token or now
                gap, ttft = ((now - last) / 1e9, None) if last else (None, (now - record.start) / 1e9)
                deliveries.append(Delivery(record, len(output.tokens), gap, ttft))
            if output.finish_reason is not None:
                del self._sequences[output.id]
            sequence.stream.put(sequence.index, output)
        if deliveries:
            self.notify("tokens_delivered", deliveries=deliveries)

    def notify(self, hook: str, **arguments: object) -> None:
        """Call an event hook of the plugins in this process; their faults are counted and logged."""
        try:
            self._plugins.notify(hook, self._fault, **arguments)
        except SystemExit as error:  # not a plugin's to decide
            self._fault(self._plugins.blame(hook, error), hook, error)

    def _fault(self, plugin: str, hook: str, error: BaseException) -> None:
        count = self._faults[plugin] = self._faults.get(plugin, 0) + 1
        if count & (count - 1) == 0:  # powers of two: a hook that always fails must not flood the log
            log.error("plugin failed", plugin=plugin, hook=hook, error=repr(error), faults=count, exc_info=error)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
