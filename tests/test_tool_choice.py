"""Calls that have to be made: what `tool_choice` and `strict` allow, as xgrammar reads it, and a model that obeys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import xgrammar
from echo_engine import EchoProcess
from framework.server.calls import ToolUse
from framework.server.tools import ToolFields
from serving import Running, check_error, events, eventually, running
from test_server_tools import ECHO, ask, said, user
from xgrammar.testing import _is_grammar_accept_string

from framework import StructuredOutputs, ToolParser
from framework.registry import load_plugins
from framework.settings import Settings

CITY = {"type": "string", "enum": ["Oslo", "Rome"]}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": CITY},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time."}}
TOOLS = [WEATHER, CLOCK]
STRICT = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, CLOCK]  # type: ignore[dict-item]
GOOD, BAD = '{"city": "Oslo", "days": 3}', '{"city": "Paris", "days": 3}'
FAMILIES: dict[str, Callable[[str, str], str]] = {
    "hermes": lambda name, arguments: f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    "llama3_json": lambda name, arguments: f'{{"name": "{name}", "parameters": {arguments}}}',
}
SEPARATORS = {"hermes": "\n", "llama3_json": "; "}


class AnyTemplate:
    takes_tools = True


def allowed(parser: str | None, asked: StructuredOutputs | None = None, **fields: Any) -> Callable[[str], bool]:
    """Whether a text is what an answer may be."""
    made: type[ToolParser] | None = None
    if parser is not None:
        made = load_plugins().create("tool_parser", parser, settings=Settings())
    use = ToolUse(ToolFields.model_validate({"tools": TOOLS, **fields}), made, AnyTemplate())  # type: ignore[arg-type]
    wanted = use.structured(asked)
    assert wanted is not None
    if wanted.structural_tag is not None:
        assert isinstance(wanted.structural_tag, dict)
        tag = json.dumps({"type": "structural_tag", **wanted.structural_tag})
        grammar = xgrammar.Grammar.from_structural_tag(tag)
    else:
        grammar = xgrammar.Grammar.from_json_schema(json.dumps(wanted.json))
    return lambda text: bool(_is_grammar_accept_string(grammar, text))


@pytest.mark.parametrize("family", FAMILIES)
def test_required_in_the_familys_form(family: str) -> None:
    spell, apart = FAMILIES[family], SEPARATORS[family]
    accepts = allowed(family, tool_choice="required")
    one, two = spell("get_weather", GOOD), spell("clock", "{}")
    assert accepts(one) and accepts(two) and accepts(apart.join([one, two, one]))
    for text in ("", "Yes.", GOOD, spell("get_weather", BAD), spell("clock", GOOD), spell("sun", "{}"), one[:-1]):
        assert not accepts(text), text
    single = allowed(family, tool_choice="required", parallel_tool_calls=False)
    assert single(one) and not single(apart.join([one, two]))


@pytest.mark.parametrize("parser", [None, "mistral"])
def test_required_without_a_form(parser: str | None) -> None:
    accepts = allowed(parser, tool_choice="required")
    one, two = (f'{{"name": "{n}", "parameters": {a}}}' for n, a in (("get_weather", GOOD), ("clock", "{}")))
    assert accepts(f"[{one}]") and accepts(f"[{one}, {two}]")
    for text in ("[]", one, f"[{one}", "[" + one.replace(GOOD, BAD) + "]"):
        assert not accepts(text), text
    single = allowed(parser, tool_choice="required", parallel_tool_calls=False)
    assert single(f"[{one}]") and not single(f"[{one}, {two}]")


def test_a_function() -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    accepts = allowed(None, tool_choice=choice)
    assert accepts(GOOD) and not accepts(BAD) and not accepts("") and not accepts("{}")
    clock = allowed("hermes", tool_choice={"type": "function", "function": {"name": "clock"}})
    assert clock("{}") and not clock(GOOD)


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_functions(family: str) -> None:
    """Text is free, and arguments of others are: only theirs have to fit."""
    spell = FAMILIES[family]
    accepts = allowed(family, tools=STRICT)
    one = spell("get_weather", GOOD)
    for text in ("", "Yes. {", one, f"So: {one} or {spell('clock', BAD)}."):
        assert accepts(text), text
    assert not accepts(spell("get_weather", BAD)) and not accepts(spell("sun", "{}"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", [{"json": {"type": "object", "properties": {"x": {}}}}, {"json_object": True}])
def test_a_form_of_answers_beside_calls(family: str, form: dict[str, Any]) -> None:
    accepts = allowed(family, StructuredOutputs(**form))
    assert accepts('{"x": 1}') and accepts(FAMILIES[family]("clock", "{}")) and not accepts("Yes.")


def test_what_is_left_as_it_is() -> None:
    for parser in ("hermes", "mistral"):
        use = ToolUse(
            ToolFields.model_validate({"tools": TOOLS}),
            load_plugins().create("tool_parser", parser, settings=Settings()),
            AnyTemplate(),  # type: ignore[arg-type]
        )
        assert use.structured(None) is None
        regex = StructuredOutputs(regex="a+")
        assert use.structured(regex) is regex


# Answers


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("templates") / "echo.jinja"
    file.write_text(ECHO)
    return file


@pytest.fixture(scope="module")
def echo(tiny_llama: Path, template: Path) -> Iterator[Running]:
    """The engine writes what the prompt says, whatever is enforced; nothing is known of its form."""
    with running(Settings(model=str(tiny_llama), chat_template=template), spawn=EchoProcess) as found:
        yield found


def test_how_answers_are_read(echo: Running) -> None:
    one, two = (f'{{"name": "{n}", "parameters": {a}}}' for n, a in (("get_weather", GOOD), ("clock", "{}")))
    (choice,) = ask(echo, f"[{one}, {two}]<|im_end|>", tools=TOOLS, tool_choice="required")
    assert said(choice) == (None, [("get_weather", GOOD), ("clock", "{}")], "tool_calls")
    named = {"type": "function", "function": {"name": "get_weather"}}
    (choice,) = ask(echo, f"{GOOD}<|im_end|>", tools=TOOLS, tool_choice=named)
    assert said(choice) == (None, [("get_weather", GOOD)], "stop")
    (choice,) = ask(echo, GOOD, tools=TOOLS, tool_choice=named, max_tokens=7)
    assert choice["finish_reason"] == "length" and GOOD.startswith(choice["calls"][0]["arguments"])
    (choice,) = ask(echo, "<|im_end|>", tools=TOOLS, tool_choice="required")
    assert said(choice) == ("", [], "stop")


def test_what_excludes_one_another(echo: Running) -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    form = {"type": "json_object"}
    for choice in ("required", named):
        body = {"messages": user("a"), "tools": TOOLS, "tool_choice": choice}
        for more in ({"response_format": form}, {"structured_outputs": {"regex": "a"}}):
            check_error(echo.post("/v1/chat/completions", **body, **more), 400, "tool_choice")
        assert echo.post("/v1/chat/completions", **body, response_format={"type": "text"}).status_code == 200


def test_schemas_that_cannot_be_enforced(echo: Running) -> None:
    """They are refused where they would have to be, and by name."""
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        body = {"messages": user("a"), "tools": tools, "tool_choice": choice}
        assert "not" in check_error(echo.post("/v1/chat/completions", **body), 400, "tools")


@pytest.fixture(scope="module", params=["bytelevel", "sentencepiece"])
def model(request: pytest.FixtureRequest, template: Path) -> Iterator[Running]:
    """A real engine. Its weights are random: all form comes from what is enforced."""
    checkpoint = request.getfixturevalue({"bytelevel": "tiny_llama", "sentencepiece": "tiny_llama_spm"}[request.param])
    form = {"chat_template": template, "tool_parser": "hermes", "dtype": "float32"}
    with running(Settings(model=str(checkpoint), kv_blocks=128, max_model_len=512, **form)) as found:
        yield found


def valid(call: Mapping[str, Any]) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in TOOLS}  # type: ignore[attr-defined]
    arguments = json.loads(call["arguments"])
    jsonschema.validate(arguments, schemas[call["name"]] or {"type": "object", "maxProperties": 0})


def test_a_model_that_has_to(model: Running) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for seed in range(3):
        common = {"tools": TOOLS, "seed": seed, "max_tokens": 300}
        for choice in ask(model, "Weather?", tool_choice="required", parallel_tool_calls=False, n=2, **common):
            content, calls, reason = said(choice)
            assert (content, len(calls), reason) == (None, 1, "tool_calls")
            valid(choice["calls"][0])
        (choice,) = ask(model, "Weather?", tool_choice=named, **common)
        assert said(choice)[::2] == (None, "stop") and choice["calls"][0]["name"] == "get_weather"
        valid(choice["calls"][0])


def test_a_model_that_may_call_many(model: Running) -> None:
    (choice,) = ask(model, "Weather?", tools=TOOLS, tool_choice="required", seed=1, max_tokens=400)
    assert choice["calls"] and (choice["content"] is None or choice["finish_reason"] == "length")
    for call in choice["calls"][:-1] if choice["finish_reason"] == "length" else choice["calls"]:
        valid(call)


def test_a_stream_that_is_left(model: Running) -> None:
    body = {"messages": user("Weather?"), "tools": TOOLS, "tool_choice": "required", "stream": True, "max_tokens": 300}
    with model.http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    assert len(events(model.post("/v1/chat/completions", **body))) > 3
    assert eventually(lambda: model.http.get("/load").json() == {"server_load": 0})


def test_a_form_beside_tools(model: Running) -> None:
    """Each answer is either of the form, or made of calls."""
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    choices = ask(model, "Weather?", tools=TOOLS, response_format=form, n=4, seed=0, max_tokens=300)
    for choice in choices:
        if choice["finish_reason"] == "stop":
            assert not choice["calls"] and set(json.loads(choice["content"])) == {"x"}
        else:
            assert choice["finish_reason"] in ("tool_calls", "length")
    assert {choice["finish_reason"] for choice in choices} - {"length"}


def test_strict_functions_leave_text_free(model: Running) -> None:
    (choice,) = ask(model, "Weather?", tools=STRICT, seed=0, max_tokens=30)
    assert choice["finish_reason"] in ("length", "stop") and choice["content"]
