"""OpenVINO GenAI behind as much of /v1/completions as load.py asks for: its own server is not a Python package.

    PYTHON benchmarks/openvino_server.py SETUP

SETUP is a `Setup` of engines.py in JSON. The engine has a process of its own, so that tokens do not wait for HTTP, nor
HTTP for a step. Prompts are token ids; the text of an event has one character for each token, since nothing here
detokenizes. Listens on a free port of the loopback interface.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import sys
from multiprocessing.connection import Connection
from typing import Any

from engines import Setup, enqueue, pipeline

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def engine(pipe: Connection, setup: Setup) -> None:
    """Takes (id, prompt, output tokens), gives lists of (id, new tokens, ended), one for each step. Ends with the
    other end of the pipe."""
    from openvino_genai import GenerationStatus  # type: ignore[import-not-found,unused-ignore]

    batches, settings = pipeline(setup)
    pipe.send(settings)
    live: dict[int, Any] = {}
    while True:
        while not live or pipe.poll():
            try:
                id, prompt, output = pipe.recv()
            except EOFError:
                return
            live[id] = enqueue(batches, id, prompt, output)
        batches.step()
        news = []
        for id, handle in list(live.items()):
            count = 0
            while handle.can_read():
                count += sum(len(output.generated_ids) for output in handle.read().values())
            ended = handle.get_status() != GenerationStatus.RUNNING
            if count or ended:
                news.append((id, count, ended))
            if ended:
                del live[id]
        pipe.send(news)


class Frontend:
    """HTTP on one side, the engine's pipe on the other."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._streams: dict[int, asyncio.Queue[tuple[int, bool]]] = {}
        self._count = 0

    async def serve(self, settings: str) -> None:
        """Until the engine ends."""
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._receive)
        listener = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        print(f"  engine    {settings}\n  URL       http://127.0.0.1:{port}/v1", flush=True)
        await self._ended.wait()

    def _receive(self) -> None:
        try:
            news = self._pipe.recv()
        except EOFError:
            self._ended.set()
            return
        for id, count, ended in news:
            self._streams[id].put_nowait((count, ended))

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if not head.startswith(b"POST /v1/completions ") or length is None:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            asked = json.loads(await reader.readexactly(int(length[1])))
            await self._stream(writer, asked["prompt"], asked["max_tokens"])
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, prompt: list[int], output: int) -> None:
        id, self._count = self._count, self._count + 1
        stream = self._streams[id] = asyncio.Queue()
        self._pipe.send((id, prompt, output))
        writer.write(HEAD)
        total, ended = 0, False
        while not ended:
            count, ended = await stream.get()
            total += count
            if count:
                self._event(writer, {"choices": [{"index": 0, "text": "x" * count}]})
                await writer.drain()
        del self._streams[id]
        self._event(writer, {"choices": [], "usage": {"completion_tokens": total}})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
        event = b"data: " + json.dumps(data).encode() + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))


def main() -> None:
    setup = Setup(**json.loads(sys.argv[1]))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine, args=(theirs, setup), daemon=True)
    process.start()
    theirs.close()
    try:
        settings = ours.recv()
    except EOFError:
        sys.exit("the engine ended: see above")
    asyncio.run(Frontend(ours).serve(settings))


if __name__ == "__main__":
    main()
