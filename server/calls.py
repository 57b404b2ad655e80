"""Calls of tools in what a model writes: which parser finds them, how clients are told, how they are made to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from framework import (
    InvalidRequest,
    Parsing,
    PluginError,
    StructuredOutputs,
    Tokenizer,
    ToolDelta,
    ToolParser,
)
from framework.registry import Plugins
from framework.settings import Settings

from .tools import ToolFields


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
        try:
            fits = parser.fits(template)
        except Exception as error:  # a plugin may raise anything
            message = f"tool_parser {provider.name!r}: fits: {type(error).__name__}: {error}"
            raise PluginError(message, provider.name) from error
        if fits:
            return parser
    return None


def _created(plugins: Plugins, name: str, settings: Settings) -> type[ToolParser]:
    made = plugins.create("tool_parser", name, settings=settings)
    if not (isinstance(made, type) and issubclass(made, ToolParser)):
        raise PluginError(f"tool_parser {name!r}: its factory gave {made!r}, which is no subclass of ToolParser", name)
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
    """[{"name": ..., "parameters": {...}}, ...]: where a call has to be made, and nobody knows the model's own form."""

    separator = ", "

    @classmethod
    def spelling(cls, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "parameters": ', "}"

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


def check_takes_tools(tokenizer: Tokenizer) -> None:
    """Raise `InvalidRequest` where the chat template would drop them."""
    if not tokenizer.takes_tools:
        raise InvalidRequest(
            "tools",
            "tools: the chat template of this model has no place for tools; start the server with --chat-template "
            "FILE, or leave them out",
        )


class ToolUse:
    """The tools of one request: what its answers are read by. Raises `InvalidRequest` where they cannot be served."""

    def __init__(self, fields: ToolFields, parser: type[ToolParser] | None, tokenizer: Tokenizer) -> None:
        """`parser`: the one of `select_parser`."""
        check_takes_tools(tokenizer)
        mode, name = fields.choice
        if mode == "auto" and parser is None:
            raise InvalidRequest(
                "tools",
                "tools: how this model writes calls is not known here; start the server with --tool-parser NAME, or "
                "set tool_choice to required, to none or to a function",
            )
        self._mode = mode
        self._functions = [tool.function for tool in fields.tools or () if name in ("", tool.function.name)]
        self._parallel = fields.parallel_tool_calls is not False
        if mode == "required" and (parser is None or parser.spelling("") is None):
            parser = _Array
        self._parser = _Named if mode == "named" or parser is None else parser

    @property
    def keep(self) -> Sequence[str]:
        """Special tokens that have to be in the text."""
        return self._parser.markers

    def calls(self) -> Calls:
        """For one choice."""
        return Calls(self._parser([function.name for function in self._functions]), self._parallel)

    def structured(self, asked: StructuredOutputs | None) -> StructuredOutputs | None:
        """What the output must be, where the request asks for `asked` beside. Raises `InvalidRequest`."""
        if self._mode in ("named", "required"):
            if asked is not None:
                raise InvalidRequest(
                    "tool_choice", f"tool_choice: {self._mode} excludes another form of the output; leave out one"
                )
            if self._mode == "named":
                return StructuredOutputs(json=self._functions[0].wanted(True))
            form = self._form(all_strict=True)
            if self._parser is _Array:
                form = {"type": "sequence", "elements": [_constant("["), form, _constant("]")]}
            return StructuredOutputs(structural_tag={"format": form})
        if self._parser.spelling("") is None:
            return asked
        if asked is not None and (asked.json_object or isinstance(asked.json, dict)):
            content = {"type": "json_schema", "json_schema": {"type": "object"} if asked.json is None else asked.json}
            form = {"type": "or", "elements": [content, self._form()]}
            return msgspec.structs.replace(asked, json=None, json_object=False, structural_tag={"format": form})
        if asked is None and any(function.strict for function in self._functions):
            return StructuredOutputs(structural_tag={"format": self._triggered()})
        return asked

    def _tags(self, all_strict: bool) -> list[dict[str, Any]]:
        tags = []
        for function in self._functions:
            begin, end = self._parser.spelling(function.name) or ("", "")
            content = {"type": "json_schema", "json_schema": function.wanted(all_strict)}
            tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
        return tags

    def _form(self, all_strict: bool = False) -> dict[str, Any]:
        """One call or, if they are allowed, several, and nothing else: as a format of structural tags."""
        return {
            "type": "tags_with_separator",
            "tags": self._tags(all_strict),
            "separator": self._parser.separator,
            "at_least_one": True,
            "stop_after_first": not self._parallel,
        }

    def _triggered(self) -> dict[str, Any]:
        """Any text, and calls from where one begins."""
        tags = self._tags(False)
        name, begin = self._functions[0].name, tags[0]["begin"]
        trigger = next((each for each in self._parser.markers if begin.startswith(each)), begin[: begin.find(name)])
        return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not self._parallel}

    def reason(self, calls: Calls, reason: str | None) -> str | None:
        """Why a choice ended, as clients know it."""
        return "tool_calls" if reason == "stop" and calls.found and self._mode != "named" else reason


def _constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
