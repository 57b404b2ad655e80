"""Tools of a chat: how calls come to a client, whole and streamed, and what it may ask for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from echo_engine import EchoProcess
from framework.server import shapes
from framework.server.calls import select_parser
from framework.server.limits import MAX_TOOL_BYTES, MAX_TOOLS
from pydantic import TypeAdapter
from serving import Running, check_error, events, running

from framework import ConfigError, Parsing, PluginError, Provider, ToolParser, hookimpl
from framework.checkpoint import open_checkpoint
from framework.registry import load_plugins
from framework.settings import Settings

ECHO = "{# {{ tools }} #}{% if tools %}{% endif %}{{ messages[0].content }}"
"""The prompt is the text of the first message, which the engine repeats."""
SHOW = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}{{ message.role }}:"
    "{{ message.name }}{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}{% endfor %};{% endfor %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
FIND = {"type": "function", "function": {"name": "find_it", "description": "Finds.", "parameters": {}}}
TOOLS = [ADD, FIND]
ARGUMENTS = ['{"a": 1, "b": {"c": "}{ \\" é🙂"}}', "{}"]


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("templates") / "echo.jinja"
    file.write_text(ECHO)
    return file


@pytest.fixture(scope="module")
def hermes(tiny_llama: Path, echo: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), chat_template=echo, tool_parser="hermes"), spawn=EchoProcess) as found:
        yield found


def special(source: Path, folder: Path, *tokens: str) -> Path:
    """A copy of a checkpoint, with these as special tokens: in place of ones that nobody uses, or behind all."""
    shutil.copytree(source, folder)
    text = (folder / "tokenizer.json").read_text()
    if "<|endoftext|>" in text:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_text((folder / file).read_text().replace("<|endoftext|>", tokens[0]))
        return folder
    backend = tokenizers.Tokenizer.from_str(text)
    backend.add_special_tokens(list(tokens))
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llama(tiny_llama: Path, echo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = special(tiny_llama, tmp_path_factory.mktemp("llama") / "model", "<|python_tag|>")
    with running(Settings(model=str(model), chat_template=echo, tool_parser="llama3_json"), spawn=EchoProcess) as found:
        yield found


@pytest.fixture(scope="module")
def mistral(tiny_llama_spm: Path, echo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = special(tiny_llama_spm, tmp_path_factory.mktemp("mistral") / "model", "[TOOL_CALLS]", "[ARGS]", "[X]")
    with running(Settings(model=str(model), chat_template=echo, tool_parser="mistral"), spawn=EchoProcess) as found:
        yield found


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def ask(server: Running, text: str, **body: Any) -> list[dict[str, Any]]:
    """Ask twice, whole and streamed; check that both say the same, and the form; return the choices."""
    request = {"messages": user(text), "tools": TOOLS, **body}
    response = server.post("/v1/chat/completions", **request)
    assert response.status_code == 200, response.text
    whole = response.json()
    TypeAdapter(shapes.ChatCompletion).validate_python(whole)
    chunks = events(server.post("/v1/chat/completions", **request, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"] == whole["usage"]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        TypeAdapter(shapes.ChatCompletionChunk).validate_python(chunk)
        (piece,) = chunk["choices"]
        delta, choice = piece["delta"], choices.get(piece["index"])
        if choice is None:
            assert delta == {"role": "assistant", "content": ""}
            choices[piece["index"]] = {"content": None, "calls": [], "logprobs": []}
            continue
        assert "finish_reason" not in choice, "something came after the end"
        choice["logprobs"] += (piece["logprobs"] or {"content": []})["content"]
        if piece["finish_reason"] is not None:
            assert delta == {}
            choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
        if "content" in delta:
            choice["content"] = (choice["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(choice["calls"]):
                assert set(call) == {"index", "id", "type", "function"} and call["type"] == "function"
                assert call["function"]["arguments"] == ""
                choice["calls"].append({"id": call["id"], **call["function"]})
            else:
                assert call["index"] == len(choice["calls"]) - 1
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                choice["calls"][-1]["arguments"] += call["function"]["arguments"]
    for choice in whole["choices"]:
        message, streamed = choice["message"], choices[choice["index"]]
        calls = message.get("tool_calls", [])
        assert [call["function"] for call in calls] == [
            {"name": call["name"], "arguments": call["arguments"]} for call in streamed["calls"]
        ]
        ids = [call["id"] for call in (*calls, *streamed["calls"])]
        assert (len(set(ids)) == len(ids) and "tool_calls" not in message) or calls
        assert (message["content"], choice["finish_reason"], choice["stop_reason"]) == (
            streamed["content"], streamed["finish_reason"], streamed["stop_reason"],
        )  # fmt: skip
        assert ((choice["logprobs"] or {}).get("content") or []) == streamed["logprobs"]
    return [choices[index] for index in sorted(choices)]


def said(choice: dict[str, Any]) -> tuple[str | None, list[tuple[str, str]], str]:
    return choice["content"], [(c["name"], c["arguments"]) for c in choice["calls"]], choice["finish_reason"]


CALLS = [("add", ARGUMENTS[0]), ("find_it", ARGUMENTS[1])]


def in_hermes(calls: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)


@pytest.mark.parametrize("chunk", [1, 3, 200])
def test_hermes(hermes: Running, chunk: int) -> None:
    extra = {"chunk": chunk}
    (choice,) = ask(hermes, in_hermes(CALLS) + "<|im_end|>", extra=extra)
    assert said(choice) == (None, CALLS, "tool_calls")
    (choice,) = ask(hermes, f"Look.\n{in_hermes(CALLS[:1])}<|im_end|>", extra=extra)
    assert said(choice) == ("Look.", CALLS[:1], "tool_calls")
    (choice,) = ask(hermes, "No <tool_ here.<|im_end|>", extra=extra)
    assert said(choice) == ("No <tool_ here.", [], "stop")
    (choice,) = ask(hermes, "<|im_end|>", extra=extra)
    assert said(choice) == ("", [], "stop")


@pytest.mark.parametrize("chunk", [1, 4])
def test_llama(llama: Running, chunk: int) -> None:
    """The tag is a special token, which texts leave out: parsers see it, and clients see no other."""
    one, two = (f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in CALLS)
    extra = {"chunk": chunk}
    for text in (f"{one}; {two}<|im_end|>", f"<|python_tag|>{one};{two}<|im_end|>"):
        assert said(ask(llama, text, extra=extra)[0]) == (None, CALLS, "tool_calls")
    (choice,) = ask(llama, f"Yes.<|im_start|><|python_tag|>{two}<|im_end|>", extra=extra)
    assert said(choice) == ("Yes.", CALLS[1:], "tool_calls")
    # without tools it is left out, as it was
    plain = llama.post("/v1/chat/completions", messages=user(f"a<|python_tag|>{two}<|im_end|>")).json()
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": f"a{two}"}


@pytest.mark.parametrize("chunk", [1, 4])
def test_mistral(mistral: Running, chunk: int) -> None:
    extra, calls = {"chunk": chunk}, [("add", '{"a": "x"}'), ("find_it", "{}")]
    array = ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    for text in (
        f"[TOOL_CALLS][{array}]</s>", f"[TOOL_CALLS] [{array}]</s>",
        '[TOOL_CALLS]add[ARGS]{"a": "x"}[TOOL_CALLS]find_it[ARGS]{}</s>',
    ):  # fmt: skip
        (choice,) = ask(mistral, text, extra=extra)
        assert said(choice) == (None, calls, "tool_calls")
        assert all(len(call["id"]) == 9 for call in choice["calls"])
    (choice,) = ask(mistral, "Well[X] then[TOOL_CALLS]find_it[ARGS]{}</s>", extra=extra)
    assert said(choice) == (" Well  then", calls[1:], "tool_calls")  # the tokenizer's spaces, behind special tokens


# What ends an answer


def test_an_answer_that_is_cut_off(hermes: Running) -> None:
    text = in_hermes(CALLS)
    most = len(hermes.ids(text))
    for length in range(1, min(most, 256 - most), 7):
        (choice,) = ask(hermes, text, max_tokens=length)
        assert choice["finish_reason"] == "length"
        for call, (name, arguments) in zip(choice["calls"], CALLS, strict=False):
            assert call["name"] == name and arguments.startswith(call["arguments"])
        if not choice["calls"]:
            assert text.startswith(choice["content"])


def test_stop_strings_see_the_text_as_the_model_wrote_it(hermes: Running) -> None:
    text = f"Look. {in_hermes(CALLS)}<|im_end|>"
    (choice,) = ask(hermes, text, stop="</tool_call>")
    assert said(choice) == ("Look.", CALLS[:1], "tool_calls") and choice["stop_reason"] == "</tool_call>"
    (choice,) = ask(hermes, text, stop=["<tool_call>"])
    assert said(choice) == ("Look. ", [], "stop")


def test_log_probabilities_are_of_all_tokens(hermes: Running) -> None:
    text = f"Look. {in_hermes(CALLS)}<|im_end|>"
    (choice,) = ask(hermes, text, logprobs=True)
    assert len(choice["logprobs"]) == len(hermes.ids(text))
    for stream in (False, True):
        body = {"messages": user(text), "tools": TOOLS, "return_token_ids": True, "stream": stream}
        response = hermes.post("/v1/chat/completions", **body)
        told = events(response) if stream else [response.json()]
        ids = [id for chunk in told for choice in chunk["choices"] for id in choice.get("token_ids", ())]
        assert ids == hermes.ids(text)


def test_several_choices(hermes: Running) -> None:
    choices = ask(hermes, f"Look. {in_hermes(CALLS)}<|im_end|>", n=3)
    assert [said(choice) for choice in choices] == [("Look.", CALLS, "tool_calls")] * 3


def test_one_call_where_no_more_are_allowed(hermes: Running) -> None:
    for parallel, count in ((False, 1), (True, 2), (None, 2)):
        (choice,) = ask(hermes, in_hermes(CALLS) + "<|im_end|>", parallel_tool_calls=parallel)
        assert said(choice) == (None, CALLS[:count], "tool_calls")


def test_tools_that_may_not_be_called(hermes: Running) -> None:
    """The text stays as it is, with all that it is made of."""
    text = in_hermes(CALLS)
    body = hermes.post("/v1/chat/completions", messages=user(text + "<|im_end|>"), tools=TOOLS, tool_choice="none")
    assert body.json()["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert body.json()["choices"][0]["finish_reason"] == "stop"


def test_tools_that_there_are_not(hermes: Running) -> None:
    text = in_hermes([("multiply", "{}")])
    assert said(ask(hermes, text + "<|im_end|>")[0]) == (text, [], "stop")


def test_telemetry_is_told_of_calls(hermes: Running) -> None:
    for stream in (False, True):
        body = {"messages": user(in_hermes(CALLS) + "<|im_end|>"), "tools": TOOLS, "stream": stream}
        response = hermes.post("/v1/chat/completions", **body)
        id = (events(response)[0] if stream else response.json())["id"]
        assert hermes.record(id).finish_reasons == ["tool_calls"]


# What the model is shown


@pytest.fixture(scope="module")
def shows(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("templates") / "show.jinja"
    file.write_text(SHOW)
    with running(Settings(model=str(tiny_llama), chat_template=file, tool_parser="none"), spawn=EchoProcess) as found:
        yield found


def prompt(server: Running, **body: Any) -> str:
    """What the template made of a request: the engine repeats it."""
    response = server.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_the_template_gets_the_tools(shows: Running) -> None:
    sent = {
        "type": "function",
        "function": {"name": "f", "strict": True, "description": None, "parameters": {"x": None}},
    }
    expected = '{"type": "function", "function": {"name": "f", "parameters": {"x": null}}}user:a;'
    assert prompt(shows, messages=user("a"), tools=[sent]) == expected
    assert prompt(shows, messages=user("a"), tools=[sent], tool_choice="auto") == expected
    assert prompt(shows, messages=user("a"), tools=[{"function": sent["function"]}]) == expected
    assert prompt(shows, messages=user("a"), tools=[sent], tool_choice="none") == "user:a;"
    assert prompt(shows, messages=user("a"), tools=None, tool_choice=None, parallel_tool_calls=None) == "user:a;"
    tokens = shows.post("/tokenize", messages=user("a"), tools=[sent]).json()["tokens"]
    assert shows.tokenizer.decode(tokens) == expected


def call(arguments: object, **more: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def test_the_template_gets_calls_as_objects(shows: Running) -> None:
    messages = [
        *user("a"),
        {"role": "assistant", "content": None, "tool_calls": [call('{"x": "1", "y": [2]}'), call("")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "content": "b", "tool_calls": []},
        {"role": "tool", "tool_call_id": "call_1", "name": "own", "content": [{"type": "text", "text": "4"}]},
    ]
    expected = "user:a;assistant:f x=1 y=[2]f;tool:f3;assistant:b;tool:own4;"
    assert prompt(shows, messages=messages) == prompt(shows, messages=messages, tools=None) == expected


# Requests that are wrong

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": []}, "tools", "leave it out"),
    ({"tools": {}}, "tools", "list"),
    ({"tools": ["add"]}, "tools.0", "object"),
    ({"tools": [{"type": "web_search", "function": ADD["function"]}]}, "tools.0.type", '"function"'),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "required"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "letters"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name", "letters"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools.0.function.name", "letters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters",
     "object"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
     "tools.0.function.parameters", "object"),
    ({"tools": [ADD, FIND, ADD]}, "tools", '"add"'),
    ({"tools": [ADD] * (MAX_TOOLS + 1)}, "tools", str(MAX_TOOLS)),
    ({"tools": [{**ADD, "x": "a" * MAX_TOOL_BYTES}]}, "tools", str(MAX_TOOL_BYTES)),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "required"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "add, find_it"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "name"),
    ({"tools": TOOLS, "tool_choice": True}, "tool_choice", "required"),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": None}, "tool_choice", "needs tools"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "true"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages.0.tool_calls", "list"),
    ({"messages": [{"role": "assistant", "tool_calls": [7]}]}, "messages.0.tool_calls.0", '"function"'),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]}]},
     "messages.0.tool_calls.0", "name"),
    ({"messages": [*user("a"), {"role": "assistant", "tool_calls": [call("{}"), call('{"a": ')]}]},
     "messages.1.tool_calls.1.function.arguments", "JSON object"),
    ({"messages": [{"role": "assistant", "tool_calls": [call("[1]")]}]},
     "messages.0.tool_calls.0.function.arguments", "JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field", "words"), WRONG, ids=range(len(WRONG)))
def test_errors_name_the_field(hermes: Running, body: dict[str, Any], field: str, words: str) -> None:
    response = hermes.post("/v1/chat/completions", **{"messages": user("a"), **body})
    assert words in check_error(response, 400, field)


def test_names_that_clients_use(hermes: Running) -> None:
    for name in ("a", "a.b-c_9", "A" * 64):
        tool = {"type": "function", "function": {"name": name, "description": "d"}, "cache_control": None}
        (choice,) = ask(hermes, in_hermes([(name, "{}")]) + "<|im_end|>", tools=[tool])
        assert said(choice) == (None, [(name, "{}")], "tool_calls")


def test_a_template_that_has_no_place_for_tools(tiny_llama: Path) -> None:
    """Nothing is left out silently; a chat without them is served."""
    with running(Settings(model=str(tiny_llama)), spawn=EchoProcess) as server:
        response = server.post("/v1/chat/completions", messages=user("a"), tools=TOOLS)
        assert "--chat-template" in check_error(response, 400, "tools")
        body = {"messages": user("a"), "max_tokens": 3}
        assert server.post("/v1/chat/completions", **body, tools=TOOLS, tool_choice="none").status_code == 200
        assert server.post("/v1/chat/completions", **body, tool_choice="none").status_code == 200


def test_a_template_that_no_parser_fits(tiny_llama: Path, echo: Path) -> None:
    with running(Settings(model=str(tiny_llama), chat_template=echo), spawn=EchoProcess) as server:
        response = server.post("/v1/chat/completions", messages=user("a"), tools=TOOLS)
        assert "--tool-parser" in check_error(response, 400, "tools")


# Parsers of plugins


class Shout(ToolParser):
    markers = ("CALL ",)

    def parse(self) -> Parsing[None]:
        while (yield from self.until("CALL ")):
            name = yield from self.word()
            if name == "boom":
                raise RuntimeError("told to")
            if self.begin(name):
                yield from self.arguments()


class Plugin:
    @hookimpl
    def providers(self) -> list[Provider]:
        return [Provider("tool_parser", "shout", lambda: Shout), Provider("tool_parser", "wrong", lambda: 7)]


def test_a_parser_of_a_plugin(tiny_llama: Path, tmp_path: Path) -> None:
    """It is found where it fits the template. What it raises is an error of this request's, which names it."""
    file = tmp_path / "template.jinja"
    file.write_text(ECHO + "{# write CALL name arguments #}")
    settings = Settings(model=str(tiny_llama), chat_template=file)
    with running(settings, extra=[("shout", Plugin())], spawn=EchoProcess) as server:
        (choice,) = ask(server, 'Now CALL add {"a": 1}<|im_end|>')
        assert said(choice) == ("Now", [("add", '{"a": 1}')], "tool_calls")
        boom = {"messages": user("CALL boom now"), "tools": TOOLS}
        response = server.post("/v1/chat/completions", **boom)
        assert check_error(response, 500, None) == "tool parser Shout: RuntimeError: told to"
        last = events(server.post("/v1/chat/completions", **boom, stream=True))[-1]
        assert last["error"]["message"] == "tool parser Shout: RuntimeError: told to"
        assert said(ask(server, "CALL find_it {}<|im_end|>")[0])[1] == [("find_it", "{}")]


