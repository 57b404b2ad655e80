"""`langchain-openai`, over an engine whose output the prompt dictates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from echo_engine import EchoProcess
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from serving import Running, running

from framework.settings import Settings

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


def options(server: Running) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "none", "model": "echo", "max_retries": 0, "timeout": 20}


@pytest.fixture
def chat(server: Running) -> ChatOpenAI:
    return ChatOpenAI(**options(server))


@pytest.fixture
def llm(server: Running) -> OpenAI:
    """It asks for 256 tokens unless told otherwise: as many as this model has for prompt and output."""
    return OpenAI(max_tokens=50, **options(server))


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke("Hello, fox.")
    assert isinstance(answer, AIMessage) and answer.content == "user\nHello, fox."
    assert answer.response_metadata["finish_reason"] == "stop" and answer.response_metadata["model_name"] == "echo"
    assert answer.usage_metadata and answer.usage_metadata["total_tokens"] > answer.usage_metadata["output_tokens"] > 0
    assert answer.tool_calls == []
    messages = [SystemMessage("Be brief."), HumanMessage("Hi"), AIMessage("Yes?"), HumanMessage("Go on")]
    assert chat.bind(stop=["brief"]).invoke(messages).content == "system\nBe "
    assert chat.bind(logprobs=True, top_logprobs=1).invoke("a").response_metadata["logprobs"]["content"]


def test_a_chain(chat: ChatOpenAI) -> None:
    prompt = ChatPromptTemplate.from_messages([("user", "Of {what}.")])
    chain = prompt | chat | StrOutputParser()
    assert chain.invoke({"what": "foxes"}) == "user\nOf foxes."
    assert chain.batch([{"what": str(number)} for number in range(5)]) == [f"user\nOf {i}." for i in range(5)]
    assert "".join(chain.stream({"what": "dogs"})) == "user\nOf dogs."


def test_stream(chat: ChatOpenAI) -> None:
    chunks = list(chat.bind(stream_options={"include_usage": True}).stream("Hello, fox."))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk  # type: ignore[assignment]
    assert whole.content == "user\nHello, fox." and whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata and whole.usage_metadata["output_tokens"] > 0
    assert len(chunks) > 3


async def test_async(chat: ChatOpenAI, llm: OpenAI) -> None:
    assert (await chat.ainvoke("Hello")).content == "user\nHello"
    assert "".join([str(chunk.content) async for chunk in chat.astream("Hello")]) == "user\nHello"
    answers = await chat.abatch(["a", "b", "c"])
    assert [answer.content for answer in answers] == ["user\na", "user\nb", "user\nc"]
    assert await llm.ainvoke("one two") == "one two"


def test_texts(llm: OpenAI) -> None:
    """It sends prompts as a list and null for whatever was not set."""
    assert llm.invoke("one two") == "one two"
    assert llm.batch(["one", "two", "three"]) == ["one", "two", "three"]
    result = llm.generate(["one", "two"], stop=["w"])
    assert [choices[0].text for choices in result.generations] == ["one", "t"]
    assert result.llm_output and result.llm_output["token_usage"]["completion_tokens"] > 0
    assert "".join(llm.stream("one two three")) == "one two three"


def test_several_of_each(server: Running) -> None:
    result = OpenAI(n=2, max_tokens=50, **options(server)).generate(["one", "two"])
    assert [[choice.text for choice in choices] for choices in result.generations] == [["one", "one"], ["two", "two"]]
    llm = OpenAI(logprobs=2, seed=3, temperature=0, max_tokens=50, **options(server))
    result = llm.generate(["one"])
    info = result.generations[0][0].generation_info
    assert info and info["finish_reason"] == "length" and "".join(info["logprobs"]["tokens"]) == "one"


def test_errors(chat: ChatOpenAI, llm: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p must be in"):
        chat.bind(top_p=0.0).invoke("a")
    with pytest.raises(openai.NotFoundError, match="available: echo"):
        llm.bind(model="none").invoke("a")
    # What it tells from other bad requests, so that chains can shorten the chat:
    with pytest.raises(ContextOverflowError, match="the limit of 256 tokens"):
        chat.invoke("word " * 2000)
    with pytest.raises(ContextOverflowError, match="leave no room for output within the limit of 256 tokens"):
        chat.invoke("! " * 150)
    with pytest.raises(ContextOverflowError, match="ask for at most 2"):
        chat.bind(max_completion_tokens=250).invoke("a")
