"""Answers of a given shape, by `openai`, langchain, litellm and huggingface_hub. The model has random weights, so only
the grammar can be why they fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from serving import Running, running

from framework.settings import Settings

pytestmark = [
    pytest.mark.usefixtures("offline"),
    pytest.mark.filterwarnings("ignore::UserWarning:pydantic", "ignore::DeprecationWarning"),
]


class Fox(BaseModel):
    colour: Literal["red", "grey"]
    quick: bool
    jumps: Literal[1, 2, 3]


MESSAGES: Any = [{"role": "user", "content": "What is the fox like?"}]
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "fox", "strict": True, "schema": Fox.model_json_schema()}}


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="tiny", dtype="float32", kv_blocks=64)) as found:
        yield found


@pytest.fixture
def options(server: Running) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 30}


@pytest.fixture
def ask(server: Running) -> dict[str, Any]:
    """Without white space, of which such a model makes no end."""
    vocab = range(server.serving.inputs.info.vocab_size)
    blank = [id for id in vocab if server.tokenizer.token_bytes(id).isspace()]
    return {"messages": MESSAGES, "seed": 5, "logit_bias": dict.fromkeys(map(str, blank), -100)}


def test_openai(options: dict[str, Any], ask: dict[str, Any]) -> None:
    with openai.OpenAI(**options) as client:
        answer = client.chat.completions.parse(model="tiny", response_format=Fox, **ask)
        fox = answer.choices[0].message.parsed
        assert isinstance(fox, Fox) and answer.choices[0].finish_reason == "stop"
        with client.chat.completions.stream(model="tiny", response_format=Fox, **ask) as stream:
            kinds = {event.type for event in stream}
            assert stream.get_final_completion().choices[0].message.parsed == fox  # the same seed
        assert {"content.delta", "content.done"} <= kinds
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(model="tiny", response_format=Fox, max_tokens=3, **ask)
        bad = {"type": "json_schema", "json_schema": {"name": "fox", "schema": {"type": "foxes"}}}
        with pytest.raises(openai.BadRequestError, match="response_format"):
            client.chat.completions.create(model="tiny", response_format=bad, **ask)  # type: ignore[call-overload]


async def test_async(options: dict[str, Any], ask: dict[str, Any]) -> None:
    async with openai.AsyncOpenAI(**options) as client:
        answer = await client.chat.completions.parse(model="tiny", response_format=Fox, **ask)
        assert isinstance(answer.choices[0].message.parsed, Fox)


def test_langchain(options: dict[str, Any], ask: dict[str, Any]) -> None:
    chat = ChatOpenAI(model="tiny", seed=5, logit_bias=ask["logit_bias"], **options)
    assert isinstance(chat.with_structured_output(Fox).invoke("What is the fox like?"), Fox)


def test_litellm(options: dict[str, Any], ask: dict[str, Any]) -> None:
    where = {"api_base": options["base_url"], "api_key": "none", "max_retries": 0}
    answer = litellm.completion("openai/tiny", response_format=Fox, **ask, **where)
    assert Fox.model_validate_json(answer.choices[0].message.content)


def test_huggingface_hub(server: Running, ask: dict[str, Any]) -> None:
    with huggingface_hub.InferenceClient(base_url=server.url, timeout=30) as client:
        answer = client.chat_completion(
            MESSAGES, response_format=SCHEMA, seed=5, extra_body={"logit_bias": ask["logit_bias"]}
        )
        assert Fox.model_validate_json(answer.choices[0].message.content or "")
        grammar: Any = {"type": "regex", "value": "(red|grey) fox"}
        assert client.text_generation("A", grammar=grammar, max_new_tokens=20) in ("red fox", "grey fox")
