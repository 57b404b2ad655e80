"""The engine process: it owns the device and runs the step loop, and nothing else.

The server spawns it with a pipe as its standard input: the first message on it carries the settings, and its end means
that the server died, however it died, so the engine ends too. All else goes over one ZeroMQ PAIR socket in a private
folder; see messages.py.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
import zmq

from . import machine
from .engine import Engine
from .errors import ConfigError, FrameworkError
from .messages import Abort, Add, Fatal, FromEngine, Outputs, Progress, Ready, ToEngine
from .settings import Settings

IDLE_POLL_MS = 10
"""How soon a policy that let nothing run is asked again while requests wait."""

_PR_SET_PDEATHSIG = 1

CHECK_MS = 1000
"""How often an idle engine looks whether its executor is alive."""


class EngineProcess:
    """A spawned engine process. The caller binds a PAIR socket to `address` and reads `FromEngine` messages."""

    def __init__(self, process: subprocess.Popen[bytes], folder: str, address: str) -> None:
        self.process = process
        self.address = address
        self._folder: str | None = folder

    def end(self, patience: float = 2.0) -> None:
        """End the process and whatever it has started: ask, then insist after `patience` seconds. Idempotent."""
        if self._folder is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with suppress(ProcessLookupError, PermissionError):  # nobody is left; on macOS, nobody but zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None  # the number of the group may become somebody else's


def spawn(settings: Settings, placement: machine.Placement | None = None) -> EngineProcess:
    """Start an engine process, on the CPUs of `placement` or else this process's. It connects at once, then loads.

    Raises `ConfigError` if no socket fits into `TMPDIR`.
    """
    if placement is not None:
        settings = settings.model_copy(update={"threads": placement.threads})
    cpus = machine.allowed() if placement is None else placement.engine
    told = msgspec.msgpack.encode(settings.model_dump(mode="json"))  # may raise: nothing to clean up yet
    folder = tempfile.mkdtemp(prefix="framework-")  # mode 0700: nobody else can connect
    path, most = f"{folder}/engine", zmq.IPC_PATH_MAX_LEN
    if (size := len(os.fsencode(path))) > most:
        os.rmdir(folder)
        raise ConfigError(
            f"TMPDIR: cannot make the socket {path}: its path has {size} bytes, at most {most} are possible; "
            "set TMPDIR to a writable folder with a short path"
        )
    address = f"ipc://{path}"
    header = msgspec.msgpack.encode({"settings": msgspec.Raw(told), "address": address, "cpus": cpus})
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "framework.process"],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is the server's to handle; and what the engine starts ends with it
    )
    assert process.stdin is not None
    try:
        process.stdin.write(len(header).to_bytes(4, "big") + header)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it died already: the caller sees that from `process`
    return EngineProcess(process, folder, address)


class Channel:
    """The engine's side of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set(zmq.SNDHWM, 0)  # outputs are never dropped, however slow the server is
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message), copy=True)

    def receive(self, timeout_ms: int | None) -> list[ToEngine]:
        """All messages that are there; waits for the first up to `timeout_ms` (None: for ever)."""
        messages: list[ToEngine] = []
        if self._socket.poll(timeout_ms):
            while True:
                try:
                    messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
                except zmq.Again:
                    break
        return messages

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def run(engine: Engine, channel: Channel) -> NoReturn:
    """Serve until SIGTERM."""
    wait: int | None = None
    while True:
        outputs = []
        for message in channel.receive(wait):
            match message:
                case Add():
                    outputs += engine.add(message)
                case Abort():
                    outputs += engine.abort(message.ids, message.reason)
        before, flying = engine.steps, bool(engine.in_flight)
        if engine.has_work:
            outputs += engine.step()
        else:
            engine.executor.check()
        stepped = flying or engine.steps != before  # what was in flight was committed, if nothing was submitted
        if outputs or stepped:
            channel.send(Outputs(outputs, engine.stats(), engine.clock.ns()))
        wait = CHECK_MS if not engine.has_work else 0 if stepped else IDLE_POLL_MS


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            raise SystemExit(1)  # the server died before it had said what to do
        data += part
    return data


def _die_with_parent(folder: str) -> None:
    # The descriptor, not sys.stdin: an interpreter that shuts down must not find its lock taken.
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():  # as `spawn` has it: with all that this process has started
        os.killpg(0, signal.SIGKILL)
    os._exit(1)  # at once, from any state: nobody is left to tell


def _wake_with_parent() -> None:
    """A stopped process (SIGSTOP) would not see the end of its parent: have it continued then, where possible."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


class _Terminated(BaseException):
    pass


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise _Terminated


def main() -> int:
    machine.prepare_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    header = msgspec.msgpack.decode(_read_exactly(int.from_bytes(_read_exactly(4), "big")))
    address: str = header["address"]
    folder = str(Path(address.removeprefix("ipc://")).parent)
    _wake_with_parent()
    threading.Thread(target=_die_with_parent, args=(folder,), daemon=True).start()
    channel = Channel(address)
    try:
        signal.signal(signal.SIGTERM, _terminate)  # before, it ends the process at once
        # What talks to the server has its threads already: they stay where the server is.
        machine.keep_to(header["cpus"])
        return _serve(Settings(**header["settings"]), channel)
    except _Terminated:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun
        channel.close()


def _serve(settings: Settings, channel: Channel) -> int:
    from .log import configure
    from .registry import load_plugins
    from .startup import build_engine

    configure(settings.log_level, settings.log_format, process="engine")
    try:
        plugins = load_plugins()
        plugins.activate(settings, engine=True)
        engine, info = build_engine(
            settings, plugins, progress=lambda stage, share: channel.send(Progress(stage, share))
        )
        gc.collect()
        gc.freeze()  # all that stays: looking through it again would make a step now and then 0.1 s longer
        try:
            channel.send(Ready(info))
            run(engine, channel)
        finally:
            engine.close()
    except FrameworkError as exc:
        channel.send(Fatal(str(exc), user=True))
        return 2
    except Exception as exc:  # noqa: BLE001 - a bug: reported to the server with its traceback, and the process ends
        channel.send(Fatal(f"{type(exc).__name__}: {exc}", traceback=traceback.format_exc()))
        return 1


if __name__ == "__main__":
    sys.exit(main())
