"""Before there is an application: what everybody is told."""

from __future__ import annotations

import asyncio

import httpx
from framework.server.gate import Gate
from framework.server.protocol import PROBES
from framework.server.tgi import PATHS
from starlette.responses import PlainTextResponse


def client(gate: Gate) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://test")


def message(response: httpx.Response) -> str:
    assert response.status_code == 503 and response.headers["x-request-id"] and response.headers["retry-after"] == "1"
    body = response.json()
    if response.request.url.path in PATHS:
        assert body["error_type"] == "healthcheck"
        return str(body["error"]).removeprefix("unhealthy: ")
    assert (body["error"]["type"], body["error"]["code"]) == ("ServiceUnavailableError", 503)
    return str(body["error"]["message"])


async def said(http: httpx.AsyncClient) -> set[str]:
    """To probes, to who asks for what there is, and to who wants something generated in either dialect."""
    found = [await http.get(path) for path in (*PROBES, "/v1/models", "/info")]
    for path in ("/v1/completions", "/v1/chat/completions", "/", "/generate", "/generate_stream"):
        found.append(await http.post(path, content=b"no JSON"))
    return set(map(message, found))


def test_everybody_is_told_at_once() -> None:
    async def run() -> None:
        gate = Gate()
        async with client(gate) as http:
            assert await said(http) == {"the engine is starting"} and not gate.opened
            gate.open(PlainTextResponse("ready"))
            assert gate.opened
            gate.close("too late")
            for path in (*PROBES, "/v1/models"):
                assert (await http.get(path)).text == "ready"

    asyncio.run(asyncio.wait_for(run(), 30))


def test_there_will_be_no_application() -> None:
    async def run() -> None:
        gate = Gate()
        async with client(gate) as http:
            gate.close("it is over")
            assert await said(http) == {"it is over"} and not gate.opened

    asyncio.run(asyncio.wait_for(run(), 30))
