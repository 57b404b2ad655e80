"""Engines that end, hang or do not start, and the ones that take their place."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from echo_engine import EchoProcess
from framework.server import client, supervisor
from framework.server.supervisor import Pace, Supervisor
from serving import Running, check_error, completion, events, eventually, running

from framework import EngineDead, Rejected
from framework.messages import EngineStats
from framework.registry import load_plugins
from framework.settings import Settings

SOON = Pace(first=0.05, most=0.2, healthy=60, tries=3)


class Failing:
    """An engine process that ends at once, or says why first."""

    def __init__(self, message: str | None = None) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.address = f"ipc://{self.folder.name}/engine"
        code = "import sys; sys.exit(3)"
        if message is not None:
            code = (
                "import zmq, msgspec; from framework.messages import Fatal; context = zmq.Context()\n"
                f"socket = context.socket(zmq.PAIR); socket.connect({self.address!r})\n"
                f"socket.send(msgspec.msgpack.encode(Fatal({message!r}, user=True))); context.destroy(linger=1000)"
            )
        self.process = subprocess.Popen([sys.executable, "-c", code])

    def end(self, patience: float = 2.0) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def settings(model: Path, **more: Any) -> Settings:
    return Settings(model=str(model), served_model_name="echo", **more)


def crash(server: Running, **extra: Any) -> httpx.Response:
    return server.post("/v1/completions", prompt=server.ids("a b c d"), extra={"die": 2, **extra})


def restarted(server: Running, times: int) -> None:
    eventually(lambda: server.supervisor.stats.restarts == times, 30)
    assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200


def metric(server: Running, name: str) -> float:
    found = re.search(rf"^framework_{re.escape(name)} (\S+)$", server.http.get("/metrics").text, re.M)
    assert found, name
    return float(found[1])


def test_another_engine_takes_the_place_of_one_that_died(tiny_llama: Path) -> None:
    """Everybody is told, nobody waits, counters go on, and what clients rely on is as before."""
    with running(settings(tiny_llama), spawn=EchoProcess, pace=SOON._replace(first=0.5)) as server:
        models = server.http.get("/v1/models").json()
        assert metric(server, 'kv_blocks{state="free"}') == 64, "before the first step"
        for times in (1, 2):
            generated = metric(server, "generation_tokens_total")
            held: list[httpx.Response] = []
            body = {"prompt": "a", "extra": {"hold": True}}
            waiter = threading.Thread(
                target=lambda held=held, body=body: held.append(
                    httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
                )
            )
            waiter.start()
            eventually(lambda: server.engine.stats.running == 1)
            message = check_error(crash(server), 503, None)
            assert "exit code 3" in message
            waiter.join(30)
            assert check_error(held[0], 503, None) == message and held[0].headers["retry-after"] == "1"
            for path in ("/health", "/ping", "/ready"):
                assert check_error(server.http.get(path), 503, None) == message
            refused = server.post("/v1/completions", prompt="a")
            assert check_error(refused, 503, None) == f"{message}; it is started again"
            assert int(refused.headers["retry-after"]) >= 1
            assert metric(server, "engine_up") == metric(server, "requests_running") == 0
            assert metric(server, "generation_tokens_total") == generated + 2
            restarted(server, times)
            assert metric(server, "engine_up") == 1 and metric(server, "engine_restarts_total") == times
            assert metric(server, 'kv_blocks{state="free"}') == 64
            assert metric(server, "generation_tokens_total") == generated + 2
            assert completion(server, server.ids("fine"))[0]["text"] == "fine"
            assert metric(server, "generation_tokens_total") == generated + 2 + 2 * len(server.ids("fine"))
        assert server.http.get("/v1/models").json() == models
        assert not server.engine._sequences and not len(server.supervisor.waiting)


def test_counters_add_up_and_gauges_do_not() -> None:
    past = EngineStats(step=3, running=9, kv_holding=9, generation_tokens=5, plugin_faults={"a": 1, "b": 2}, restarts=1)
    now = EngineStats(step=4, running=2, kv_holding=6, generation_tokens=1, plugin_faults={"b": 3, "c": 4})
    assert supervisor._sum(past, now) == EngineStats(
        step=7, running=2, kv_holding=6, generation_tokens=6, plugin_faults={"a": 1, "b": 5, "c": 4}, restarts=1
    )


# The pace of restarts


class Engines:
    """Spawns, in this order, what it was made of; the last for ever."""

    def __init__(self, *kinds: Callable[[Settings], Any]) -> None:
        self.kinds = kinds
        self.asked: list[Settings] = []

    def __call__(self, settings: Settings) -> Any:
        self.asked.append(settings)
        return self.kinds[min(len(self.asked), len(self.kinds)) - 1](settings)


def fails(message: str | None = None) -> Callable[[Settings], Failing]:
    return lambda settings: Failing(message)


async def until(what: Callable[[], Any], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not what():
            await asyncio.sleep(0.01)


def pauses(caplog: pytest.LogCaptureFixture) -> list[float]:
    return [r.msg["in_seconds"] for r in caplog.records if "is started again" in str(r.msg)]  # type: ignore[index]


async def test_the_first_start_is_not_repeated(tiny_llama: Path) -> None:
    engines = Engines(fails("--kv-blocks 1: too few"), EchoProcess)
    found = Supervisor(settings(tiny_llama), load_plugins(), engines, SOON)
    with pytest.raises(Exception, match="too few"):
        await found.start()
    await found.close()
    assert len(engines.asked) == 1


@pytest.mark.parametrize("kind", [fails(), fails("--kv-blocks 9: too few")], ids=["dies", "fatal"])
async def test_engines_that_do_not_become_ready_end_the_server(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture, kind: Callable[[Settings], Failing]
) -> None:
    """However they fail; one that becomes ready in between starts the count again, but not the pauses."""
    caplog.set_level("INFO")
    engines = Engines(EchoProcess, kind, kind, EchoProcess, kind)
    found = Supervisor(settings(tiny_llama), load_plugins(), engines, SOON)
    try:
        await found.start()
        found.client._engine.process.kill()  # type: ignore[union-attr]
        await until(lambda: found.stats.restarts == 1)
        found.client._engine.process.kill()  # type: ignore[union-attr]
        with pytest.raises(EngineDead, match=r"did not start again in 3 tries; the last: .*(exit code 3|too few)"):
            await asyncio.wait_for(found.given_up(), 30)
        assert len(engines.asked) == 7 and pauses(caplog) == [0.05, 0.1, 0.2, 0.2, 0.2, 0.2]
        assert "SIGKILL" in (found.dead or "")
        with pytest.raises(Rejected) as refused:
            found.check()
        assert refused.value.status == 503
    finally:
        await found.close()


async def test_a_server_that_is_busy_replaces_engines_all_the_same(tiny_llama: Path) -> None:
    over, loop = threading.Event(), asyncio.get_running_loop()
    works = [loop.run_in_executor(None, over.wait, 60) for _ in range(100)]  # as long texts of clients do
    found = Supervisor(settings(tiny_llama), load_plugins(), EchoProcess, SOON)
    try:
        await found.start()
        found.client._engine.process.kill()  # type: ignore[union-attr]
        await until(lambda: found.stats.restarts == 1)
        await asyncio.wait_for(found.close(), 5)
    finally:
        over.set()
        await asyncio.gather(*works, found.close())


async def test_pauses_are_short_again_once_an_engine_was_healthy(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = Supervisor(settings(tiny_llama), load_plugins(), EchoProcess, SOON._replace(healthy=0.5))
    try:
        await found.start()
        for times, pause in enumerate((0, 0, 0.7), 1):
            await asyncio.sleep(pause)
            found.client._engine.process.kill()  # type: ignore[union-attr]
            await until(lambda times=times: found.stats.restarts == times)
        assert pauses(caplog) == [0.05, 0.1, 0.05]
    finally:
        await found.close()


async def test_an_engine_that_would_serve_something_else_is_none(tiny_llama: Path) -> None:
    """What tokenises for clients, and what they were told, is the first one's."""

    def other(settings: Settings) -> EchoProcess:
        return EchoProcess(settings.model_copy(update={"served_model_name": ("other",)}))

    found = Supervisor(settings(tiny_llama), load_plugins(), Engines(EchoProcess, other), SOON)
    try:
        await found.start()
        found.client._engine.process.kill()  # type: ignore[union-attr]
        with pytest.raises(EngineDead, match="came back with another model: 'other', it was 'echo'"):
            await asyncio.wait_for(found.given_up(), 30)
    finally:
        await found.close()


