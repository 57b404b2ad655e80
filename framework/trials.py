"""The process that tries grammars out before the engine sees them: what is wrong with one, or takes too long or too
much memory, ends there.

It reads a `Vocabulary` and then any number of `Trial`s from its standard input, and answers each with a `Verdict` on
its standard output, in the order in which they are done; after an `End`, at once. Each trial runs in a fork, whose end
the kernel sees to: it has an alarm clock and a bound on its memory. That leaves this process as it was, whatever a
trial did to its own, and the next one need not wait for a second of imports. It ends with its standard input, hence
with the server.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import sys
from typing import NamedTuple, NoReturn

import msgspec
import psutil

from .errors import InvalidRequest
from .grammars import Compiler, Vocabulary
from .types import StructuredOutputs

MEMORY = 512 * 2**20
"""Bytes that a trial may take beside what this process has."""
COMMAND = (sys.executable, "-P", "-m", "framework.trials")
"""Starts the process. It needs a group of its own, with which its forks can be ended, and which keeps Ctrl-C away."""


class Trial(msgspec.Struct, tag="trial", array_like=True):
    """`seconds`: as long as it may take."""

    id: int
    wanted: StructuredOutputs
    seconds: float


class End(msgspec.Struct, tag="end", array_like=True):
    """Nobody waits for this trial any more. No matter if it is over."""

    id: int


class Verdict(msgspec.Struct, array_like=True):
    """`refusal`: the message of an `InvalidRequest`, or nothing. `code`: what the trial ended with; -SIGALRM if its
    time was up."""

    id: int
    refusal: str = ""
    code: int = 0


class _Running(NamedTuple):
    id: int
    pid: int
    said: bytearray


def framed(message: msgspec.Struct) -> bytes:
    """A message as it goes through a pipe: its length in four bytes, then itself."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "big") + data


class _Trials:
    def __init__(self, vocabulary: Vocabulary, output: int) -> None:
        self._vocabulary = vocabulary
        self._output = output
        self._compiler = Compiler(vocabulary)
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Until the end of the input."""
        self._selector.register(0, selectors.EVENT_READ)
        buffer = bytearray()
        while True:
            for key, _ in self._selector.select():
                data = os.read(key.fd, 65536)
                if key.fd != 0:
                    self._heard(key.fd, key.data, data)
                elif data:
                    buffer += data
                    while (message := _taken(buffer)) is not None:
                        self._take(msgspec.msgpack.decode(message, type=Trial | End))
                else:
                    return

    def _take(self, message: Trial | End) -> None:
        if isinstance(message, Trial):
            self._begin(message)
            return
        for key in self._selector.get_map().values():
            if isinstance(key.data, _Running) and key.data.id == message.id:
                os.kill(key.data.pid, signal.SIGKILL)  # not waited for yet: `_heard` does

    def _begin(self, trial: Trial) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._try(trial, writing)
        os.close(writing)
        self._selector.register(reading, selectors.EVENT_READ, _Running(trial.id, pid, bytearray()))

    def _try(self, trial: Trial, writing: int) -> NoReturn:
        """In the fork."""
        signal.setitimer(signal.ITIMER_REAL, trial.seconds)  # nothing handles it: the kernel ends the process
        code, said = 1, ""
        try:
            os.close(self._output)  # the server is to see the end of the other process, whatever this one does
            most = psutil.Process().memory_info().vms + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            try:
                self._compiler.rehearse(trial.wanted)
            except InvalidRequest as error:
                said = str(error)
            os.write(writing, said.encode())
            code = 0
        finally:
            os._exit(code)

    def _heard(self, fd: int, running: _Running, data: bytes) -> None:
        running.said.extend(data)
        if data:
            return
        self._selector.unregister(fd)
        os.close(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(running.pid, 0)[1])
        verdict = Verdict(running.id, running.said.decode(), code)
        with open(self._output, "wb", closefd=False) as output:
            output.write(framed(verdict))


def _taken(buffer: bytearray) -> bytes | None:
    """The first message of those that begin in `buffer`, taken from there; None if there is no whole one."""
    size = 4 + int.from_bytes(buffer[:4], "big")
    if len(buffer) < 4 or len(buffer) < size:
        return None
    message = bytes(buffer[4:size])
    del buffer[:size]
    return message


def _first() -> bytes:
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        whole, size = b"", int.from_bytes(stdin.read(4), "big")
        while len(whole) < size and (part := stdin.read(size - len(whole))):
            whole += part
    return whole


def main() -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # nothing else may write there
    _Trials(msgspec.msgpack.decode(_first(), type=Vocabulary), output).run()
    if os.getpgrp() == os.getpid():  # as `COMMAND` wants it: with the trials that go on
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
