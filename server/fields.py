"""Types of fields: what a value must be, and how the API's schema says it.

Ranges that `SamplingParams.check` knows are only told here: a value out of range gets its words.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from framework import InvalidRequest
from framework.inputs import MAX_NAME, MAX_SALT

from .limits import MAX_REQUEST_ID, MAX_SEQUENCES, MAX_USER

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_NAME = WithJsonSchema({"type": "string", "maxLength": MAX_NAME})
_SALT = WithJsonSchema({"type": "string", "maxLength": MAX_SALT})
_USER = {"anyOf": [{"type": "string", "maxLength": MAX_USER}, {"type": "null"}]}
REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID}}}")


def integer(**bounds: int) -> WithJsonSchema:
    """Tells the range of an integer: minimum, maximum."""
    return WithJsonSchema({"type": "integer", **bounds})


def number(**bounds: float) -> WithJsonSchema:
    """Tells the range of a number: minimum, maximum, exclusiveMinimum."""
    return WithJsonSchema({"type": "number", **bounds})


def _request_id(value: str) -> str:
    if not REQUEST_ID.fullmatch(value):
        raise ValueError(f"must be 1 to {MAX_REQUEST_ID} printable characters of ASCII, without spaces")
    return value


RequestId = Annotated[
    str, AfterValidator(_request_id), WithJsonSchema({"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"})
]


def _count(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number of likeliest tokens; true and false are for /v1/chat/completions")
    return value


def _whether(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError("must be true or false; the number of likeliest tokens is top_logprobs")
    return value


Count = Annotated[int, BeforeValidator(_count)]
Whether = Annotated[bool, BeforeValidator(_whether)]
"""`logprobs` is a number in one route and a boolean in the other: whoever confuses them is told."""


class Limited:
    """The length of a list, checked before any of its elements is looked at."""

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "minItems": self._least, "maxItems": self._most}

    def _check(self, value: object) -> object:
        if isinstance(value, list) and not self._least <= len(value) <= self._most:
            raise ValueError(f"must have {self._least} to {self._most} elements, got {len(value)}")
        return value


class Only:
    """The type of a field that asks for what is not there: any value but the neutral ones is refused, and `why` says
    so. null is always neutral."""

    def __init__(self, why: str, *neutral: Any) -> None:
        self._why = why
        self.neutral = neutral

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.neutral]}

    def _check(self, value: object) -> object:
        if value is not None and not any(value == one and type(value) is type(one) for one in self.neutral):
            raise ValueError(f"{self._why}; leave it out")
        return value


def valid_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode, without lone surrogates") from None
    return value


def check_texts(where: str, value: object) -> None:
    """Of a value of JSON every text. Raises `InvalidRequest` naming `where` it stands."""
    try:
        valid_text(json.dumps(value, ensure_ascii=False))
    except ValueError as error:
        raise InvalidRequest(where, f"{where} {error}") from None
    except RecursionError:
        raise InvalidRequest(where, f"{where} is nested too deeply") from None


def _user(value: object) -> object:
    if isinstance(value, str) and len(valid_text(value)) > MAX_USER:
        raise ValueError(f"at most {MAX_USER} characters, got {len(value)}")
    return value


def _integers(value: Any, depth: int = 2) -> Any:
    """Whole numbers as integers, in lists of numbers and lists of these, too: as far as such have a use."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and depth:
        some = {float} <= set(map(type, value)) <= {int, float}
        if some or len(value) <= MAX_SEQUENCES:
            return [_integers(one, depth - 1) for one in value]
    return value


