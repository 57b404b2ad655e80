"""What the TGI routes refuse, and how they say so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import huggingface_hub
import pytest
from echo_engine import EchoProcess
from framework.server import limits, tgi, tgi_schemas
from framework.server.gate import Gate
from framework.server.keys import Keys
from huggingface_hub.errors import GenerationError, IncompleteGenerationError, OverloadedError
from serving import Running, check_tgi_error, eventually, running

from framework.settings import Settings


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"temperature": -1.0}, "`temperature` must be strictly positive"),
    ({"temperature": float("inf")}, "temperature must be a finite number"),
    ({"temperature": "hot"}, "parameters.temperature: must be a number"),
    ({"temperature": float("nan")}, "temperature"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": -2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": -1}, "`top_k` must be strictly positive"),
    ({"top_k": 1.5}, "top_k: must be"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": float("nan")}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 0.9}, "typical_p: typical sampling is not supported"),
    ({"watermark": True}, "watermark: watermarks are not supported"),
    ({"adapter_id": "lora"}, "adapter_id: adapters are not supported"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"max_new_tokens": 256}, "max_new_tokens"),
    ({"max_new_tokens": 10**40}, "max_new_tokens"),
    ({"max_new_tokens": "5"}, "max_new_tokens: must be"),
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": ["a"] * 3, "stop_sequences": ["b"] * 2}, "Given: 5"),
    ({"stop": [""]}, "stop.0"),
    ({"stop": "a"}, "stop: must be a list"),
    ({"stop": [1]}, "stop.0: must be a string"),
    ({"stop": ["a" * 2000]}, "stop.0"),
    ({"stop": ["\ud800"]}, "stop.0: must be valid Unicode"),
    ({"truncate": 0}, "`truncate` must be strictly positive"),
    ({"truncate": 1000}, "truncate must be between 1 and the limit of 256 tokens (prompt and output), got 1000"),
    ({"seed": -1}, "`seed` must be an unsigned 64-bit integer"),
    ({"seed": 2**64}, "`seed` must be an unsigned 64-bit integer"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"top_n_tokens": -1}, "`top_n_tokens` must be >= 0 and <= 5. Given: -1"),
    ({"best_of": 0, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 0"),
    ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"grammar": {"type": "ebnf", "value": "a"}}, "grammar.type"),
    ({"grammar": {"type": "regex", "value": 5}}, "`grammar`: `value` of type regex must be"),
    ({"grammar": {"type": "json", "value": []}}, "`grammar`: `value` of type json must be"),
    ({"grammar": {"type": "json"}}, "grammar.value: is required"),
    ({"details": "yes"}, "details: must be true or false"),
    ({"do_sample": 1}, "do_sample: must be true or false"),
]


def test_bad_values(server: Running) -> None:
    json_type = {"content-type": "application/json"}
    for parameters, message in BAD:
        content = json.dumps({"inputs": "a", "parameters": parameters}).encode()
        for path in ("/generate", "/generate_stream", "/"):
            response = server.http.post(path, content=content, headers=json_type)
            if path != "/generate_stream" or parameters.get("best_of") != 2:
                error = check_tgi_error(response, 422, "validation", message)
                assert error.startswith("Input validation error: ")
    for body, message in (
        ({}, "inputs"),
        ({"inputs": None}, "inputs"),
        ({"inputs": 5}, "inputs: must be a string"),
        ({"inputs": ""}, "inputs: empty; give at least one token"),
        ({"inputs": "\ud800"}, "inputs: must be valid Unicode"),
        ({"inputs": "word " * 300}, "inputs: "),
        ({"inputs": "word " * 100_000}, "inputs: "),
        ({"inputs": "a", "parameters": []}, "parameters: must be an object"),
        ({"inputs": "a", "stream": "yes"}, "stream: must be true or false"),
        ({"inputs": "a", "priority": 1}, "priority"),
        ({"inputs": "a", "extra": {"a": "b" * 100_000}}, "extra"),
        ({"inputs": "a", "user": "a" * 1000}, "user"),
    ):
        content = json.dumps(body).encode()
        for path in ("/generate", "/"):
            check_tgi_error(server.http.post(path, content=content, headers=json_type), 422, "validation", message)
    assert server.post("/", inputs="fine").json() == [{"generated_text": "fine"}]


def test_what_a_stream_cannot_tell(server: Running) -> None:
    for path, more in (("/generate_stream", {}), ("/", {"stream": True}), ("/generate", {"stream": True})):
        body = {"inputs": "a", "parameters": {"best_of": 2, "do_sample": True}, **more}
        check_tgi_error(server.post(path, **body), 422, "validation", "`best_of` != 1 is not supported when streaming")
        body = {"inputs": "a", "parameters": {"decoder_input_details": True}, **more}
        check_tgi_error(server.post(path, **body), 422, "validation", "== true is not supported when streaming")


def test_null_means_default_and_unknown_fields_are_ignored(server: Running) -> None:
    nothing = dict.fromkeys(tgi_schemas.GenerateParameters.model_fields)
    off = {"watermark": False, "adapter_id": "", "details": False, "do_sample": False, "stop": [], "best_of": 1}
    for parameters in (nothing, nothing | off, None, {"future": {"x": 1}}):
        response = server.post("/generate", inputs="abc", parameters=parameters, stream=None, future=1)
        assert response.json() == {"generated_text": "abc"}


def test_bodies_that_are_none(server: Running) -> None:
    for path in ("/", "/generate", "/generate_stream"):
        for content in (b"", b"[]", b"{", b'{"a": "\xff"}'):
            response = server.http.post(path, content=content, headers={"content-type": "application/json"})
            check_tgi_error(response, 400, "validation", "the body ")
        check_tgi_error(server.http.post(path, content=b"{}"), 415, "validation", "Content-Type must be")
        check_tgi_error(server.http.get(path), 405, "method_not_allowed", "")
    large = json.dumps({"inputs": "a" * limits.MAX_BODY}).encode()
    response = server.http.post("/generate", content=large, headers={"content-type": "application/json"})
    check_tgi_error(response, 413, "request_entity_too_large", "larger than")
    assert "param" in server.http.post("/v1/completions", content=b"{").json()["error"]


def test_errors_of_the_engine(server: Running) -> None:
    def refused(**extra: Any) -> httpx.Response:
        return server.post("/generate_stream", inputs="a b", extra=extra)

    check_tgi_error(refused(error="it broke"), 424, "generation", "Request failed during generation: it broke")
    response = refused(error="come later", status=429, retry_after=2.5)
    check_tgi_error(response, 429, "overloaded", "Model is overloaded: come later")
    assert response.headers["retry-after"] == "3"
    check_tgi_error(refused(error="unfit", status=400), 400, "validation", "unfit")
    check_tgi_error(refused(error="pay", status=402), 402, "payment_required", "pay")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_somebody_ends(server: Running, stream: bool) -> None:
    found: list[httpx.Response] = []
    name = f"ended-{stream}"
    body = {"inputs": "a b c", "stream": stream, "extra": {"pace": 0.2 if stream else 0, "hold": not stream}}

    def ask() -> None:
        found.append(server.http.post("/generate", json=body, headers={"x-request-id": name}))

    thread = Thread(target=ask)
    thread.start()
    eventually(lambda: server.engine.stats.running == 1)
    eventually(lambda: server.post("/abort_requests", request_ids=[name]).json()["aborted"] == 1)
    thread.join()
    message = "Incomplete generation: the request was aborted"
    if found[0].headers["content-type"] == "application/json":
        check_tgi_error(found[0], 500, "incomplete_generation", message)
    else:
        last = json.loads(found[0].text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert stream and last == {"error": message, "error_type": "incomplete_generation"}
    record = server.record(f"gen-{name}")
    assert (record.status, record.finish_reasons) == (500, ["abort"])


def test_a_dead_engine(tiny_llama: Path) -> None:
    with running(Settings(model=str(tiny_llama)), spawn=EchoProcess) as server:
        lines = server.post("/generate_stream", inputs="a b c", extra={"die": 2}).text.strip().split("\n\n")
        first, *_, last = (json.loads(line.removeprefix("data: ")) for line in lines)
        assert first["token"]["text"] == "a"
        assert last["error_type"] == "healthcheck" and last["error"].startswith("unhealthy: the engine process ended")
        for path in ("/generate", "/generate_stream", "/"):
            check_tgi_error(server.post(path, inputs="a"), 503, "healthcheck", "unhealthy: the engine process ended")
        assert server.http.get("/health").status_code == 503


def test_a_full_queue(tiny_llama: Path) -> None:
    with running(Settings(model=str(tiny_llama), max_queued_requests=1), spawn=EchoProcess) as server:
        body = {"inputs": "a", "request_id": "first", "extra": {"hold": True}}
        thread = Thread(target=lambda: server.post("/generate", **body))
        thread.start()
        eventually(lambda: len(server.engine.waiting) == 1)
        response = server.post("/generate", inputs="a", parameters={"do_sample": True, "best_of": 2})
        check_tgi_error(response, 429, "overloaded", "Model is overloaded: the queue is full")
        assert response.headers["retry-after"] == "1"
        assert server.post("/abort_requests", request_ids=["first"]).json() == {"aborted": 1}
        thread.join()


def test_keys(tiny_llama: Path) -> None:
    settings = Settings(model=str(tiny_llama))
    with running(settings, Keys([("ann", "sk-ann")]), spawn=EchoProcess) as server:
        for path in tgi.PATHS:
            response = server.post(path, inputs="a")
            check_tgi_error(response, 401, "unauthorized", "an API key is needed")
            assert response.headers["www-authenticate"] == "Bearer"
        headers = {"Authorization": "Bearer sk-ann"}
        body = {"inputs": "a", "tenant": "ben"}
        check_tgi_error(server.http.post("/generate", json=body, headers=headers), 403, "forbidden", "tenant")
        assert server.http.post("/", json={"inputs": "a"}, headers=headers).json() == [{"generated_text": "a"}]


def test_before_there_is_an_application() -> None:
    async def run() -> None:
        gate = Gate()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://test") as http:
            gate.close("no model")
            for path in ("/generate", "/", "/generate_stream"):
                check_tgi_error(await http.post(path), 503, "healthcheck", "unhealthy: no model")
            assert (await http.get("/v1/models")).json()["error"]["code"] == 503

    asyncio.run(asyncio.wait_for(run(), 30))


# A client


@pytest.mark.usefixtures("offline")
async def test_errors_at_the_client_of_the_hub(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine says, through a client that cannot ask for it."""
    extra: dict[str, Any] = {}
    sender = tgi_schemas.GenerateRequest.sender
    monkeypatch.setattr(tgi_schemas.GenerateRequest, "sender", lambda self: {**sender(self), "extra": extra})
    async with huggingface_hub.AsyncInferenceClient(model=server.url, timeout=20) as client:
        for asked, kind in (
            ({"error": "broke"}, GenerationError),
            ({"error": "full", "status": 429}, OverloadedError),
            ({"error": "away", "status": 499}, IncompleteGenerationError),
        ):
            extra.clear()
            extra.update(asked)
            for stream in (False, True):
                with pytest.raises(kind):
                    await client.text_generation("a", stream=stream)
