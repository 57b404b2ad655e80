"""Tools as `openai` and `langchain-openai` have them, over an engine whose output the prompt dictates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from echo_engine import EchoProcess
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from serving import Running, running

from framework.settings import Settings

pytestmark = pytest.mark.usefixtures("offline")
ECHO = (
    "{% if tools %}{% endif %}{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
)
"""The prompt is what the user says, which the engine repeats."""
CALLS = (
    '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 3}}</tool_call>\n'
    '<tool_call>{"name": "find_city", "arguments": {"name": "Zürich {}"}}</tool_call><|im_end|>'
)
ARGUMENTS = [("add", {"a": 20, "b": 3}), ("find_city", {"name": "Zürich {}"})]


class add(BaseModel):
    """The sum."""

    a: int
    b: int


class find_city(BaseModel):
    name: str


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("templates") / "echo.jinja"
    file.write_text(ECHO)
    settings = Settings(model=str(tiny_llama), served_model_name="echo", chat_template=file, tool_parser="hermes")
    with running(settings, spawn=EchoProcess) as found:
        yield found


def asks(text: str, **more: Any) -> Any:
    tools = [openai.pydantic_function_tool(kind) for kind in (add, find_city)]
    for one in tools:
        one["function"].pop("strict", None)
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "tools": tools, **more}


def test_create(server: Running) -> None:
    answer = server.openai.chat.completions.create(**asks(f"Look.\n{CALLS}"))
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Look.")
    for call, (name, _) in zip(choice.message.tool_calls or (), ARGUMENTS, strict=True):
        assert call.type == "function" and call.function.name == name and call.id.startswith("call_")
    with server.openai.chat.completions.create(**asks(CALLS), stream=True) as stream:
        chunks = list(stream)
    begun = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or () if call.id]
    assert [(call.index, call.type, call.function and call.function.name) for call in begun] == [
        (0, "function", "add"),
        (1, "function", "find_city"),
    ]
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_an_agent_goes_on(server: Running) -> None:
    """What came is sent back as it is, with the results."""
    message = server.openai.chat.completions.create(**asks(CALLS)).choices[0].message
    ask = asks("So?<|im_end|>")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "23"} for call in message.tool_calls or ()]
    ask["messages"] = [message, *results, *ask["messages"]]
    assert server.openai.chat.completions.create(**ask).choices[0].message.content == "So?"


def test_the_stream_helper(server: Running) -> None:
    with server.openai.chat.completions.stream(**asks(f"Look. {CALLS}")) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.name) for event in done] == [(0, "add"), (1, "find_city")]
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    for index, event in enumerate(done):
        given = [piece.arguments_delta for piece in pieces if piece.index == index]
        assert len([piece for piece in given if piece]) > 3 and "".join(given) == event.arguments
    (choice,) = final.choices
    assert choice.message.content == "Look." and choice.finish_reason == "tool_calls"
    whole = server.openai.chat.completions.create(**asks(f"Look. {CALLS}")).choices[0].message
    assert [call.function.arguments for call in whole.tool_calls or ()] == [event.arguments for event in done]


def test_runs_of_langchain(server: Running) -> None:
    @tool
    def adds(a: int, b: int) -> int:
        """The sum."""
        return a + b

    chat = ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="echo", max_retries=0, timeout=20)  # type: ignore[arg-type]
    bound = chat.bind_tools([adds])
    text = '<tool_call>{"name": "adds", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>'
    answer = bound.invoke(text)
    assert answer.content == "" and answer.response_metadata["finish_reason"] == "tool_calls"
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("adds", {"a": 1, "b": 2})
    streamed = AIMessageChunk("")
    for chunk in bound.stream(text):
        streamed += chunk  # type: ignore[assignment]
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [("adds", {"a": 1, "b": 2})]
    result = adds.invoke(call)
    assert isinstance(result, ToolMessage) and result.content == "3"
    assert bound.invoke([HumanMessage("a"), answer, result, HumanMessage("b<|im_end|>")]).content == "ab"


def test_strict_functions_of_pydantic(server: Running) -> None:
    """`pydantic_function_tool` makes strict ones; the helpers give models back."""
    tools = [openai.pydantic_function_tool(kind) for kind in (add, find_city)]
    ask = asks(CALLS) | {"tools": tools}
    parsed = server.openai.chat.completions.parse(**ask).choices[0].message.tool_calls or ()
    expected = [add(a=20, b=3), find_city(name="Zürich {}")]
    assert [call.function.parsed_arguments for call in parsed] == expected
    with server.openai.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion()
    assert [call.function.parsed_arguments for call in final.choices[0].message.tool_calls or ()] == expected


def test_structured_output_of_langchain_by_a_function(server: Running) -> None:
    """It names the function, and allows one call."""
    chat = ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="echo", max_retries=0, timeout=20)  # type: ignore[arg-type]
    for strict in (None, True):
        chain = chat.with_structured_output(add, method="function_calling", strict=strict)
        assert chain.invoke('{"a": 1, "b": 2}<|im_end|>') == add(a=1, b=2)
    called = chat.bind_tools([add, find_city], tool_choice="any")
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    assert [call["name"] for call in called.invoke(text).tool_calls] == ["add"]
