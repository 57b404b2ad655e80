"""Tool parsers: how families of models write the calls of tools."""

from __future__ import annotations

from collections.abc import Iterable

from framework import Provider, ToolParser, hookimpl


def _hermes() -> type[ToolParser]:
    from .hermes import Hermes

    return Hermes


def _llama3_json() -> type[ToolParser]:
    from .llama import Llama3Json

    return Llama3Json


def _mistral() -> type[ToolParser]:
    from .mistral import Mistral

    return Mistral


@hookimpl
def providers() -> Iterable[Provider]:
    return [
        Provider(
            "tool_parser", "hermes", _hermes, summary="<tool_call>{...}</tool_call>: Hermes, Qwen 2.5 and 3, SmolLM2"
        ),
        Provider("tool_parser", "mistral", _mistral, summary="[TOOL_CALLS], with an array or with name[ARGS]{...}"),
        Provider("tool_parser", "llama3_json", _llama3_json, summary="a bare JSON object: Llama 3.1, 3.2 and 3.3"),
    ]
