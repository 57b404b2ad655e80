"""Grammars are tried out in a process of their own before the engine sees them: see `framework.trials`."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import Counter, OrderedDict
from contextlib import suppress
from contextvars import Context

import msgspec

from framework import EngineDead, FrameworkError, InvalidRequest, Rejected, StructuredOutputs
from framework.grammars import FIELD, Vocabulary, refusal
from framework.inputs import InputProcessor
from framework.log import get_logger
from framework.trials import COMMAND, End, Trial, Verdict, framed

from .limits import KEPT_VERDICTS, MAX_GRAMMAR, MAX_TRIALS, MAX_TRIALS_WAITING, RETRY_AFTER, TRIALS_START

log = get_logger(__name__)

_OVERHEAD = 300
"""Bytes that what is known of a grammar takes beside the message."""


class _Trying:
    """One grammar, for all who wait for its verdict. error: theirs if it was ended before that."""

    task: asyncio.Task[str]

    def __init__(self) -> None:
        self.waiting: list[str] = []  # a tenant for each who waits
        self.turn = asyncio.Event()
        self.error: FrameworkError | None = None

    def end(self, error: FrameworkError) -> None:
        self.error = self.error or error
        self.task.cancel()


class Grammars:
    """Knows which grammars the engine may have. The process starts with the first that is asked for, and again when one
    is asked for after its end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._known: OrderedDict[bytes, str] = OrderedDict()  # by hash: what is wrong with it; the last used last
        self._size = 0
        self._trying: dict[bytes, _Trying] = {}  # by hash: those that somebody waits for
        self._queue: list[_Trying] = []  # of them: those without a place
        self._placed: dict[_Trying, str] = {}  # those with one, and whose it is
        self._starting: asyncio.Task[_Process] | None = None

    async def check(self, wanted: StructuredOutputs, inputs: InputProcessor, tenant: str = "") -> None:
        """Raise `InvalidRequest` for a grammar that cannot be compiled, not in time, or not in the memory that it may
        have; `Rejected` if that cannot be told now. `wanted` must be normalised.

        The trial ends with the last who waits for it. Tenants take turns.
        """
        data = msgspec.msgpack.encode(wanted)
        if len(data) > MAX_GRAMMAR:
            raise refusal(wanted, f"{len(data)} bytes, at most {MAX_GRAMMAR} are possible")
        key = hashlib.blake2b(data, digest_size=16).digest()
        message = self._known.get(key)
        if message is None:
            message = await self._tried(key, wanted, inputs, tenant)
        else:
            self._known.move_to_end(key)
        if message:
            raise InvalidRequest(FIELD, message)

    async def _tried(self, key: bytes, wanted: StructuredOutputs, inputs: InputProcessor, tenant: str) -> str:
        trying = self._trying.get(key)
        if trying is None:
            trying = self._begin(key, wanted, inputs, tenant)
        trying.waiting.append(tenant)
        self._next()
        try:
            return await asyncio.shield(trying.task)  # others may wait for it, too
        except asyncio.CancelledError:
            if trying.task.cancelled() and trying.error is not None:
                raise trying.error from None
            raise
        finally:
            trying.waiting.remove(tenant)
            if not trying.waiting:
                self._forget(key, trying)
                trying.task.cancel()

    def _begin(self, key: bytes, wanted: StructuredOutputs, inputs: InputProcessor, tenant: str) -> _Trying:
        if len(self._trying) >= MAX_TRIALS_WAITING:
            self._make_room(tenant)
        trying = self._trying[key] = _Trying()
        self._queue.append(trying)
        trying.task = asyncio.create_task(self._try(trying, key, wanted, inputs))

        def done(task: asyncio.Task[str]) -> None:
            self._forget(key, trying)
            self._placed.pop(trying, None)
            self._next()
            if not task.cancelled():
                task.exception()  # seen, even if all who waited for it have gone away

        trying.task.add_done_callback(done)
        return trying

    def _forget(self, key: bytes, trying: _Trying) -> None:
        """Nobody is to wait for it any more."""
        if self._trying.get(key) is trying:
            del self._trying[key]
        if trying in self._queue:
            self._queue.remove(trying)

    def _make_room(self, tenant: str) -> None:
        """For one of this tenant's, at the cost of who has the most waiting. Raises `Rejected` if that is himself."""
        full = Rejected(f"{len(self._trying)} grammars wait to be compiled; come again later", 429, RETRY_AFTER)
        own = [(trying.waiting[0], trying) for trying in self._queue if len({*trying.waiting}) == 1]
        count = Counter(whose for whose, _ in own)
        most = max(count, key=count.__getitem__, default=tenant)
        if count[most] <= count[tenant] + 1:
            raise full
        last = [trying for whose, trying in own if whose == most][-1]
        self._queue.remove(last)
        last.end(full)

    def _next(self) -> None:
        """Give places: to tenants who have the fewest, and among those to who waits longest. Behind one that has got a
        place, the others of its tenant wait behind those of all others."""
        while self._queue and len(self._placed) < MAX_TRIALS:
            placed = Counter(self._placed.values())
            pairs = [(tenant, trying) for trying in self._queue for tenant in trying.waiting]
            tenant, trying = min(pairs, key=lambda pair: placed[pair[0]])
            self._queue.remove(trying)
            self._queue.sort(key=lambda other: tenant in other.waiting)
            self._placed[trying] = tenant
            trying.turn.set()

    async def _try(self, trying: _Trying, key: bytes, wanted: StructuredOutputs, inputs: InputProcessor) -> str:
        await trying.turn.wait()
        process = await self._running(inputs)
        verdict = await process.ask(wanted, self._seconds)
        if verdict.code == 0:
            self._keep(key, verdict.refusal)
            return verdict.refusal
        # It may have been the machine's fault: the next time it is tried again.
        reason = f"takes longer than {self._seconds:g} s to compile (--grammar-timeout); make it simpler"
        if verdict.code != -signal.SIGALRM:
            log.warning("a grammar ended its compiler", code=verdict.code)
            reason = "the compiler cannot cope with it; make it simpler"
        return str(refusal(wanted, reason))

    def _keep(self, key: bytes, message: str) -> None:
        self._known[key] = message
        self._size += len(message) + _OVERHEAD
        while self._size > KEPT_VERDICTS:
            self._size -= len(self._known.popitem(last=False)[1]) + _OVERHEAD

    async def _running(self, inputs: InputProcessor) -> _Process:
        started = self._starting
        if started is None or (started.done() and (started.exception() is not None or started.result().ended)):
            started = self._starting = asyncio.create_task(_begun(inputs))
        return await asyncio.shield(started)  # the next one needs it, even if this one is given up

    def fail(self, error: FrameworkError) -> None:
        """End every request that waits for a trial."""
        for trying in self._trying.values():
            trying.end(error)

    async def close(self) -> None:
        """End the process and all trials. Idempotent."""
        self.fail(EngineDead("the server is shutting down"))
        if self._starting is not None:
            self._starting.cancel()  # it may wait for a thread
            [started] = await asyncio.gather(self._starting, return_exceptions=True)
            if isinstance(started, _Process):
                await started.end()


