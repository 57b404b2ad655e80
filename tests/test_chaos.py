"""Engines that die, freeze and hang under load, clients that leave, a queue that is full: nothing is lost or left."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from framework.server import client
from framework.server.errors import GONE
from framework.server.supervisor import Pace
from rogue import install
from serving import Running, completion, eventually, running

from framework.settings import Settings

KILLS = 20
DROPS = 200
WORKERS = 12
SEGVS = 2
CAUSES = {"SIGKILL": KILLS - SEGVS, "SIGSEGV": SEGVS, "--step-timeout": 3}
"""What the log must say of the engines that are gone, and how often."""


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    folder = str(install(tmp_path / "plugins"))
    monkeypatch.setenv("PYTHONPATH", folder)  # for engines
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(client, "TICK", 0.05)
    monkeypatch.setattr(client, "STALLED_AFTER", 0.5)
    settings = Settings(
        model=str(tiny_llama),
        executor="scripted",
        executor_opt={"delay": 0.003},
        plugin=("rogue",),
        kv_blocks=128,
        max_num_seqs=16,
        max_queued_requests=48,
        step_timeout=1.0,
    )
    with running(settings, pace=Pace(first=0.02, most=0.05)) as found:
        yield found


class Load:
    """Requests of every kind, and how each ended for its client, by id."""

    def __init__(self, url: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.http = httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_connections=None))
        self.ended: dict[str, tuple[str, int]] = {}
        self.drops = 0
        self.over = False

    def count(self) -> Counter[str]:
        return Counter(how for how, _ in self.ended.values())

    async def work(self) -> None:
        while not self.over:
            id = f"r{len(self.ended)}-{self.rng.getrandbits(64):x}"
            self.ended[id] = ("lost", 0)
            kind = self.rng.choice(["whole", "stream", "drop", "drop", "abort"])
            body: dict[str, Any] = {
                "prompt": [[5 + i] * self.rng.choice([3, 40]) for i in range(self.rng.choice([1, 1, 4]))],
                "n": self.rng.choice([1, 1, 3]),
                "max_tokens": self.rng.choice([1, 30, 60]),
                "ignore_eos": True,
                "stream": kind != "whole",
            }
            self.ended[id] = await self.ask(id, kind, body)
            if self.ended[id][0] == "error":
                await asyncio.sleep(0.5)  # a restart costs the machine enough

    async def ask(self, id: str, kind: str, body: dict[str, Any]) -> tuple[str, int]:
        """How it ended: finished, aborted, dropped or error; the status, also that of an error event."""
        async with self.http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": id}) as response:
            if response.status_code != 200:
                await response.aread()
                assert response.json()["error"]["code"] == response.status_code
                return "error", response.status_code
            if kind == "whole":
                choices = json.loads(await response.aread())["choices"]
                return self.verdict([choice["finish_reason"] for choice in choices], body)
            reasons: list[str] = []
            error, done = 0, False
            async for line in response.aiter_lines():
                if not line:
                    continue
                assert not done, "something came after the end"
                done = line == "data: [DONE]"
                if done:
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    error = event["error"]["code"]
                    continue
                if kind == "drop":
                    self.drops += 1
                    return "dropped", 0
                if kind == "abort":
                    kind = "aborting"
                    await self.http.post("/abort_requests", json={"request_ids": [id]})
                reasons += [c["finish_reason"] for c in event["choices"] if c["finish_reason"] is not None]
            assert done, "a stream just ended"
            return ("error", error) if error else self.verdict(reasons, body)

    @staticmethod
    def verdict(reasons: list[str], body: dict[str, Any]) -> tuple[str, int]:
        assert len(reasons) == len(body["prompt"]) * body["n"] and set(reasons) <= {"length", "abort"}
        return ("aborted" if "abort" in reasons else "finished"), 200


async def healthy(load: Load) -> None:
    async with asyncio.timeout(30):
        while (await load.http.get("/health")).status_code != 200:
            await asyncio.sleep(0.02)


async def trouble(server: Running, load: Load) -> None:
    """Twenty deaths, and three engines that do not go on: one frozen, one asleep, one that spins."""
    ways = ["kill"] * (KILLS - SEGVS) + ["segv"] * SEGVS
    ways[5:5], ways[10:10], ways[15:15] = ["freeze"], ["sleep"], ["spin"]
    for times, way in enumerate(ways, 1):
        await healthy(load)
        await asyncio.sleep(load.rng.random() * 0.3)
        if way in ("sleep", "spin"):
            body = {"prompt": "a", "extra": {way: 60}}
            while (status := (await load.http.post("/v1/completions", json=body)).status_code) == 429:
                await asyncio.sleep(0.02)
            assert status == 503
        else:
            number = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "freeze": signal.SIGSTOP}[way]
            server.process.send_signal(number)
        async with asyncio.timeout(30):
            while server.supervisor.stats.restarts < times:
                await asyncio.sleep(0.02)
    await healthy(load)


async def fill(load: Load) -> None:
    """More at once than may wait."""
    body = {"prompt": [[5] * 40] * 12, "n": 1, "max_tokens": 30, "ignore_eos": True}
    ids = [f"full-{i}" for i in range(20)]
    load.ended.update(zip(ids, await asyncio.gather(*(load.ask(id, "whole", body) for id in ids)), strict=True))


def early(caplog: pytest.LogCaptureFixture) -> dict[str, list[tuple[int, str]]]:
    """By the id of the request: status and cause of each line of a response that was not whole."""
    found: dict[str, list[tuple[int, str]]] = {}
    for record in caplog.records:
        event: Any = record.msg
        if isinstance(event, dict) and event["event"] == "response ended early":
            found.setdefault(event["request_id"], []).append((event["status"], event["cause"]))
    return found


@pytest.mark.slow
async def test_chaos(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load = Load(server.url, 7)
    async with asyncio.timeout(280), load.http:
        workers = [asyncio.create_task(load.work()) for _ in range(WORKERS)]
        await trouble(server, load)
        await fill(load)
        while load.drops < DROPS:
            await asyncio.sleep(0.05)
        load.over = True
        await asyncio.gather(*workers)

    # Everybody was told how it ended, and the server's books say the same.
    count = load.count()
    assert not count["lost"] and min(count[how] for how in ("finished", "aborted", "error")) > 0
    assert {status for how, status in load.ended.values() if how == "error"} == {429, 503}
    own = [f"cmpl-{id}" for id in load.ended]
    eventually(lambda: set(own) <= {record.id for record in server.recorder.records})
    records = {record.id: record for record in server.recorder.records}
    assert len(records) == len(server.recorder.records)
    for id, (how, status) in load.ended.items():
        record = records[f"cmpl-{id}"]
        said = (how, record.status, record.error, record.finish_reasons)
        match how:
            case "finished":
                assert (record.status, record.error) == (200, None) and set(record.finish_reasons) == {"length"}, said
            case "aborted":
                assert (record.status, record.error) == (200, None) and "abort" in record.finish_reasons, said
            case "error":
                assert record.status == status and record.error, said
            case "dropped":  # or it had ended before the server saw that nobody read it any more
                assert record.status in (200, 499, 503), said

    # The log says of each that was not whole why, once, and nothing of the others.
    causes = early(caplog)
    for id, (how, status) in load.ended.items():
        told = causes.get(id, [])
        record = records[f"cmpl-{id}"]
        match how, record.status:
            case "finished", _:
                assert told == []
            case "dropped", 200 if "abort" not in record.finish_reasons:
                assert told == []
            case "aborted", _:
                assert told == [(200, "the request was aborted")]
            case "dropped", 499:
                assert told == [(499, GONE)]
            case "error", 429:
                [(status, cause)] = told
                assert status == 429 and cause.startswith("the queue is full: ")
            case _:
                [(status, cause)] = told
                assert status == record.status == 503 and re.search("the engine", cause), cause

    # Nothing is left of them, and the server serves.
    gone = [line for line in caplog.text.splitlines() if "the engine is gone" in line]
    assert Counter(cause for line in gone for cause in CAUSES if cause in line) == CAUSES
    assert len(gone) == KILLS + 3
    assert caplog.text.count("has done nothing for") >= 2  # frozen and asleep; or one that got no CPU for so long
    eventually(lambda: server.supervisor.load == 0 == server.engine.stats.running)
    assert completion(server, server.ids("fine"))[0]["finish_reason"] is not None
    stats = server.supervisor.stats
    assert stats.restarts == KILLS + 3
    assert (stats.running, stats.waiting, stats.kv_holding, stats.kv_reserved, stats.kv_swapped) == (0, 0, 0, 0, 0)
    assert not server.engine._sequences and not len(server.supervisor.waiting)
    assert stats.failed_steps == 0 and not stats.plugin_faults
