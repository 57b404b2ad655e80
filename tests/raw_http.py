"""Bytes to a server that is impatient, what comes back, and a neighbour who is served meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import h11
import httpx
import pytest
from echo_engine import EchoProcess
from framework.server import protocol
from serving import Running, eventually, running

from framework.errors import brief
from framework.settings import Settings

RECEIVE = 0.6
"""Seconds here, for a request and for idle connections: so every connection ends, and its end is waited for."""
LONGEST = 20
"""Seconds that no connection takes, on a machine that is busy with other tests."""


@contextmanager
def impatient(model: Path) -> Iterator[Running]:
    """A server for which `RECEIVE` is the longest that it waits for a client."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "RECEIVE", RECEIVE)
        patch.setattr(protocol, "KEEP_ALIVE", RECEIVE)
        with running(Settings(model=str(model), served_model_name="echo"), spawn=EchoProcess) as found:
            yield found


@contextmanager
def neighbour(server: Running) -> Iterator[None]:
    """Somebody else, who is served throughout, whole and streamed by turns."""
    failed: list[str] = []
    slowest = 0.0
    served = 0
    done = threading.Event()

    def ask() -> None:
        nonlocal served, slowest
        with httpx.Client(base_url=server.url, timeout=LONGEST) as client:
            while not done.is_set():
                begin = time.monotonic()
                try:
                    response = client.post("/v1/completions", json={"prompt": "fine", "stream": bool(served % 2)})
                    if response.status_code != 200 or "fi" not in response.text:
                        failed.append(response.text)
                except httpx.HTTPError as error:  # the idle connection ended as the request left: asked anew
                    if not isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
                        failed.append(repr(error))
                slowest = max(slowest, time.monotonic() - begin)
                served += 1
                done.wait(0.02)

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    eventually(lambda: served)
    done.set()
    thread.join(LONGEST)
    assert not thread.is_alive() and not failed and slowest < LONGEST / 2
    eventually(lambda: server.engine.load == 0)


@dataclass(frozen=True)
class Sent:
    """What goes over one connection."""

    pieces: Sequence[bytes]
    end: str = "wait"
    """wait for the server to close, close the sending half, or reset the connection"""

    def __repr__(self) -> str:
        return f"Sent({[brief(repr(piece), 500) for piece in self.pieces]}, {self.end!r})"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


async def exchange(server: Running, sent: Sent, pause: float = 0.005) -> bytes:
    """Everything that comes back until the server closes, which it must do in time."""
    port = server.http.base_url.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = bytearray()

    async def read() -> None:
        try:
            while data := await reader.read(2**16):
                got.extend(data)
        except ConnectionError:
            pass  # it closed while more was coming

    reading = asyncio.create_task(read())
    try:
        for piece in sent.pieces:
            writer.write(piece)
            await asyncio.sleep(pause)
        if sent.end == "half":
            writer.write_eof()
        elif sent.end == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
    except OSError:
        pass  # it is closed already
    if sent.end != "reset":
        done, _ = await asyncio.wait((reading,), timeout=LONGEST)
        assert done, f"{sent} was answered with {bytes(got)[:1000]!r}, and is not done"
    writer.close()
    await asyncio.wait((reading,))
    return bytes(got)


def answers(data: bytes, broken_off: bool = False) -> list[Answer]:
    """What h11 makes of it, as answers to any number of GETs. `broken_off`: the last one need not be complete."""
    found = []
    client = h11.Connection(h11.CLIENT)
    client.receive_data(data)
    client.receive_data(b"")
    while not found or (client.our_state is h11.DONE and client.their_state is h11.DONE and client.trailing_data[0]):
        if found:
            client.start_next_cycle()
        client.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
        client.send(h11.EndOfMessage())
        response, body = None, b""
        try:
            while not isinstance(event := client.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
                if isinstance(event, h11.Response):
                    response = event
                elif isinstance(event, h11.Data):
                    body += event.data
        except h11.RemoteProtocolError:
            assert broken_off
        if response is None:
            break
        headers = {name.decode(): value.decode() for name, value in response.headers}
        found.append(Answer(response.status_code, headers, body))
    assert broken_off or not client.trailing_data[0]
    return found


def check(data: bytes, broken_off: bool = False) -> list[Answer]:
    """Everything is HTTP, nothing is the server's fault, and errors are told in the usual envelope."""
    found = answers(data, broken_off) if data else []
    for answer in found:
        assert answer.status < 500, answer
        if answer.status >= 400 and not broken_off:
            assert answer.headers["content-type"] == "application/json"
            error = json.loads(answer.body)["error"]
            if isinstance(error, str):  # TGI's
                error = {"message": error, "code": answer.status}
            assert error["code"] == answer.status and 0 < len(error["message"]) < 4000
    return found


def ask(server: Running, *pieces: bytes, end: str = "wait", pause: float = 0.005) -> list[Answer]:
    return check(asyncio.run(exchange(server, Sent(pieces, end), pause)))


BODY = b'{"prompt": "one two", "max_tokens": 20}'
JSON = b"Content-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + JSON
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
GET = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
