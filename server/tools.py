"""Tools of a chat: what the client may say of them, what the model is shown, and its calls in the client's words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from framework import ConfigError, InvalidRequest, Parsing, PluginError, Tokenizer, ToolDelta, ToolParser
from framework.errors import brief
from framework.registry import Plugins
from framework.settings import Settings

from .limits import MAX_INPUT, MAX_TOOL_BYTES, MAX_TOOL_CALLS, MAX_TOOLS

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_CHOICES = ("none", "auto", "required")
_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}


# What the client says


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("must have 1 to 64 letters, digits, '_', '-' and '.'")
    return value


def _parameters(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None and value.get("type", "object") != "object":
        raise ValueError("must be the schema of an object: {'type': 'object', 'properties': ...}")
    return value


class Function(BaseModel):
    """Further keys reach the chat template."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Annotated[str, AfterValidator(_name)]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_parameters)] = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"]
    function: Function
    _sent: dict[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = handler(value)
        tool._sent = value
        return tool

    @property
    def sent(self) -> dict[str, Any]:
        """As the client wrote it."""
        return self._sent


def _sized(value: object) -> object:
    """Before any of it is looked at."""
    if isinstance(value, list) and not 1 <= len(value) <= MAX_TOOLS:
        raise ValueError(f"must have 1 to {MAX_TOOLS} elements, got {len(value)}; leave it out for none")
    try:
        size = len(json.dumps(value))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if size > MAX_TOOL_BYTES:
        raise ValueError(f"must have at most {MAX_TOOL_BYTES} bytes, got {size}")
    return value


def _unique(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the name {name!r} is given twice; each tool needs its own")
    return tools


class ToolChoice(NamedTuple):
    mode: str
    """One of `_CHOICES`, or "named"."""
    name: str = ""


def _choice(value: object) -> ToolChoice | None:
    match value:
        case None:
            return None
        case str() if value in _CHOICES:
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("named", name)
    raise ValueError("must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}")


class ToolFields(BaseModel):
    """The fields of a chat request that are about tools."""

    tools: Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(_sized), AfterValidator(_unique)] | None = None
    tool_choice: Annotated[
        ToolChoice | None,
        PlainValidator(_choice),
        WithJsonSchema({"anyOf": [{"enum": list(_CHOICES)}, _FUNCTION, {"type": "null"}]}),
    ] = None
    parallel_tool_calls: bool | None = None

    @property
    def choice(self) -> ToolChoice:
        return self.tool_choice or ToolChoice("auto" if self.tools else "none")

    def check_tools(self) -> None:
        """What types cannot say. Raises `InvalidRequest`."""
        names = [tool.function.name for tool in self.tools or ()]
        if not names and self.choice.mode != "none":
            raise InvalidRequest("tool_choice", "tool_choice needs tools")
        if self.choice.mode == "named" and self.choice.name not in names:
            known = brief(", ".join(names), MAX_INPUT)
            raise InvalidRequest(
                "tool_choice", f"tool_choice: {brief(self.choice.name, 64)!r} is not in tools: {known}"
            )

    def shown(self) -> list[dict[str, Any]]:
        """The tools that the model is told of: none where it may not call them."""
        return [] if self.choice.mode == "none" else [shown(tool.sent) for tool in self.tools or ()]


# What the model is shown


def shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """As chat templates print it: without nulls, which clients send for what is absent, and `strict`, which is ours."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return dict(tool)
    return {**tool, "function": {k: v for k, v in function.items() if v is not None and k != "strict"}}


def as_template(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message as chat templates expect it: arguments of calls are objects, which clients send as text. Raises
    `InvalidRequest`."""
    calls = message.get("tool_calls")
    if calls is None:
        return message
    where += ".tool_calls"
    if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
        raise InvalidRequest(where, f"{where} must be a list of at most {MAX_TOOL_CALLS} calls")
    message = {key: value for key, value in message.items() if key != "tool_calls"}
    if calls:
        message["tool_calls"] = [_call(call, f"{where}.{i}") for i, call in enumerate(calls)]
    return message


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(), **rest} as function} if (call.get("type") or "function") == "function":
            arguments = rest.get("arguments") or {}
        case _:
            raise InvalidRequest(
                where, f"{where} must be {{'id': ..., 'type': 'function', 'function': {{'name': ...}}}}"
            )
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        where += ".function.arguments"
        raise InvalidRequest(where, f"{where} must be a JSON object, written as a string")
    return {**call, "function": {**function, "arguments": arguments}}


# Its calls


