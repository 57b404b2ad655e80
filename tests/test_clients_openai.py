"""The `openai` package: every way of asking that its users have, over an engine whose output the prompt dictates."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from echo_engine import EchoProcess
from framework.server.keys import Keys
from serving import Running, eventually, running

from framework.settings import Settings

pytestmark = pytest.mark.usefixtures("offline")
KEY = "sk-somebody"
HELLO: Any = {"model": "echo", "messages": [{"role": "user", "content": "Hello, fox."}]}
ECHOED = "user\nHello, fox."
"""What the engine makes of it: the chat up to its first end token."""


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(model=str(tiny_llama), served_model_name="echo", max_queued_requests=4)
    with running(settings, Keys([("somebody", KEY)]), spawn=EchoProcess) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=20) as found:
        yield found


@pytest_asyncio.fixture
async def aclient(server: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=20) as found:
        yield found


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**HELLO, user="ann", store=False, metadata={"a": "b"})
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ECHOED, "stop")
    assert choice.message.tool_calls is None and choice.message.refusal is None and choice.logprobs is None
    assert answer.object == "chat.completion" and answer.model == "echo" and answer.id.startswith("chatcmpl-")
    assert abs(answer.created - time.time()) < 60
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details and answer.usage.prompt_tokens_details.cached_tokens == 0
    parts: Any = [{"type": "text", "text": "Hello,"}, {"type": "text", "text": "fox."}]
    answer = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "user\nHello,\nfox."


def test_chat_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.create(**HELLO, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == ECHOED
    assert [chunk.choices[0].finish_reason for chunk in pieces if chunk.choices[0].finish_reason] == ["stop"]
    assert last.choices == [] and last.usage and last.usage.completion_tokens > 0
    assert {chunk.id for chunk in chunks} == {last.id} and {chunk.object for chunk in chunks} == {last.object}


def test_the_stream_helper_puts_it_together_again(client: openai.OpenAI) -> None:
    ask = {**HELLO, "logprobs": True, "top_logprobs": 2}
    with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**ask)
    kinds = [event.type for event in events]
    assert kinds.count("content.done") == kinds.count("logprobs.content.done") == 1
    assert "".join(event.delta for event in events if event.type == "content.delta") == ECHOED
    assert final.choices[0].message.content == ECHOED and final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs and whole.choices[0].logprobs
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content
    assert final.usage == whole.usage


async def test_async(aclient: openai.AsyncOpenAI) -> None:
    def ask(word: str) -> Any:
        return {"model": "echo", "messages": [{"role": "user", "content": word}]}

    words = [f"word {number}" for number in range(4)]
    answers = await asyncio.gather(*(aclient.chat.completions.create(**ask(word)) for word in words))
    assert [answer.choices[0].message.content for answer in answers] == [f"user\n{word}" for word in words]
    stream = await aclient.chat.completions.create(**HELLO, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ECHOED
    async with aclient.chat.completions.stream(**HELLO) as helper:
        assert (await helper.get_final_completion()).choices[0].message.content == ECHOED
    text = await aclient.completions.create(model="echo", prompt="one two", max_tokens=50)
    assert text.choices[0].text == "one two"
    assert [model.id async for model in aclient.models.list()] == ["echo"]


async def test_a_task_that_is_cancelled_frees_its_request(server: Running, aclient: openai.AsyncOpenAI) -> None:
    ask = aclient.chat.completions.create(**HELLO, extra_body={"extra": {"hold": True}})
    task = asyncio.create_task(ask)
    await asyncio.to_thread(eventually, lambda: server.engine.load == 1)
    task.cancel()
    await asyncio.to_thread(eventually, lambda: server.engine.load == 0)
    stream = await aclient.chat.completions.create(**HELLO, stream=True, extra_body={"extra": {"pace": 0.2}})
    async for _ in stream:
        break
    await stream.close()
    await asyncio.to_thread(eventually, lambda: server.engine.load == 0)


def test_a_timeout_frees_the_request(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            model="echo", prompt="a", extra_body={"extra": {"hold": True}}
        )
    eventually(lambda: server.engine.load == 0)


def test_completions(server: Running, client: openai.OpenAI) -> None:
    prompts = ["one two", "three"]
    answer = client.completions.create(model="echo", prompt=prompts, n=2, max_tokens=50, logprobs=2)
    assert [choice.text for choice in answer.choices] == ["one two", "one two", "three", "three"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.tokens and "".join(logprobs.tokens) == "one two"
    assert logprobs.text_offset and logprobs.text_offset[0] == 0 and logprobs.token_logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs or ())
    ids = [server.ids(prompt) for prompt in prompts]
    answer = client.completions.create(model="echo", prompt=ids, stop=["wo", "x"], max_tokens=50)
    ends = [(choice.text, choice.finish_reason) for choice in answer.choices]
    assert ends == [("one t", "stop"), ("three", "length")]
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model="echo", prompt=ids, max_tokens=50, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "one two", 1: "three"}
    assert client.completions.create(model="echo", prompt="a b", echo=True, max_tokens=9).choices[0].text == "a ba b"


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("echo", "model") and model == client.models.retrieve("echo")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-none")


def test_raw_and_streaming_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**HELLO, extra_headers={"X-Request-Id": "mine"})
    assert raw.status_code == 200 and raw.headers["x-request-id"] == raw.request_id == "mine"
    assert raw.headers["content-type"] == "application/json"
    answer = raw.parse()
    assert answer.id == "chatcmpl-mine" and answer._request_id == "mine"
    with client.chat.completions.with_streaming_response.create(**HELLO, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"


def test_fields_of_ours(client: openai.OpenAI) -> None:
    extra = {"min_tokens": 2, "top_k": 5, "repetition_penalty": 1.1, "stop_token_ids": [3], "ignore_eos": True}
    answer = client.chat.completions.create(**HELLO, extra_body={**extra, "skip_special_tokens": False})
    content = answer.choices[0].message.content
    assert content == "<|im_start|>user\nHello, fox.<|im_end|>\n<|im_start|>assistant\n"


def test_errors(server: Running, client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(**HELLO, top_p=0)
    assert (bad.value.param, bad.value.code, bad.value.type) == ("top_p", "400", "BadRequestError")
    assert "top_p must be in (0, 1]" in bad.value.message and bad.value.request_id
    with pytest.raises(openai.NotFoundError) as unknown:
        create(**{**HELLO, "model": "gpt-none"})
    assert unknown.value.param == "model" and "available: echo" in unknown.value.message
    with pytest.raises(openai.AuthenticationError) as stranger:
        client.with_options(api_key="sk-nobody").models.list()
    assert stranger.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError) as forbidden:
        create(**HELLO, extra_body={"tenant": "other"})
    assert forbidden.value.param == "tenant"
    with pytest.raises(openai.RateLimitError) as full:
        create(**HELLO, extra_body={"extra": {"error": "quota", "status": 429, "retry_after": 7}})
    assert full.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.UnprocessableEntityError):
        create(**HELLO, extra_body={"extra": {"error": "no", "status": 422}})
    for status in (500, 503):
        with pytest.raises(openai.InternalServerError) as broken:
            create(**HELLO, extra_body={"extra": {"error": "no", "status": status}})
        assert broken.value.status_code == status
    with pytest.raises(openai.NotFoundError):  # a route that is not here
        client.embeddings.create(model="echo", input="a")
    assert create(**HELLO).choices[0].message.content == ECHOED


def test_an_error_in_a_stream(client: openai.OpenAI, server: Running) -> None:
    """The status line is out: the client finds the error among the events, and says so."""
    seen = []
    with pytest.raises(openai.APIError, match="broke half way") as error:
        for chunk in client.completions.create(
            model="echo", prompt="one two three four", stream=True, extra_body={"extra": {"pace": 0.05}}
        ):
            seen.append(chunk)
            server.engine._loop.call_soon_threadsafe(_break, server)
    assert seen and not isinstance(error.value, openai.APIStatusError)


def _break(server: Running) -> None:
    from framework import Rejected

    for sequence in server.engine._sequences.values():
        sequence.stream.fail(Rejected("broke half way", 500))


def test_a_full_queue_is_tried_again_when_the_server_says(server: Running, client: openai.OpenAI) -> None:
    held = threading.Thread(
        target=client.completions.create,
        kwargs={"model": "echo", "prompt": ["a"] * 4, "extra_body": {"extra": {"hold": True}}},
    )
    held.start()
    eventually(lambda: len(server.engine.waiting) == 4)
    with pytest.raises(openai.RateLimitError, match="queue is full") as full:
        client.completions.create(model="echo", prompt="a")
    assert full.value.response.headers["retry-after"] == "1"
    ids = [sequence.stream.record.id for sequence in server.engine._sequences.values()]
    threading.Timer(0.3, client.post, ("../abort_requests",), {"body": {"request_ids": ids}, "cast_to": object}).start()
    begin = time.monotonic()
    answer = client.with_options(max_retries=2).completions.create(model="echo", prompt="fine", max_tokens=50)
    assert answer.choices[0].text == "fine" and time.monotonic() - begin > 0.9
    held.join(10)
    assert not held.is_alive()