class Body(BaseModel):
    """In JSON 4.0 is an integer. Objects within stay as they are: they are for plugins, templates and grammars."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    @model_validator(mode="wrap")
    @classmethod
    def _whole(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(value)
        except ValidationError:  # only then it is looked for: it costs nobody else anything
            if not isinstance(value, dict):
                raise
            return handler({name: _integers(one) for name, one in value.items()})


class Sender(Body):
    """Who asks, and what concerns the way to the engine: alike in every dialect."""

    request_id: RequestId | None = None
    """Instead of the X-Request-Id, where there is no such header."""
    priority: Int64 | None = None
    """Lower is sooner. Refused where the scheduler would ignore it."""
    tenant: Annotated[str, _NAME] | None = None
    """Whose share of the service this counts against; left out: `user`, or else the API key. With keys of
    the server's: only the key's name."""
    user: Annotated[str | None, BeforeValidator(_user), WithJsonSchema(_USER)] = None
    cache_salt: Annotated[str, _SALT] | None = None
    """Only requests with the same salt share cached prefixes."""
    extra: dict[str, Any] | None = None
    """Passed on to plugins: they read it as `Request.extra`."""

    def sender(self) -> dict[str, Any]:
        """As fields of `Ask`."""
        return {
            "priority": self.priority or 0,
            "tenant": self.tenant or "",
            "cache_salt": self.cache_salt or "",
            "extra": self.extra,
            "user": self.user or "",
        }


_GUIDED = "has become part of structured_outputs"


class Absent(BaseModel):
    """What clients of other servers may ask for, and would miss in the output if it were ignored."""

    guided_json: Annotated[Any, Only(_GUIDED)] = None
    guided_regex: Annotated[Any, Only(_GUIDED)] = None
    guided_choice: Annotated[Any, Only(_GUIDED)] = None
    guided_grammar: Annotated[Any, Only(_GUIDED)] = None
    guided_json_object: Annotated[Any, Only(_GUIDED, False)] = None
    guided_decoding_backend: Annotated[Any, Only(_GUIDED)] = None
    guided_whitespace_pattern: Annotated[Any, Only(_GUIDED)] = None
    use_beam_search: Annotated[Any, Only("beam search is not supported", False)] = None
    length_penalty: Annotated[Any, Only("is for beam search, which is not supported", 1, 1.0)] = None
    logprob_token_ids: Annotated[Any, Only("log-probabilities of chosen tokens are not supported", [])] = None
    repetition_detection: Annotated[Any, Only("is not supported")] = None
    thinking_token_budget: Annotated[Any, Only("is not supported", -1)] = None
    watermarking: Annotated[Any, Only("watermarks are not supported", False)] = None
    prompt_embeds: Annotated[Any, Only("embeddings as prompts are not supported")] = None
    kv_transfer_params: Annotated[Any, Only("transfer of KV caches is not supported")] = None
    ec_transfer_params: Annotated[Any, Only("transfer of encoder caches is not supported")] = None
    custom_logit_processor: Annotated[Any, Only("is not supported: logits processors are plugins here")] = None
    return_token_offsets: Annotated[Any, Only("is not supported: text_offset is among the logprobs", False)] = None
    return_prompt_text: Annotated[Any, Only("is not supported: use echo", False)] = None
    mm_payload: Annotated[Any, Only("only text is read", {})] = None
    return_hidden_states: Annotated[Any, Only("hidden states are not supported", False)] = None
    lora_path: Annotated[Any, Only("adapters are not supported")] = None
    lora_request: Annotated[Any, Only("adapters are not supported")] = None
    adapter_id: Annotated[Any, Only("adapters are not supported")] = None


class AbsentOfCompletions(Absent):
    suffix: Annotated[Any, Only("is not supported: the model continues prompts only", "")] = None


_TOOLS = "is out of date: use tools and tool_choice"


class AbsentOfChats(Absent):
    functions: Annotated[Any, Only(_TOOLS, [])] = None
    function_call: Annotated[Any, Only(_TOOLS, "none")] = None
    modalities: Annotated[Any, Only("only text is generated", [], ["text"])] = None
    audio: Annotated[Any, Only("only text is generated")] = None
    mm_processor_kwargs: Annotated[Any, Only("only text is read", {})] = None
    media_io_kwargs: Annotated[Any, Only("only text is read", {})] = None
    web_search_options: Annotated[Any, Only("there is no web search")] = None
    store: Annotated[Any, Only("nothing is stored", False)] = None