def select_parser(settings: Settings, plugins: Plugins, tokenizer: Tokenizer) -> type[ToolParser] | None:
    """The parser that --tool-parser names; for "auto" the first that fits the chat template, or None.

    Raises `ConfigError` for an unknown name.
    """
    name = settings.tool_parser
    if name != "auto":
        return Verbatim if name == "none" else _created(plugins, name, settings)
    template = tokenizer.tool_template or ""
    for provider in plugins.providers("tool_parser"):
        parser = _created(plugins, provider.name, settings)
        if parser.fits(template):
            return parser
    return None


def _created(plugins: Plugins, name: str, settings: Settings) -> type[ToolParser]:
    made = plugins.create("tool_parser", name, settings=settings)
    if not (isinstance(made, type) and issubclass(made, ToolParser)):
        raise ConfigError(f"--tool-parser {name}: its factory gave {made!r}, which is no subclass of ToolParser")
    return made


class Verbatim(ToolParser):
    """Everything is content."""

    def parse(self) -> Parsing[None]:
        yield from ()


class _Named(ToolParser):
    """The text is the arguments of the only tool there is."""

    def parse(self) -> Parsing[None]:
        if (yield from self.peek()):
            self.begin(next(iter(self.names)))
            yield from self.arguments()


class _Array(ToolParser):
    """[{"name": ..., "parameters": {...}}, ...]"""

    def parse(self) -> Parsing[None]:
        if (yield from self.skip("[")):
            while (yield from self.call()) and (yield from self.skip(",")):
                pass
            yield from self.skip("]")


class Calls:
    """What the text of one choice says: content and calls, in OpenAI's words."""

    def __init__(self, parser: ToolParser, parallel: bool) -> None:
        self._parser = parser
        self._parallel = parallel
        self._content: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments

    def push(self, text: str, finished: bool) -> list[dict[str, Any]]:
        """What is new, as `delta`s of chunks."""
        try:
            pieces = self._parser.push(text)
            if finished:
                pieces += self._parser.finish()
        except Exception as error:  # a plugin may raise anything
            name = type(self._parser).__name__
            raise PluginError(f"tool parser {name}: {type(error).__name__}: {error}", name) from error
        deltas = [delta for piece in pieces for delta in self._deltas(piece)]
        if finished and not self._calls and not self._content:
            deltas.append({"content": ""})
        return deltas

    def _deltas(self, piece: ToolDelta) -> Iterator[dict[str, Any]]:
        if piece.call is None:
            self._content.append(piece.text)
            yield {"content": piece.text}
            return
        if piece.call and not self._parallel:
            return
        if piece.name is not None:
            id = self._parser.call_id()
            self._calls.append((id, piece.name, []))
            function = {"name": piece.name, "arguments": ""}
            yield {"tool_calls": [{"index": piece.call, "id": id, "type": "function", "function": function}]}
        if piece.text:
            self._calls[piece.call][2].append(piece.text)
            yield {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}

    @property
    def found(self) -> bool:
        """Whether there is any call so far."""
        return bool(self._calls)

    @property
    def message(self) -> dict[str, Any]:
        content = "".join(self._content)
        if not self._calls:
            return {"content": content}
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": "".join(parts)}}
            for id, name, parts in self._calls
        ]
        return {"content": content or None, "tool_calls": calls}


class ToolUse:
    """The tools of one request: what its answers are read by. Raises `InvalidRequest` where they cannot be served."""

    def __init__(self, fields: ToolFields, parser: type[ToolParser] | None, tokenizer: Tokenizer) -> None:
        """`parser`: the one of `select_parser`."""
        if not tokenizer.takes_tools:
            raise InvalidRequest(
                "tools",
                "tools: the chat template of this model has no place for tools; start the server with --chat-template "
                "FILE, or leave them out",
            )
        mode, name = fields.choice
        if mode == "auto" and parser is None:
            raise InvalidRequest(
                "tools",
                "tools: how this model writes calls is not known here; start the server with --tool-parser NAME, or "
                "set tool_choice to required, to none or to a function",
            )
        self._named = mode == "named"
        self._names = [name] if name else [tool.function.name for tool in fields.tools or ()]
        self._parser = {"named": _Named, "required": _Array}.get(mode, parser) or Verbatim
        self._parallel = fields.parallel_tool_calls is not False

    @property
    def keep(self) -> Sequence[str]:
        """Special tokens that have to be in the text."""
        return self._parser.markers

    def calls(self) -> Calls:
        """For one choice."""
        return Calls(self._parser(self._names), self._parallel)

    def reason(self, calls: Calls, reason: str | None) -> str | None:
        """Why a choice ended, as clients know it."""
        return "tool_calls" if reason == "stop" and calls.found and not self._named else reason