@pytest.mark.parametrize(("reason", "blocks"), [("model", None), ("pool", 64)])
async def test_the_length_of_requests_outlives_an_engine(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, reason: str, blocks: int | None
) -> None:
    """Also where it is what the pool happened to have room for."""
    engines = Engines(EchoProcess)
    found = Supervisor(settings(tiny_llama), load_plugins(), engines, SOON)
    start = found.client.start

    async def started(progress: Any) -> Any:
        info = await start(progress)
        info.max_model_len_reason = reason
        return info

    monkeypatch.setattr(found.client, "start", started)
    try:
        info = await found.start()
        found.client._engine.process.kill()  # type: ignore[union-attr]
        await until(lambda: found.stats.restarts == 1)
        assert (engines.asked[0].max_model_len, engines.asked[0].kv_blocks) == (None, None)
        assert (engines.asked[1].max_model_len, engines.asked[1].kv_blocks) == (info.max_model_len, blocks)
    finally:
        await found.close()


@pytest.mark.parametrize(("pace", "count"), [(Pace(first=60), 1), (SOON, 2)], ids=["due", "loading"])
async def test_the_end_while_an_engine_is_started_again(tiny_llama: Path, pace: Pace, count: int) -> None:
    """Nothing is left."""
    processes: list[subprocess.Popen[bytes]] = []

    def noted(settings: Settings) -> EchoProcess:
        found = EchoProcess(settings)
        processes.append(found.process)
        return found

    found = Supervisor(settings(tiny_llama), load_plugins(), noted, pace)
    await found.start()
    found.client._engine.process.kill()  # type: ignore[union-attr]
    last = found.client
    await until(lambda: found.dead and len(processes) == count)
    await asyncio.wait_for(found.close(), 10)
    assert all(process.poll() is not None for process in processes)
    assert last._context.closed and (count == 1 or found._next._context.closed)  # type: ignore[union-attr]


