"""Tools of a chat: what clients may say of them, and what the model is shown."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
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

from framework import InvalidRequest
from framework.errors import brief, quoted

from .fields import check_texts, valid_text
from .limits import MAX_INPUT, MAX_TOOL_BYTES, MAX_TOOL_CALLS, MAX_TOOLS

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NAMES = {"type": "string", "pattern": f"^{_NAME.pattern}$"}
_OBJECTS = {"type": "object", "properties": {"type": {"const": "object"}}}
_COUNT = Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)
_CHOICES = ("none", "auto", "required")
_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": _NAMES}, "required": ["name"]},
    },
    "required": ["function"],
}


# What the client says


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("must have 1 to 64 letters, digits, _, - and .")
    return value


def _parameters(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        raise ValueError('must be the schema of an object: {"type": "object", "properties": ...}')
    return value


class Function(BaseModel):
    """Further keys reach the chat template."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Annotated[str, AfterValidator(_name), WithJsonSchema(_NAMES)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_parameters), WithJsonSchema(_OBJECTS)] | None = None
    strict: bool | None = None

    def wanted(self, strict: bool) -> dict[str, Any]:
        """The schema of its arguments; of any, unless it is `strict` by itself or here."""
        if not (strict or self.strict):
            return {"type": "object"}
        none = {"properties": {}, "additionalProperties": False}
        return {"type": "object", **(none if self.parameters is None else self.parameters)}


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"] = "function"
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
        valid_text(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if size > MAX_TOOL_BYTES:
        raise ValueError(f"must have at most {MAX_TOOL_BYTES} bytes, got {size}")
    return value


def _unique(tools: list[Tool]) -> list[Tool]:
    for name, count in Counter(tool.function.name for tool in tools).items():
        if count > 1:
            raise ValueError(f"the name {quoted(name)} is given twice; each tool needs its own")
    return tools


class ToolChoice(NamedTuple):
    mode: str
    """One of `_CHOICES`, or "named"."""
    name: str = ""


def _choice(value: Any) -> ToolChoice | None:
    match value:
        case None:
            return None
        case str() if value in _CHOICES:
            return ToolChoice(value)
        case {"function": {"name": str(name)}} if value.get("type", "function") == "function":
            return ToolChoice("named", name)
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


class ToolFields(BaseModel):
    """The fields of a chat request that are about tools."""

    tools: Annotated[list[Tool], _COUNT, BeforeValidator(_sized), AfterValidator(_unique)] | None = None
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
            raise InvalidRequest("tool_choice", f"tool_choice: {quoted(self.choice.name)} is not in tools: {known}")

    def shown(self) -> list[dict[str, Any]]:
        """The tools that the model is told of: none where it may not call them."""
        return [] if self.choice.mode == "none" else [shown(tool.sent) for tool in self.tools or ()]


# What the model is shown


def shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """As chat templates print it: without nulls, which clients send for what is absent, and `strict`, which is ours."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return dict(tool)
    function = {key: value for key, value in function.items() if value is not None and key != "strict"}
    return {"type": "function", **tool, "function": function}


def as_template(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: arguments of calls are objects, which clients send as text, and results
    have the name of the function, which clients leave out. Raises `InvalidRequest`."""
    names: dict[str, str] = {}
    messages = []
    for i, sent in enumerate(chat):
        where = f"messages.{i}"
        for name in sent.keys() - {"role", "content"}:  # these were checked as they came
            check_texts(where, name)
            check_texts(f"{where}.{brief(name, MAX_INPUT)}", sent[name])
        message = _message(sent, where)
        for call in message.get("tool_calls") or ():
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        id = message.get("tool_call_id")
        if isinstance(id, str) and id in names and message.get("name") is None:
            message = {**message, "name": names[id]}
        messages.append(message)
    return messages


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
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
                where, f'{where} must be {{"id": ..., "type": "function", "function": {{"name": ...}}}}'
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
