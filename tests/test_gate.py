"""Before there is an application: what probes are told, and who waits."""

from __future__ import annotations

import asyncio

import httpx
from framework.server.gate import Gate
from framework.server.protocol import PROBES
from starlette.responses import PlainTextResponse


def client(gate: Gate) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://test")


def message(response: httpx.Response) -> str:
    assert response.status_code == 503 and response.headers["x-request-id"]
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
    return str(error["message"])


def test_probes_are_answered_and_others_wait() -> None:
    async def run() -> None:
        gate = Gate()
        async with client(gate) as http:
            waiting = [asyncio.create_task(http.get("/v1/models")) for _ in range(3)]
            for path in PROBES:
                assert message(await http.get(path)) == "the engine is starting"
            assert not any(task.done() for task in waiting) and not gate.opened
            gate.open(PlainTextResponse("ready"))
            assert gate.opened
            assert [(await task).text for task in waiting] == ["ready"] * 3
            gate.close("too late")
            for path in (*PROBES, "/v1/models"):
                assert (await http.get(path)).text == "ready"

    asyncio.run(asyncio.wait_for(run(), 30))


def test_there_will_be_no_application() -> None:
    async def run() -> None:
        gate = Gate()
        async with client(gate) as http:
            waiting = asyncio.create_task(http.get("/v1/models"))
            assert message(await http.get("/ready")) == "the engine is starting"
            assert not waiting.done()
            gate.close("it is over")
            assert message(await waiting) == "it is over"
            for path in (*PROBES, "/v1/models"):
                assert message(await http.get(path)) == "it is over"

    asyncio.run(asyncio.wait_for(run(), 30))
