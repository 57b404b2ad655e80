"""`framework serve`: from settings to a server that answers, and its orderly end."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import uvicorn
import uvloop

from framework import Checkpoint, ConfigError, EngineDead, Tokenizer, ToolParser
from framework.checkpoint import open_checkpoint
from framework.errors import brief, one_line
from framework.inputs import InputProcessor
from framework.log import configure, get_logger
from framework.machine import keep_to, place
from framework.messages import EngineInfo
from framework.process import spawn
from framework.registry import Plugins
from framework.settings import Settings, flag
from framework.terminal import UI

from .app import create_app
from .calls import select_parser
from .client import SHUTTING_DOWN, Spawned
from .gate import Gate
from .generation import Serving
from .keys import Keys
from .limits import INTERRUPT, JOIN
from .protocol import Protocol, http_config
from .supervisor import Supervisor
from .tls import check_tls
from .unix import unix_socket

log = get_logger(__name__)
T = TypeVar("T")
TICK = 0.1
"""Seconds between looks at what is unfinished while the server drains."""


def serve(settings: Settings, plugins: Plugins, ui: UI) -> int:
    """Serve until a signal comes; return the exit code: 0 after SIGTERM, 130 after Ctrl-C.

    Raises `FrameworkError`s that stop start-up.
    """
    configure(settings.log_level, settings.log_format)
    check_tls(settings)
    keys = Keys.load(settings.api_key_file)
    with _listen(settings) as listener:
        placement = place(settings.threads)
        keep_to(placement.server)  # ahead of anything that starts threads
        plugins.activate(settings, engine=False)
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        try:
            run = _Run(settings, plugins, ui, listener, partial(spawn, placement=placement), keys)
            return runner.run(run.main())
        finally:  # closing the runner would wait for every thread, whatever plugins do there
            runner.run(_cancel())
            runner.get_loop().close()


async def _cancel() -> None:
    """All other tasks of this loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=INTERRUPT)


def _listen(settings: Settings) -> AbstractContextManager[socket.socket]:
    """Raises `ConfigError` naming the setting at fault."""
    if settings.uds is None:
        return bind(settings.host, settings.port)
    both = settings.model_fields_set & {"host", "port"}
    if both:
        raise ConfigError(
            f"--uds: the server listens there and nowhere else; leave out {', '.join(sorted(map(flag, both)))}"
        )
    return unix_socket(settings.uds)