async def _begun(inputs: InputProcessor) -> _Process:
    vocabulary = await asyncio.to_thread(Vocabulary.of, inputs.tokenizer, inputs.info.vocab_size)
    return _Process(await _start(), vocabulary)


async def _start() -> Process:
    return await asyncio.create_subprocess_exec(*COMMAND, stdin=PIPE, stdout=PIPE, start_new_session=True)


class _Process:
    """One life of the process."""

    def __init__(self, process: Process, vocabulary: Vocabulary) -> None:
        self.ended = False
        self._process = process
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._ids = itertools.count()
        self._write(vocabulary)
        # In a context of its own: it outlives the request that it starts for, whose id is in lines of the log.
        self._reading = asyncio.create_task(self._read(), context=Context())

    async def ask(self, wanted: StructuredOutputs, seconds: float) -> Verdict:
        """Raises `Rejected` if the process ends meanwhile."""
        assert self._process.stdin is not None
        id = next(self._ids)
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting[id] = verdict
        try:
            async with asyncio.timeout(seconds + TRIALS_START):
                with suppress(ConnectionError):  # it has ended, which `verdict` will say
                    await self._process.stdin.drain()  # behind what it has not read: it may be starting
                self._write(Trial(id, wanted, seconds))
                return await verdict
        except TimeoutError:
            self._kill()
            raise Rejected("the compiler of grammars does not answer; come again later", 503, RETRY_AFTER) from None
        except asyncio.CancelledError:  # nobody waits for it any more
            if not self.ended:
                self._write(End(id))
            raise
        finally:
            del self._waiting[id]

    def _write(self, message: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(framed(message))

    async def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(asyncio.IncompleteReadError):
            while True:
                size = int.from_bytes(await self._process.stdout.readexactly(4), "big")
                verdict = msgspec.msgpack.decode(await self._process.stdout.readexactly(size), type=Verdict)
                waiting = self._waiting.get(verdict.id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(verdict)
        log.warning("the compiler of grammars has ended; the next grammar starts it again")
        self.ended = True
        self._kill()  # what it left behind
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Rejected("the compiler of grammars has ended; try again", 503, RETRY_AFTER))

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        self._reading.cancel()
        self._kill()
        await self._process.wait()
