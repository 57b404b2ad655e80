"""Request bodies of the OpenAI dialect. Types are strict, null means default, unknown fields are ignored.

Ranges are checked by `SamplingParams.check`. Values that may be of several types are checked by functions here: a union
of models answers a wrong value with an error for each of its branches and elements.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from framework import InvalidRequest, SamplingParams

from .generation import Ask
from .limits import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_SEQUENCES,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_USER,
)

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_STRING = {"type": "string"}
_RESERVED = {"self", "messages", "add_generation_prompt", "continue_final_message"}
_TOKENS = {"type": "array", "items": {"type": "integer"}}


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode, without lone surrogates") from None
    return value


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}  # bool is not among them


def _prompts(value: object) -> list[str | list[int]]:
    if isinstance(value, str):
        return [_text(value)]
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return [value]
        if len(value) > MAX_SEQUENCES:
            raise ValueError(f"at most {MAX_SEQUENCES} prompts in one request, got {len(value)}")
        if all(isinstance(item, str) for item in value):
            return [_text(item) for item in value]
        if all(_is_tokens(item) for item in value):
            return value
    raise ValueError("must be a string, a list of token ids, or a list of either, and not empty")


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise ValueError(f"must have at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters")
    return [_text(stop) for stop in stops]


def _bias(value: object) -> object:
    """JSON has string keys only."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} token ids, got {len(value)}")
    try:
        return {int(key): bias for key, bias in value.items()}
    except ValueError:
        raise ValueError("must have token ids as keys") from None


def _content(value: object) -> str | None:
    """Text, or text parts joined by newlines."""
    if value is None or isinstance(value, str):
        return value if value is None else _text(value)
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a string or a list of parts")
    for part in value:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("only parts of type 'text', with a 'text', are supported")
    return "\n".join(_text(part["text"]) for part in value)


def _user(value: object) -> object:
    if isinstance(value, str) and len(_text(value)) > MAX_USER:
        raise ValueError(f"at most {MAX_USER} characters, got {len(value)}")
    return value


def _limited(least: int, most: int) -> BeforeValidator:
    """The length of a list, before any of its elements is looked at."""

    def check(value: object) -> object:
        if isinstance(value, list) and not least <= len(value) <= most:
            raise ValueError(f"must have {least} to {most} elements, got {len(value)}")
        return value

    return BeforeValidator(check)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Body):
    """What both routes share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias)] | None = None
    stop: Annotated[
        list[str] | None,
        BeforeValidator(_stops),
        WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": _STRING}, {"type": "null"}]}),
    ] = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True), _limited(0, MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: Int64 | None = None
    """Lower is sooner. Refused where the scheduler would ignore it."""
    tenant: str | None = None
    """Whose share of the service this counts against; left out: `user`, or else the API key. With keys of
    the server's: only the key's name."""
    user: Annotated[str | None, BeforeValidator(_user)] = None
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    extra: dict[str, Any] | None = None
    """Passed on to plugins: they read it as `Request.extra`."""

    def check(self) -> None:
        """What types cannot say. Raises `InvalidRequest`."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream_options needs stream: true")

    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that are set."""
        fields: dict[str, Any] = {name: getattr(self, name, None) for name in SamplingParams.__struct_fields__}
        for name in ("stop", "stop_token_ids"):
            if fields[name] is not None:
                fields[name] = tuple(fields[name])
        return {name: value for name, value in fields.items() if value is not None}

    def ask(self) -> Ask:
        return Ask(
            self.sampling(),
            self.n or 1,
            self.priority or 0,
            self.tenant or "",
            self.cache_salt or "",
            self.extra,
            user=self.user or "",
        )


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    _STRING,
                    {"type": "array", "items": _STRING, "minItems": 1},
                    {**_TOKENS, "minItems": 1},
                    {"type": "array", "items": _TOKENS, "minItems": 1},
                ]
            }
        ),
    ]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise InvalidRequest("suffix", "suffix is not supported")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest(
                "logprobs", "logprobs of an echoed prompt are not supported; leave out echo or logprobs"
            )
        if len(self.prompt) * (self.n or 1) > MAX_SEQUENCES:
            raise InvalidRequest("prompt", f"prompt: at most {MAX_SEQUENCES} prompts times n in one request")


class ChatMessage(BaseModel):
    """Other fields than these reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Annotated[
        str | None,
        PlainValidator(_content),
        WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
    ] = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True), _limited(1, MAX_MESSAGES)]


class Chat(_Body):
    """What becomes a prompt through the chat template."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """What types cannot say. Raises `InvalidRequest`."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message", "continue_final_message excludes add_generation_prompt; leave out one of them"
            )
        for name in _RESERVED & set(self.chat_template_kwargs or ()):
            raise InvalidRequest("chat_template_kwargs", f"chat_template_kwargs: {name} has a field of its own")

    @property
    def size(self) -> int:
        """Characters of all messages."""
        return sum(len(message.content or "") for message in self.messages or ())

    def chat(self) -> list[dict[str, Any]]:
        """The messages, as the template reads them."""
        return [message.model_dump() for message in self.messages or ()]

    def template(self) -> dict[str, Any]:
        """Further arguments of `Tokenizer.render`."""
        variables = dict(self.chat_template_kwargs or {})
        if self.continue_final_message:
            variables |= {"continue_final_message": True, "add_generation_prompt": False}
        elif self.add_generation_prompt is not None:
            variables["add_generation_prompt"] = self.add_generation_prompt
        return variables


class ChatRequest(Chat, GenerationRequest):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def check(self) -> None:
        Chat.check(self)
        GenerationRequest.check(self)
        most = SamplingParams.MAX_LOGPROBS
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= most:
            raise InvalidRequest("top_logprobs", f"top_logprobs must be between 0 and {most}, got {self.top_logprobs}")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs: true")
        if self.tools:
            raise InvalidRequest("tools", "tools are not supported")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise InvalidRequest("response_format", "response_format: only {'type': 'text'} is supported")

    def ask(self) -> Ask:
        names = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return super().ask()._replace(names=names)

    def sampling(self) -> dict[str, Any]:
        fields = super().sampling()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        fields.pop("logprobs", None)
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        return fields


class ChatTokenizeRequest(Chat):
    """`tools` reach the template."""

    model: str | None = None
    messages: Messages
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None

    def check(self) -> None:
        super().check()
        if self.chat_template is not None:
            raise InvalidRequest(
                "chat_template", "chat_template is not supported; start the server with --chat-template FILE"
            )

    def template(self) -> dict[str, Any]:
        return super().template() | ({"tools": self.tools} if self.tools else {})


class TokenizeRequest(ChatTokenizeRequest):
    """Of a prompt or of messages."""

    messages: Messages | None = None  # type: ignore[assignment]
    prompt: Annotated[str, AfterValidator(_text)] | None = None
    add_special_tokens: bool | None = None
    """Left out: true for a prompt, false for a chat, whose template has its own."""
    return_token_strs: bool | None = None

    def check(self) -> None:
        super().check()
        if self.prompt is None and self.messages is None:
            raise InvalidRequest("prompt", "prompt: is required, or else messages")
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequest("messages", "messages and prompt exclude one another; leave out one of them")


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True), _limited(0, MAX_TOKENS)]


class AbortRequest(_Body):
    request_ids: Annotated[list[str], Field(fail_fast=True), _limited(0, MAX_SEQUENCES)]
