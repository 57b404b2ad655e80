"""`huggingface_hub.InferenceClient`, over an engine whose output the prompt dictates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import jsonschema
import pytest
from echo_engine import EchoProcess
from huggingface_hub.errors import HfHubHTTPError, ValidationError
from serving import Running, running

from framework.settings import Settings

pytestmark = pytest.mark.usefixtures("offline")
HELLO: Any = [{"role": "user", "content": "Hello, fox."}]
ECHOED = "user\nHello, fox."
"""What the engine makes of it: the chat up to its first end token."""


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[huggingface_hub.InferenceClient]:
    with huggingface_hub.InferenceClient(base_url=server.url, timeout=20) as found:
        yield found


def test_chat(client: huggingface_hub.InferenceClient) -> None:
    for create in (client.chat_completion, client.chat.completions.create):
        answer = create(HELLO, max_tokens=50, seed=3, logprobs=True, top_logprobs=2)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ECHOED, "stop")
        assert answer.model == "echo" and answer.usage.total_tokens > answer.usage.prompt_tokens > 0
        assert choice.logprobs and len(choice.logprobs.content) == answer.usage.completion_tokens
        assert len(choice.logprobs.content[0].top_logprobs) == 2


def test_chat_streamed(client: huggingface_hub.InferenceClient) -> None:
    chunks = list(client.chat_completion(HELLO, max_tokens=50, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == ECHOED
    assert [chunk.choices[0].finish_reason for chunk in pieces if chunk.choices[0].finish_reason] == ["stop"]
    assert last.choices == [] and last.usage and last.usage.completion_tokens > 0


async def test_async_chat(server: Running) -> None:
    async with huggingface_hub.AsyncInferenceClient(base_url=server.url, timeout=20) as client:
        answer = await client.chat_completion(HELLO)
        assert answer.choices[0].message.content == ECHOED
        pieces = await client.chat_completion(HELLO, stream=True)
        assert "".join([piece.choices[0].delta.content or "" async for piece in pieces]) == ECHOED


def test_names_and_errors(client: huggingface_hub.InferenceClient, server: Running) -> None:
    assert client.chat_completion(HELLO, model="echo").choices[0].message.content == ECHOED
    for fault, status, message in (
        ({"top_p": 0.0}, 400, "top_p must be in"),
        ({"model": "none"}, 404, "available: echo"),
        ({"extra_body": {"extra": {"error": "quota", "status": 429}}}, 429, "quota"),
    ):
        with pytest.raises(HfHubHTTPError) as error:
            client.chat_completion(HELLO, **fault)
        assert error.value.response.status_code == status and message in error.value.response.text
    with huggingface_hub.InferenceClient(base_url=f"{server.url}/v1", token="hf_any", timeout=20) as other:
        assert other.chat_completion(HELLO).choices[0].message.content == ECHOED


def test_response_formats(tiny_llama: Path) -> None:
    """That of the client's own documentation, and others; of the last it makes one of TGI's forms."""
    animals = {"type": "array", "items": {"enum": ["puppy", "cat", "raccoon"]}, "maxItems": 3}
    properties: dict[str, Any] = {"animals_seen": {"type": "integer", "minimum": 1, "maximum": 5}, "animals": animals}
    schema = {"properties": properties, "required": ["animals_seen", "animals"]}
    forms: list[Any] = [
        {"type": "json", "value": schema},
        {"type": "json_object", "value": schema},
        {"type": "json_schema", "json_schema": {"name": "animals", "schema": schema}},
    ]
    with (
        running(Settings(model=str(tiny_llama), dtype="float32")) as server,
        huggingface_hub.InferenceClient(base_url=server.url, timeout=60) as client,
    ):
        for form in forms:
            answer = client.chat_completion(HELLO, response_format=form, max_tokens=150, seed=1)
            found = json.loads(answer.choices[0].message.content or "")
            jsonschema.validate(found, {"type": "object", **schema})
            assert answer.choices[0].finish_reason == "stop"
        regex: Any = {"type": "regex", "value": "[0-9]{3}-[a-c]"}
        pieces = client.chat_completion(HELLO, response_format=regex, max_tokens=50, stream=True)
        assert re.fullmatch("[0-9]{3}-[a-c]", "".join(piece.choices[0].delta.content or "" for piece in pieces))


def test_text_generation(client: huggingface_hub.InferenceClient) -> None:
    assert client.text_generation("one two three", max_new_tokens=50) == "one two three"
    assert client.text_generation("one two", max_new_tokens=50, return_full_text=True) == "one twoone two"
    answer = client.text_generation(
        "one two three", max_new_tokens=50, stop=["tw"], details=True, top_n_tokens=2, decoder_input_details=True
    )
    assert answer.generated_text == "one tw" and answer.details and answer.details.finish_reason == "stop_sequence"
    assert "".join(token.text for token in answer.details.tokens).startswith("one t")
    assert len(answer.details.tokens) == answer.details.generated_tokens == len(answer.details.top_tokens or ())
    assert "".join(token.text for token in answer.details.prefill) == "one two three"
    answer = client.text_generation("one two", max_new_tokens=2, do_sample=True, seed=7, temperature=0.5, details=True)
    assert answer.details and (answer.details.seed, answer.details.finish_reason) == (7, "length")


def test_text_generation_streamed(client: huggingface_hub.InferenceClient) -> None:
    assert "".join(client.text_generation("one two three", max_new_tokens=50, stream=True)) == "one two three"
    events = list(client.text_generation("one two three", max_new_tokens=50, stream=True, details=True, stop=["tw"]))
    assert [event.generated_text for event in events] == [None] * (len(events) - 1) + ["one tw"]
    assert events[-1].details and events[-1].details.finish_reason == "stop_sequence"
    assert events[-1].details.generated_tokens == len(events)


async def test_async_text_generation(server: Running) -> None:
    async with huggingface_hub.AsyncInferenceClient(base_url=server.url, timeout=20) as client:
        assert await client.text_generation("one two", max_new_tokens=50) == "one two"
        pieces = await client.text_generation("one two", max_new_tokens=50, stream=True)
        assert "".join([piece async for piece in pieces]) == "one two"


def test_text_generation_errors(client: huggingface_hub.InferenceClient) -> None:
    with pytest.raises(ValidationError, match="too long"):
        client.text_generation("word " * 2000)
    with pytest.raises(ValidationError, match="top_p"):
        client.text_generation("a", top_p=2.0)
