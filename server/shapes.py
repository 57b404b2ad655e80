"""What the OpenAI routes and those beside them answer, for the API's document. Optional keys are there if asked for."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any, Literal, NotRequired

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from typing_extensions import TypedDict  # typing's own, for pydantic under Python 3.12

from .keys import OPEN

# Errors


class ErrorDetails(TypedDict):
    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: int | str
    """The HTTP status; of API keys, a word."""


class Error(TypedDict):
    error: ErrorDetails


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Error, "description": HTTPStatus(status).phrase} for status in statuses}


ERRORS = _errors(400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 503)
"""Of every route that answers errors so."""
LATE = _errors(504) | {499: {"model": Error, "description": "Aborted"}}
"""Of those that generate, too."""

# Both generating routes


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class RankedToken(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]
FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class Envelope(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class Choice(TypedDict):
    index: int
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class Piece(TypedDict):
    index: int
    finish_reason: FinishReason | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


# Completions


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int]]


class Completion(Envelope):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionPiece(Piece):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChunk(Envelope):
    object: Literal["text_completion"]
    choices: list[CompletionPiece]
    usage: NotRequired[Usage | None]


# Chats


class ChatToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]


class Function(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCall(TypedDict):
    """In a stream, `id`, `type` and the name come with the first piece."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: Function


class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None


class ChatCompletion(Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int]]


class MessageDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatPiece(Piece):
    delta: MessageDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(Envelope):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatPiece]
    usage: NotRequired[Usage | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int]]


# Models


class Permission(TypedDict):
    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Permission]


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


# Tokens


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Detokenized(TypedDict):
    prompt: str


class Span(TypedDict):
    id: int
    text: str
    start: int
    stop: int


class Spans(TypedDict):
    tokenize_response: list[Span]
    templated_text: str


class TokenizerInfo(TypedDict):
    """Beside these, the special tokens by their names."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    chat_template: str | None
    eos_token_ids: list[int]


# Operations


class Version(TypedDict):
    version: str


class Load(TypedDict):
    server_load: int


class Aborted(TypedDict):
    aborted: int


_OURS = {"OpenAI", "TGI"}
"""Tags of routes whose streams end as `_event` says."""
_CHUNKS = {"/v1/completions": CompletionChunk, "/v1/chat/completions": ChatCompletionChunk}


def operation_id(route: APIRoute) -> str:
    """Of its method and path alone, whatever its handler is called: post_v1_chat_completions."""
    method = min(route.methods or ())
    return re.sub(r"\W+", "_", f"{method.lower()} {route.path_format}").strip("_")


def install(app: FastAPI, keys: bool = False) -> None:
    """Make the document of `app` say how streams look, that what is invalid is answered with 400, and what needs one
    of the server's API `keys`."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _amend(generate(), keys)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _amend(document: dict[str, Any], keys: bool) -> None:
    schemas = document["components"]["schemas"]
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if keys and path not in OPEN:
                operation["security"] = [{"key": []}]
            line = operation.get("description", "")
            if line and "\n" not in line and operation["summary"].istitle():  # made of the handler's name
                operation["summary"] = operation.pop("description")
            responses = operation["responses"]
            if "HTTPValidationError" in str(responses.get("422")):  # FastAPI's own, which no route here has
                del responses["422"]
            if path in _CHUNKS and method == "post":
                chunk = TypeAdapter(_CHUNKS[path]).json_schema(ref_template="#/components/schemas/{model}")
                schemas |= chunk.pop("$defs") | {_CHUNKS[path].__name__: chunk}
                responses["200"]["content"]["text/event-stream"] = {
                    "schema": {"$ref": f"#/components/schemas/{_CHUNKS[path].__name__}"}
                }
            # Those of plugins may have neither, and their streams are what they are.
            events, error = (_content(responses.get(status, {})) for status in ("200", "400"))
            stream, wrong = events.get("text/event-stream", {}), error.get("application/json", {})
            if _OURS.intersection(operation.get("tags", ())) and "schema" in stream and "schema" in wrong:
                stream["itemSchema"] = _event(stream.pop("schema"), wrong["schema"])
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)


def _content(response: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = response.get("content", {})
    return content


def _event(chunk: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """Of server-sent events with JSON in them, as OpenAPI 3.2 has it: what is no JSON is an end."""
    content = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [chunk, error]}}
    data = {"type": "string", "anyOf": [content, {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}
