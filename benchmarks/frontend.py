"""What the HTTP front end costs while many clients stream: its CPU time beside the engine's, and how long its event
loop is kept from others.

    python benchmarks/frontend.py [--streams 256] [--words 100] [--output 64] [--reps 3] [--check] [-- FLAGS]

FLAGS are those of `framework serve`. Chats of a hundred words each, all at once, streamed, greedy, ends ignored, over
loopback to `framework serve` with the demo weights. The clients run in this process, whose cost is not counted. front
end: CPU time of the server's process, all threads: HTTP, chat template, tokenising, detokenising, server-sent events.
engine: that of the process that runs the model. stall: how much later than asked for a timer fires. callback: the
most CPU time of one callback of the event loop, from a run of its own with asyncio's loop, which can be asked for
that, in place of uvloop's. With --check the exit code is 1 if the front end takes 15% of the engine's CPU time or
more, or a callback 50 ms.

It takes minutes: with `--output 16 --reps 1` about three, on two cores that others use, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from common import finish, header, server
from fastapi import APIRouter

from framework import hookimpl

SHARE, CALLBACK = 0.15, 50.0
BEAT = 0.002
"""Seconds between two looks of the heartbeat."""
PATIENCE = 600.0
WORDS = Path(__file__).parent.parent.joinpath("README.md").read_text("utf-8").split()


class Watch:
    """A plugin of the measured server: how late timers fire, and what asyncio's callbacks compute."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._callback, self._name = 0.0, ""

    @hookimpl
    def routes(self, client: Any) -> Iterable[APIRouter]:
        router = APIRouter()
        router.add_api_route("/watch", self._report, methods=["GET"])
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + BEAT
        self._loop.call_at(self._due, self._beat)
        return [router]

    def _beat(self) -> None:
        now = self._loop.time()
        self._late.append(now - self._due)
        self._due = now + BEAT
        self._loop.call_at(self._due, self._beat)

    def watch_callbacks(self) -> None:
        """From now on, in all event loops of asyncio's own."""
        run = asyncio.Handle._run  # type: ignore[attr-defined]

        def watched(handle: asyncio.Handle) -> None:
            begin = time.thread_time()
            run(handle)
            spent = time.thread_time() - begin
            if spent > self._callback:
                self._callback, self._name = spent, repr(handle)

        asyncio.Handle._run = watched  # type: ignore[attr-defined]

    async def _report(self) -> dict[str, Any]:
        """Milliseconds, since the last report."""
        late, self._late = sorted(self._late), []
        callback, name, self._callback = self._callback, self._name, 0.0
        return {"stall": 1e3 * late[int(0.999 * len(late))], "callback": 1e3 * callback, "name": name}


class Figures(NamedTuple):
    """rate: output tokens per second. share: CPU time of the front end over that of the engine. per_token: microseconds
    of the front end for each output token. stall: milliseconds, p99.9."""

    rate: float
    share: float
    per_token: float
    stall: float


async def ask(client: httpx.AsyncClient, text: str, output: int) -> None:
    """Raises `RuntimeError` unless all tokens came."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                last = line
    usage = json.loads(last.removeprefix("data: ")).get("usage") if last else None
    if usage is None or usage["completion_tokens"] != output:
        raise RuntimeError(f"asked for {output} tokens, got {usage}: {last}")


async def load(url: str, streams: int, words: int, output: int, seed: int) -> float:
    """Seconds that it took."""
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
        begin = time.perf_counter()
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(ask(client, " ".join(rng.choices(WORDS, k=words)), output))
        return time.perf_counter() - begin


def spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure(url: str, streams: int, words: int, output: int, seed: int) -> Figures:
    front = next(p for p in psutil.Process().children() if "--serve" in p.cmdline())
    engine = next(p for p in front.children() if "framework.process" in p.cmdline())
    httpx.get(f"{url}/watch")
    before = spent(front), spent(engine)
    seconds = asyncio.run(load(url, streams, words, output, seed))
    front_seconds, engine_seconds = (spent(p) - was for p, was in zip((front, engine), before, strict=True))
    tokens = streams * output
    share, per_token = front_seconds / engine_seconds, 1e6 * front_seconds / tokens
    return Figures(tokens / seconds, share, per_token, httpx.get(f"{url}/watch").json()["stall"])


def serve(loop: str, *flags: str) -> None:
    """As `framework serve`, watched."""
    import uvloop

    from framework import registry
    from framework.__main__ import main

    watch, plain = Watch(), registry.load_plugins
    if loop == "asyncio":
        watch.watch_callbacks()
        uvloop.new_event_loop = asyncio.new_event_loop
    registry.load_plugins = lambda extra=(): plain([*extra, ("watch", watch)])
    sys.argv = ["framework", "serve", *flags]
    main()


def main() -> None:
    if "--serve" in sys.argv:
        serve(*sys.argv[sys.argv.index("--serve") + 1 :])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--words", type=int, default=100, help="of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each stream")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a target is missed")
    parser.add_argument("flags", nargs="*", help="of framework serve, behind --")
    options = parser.parse_args()
    header()
    size = options.streams, options.words, options.output
    command = [sys.executable, __file__, "--serve"]
    flags = ["--port", "0", "--log-level", "warning", "--no-prefix-cache", *options.flags]
    with server([*command, "uvloop", *flags]) as (url, _):
        asyncio.run(load(url, 8, options.words, 8, 0))  # warm up
        found = [measure(url, *size, seed) for seed in range(1, options.reps + 1)]
    with server([*command, "asyncio", *flags]) as (url, _):
        asyncio.run(load(url, 8, options.words, 8, 0))
        httpx.get(f"{url}/watch")
        asyncio.run(load(url, *size, 1))
        longest = httpx.get(f"{url}/watch").json()
    print(f"{options.streams} streams x {options.output} tokens, medians of {options.reps}")
    middle = Figures(*(statistics.median(values) for values in zip(*found, strict=True)))
    for name, text in (
        ("rate", "output tokens/s"),
        ("share", "CPU time of the front end / of the engine"),
        ("per_token", "us of the front end per output token"),
        ("stall", "ms, p99.9 of stalls"),
    ):
        values = [round(getattr(one, name), 3) for one in found]
        print(f"  {getattr(middle, name):9.3f} {text}  {values}")
    print(f"  {longest['callback']:9.3f} ms of CPU time, longest callback: {longest['name'][:120]}")
    finish(
        options.check,
        [
            (f"front end under {SHARE:.0%} of the engine's CPU time", middle.share < SHARE),
            (f"no callback over {CALLBACK:.0f} ms", longest["callback"] < CALLBACK),
        ],
    )


if __name__ == "__main__":
    main()