def bind(host: str, port: int) -> socket.socket:
    """Listen, before the model loads: a port that is taken costs no minute, and early clients are told: see `Gate`.

    Raises `ConfigError` naming --host or --port.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: no such address ({error.strerror})") from None
    except ValueError as error:  # not even the form of a name: an empty or too long label, a null character
        raise ConfigError(f"--host {brief(repr(host), 80)}: no such address ({one_line(error)})") from None
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # :: is every address, IPv4 too
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port {port}: already in use on {host}; choose another, or 0 for a free one") from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"--port {port}: not permitted; choose one above 1023") from None
        raise ConfigError(f"--host {host}: cannot listen there ({error.strerror})") from None
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to us."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)


class _Run:
    """One run of the server."""

    def __init__(
        self,
        settings: Settings,
        plugins: Plugins,
        ui: UI,
        listener: socket.socket,
        spawn: Callable[[Settings], Spawned] = spawn,
        keys: Keys | None = None,
    ) -> None:
        self._settings = settings
        self._plugins = plugins
        self._ui = ui
        self._listener = listener
        self._client = Supervisor(settings, plugins, spawn)
        self._keys = keys
        self._gate = Gate()
        self._server = _Server(http_config(self._gate, settings))
        self._loading: asyncio.Task[Any] | None = None
        self._opening: threading.Thread | None = None
        self._signal: int | None = None
        self._draining: asyncio.Task[None] | None = None

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            self._loading = loop.create_task(self._load())
            serving = loop.create_task(self._server.serve([self._listener]))
            try:
                await asyncio.wait((self._loading,))
                if self._signal is None and not self._loading.cancelled():
                    self._open(*self._loading.result())
                    await self._serve(serving)
            finally:
                self._gate.close(SHUTTING_DOWN)  # to those who still come
                self._server.should_exit = True
                await serving
                self._hang_up()
                await self._finish()
        finally:
            # All at once: none of these takes longer than 2 s, nor do they together.
            joining = loop.run_in_executor(ThreadPoolExecutor(1), self._join)  # whatever other threads do
            ending = asyncio.gather(self._client.close(), joining)
            await asyncio.sleep(0)
            self._client.notify("stopping", engine=None)
            await ending
        return 130 if self._signal == signal.SIGINT else 0

    def _on_signal(self, number: int) -> None:
        again, self._signal = self._signal is not None, self._signal or number
        if not self._gate.opened:
            if self._loading is not None:
                self._loading.cancel()
            return
        self._client.draining = SHUTTING_DOWN
        loop = asyncio.get_running_loop()
        if number == signal.SIGTERM and not again:
            self._draining = loop.create_task(self._drain())
        else:
            if self._client.load:
                log.warning("ending at once", cut=self._client.load)
            self._client.fail(EngineDead(SHUTTING_DOWN))
            loop.call_later(INTERRUPT, self._hang_up)
            self._server.should_exit = True
            self._server.force_exit = again

    async def _drain(self) -> None:
        """Connections are accepted as long as responses that have begun go on: what comes is told to go elsewhere."""
        loop, seconds = asyncio.get_running_loop(), self._settings.drain_seconds
        end = loop.time() + seconds
        log.info("draining", responses=self._client.load, seconds=seconds)
        closing = (b"connection", b"close")  # who is refused must not come back on the same connection
        self._server.config.encoded_headers.append(closing)
        self._server.server_state.default_headers = [*self._server.server_state.default_headers, closing]
        loop.call_at(end, self._cut)
        loop.call_at(end + INTERRUPT, self._hang_up)
        # Beside responses that are generated: what else is answered, and what slow clients have not read yet.
        owing = self._owing()
        while (self._client.load or owing) and loop.time() < end:
            await asyncio.sleep(TICK)
            owing &= self._owing()
        self._server.should_exit = True

    def _owing(self) -> set[Protocol]:
        return {one for one in self._server.server_state.connections if isinstance(one, Protocol) and one.owes}

    def _cut(self) -> None:
        if self._client.load:
            log.warning("the time to drain is over", cut=self._client.load)
        self._client.cut(EngineDead(SHUTTING_DOWN))

    def _hang_up(self) -> None:
        """On clients that do not read what they are told: to their responses it is as if they had left."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def _finish(self) -> None:
        """Let requests end whose clients are gone: their records are still to come. What waits for a thread, such as
        texts in a long queue, is given up."""
        tasks = self._server.server_state.tasks
        if tasks:
            await asyncio.wait(list(tasks), timeout=INTERRUPT)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks), timeout=INTERRUPT)

    async def _serve(self, serving: asyncio.Task[None]) -> None:
        """Until the server ends, or the engine for good: then raises why."""
        lost = asyncio.ensure_future(self._client.given_up())
        await asyncio.wait((serving, lost), return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            error = lost.exception()
            if error is not None and self._signal is None:
                raise error
            await asyncio.wait((serving,))  # it ended, or did not start again, while the server drained
        lost.cancel()

    async def _load(self) -> tuple[EngineInfo, _Opened]:
        starting = asyncio.ensure_future(self._client.start(self._ui.progress))
        self._opening, opening = _in_thread(lambda: _open(self._settings, self._plugins))
        try:
            info, opened = await asyncio.gather(starting, opening)
        finally:
            starting.cancel()
            opening.cancel()
        return info, opened

    def _join(self) -> None:
        # A thread that comes back from native code while the interpreter ends can abort the process: wait a little.
        if self._opening is not None:
            self._opening.join(JOIN)

    def _open(self, info: EngineInfo, opened: _Opened) -> None:
        checkpoint, tokenizer, tool_parser = opened
        inputs = InputProcessor(checkpoint, tokenizer, info)
        names, now = self._settings.served_model_name, int(time.time())
        given = None if names else self._settings.model
        serving = Serving(self._client, inputs, tokenizer, info.model, now, names, tool_parser, given)
        app = create_app(serving, self._plugins, self._keys)
        gc.collect()
        gc.freeze()  # all that stays: looking through it again would stop every stream for 0.1 s now and then
        self._gate.open(app)
        key, uds, certificate = self._keys.shown if self._keys else "", self._settings.uds, self._settings.ssl_certfile
        url = _url(self._settings, self._listener)
        self._ui.banner(info, url, tokenizer.chat_template is not None, key, uds, certificate)


class _Opened(NamedTuple):
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    tool_parser: type[ToolParser] | None


def _open(settings: Settings, plugins: Plugins) -> _Opened:
    checkpoint = open_checkpoint(settings, plugins)
    tokenizer = checkpoint.tokenizer()
    return _Opened(checkpoint, tokenizer, select_parser(settings, plugins, tokenizer))


def _in_thread(work: Callable[[], T]) -> tuple[threading.Thread, asyncio.Future[T]]:
    """As `asyncio.to_thread`, but at exit nobody has to wait for it: the thread may be downloading."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed on to whoever awaits
            failed = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, result, failed)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, future


def _url(settings: Settings, listener: socket.socket) -> str:
    """The URL to use on this machine."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    if settings.uds is not None:
        return f"{scheme}://localhost"
    port = listener.getsockname()[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.host, settings.host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
