"""Request bodies of the OpenAI dialect. Types are strict, null means default, unknown fields are ignored.

Ranges are checked by `SamplingParams.check`. Values that may be of several types are checked by functions here: a union
of models answers a wrong value with an error for each of its branches and elements.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
)

from framework import InvalidRequest, SamplingParams
from framework.errors import quoted
from framework.inputs import Cut

from .fields import (
    Absent,
    AbsentOfChats,
    AbsentOfCompletions,
    Body,
    Count,
    Limited,
    Only,
    Sender,
    Whether,
    check_texts,
    integer,
    number,
    valid_text,
)
from .generation import Ask
from .limits import (
    INLINE_TEXT,
    MAX_ALLOWED,
    MAX_BAD_WORD,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_SEQUENCES,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS,
    USUAL_TOKENS,
)
from .structured import RESPONSE_FORMAT, STRUCTURED_OUTPUTS, structured_outputs
from .tools import ToolFields, as_template, shown

_RESERVED = {"self", "messages", "add_generation_prompt", "continue_final_message"}
_MOST = SamplingParams.MAX_LOGPROBS
TokenId = Annotated[int, integer(minimum=0)]

# How the API's schema says what functions here check
_NULL = {"type": "null"}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {"type": "string", "minLength": 1}
_PROMPTS = {
    "anyOf": [
        _PROMPT,
        _TOKENS,
        *({"type": "array", "items": one, "minItems": 1, "maxItems": MAX_SEQUENCES} for one in (_PROMPT, _TOKENS)),
    ]
}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOPS = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, _NULL]}
_BIASES = {
    "anyOf": [
        {"type": "object", "patternProperties": {"^[0-9]+$": {"type": "number"}}, "additionalProperties": False}
        | {"maxProperties": MAX_BIASES},
        _NULL,
    ]
}
_KEPT = {"type": "integer", "anyOf": [{"const": -1}, {"minimum": 1}]}
_TEXTS = ("text", "refusal")
"""Types of parts that are texts, and the names under which those have them."""
_PART = {
    "anyOf": [
        {"type": "string"},
        *(
            {
                "type": "object",
                "properties": {"type": {"const": kind}, kind: {"type": "string"}},
                "required": ["type", kind],
            }
            for kind in _TEXTS
        ),
    ]
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, _NULL]}


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}  # bool is not among them


def _prompts(value: object) -> list[str | list[int]]:
    if isinstance(value, str):
        return [valid_text(value)]
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return [value]
        if len(value) > MAX_SEQUENCES:
            raise ValueError(f"at most {MAX_SEQUENCES} prompts in one request, got {len(value)}")
        if all(isinstance(item, str) for item in value):
            return [valid_text(item) for item in value]
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
    return [valid_text(stop) for stop in stops]


def _bias(value: object) -> object:
    """JSON has string keys only."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} token ids, got {len(value)}")
    if not all(key.isascii() and key.isdecimal() and len(key) < 20 for key in value):
        raise ValueError("must have token ids as keys: decimal digits, and nothing else")
    found = {int(key): bias for key, bias in value.items()}
    if len(found) < len(value):
        raise ValueError("must have each token id once, however it is written")
    return found


def _content(value: object) -> str | None:
    """Text, or text parts joined by newlines."""
    if value is None or isinstance(value, str):
        return value if value is None else valid_text(value)
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    return "\n".join(valid_text(part if isinstance(part, str) else _text(part)) for part in value)


def _text(part: object) -> str:
    if not isinstance(part, dict):
        raise ValueError("must be a string or a list of parts")
    kind = part.get("type")
    if kind not in _TEXTS:
        what = quoted(kind, 40)
        raise ValueError(f'parts of type {what} are not supported: this server reads "refusal" and "text" only')
    text = part.get(kind)
    if not isinstance(text, str):
        raise ValueError(f'parts of type "{kind}" must have a string as their "{kind}"')
    return text