# Steps that hang


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TICK", 0.05)
    monkeypatch.setattr(client, "STALLED_AFTER", 0.3)


@pytest.fixture
def hanging(tiny_llama: Path, impatient: None) -> Iterator[Running]:
    with running(settings(tiny_llama, step_timeout=1.2), spawn=EchoProcess, pace=SOON) as found:
        yield found


@pytest.mark.parametrize("how", ["frozen", "asleep", "spinning"])
def test_a_step_that_hangs_is_ended(hanging: Running, how: str) -> None:
    """Whatever the engine does instead: its requests are told, it is killed, and another one serves."""
    process = hanging.process
    extra = {"frozen": {}, "asleep": {"sleep": 60}, "spinning": {"spin": 60}}[how]
    if how == "frozen":
        process.suspend()
    message = check_error(hanging.post("/v1/completions", prompt="a", extra=extra), 503, None)
    if how == "spinning":
        assert "has finished no step for 1.2 s (--step-timeout)" in message
    else:  # it is stalled sooner, and healthy again only with the next engine
        assert "has done nothing for 0.3 s" in message
        assert check_error(hanging.http.get("/health"), 503, None) == message
    restarted(hanging, 1)
    assert not process.is_running()
    assert completion(hanging, hanging.ids("fine"))[0]["text"] == "fine"


def test_a_frozen_engine_is_noticed_although_its_client_left(hanging: Running) -> None:
    hanging.process.suspend()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{hanging.url}/v1/completions", json={"prompt": "a"}, timeout=0.2)
    eventually(lambda: not hanging.engine._sequences)
    restarted(hanging, 1)


def test_a_server_that_was_suspended_does_not_blame_the_engine(hanging: Running) -> None:
    """Time during which this process did not run is no time without a step."""
    answers: list[httpx.Response] = []
    body = {"prompt": hanging.ids("a b"), "stream": True, "extra": {"spin": 0.4}}
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{hanging.url}/v1/completions", json=body, timeout=30))
    )
    asking.start()
    eventually(lambda: hanging.engine._sequences)
    hanging.engine._loop.call_soon_threadsafe(time.sleep, 2.0)
    asking.join(30)
    assert events(answers[0])[-1]["choices"][0]["finish_reason"] == "length"
    assert hanging.supervisor.stats.restarts == 0 and hanging.http.get("/health").status_code == 200
