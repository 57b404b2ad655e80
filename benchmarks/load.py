"""A closed loop of clients over HTTP: output tokens per second, time to the first token, time between tokens.

    python benchmarks/load.py URL [--concurrency 32] [--requests 96] [--seed 1] [--vocab 40000]

URL (http://HOST:PORT) has an OpenAI-like /v1/completions that takes token ids. Each client sends a request, reads its
stream to the end and sends the next, until `--requests` are sent: prompts of 50 to 200 random tokens, outputs of 32 to
96, greedy, ends ignored. What is printed is one line of JSON: `Figures`. Gaps are those between two events with text
of one response; where a server sends several tokens in one event, tokens_per_event says so.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from common import percentile

PROMPTS, OUTPUTS = range(50, 201), range(32, 97)
PATIENCE = 300.0
"""Seconds that all requests together may take."""


class Figures(NamedTuple):
    """rate: output tokens per second. first: milliseconds to the first event with text; gap: between two of them."""

    rate: float
    first: float
    gap: float
    first_p99: float
    gap_p99: float
    tokens_per_event: float
    seconds: float


def tokens(vocab: int) -> range:
    """What random prompts are made of: tokens of every vocabulary, and no special ones."""
    return range(min(300, vocab // 2), min(vocab, 40000))


def requests(seed: int, count: int, vocab: int) -> list[tuple[list[int], int]]:
    """(prompt, output tokens) of each."""
    rng = random.Random(seed)
    return [(rng.choices(tokens(vocab), k=rng.choice(PROMPTS)), rng.choice(OUTPUTS)) for _ in range(count)]


async def ask(url: str, prompt: list[int], output: int) -> tuple[float, list[float]]:
    """When a request was sent, and when each event with text came. Raises `RuntimeError` unless all tokens came."""
    where = urlsplit(url)
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": output, "min_tokens": output, "ignore_eos": True}
    asked |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    begin, times, got = time.perf_counter(), [], 0
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer.partition(b"\r\n")[0]:
            raise RuntimeError(f"{answer.decode()}{(await reader.read()).decode()}")
        async for event in events(reader):
            if event == b"data: [DONE]":
                break
            data = json.loads(event.removeprefix(b"data:"))
            if "error" in data:
                raise RuntimeError(event.decode())
            if any(choice["text"] for choice in data["choices"]):
                times.append(time.perf_counter())
            got = (data.get("usage") or {}).get("completion_tokens", got)
    finally:
        writer.close()
    if got != output or not times:
        raise RuntimeError(f"asked for {output} tokens, got {got} in {len(times)} events")
    return begin, times


async def events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Server-sent events of a chunked body, each without the empty line that ends it."""
    rest = b""
    while size := int(await reader.readline(), 16):
        rest += await reader.readexactly(size)
        await reader.readline()
        *whole, rest = rest.split(b"\n\n")
        for event in whole:
            yield event


async def load(url: str, concurrency: int, count: int, seed: int, vocab: int) -> Figures:
    """Raises `RuntimeError` if a request fails, `TimeoutError` after `PATIENCE`."""
    waiting = requests(seed, count, vocab)
    generated = sum(output for _, output in waiting)
    done: list[tuple[float, list[float]]] = []

    async def client() -> None:
        while waiting:
            done.append(await ask(url, *waiting.pop()))

    begin = time.perf_counter()
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    seconds = time.perf_counter() - begin
    first = [1e3 * (times[0] - sent) for sent, times in done]
    gaps = [1e3 * (b - a) for _, times in done for a, b in itertools.pairwise(times)]
    return Figures(
        rate=generated / seconds,
        first=percentile(first, 50),
        gap=percentile(gaps, 50),
        first_p99=percentile(first, 99),
        gap_p99=percentile(gaps, 99),
        tokens_per_event=generated / sum(len(times) for _, times in done),
        seconds=seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, help="default: three for each client, and at least 8")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=40000, help="prompts have only smaller token ids")
    options = parser.parse_args()
    count = options.requests or max(3 * options.concurrency, 8)
    figures = asyncio.run(load(options.url, options.concurrency, count, options.seed, options.vocab))
    print(json.dumps(figures._asdict()))


if __name__ == "__main__":
    sys.exit(main())