def test_errors_are_small(hermes: Running) -> None:
    tools = [{"type": "function", "function": {"name": "b" * 60 + str(i)}} for i in range(500)]
    choice = {"type": "function", "function": {"name": "x" * 10_000}}
    check_error(
        hermes.post("/v1/chat/completions", messages=user("a"), tools=tools, tool_choice=choice), 400, "tool_choice"
    )


def test_deep_tools(hermes: Running) -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"items": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": deep}}}
    (choice,) = ask(hermes, in_hermes([("f", "{}")]) + "<|im_end|>", tools=[tool])
    assert choice["calls"]
    body = json.dumps({"messages": user("a"), "tools": [ADD]}).replace('{"a": {}}', '{"a":' * 5000 + "{}" + "}" * 5000)
    headers = {"Content-Type": "application/json"}
    response = hermes.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400


class Moody(ToolParser):
    @classmethod
    def fits(cls, template: str) -> bool:
        raise KeyError("mood")


def test_parsers_that_cannot_be_had(tiny_llama: Path) -> None:
    plugins = load_plugins([("more", Plugin())])
    tokenizer = open_checkpoint(Settings(model=str(tiny_llama)), plugins).tokenizer()
    with pytest.raises(ConfigError, match=r"^--tool-parser nope: no such tool_parser; available: auto, none, hermes, "):
        select_parser(Settings(tool_parser="nope"), plugins, tokenizer)
    with pytest.raises(PluginError, match="'wrong': its factory gave 7"):
        select_parser(Settings(tool_parser="wrong"), plugins, tokenizer)
    plugins = load_plugins()
    plugins.add(Moods(), "moods")
    with pytest.raises(PluginError, match="tool_parser 'moody': fits: KeyError: 'mood'"):
        select_parser(Settings(), plugins, tokenizer)


class Moods:
    @hookimpl
    def providers(self) -> list[Provider]:
        return [Provider("tool_parser", "moody", lambda: Moody)]
