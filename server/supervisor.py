"""One engine after another: whoever needs an engine holds the `Supervisor`, and finds the present one behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import msgspec

from framework import EngineDead, FrameworkError, Rejected, ResponseRecord
from framework.log import get_logger
from framework.messages import Add, EngineInfo, EngineStats
from framework.process import spawn
from framework.registry import Plugins
from framework.settings import Settings

from .client import EngineClient, Spawned
from .grammars import Grammars
from .limits import RETRY_AFTER
from .stream import Stream
from .waiting import Waiting

log = get_logger(__name__)


class Pace(NamedTuple):
    """When the next engine is started: `first` seconds after the end of the last one, doubled up to `most` each time,
    until one has been ready for `healthy` seconds. After `tries` that did not become ready, one after another, there
    is no next one."""

    first: float = 0.5
    most: float = 30.0
    healthy: float = 60.0
    tries: int = 5


class Supervisor:
    """As `EngineClient`, and outlives engines. Lives in the event loop that calls `start`.

    The first engine is started once: whatever stops it is the user's to fix. Those after it must keep what the first
    one promised to clients: the model, its vocabulary and the length of requests. `draining` says why no further
    requests are taken.
    """

    def __init__(
        self,
        settings: Settings,
        plugins: Plugins,
        spawn: Callable[[Settings], Spawned] = spawn,
        pace: Pace = Pace(),
    ) -> None:
        self.draining: str | None = None
        self._ended: FrameworkError | None = None  # what every request meets from now on
        self._settings = settings
        self._plugins = plugins
        self._spawn = spawn
        self._pace = pace
        self.client = EngineClient(settings, plugins, spawn)
        """Of the present engine; of the last one, until the next is ready."""
        self._next: EngineClient | None = None
        self._due = 0.0  # when the next one is started
        self._past = EngineStats()
        self._keeping: asyncio.Task[None] | None = None

    # Life

    async def start(self, progress: Callable[[str, float], None] = lambda stage, share: None) -> EngineInfo:
        """As `EngineClient.start`; from then on the engine is replaced when it ends."""
        info = await self.client.start(progress)
        # The length may be what the pool had room for, and the memory that is free differs from start to start.
        same = {"max_model_len": info.max_model_len}
        if info.max_model_len_reason == "pool":
            same["kv_blocks"] = info.kv_blocks
        self._settings = self._settings.model_copy(update=same)
        self._keeping = asyncio.get_running_loop().create_task(self._keep(info))
        return info

    async def given_up(self) -> None:
        """Wait until there will be no further engine. Raises `EngineDead` if the last ones did not start."""
        assert self._keeping is not None
        await asyncio.shield(self._keeping)

    async def _keep(self, promised: EngineInfo) -> None:
        loop, pause = asyncio.get_running_loop(), self._pace.first
        while True:
            ready = loop.time()
            await self.client.gone.wait()
            if self.draining is not None:
                return
            if loop.time() - ready >= self._pace.healthy:
                pause = self._pace.first
            self._due = loop.time() + pause
            await self.client.close()
            pause = await self._replace(promised, pause)

    async def _replace(self, promised: EngineInfo, pause: float) -> float:
        """Start the next engine, after `pause` seconds at first; returns the pause after it. Raises `EngineDead`."""
        loop, cause = asyncio.get_running_loop(), ""
        for attempt in range(1, self._pace.tries + 1):
            log.info("the engine is started again", in_seconds=pause, attempt=attempt, of=self._pace.tries)
            self._due = loop.time() + pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._pace.most)
            client = self._next = EngineClient(self._settings, self._plugins, self._spawn)
            try:
                _check(await client.start(), promised)
            except Exception as error:  # noqa: BLE001 - also of the system, as without memory for a process: the next try
                cause = str(error) or type(error).__name__
                log.error("the engine did not start", reason=cause, attempt=attempt, of=self._pace.tries)
                await client.close()
                continue
            self._past = self.stats
            self._past.restarts += 1
            self.client, self._next = client, None
            log.info("the engine serves again", restarts=self._past.restarts)
            return pause
        raise EngineDead(f"the engine ended and did not start again in {self._pace.tries} tries; the last: {cause}")

    async def close(self) -> None:
        """End the engine, one that is starting too. Idempotent."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._next is None:
            await self.client.close()
        else:  # the one before it is closed already
            await self._next.close()

    # State

    @property
    def info(self) -> EngineInfo | None:
        return self.client.info

    @property
    def dead(self) -> str | None:
        """Why there is no engine now."""
        return self.client.dead

    @property
    def stalled(self) -> str | None:
        return self.client.stalled

    @property
    def alive(self) -> bool:
        return self.client.alive

    @property
    def grammars(self) -> Grammars:
        return self.client.grammars

    @property
    def waiting(self) -> Waiting:
        return self.client.waiting

    @property
    def load(self) -> int:
        return self.client.load

    @property
    def stats(self) -> EngineStats:
        """Gauges of the present engine; counters of all."""
        return _sum(self._past, self.client.stats)

    # Requests

    def check(self) -> None:
        """Raise what a new request would meet now, before any work is done for it: `EngineDead` or `Rejected`."""
        if self._ended is not None:
            raise self._ended
        if self.draining is not None:
            raise EngineDead(self.draining)
        if self.client.dead is not None:
            left = max(self._due - asyncio.get_running_loop().time(), RETRY_AFTER)
            raise Rejected(f"{self.client.dead}; it is started again", 503, left)
        self.client.check()

    def prepare(self, id: str, tenant: str, start: int) -> AbstractAsyncContextManager[None]:
        """As `EngineClient.prepare`. Raises what `check` does."""
        self.check()
        return self.client.prepare(id, tenant, start)

    def generate(self, adds: Sequence[Add], record: ResponseRecord) -> Stream:
        """As `EngineClient.generate`. What has passed `check` is taken while draining, too, until `cut` or `fail`."""
        if self._ended is not None:
            raise self._ended
        return self.client.generate(adds, record)

    def cancel(self, names: Set[str], tenant: str | None = None) -> int:
        return self.client.cancel(names, tenant)

    def fail(self, error: FrameworkError) -> None:
        """As `EngineClient.fail`, and whatever comes after it."""
        self._ended = error
        self.client.fail(error)

    def cut(self, error: FrameworkError) -> None:
        """As `EngineClient.cut`; whatever comes after it meets the error."""
        self._ended = error
        self.client.cut(error)

    def notify(self, hook: str, **arguments: object) -> None:
        self.client.notify(hook, **arguments)


def _check(info: EngineInfo, promised: EngineInfo) -> None:
    """Raise `EngineDead` if clients would meet another model than before: what tokenises for them is still the first
    one's."""
    for field in ("model", "architecture", "vocab_size", "max_model_len"):
        was, now = getattr(promised, field), getattr(info, field)
        if was != now:
            raise EngineDead(f"the engine came back with another {field}: {now!r}, it was {was!r}")


def _sum(past: EngineStats, now: EngineStats) -> EngineStats:
    counters = {
        name: getattr(past, name) + getattr(now, name)
        for name in EngineStats.__struct_fields__
        if name not in ("running", "waiting", "plugin_faults") and not name.startswith("kv_")
    }
    faults = dict(past.plugin_faults)
    for plugin, count in now.plugin_faults.items():
        faults[plugin] = faults.get(plugin, 0) + count
    return msgspec.structs.replace(now, plugin_faults=faults, **counters)
