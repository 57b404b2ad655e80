"""`litellm`, which many proxies are made of, over an engine whose output the prompt dictates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litellm
import pytest
from echo_engine import EchoProcess
from serving import Running, running

from framework.settings import Settings

pytestmark = [
    pytest.mark.usefixtures("offline"),
    pytest.mark.filterwarnings("ignore::UserWarning:pydantic", "ignore::DeprecationWarning"),  # of its own models
]
litellm.suppress_debug_info = True
HELLO: Any = [{"role": "user", "content": "Hello, fox."}]
ECHOED = "user\nHello, fox."


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


@pytest.fixture
def options(server: Running) -> dict[str, Any]:
    return {"api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 20}


def test_chat(options: dict[str, Any]) -> None:
    answer = litellm.completion("openai/echo", HELLO, max_tokens=50, seed=3, **options)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (ECHOED, "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0
    whole = litellm.completion("openai/echo", HELLO, logprobs=True, top_logprobs=2, **options)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


def test_chat_streamed(options: dict[str, Any]) -> None:
    ask = {**options, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion("openai/echo", HELLO, **ask))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ECHOED
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    whole = litellm.completion("openai/echo", HELLO, **options)
    assert built.choices[0].message.content == ECHOED
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(built.usage, count) == getattr(whole.usage, count)


async def test_async(options: dict[str, Any]) -> None:
    answer = await litellm.acompletion("openai/echo", HELLO, **options)
    assert answer.choices[0].message.content == ECHOED
    stream = await litellm.acompletion("openai/echo", HELLO, stream=True, **options)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ECHOED
    text = await litellm.atext_completion(model="text-completion-openai/echo", prompt="one two", **options)
    assert text.choices[0].text == "one two"


def test_texts(options: dict[str, Any]) -> None:
    model = "text-completion-openai/echo"
    answer = litellm.text_completion(model=model, prompt=["one two", "three"], max_tokens=50, **options)
    assert [choice.text for choice in answer.choices] == ["one two", "three"]
    chunks = list(litellm.text_completion(model=model, prompt="one two", stream=True, **options))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == "one two"
    # The chat function over the route for texts: it makes a prompt of the messages by itself.
    assert "Hello, fox." in litellm.completion(model, HELLO, **options).choices[0].message.content


def test_a_batch(options: dict[str, Any]) -> None:
    several = [[{"role": "user", "content": f"word {number}"}] for number in range(4)]
    answers = litellm.batch_completion("openai/echo", several, **options)
    assert [answer.choices[0].message.content for answer in answers] == [f"user\nword {i}" for i in range(4)]


def test_errors(options: dict[str, Any]) -> None:
    def refused(status: int) -> dict[str, Any]:
        return {"extra_body": {"extra": {"error": "refused", "status": status}}}

    for kind, more in (
        (litellm.BadRequestError, {"top_p": 0.0}),
        (litellm.NotFoundError, {"model": "openai/none"}),
        (litellm.RateLimitError, refused(429)),
        (litellm.InternalServerError, refused(500)),
        (litellm.ServiceUnavailableError, refused(503)),
    ):
        with pytest.raises(kind) as error:
            litellm.completion(**{"model": "openai/echo", "messages": HELLO, **options, **more})
        assert error.value.status_code == kind(message="", llm_provider="", model="").status_code
    # What it tells from other bad requests, to fall back to a model that takes more:
    for more in ({"messages": [{"role": "user", "content": "word " * 2000}]}, {"max_tokens": 250}):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**{"model": "openai/echo", "messages": HELLO, **options, **more})