_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD), AfterValidator(valid_text)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Absent, Sender):
    """What both routes share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, integer(minimum=1)] | None = None
    min_tokens: Annotated[int, integer(minimum=0)] | None = None
    temperature: Annotated[float, number(minimum=0)] | None = None
    top_p: Annotated[float, number(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, integer(minimum=-1)] | None = None
    min_p: Annotated[float, number(minimum=0, maximum=1)] | None = None
    seed: Annotated[int, integer(minimum=-(2**63), maximum=2**63 - 1)] | None = None
    repetition_penalty: Annotated[float, number(exclusiveMinimum=0)] | None = None
    presence_penalty: Annotated[float, number(minimum=-2, maximum=2)] | None = None
    frequency_penalty: Annotated[float, number(minimum=-2, maximum=2)] | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_bias), WithJsonSchema(_BIASES)] = None
    stop: Annotated[list[str] | None, BeforeValidator(_stops), WithJsonSchema(_STOPS)] = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True), Limited(0, MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Without effect: what stands between special tokens is the tokenizer's own to say."""
    add_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True), Limited(1, MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[_BadWord], Field(fail_fast=True), Limited(0, MAX_BAD_WORDS)] | None = None
    prompt_logprobs: Annotated[int, integer(minimum=0, maximum=_MOST)] | None = None
    truncate_prompt_tokens: Annotated[int, WithJsonSchema(_KEPT)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: Annotated[dict[str, Any], RESPONSE_FORMAT] | None = None
    structured_outputs: Annotated[dict[str, Any], STRUCTURED_OUTPUTS] | None = None
    vllm_xargs: dict[str, Any] | None = None
    """`extra`, as vLLM's clients spell it."""

    def check(self) -> None:
        """What types cannot say. Raises `InvalidRequest`."""
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise InvalidRequest("stream_options", "stream_options needs stream: true")
        if self.stream and self.prompt_logprobs:
            raise InvalidRequest(
                "prompt_logprobs", "prompt_logprobs above 0 excludes stream: true; leave out one of them"
            )
        if self.extra and self.vllm_xargs and self.extra != self.vllm_xargs:
            raise InvalidRequest(
                "vllm_xargs", "vllm_xargs is another name of extra, which differs; leave out one of them"
            )
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequest("best_of", f"best_of must be at least n ({n}), got {self.best_of}")
        if self.stream and (self.best_of or n) > n:
            raise InvalidRequest(
                "best_of", "best_of above n excludes stream: true: which are the best is known at the end"
            )

    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that are set."""
        fields: dict[str, Any] = {name: getattr(self, name, None) for name in SamplingParams.__struct_fields__}
        for name in ("stop", "stop_token_ids", "bad_words"):
            if fields[name] is not None:
                fields[name] = tuple(fields[name])
        if self.allowed_token_ids is not None:
            fields["allowed_token_ids"] = tuple(sorted(set(self.allowed_token_ids)))
        fields["structured_outputs"] = structured_outputs(self.response_format, self.structured_outputs)
        return {name: value for name, value in fields.items() if value is not None}

    def sender(self) -> dict[str, Any]:
        return super().sender() | {"extra": self.extra or self.vllm_xargs}

    def ask(self) -> Ask:
        keep = self.truncate_prompt_tokens
        return Ask(
            self.sampling(),
            self.n or 1,
            names={"truncate": "truncate_prompt_tokens"}
            | ({} if self.structured_outputs is not None else {"structured_outputs": "response_format"})
            | ({} if self.extra else {"extra": "vllm_xargs"}),
            best_of=self.best_of or 0,
            truncate=None if keep is None else Cut(keep, self.truncation_side or "left"),
            **self.sender(),
        )


class CompletionRequest(AbsentOfCompletions, GenerationRequest):
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPTS)]
    max_tokens: Annotated[int, integer(minimum=0)] | None = None
    """0, with `echo`: nothing but the prompt, for the sake of its log-probabilities."""
    logprobs: Annotated[Count, integer(minimum=0, maximum=_MOST)] | None = None

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of an echoed prompt are among `logprobs`."""
        return bool(self.echo) and self.logprobs is not None

    def check(self) -> None:
        super().check()
        if len(self.prompt) * max(self.n or 1, self.best_of or 1) > MAX_SEQUENCES:
            raise InvalidRequest("prompt", f"prompt: at most {MAX_SEQUENCES} prompts times n or best_of in one request")

    def sampling(self) -> dict[str, Any]:
        fields = super().sampling()
        if self.scored:
            fields["prompt_logprobs"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
        return fields

    def ask(self) -> Ask:
        ask = super().ask()
        names = {**ask.names, "prompt_logprobs": "logprobs"} if self.prompt_logprobs is None else ask.names
        score = bool(self.echo) and self.max_tokens == 0
        return ask._replace(names=names, score=score, usual_tokens=USUAL_TOKENS)


class ChatMessage(BaseModel):
    """Other fields than these reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, AfterValidator(valid_text)]
    content: Annotated[str | None, PlainValidator(_content), WithJsonSchema(_CONTENT)] = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True), Limited(1, MAX_MESSAGES)]


class Chat(Body):
    """What becomes a prompt through the chat template."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True), Limited(0, MAX_DOCUMENTS)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template; `documents` and `reasoning_effort` are such, too."""
    chat_template: Annotated[
        Any, Only("templates of clients are not run; start the server with --chat-template FILE instead")
    ] = None

    def check(self) -> None:
        """What types cannot say. Raises `InvalidRequest`."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message", "continue_final_message excludes add_generation_prompt; leave out one of them"
            )
        for name in _RESERVED & set(self.chat_template_kwargs or ()):
            raise InvalidRequest("chat_template_kwargs", f"chat_template_kwargs: {name} has a field of its own")
        for name in ("documents", "reasoning_effort", "chat_template_kwargs"):
            check_texts(name, getattr(self, name))

    @property
    def size(self) -> int:
        """Characters that the template reads, about: those of its variables and of further fields of messages are not
        counted, but may be many."""
        messages = self.messages or ()
        uncounted = self.documents or self.chat_template_kwargs or any(message.model_extra for message in messages)
        texts = sum(len(message.role) + len(message.content or "") for message in messages)
        return texts + (INLINE_TEXT + 1 if uncounted else 0)

    def chat(self) -> list[dict[str, Any]]:
        """The messages, as the template reads them."""
        chat = as_template([message.model_dump() for message in self.messages or ()])
        for message in chat[:-1] if self.continue_final_message else chat:
            if message["content"] is None:
                message["content"] = ""  # templates add texts up
        return chat

    def template(self) -> dict[str, Any]:
        """Further arguments of `Tokenizer.render`."""
        variables = dict(self.chat_template_kwargs or {})
        for name in ("documents", "reasoning_effort"):
            if getattr(self, name) is not None:
                variables[name] = getattr(self, name)
        if self.continue_final_message:
            variables |= {"continue_final_message": True, "add_generation_prompt": False}
        elif self.add_generation_prompt is not None:
            variables["add_generation_prompt"] = self.add_generation_prompt
        return variables


class ChatRequest(AbsentOfChats, Chat, ToolFields, GenerationRequest):
    messages: Messages
    max_completion_tokens: Annotated[int, integer(minimum=1)] | None = None
    logprobs: Whether | None = None
    top_logprobs: Annotated[int, integer(minimum=0, maximum=_MOST)] | None = None

    def check(self) -> None:
        Chat.check(self)
        GenerationRequest.check(self)
        most = SamplingParams.MAX_LOGPROBS
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= most:
            raise InvalidRequest("top_logprobs", f"top_logprobs must be between 0 and {most}, got {self.top_logprobs}")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs: true")
        self.check_tools()

    @property
    def prefix(self) -> str:
        """What the answer goes on with, if that is to be returned, too."""
        last = self.messages[-1]
        goes_on = self.continue_final_message or self.add_generation_prompt is False or last.role == "assistant"
        return (last.content or "") if self.echo and goes_on else ""

    @property
    def size(self) -> int:
        return super().size + sum(len(str(tool)) for tool in self.shown())

    def template(self) -> dict[str, Any]:
        return super().template() | ({"tools": tools} if (tools := self.shown()) else {})

    def ask(self) -> Ask:
        ask = super().ask()
        if self.max_completion_tokens is None:
            return ask
        return ask._replace(names={**ask.names, "max_tokens": "max_completion_tokens"})

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

    @property
    def size(self) -> int:
        return super().size + (INLINE_TEXT + 1 if self.tools else 0)

    def template(self) -> dict[str, Any]:
        return super().template() | ({"tools": [shown(tool) for tool in self.tools]} if self.tools else {})


class TokenizeRequest(ChatTokenizeRequest):
    """Of a prompt, of messages, or of `inputs`."""

    messages: Messages | None = None  # type: ignore[assignment]
    prompt: Annotated[str, AfterValidator(valid_text)] | None = None
    add_special_tokens: bool | None = None
    """Left out: true for a prompt, false for a chat, whose template has its own."""
    return_token_strs: bool | None = None
    inputs: Annotated[str, AfterValidator(valid_text)] | None = None
    """A prompt, as TGI's clients send it: the answer then is TGI's, too."""

    def check(self) -> None:
        super().check()
        given = [name for name in ("prompt", "messages", "inputs") if getattr(self, name) is not None]
        if not given:
            raise InvalidRequest("prompt", "prompt: is required, or else messages or inputs")
        if len(given) > 1:
            raise InvalidRequest(given[1], f"{' and '.join(given)} exclude one another; leave out all but one of them")


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True), Limited(0, MAX_TOKENS)]


class AbortRequest(Body):
    request_ids: Annotated[list[str], Field(fail_fast=True), Limited(0, MAX_SEQUENCES)]
