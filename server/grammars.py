"""Grammars are tried out in a process of their own before the engine sees them: see `framework.trials`."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from contextlib import suppress

import msgspec

from framework import EngineDead, InvalidRequest, Rejected, StructuredOutputs
from framework.grammars import FIELD, Vocabulary, refusal
from framework.inputs import InputProcessor
from framework.log import get_logger
from framework.trials import COMMAND, Trial, Verdict, framed

from .limits import KEPT_VERDICTS, MAX_GRAMMAR, MAX_TRIALS, MAX_TRIALS_WAITING, RETRY_AFTER, TRIALS_START

log = get_logger(__name__)

_OVERHEAD = 300
"""Bytes that what is known of a grammar takes beside the message."""


class Grammars:
    """Knows which grammars the engine may have. The process starts with the first that is asked for, and again when one
    is asked for after its end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._known: OrderedDict[bytes, str] = OrderedDict()  # by hash: what is wrong with it; the last used last
        self._size = 0
        self._trials: dict[bytes, asyncio.Task[str]] = {}
        self._places = asyncio.Semaphore(MAX_TRIALS)
        self._starting = asyncio.Lock()
        self._process: _Process | None = None
        self._reason = ""

    async def check(self, wanted: StructuredOutputs, inputs: InputProcessor) -> None:
        """Raise `InvalidRequest` for a grammar that cannot be compiled, not in time, or not in the memory that it may
        have; `Rejected` if that cannot be told now. `wanted` must be normalised."""
        data = msgspec.msgpack.encode(wanted)
        if len(data) > MAX_GRAMMAR:
            raise refusal(wanted, f"{len(data)} bytes, at most {MAX_GRAMMAR} are possible")
        key = hashlib.blake2b(data, digest_size=16).digest()
        message = self._known.get(key)
        if message is None:
            trial = self._trials.get(key)
            if trial is None:
                trial = self._begin(key, wanted, inputs)
            try:
                message = await asyncio.shield(trial)  # others may wait for it, too
            except asyncio.CancelledError:
                if trial.cancelled():
                    raise EngineDead(self._reason) from None
                raise
        else:
            self._known.move_to_end(key)
        if message:
            raise InvalidRequest(FIELD, message)

    def _begin(self, key: bytes, wanted: StructuredOutputs, inputs: InputProcessor) -> asyncio.Task[str]:
        if len(self._trials) >= MAX_TRIALS_WAITING:
            raise Rejected(f"{len(self._trials)} grammars wait to be compiled; come again later", 429, RETRY_AFTER)
        trial = self._trials[key] = asyncio.create_task(self._try(key, wanted, inputs))

        def done(task: asyncio.Task[str]) -> None:
            del self._trials[key]
            if not task.cancelled():
                task.exception()  # seen, even if all who waited for it have gone away

        trial.add_done_callback(done)
        return trial

    async def _try(self, key: bytes, wanted: StructuredOutputs, inputs: InputProcessor) -> str:
        async with self._places:
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
        async with self._starting:
            if self._process is None or self._process.ended:
                vocabulary = await asyncio.to_thread(Vocabulary.of, inputs.tokenizer, inputs.info.vocab_size)
                self._process = _Process(await _start(), vocabulary)
            return self._process

    def fail(self, reason: str) -> None:
        """End every request that waits for a trial."""
        self._reason = reason
        for trial in self._trials.values():
            trial.cancel()

    async def close(self) -> None:
        """End the process and all trials. Idempotent."""
        self.fail("the server is shutting down")
        async with self._starting:
            if self._process is not None:
                await self._process.end()


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
        self._reading = asyncio.create_task(self._read())

    async def ask(self, wanted: StructuredOutputs, seconds: float) -> Verdict:
        """Raises `Rejected` if the process ends meanwhile."""
        id = next(self._ids)
        verdict = self._waiting[id] = asyncio.get_running_loop().create_future()
        self._write(Trial(id, wanted, seconds))
        try:
            return await asyncio.wait_for(verdict, seconds + TRIALS_START)
        except TimeoutError:
            self._kill()
            raise Rejected("the compiler of grammars does not answer; come again later", 503, RETRY_AFTER) from None
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
