"""Bodies of the TGI dialect: what its requests hold, and the shapes of its answers.

As in the other dialect, types are strict, null means default and unknown fields are ignored. Messages name fields as
TGI's do, because clients show them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict  # typing's own, for pydantic under Python 3.12

from framework import InvalidRequest
from framework.inputs import Cut

from .fields import Body, Limited, Only, Sender, integer, number, valid_text
from .generation import Ask
from .limits import MAX_BEST_OF, MAX_NEW_TOKENS, MAX_STOP_LENGTH, MAX_STOP_SEQUENCES, MAX_STOPS, MAX_TOP_TOKENS
from .structured import COMPACT

_Text = Annotated[str, AfterValidator(valid_text)]
_Stop = Annotated[_Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Stops = Annotated[list[_Stop], Field(fail_fast=True), Limited(0, MAX_STOPS)]

NAMES = {
    "max_tokens": "max_new_tokens",
    "prompt": "inputs",
    "prompt_logprobs": "decoder_input_details",
    "structured_outputs": "grammar",
}
"""How the fields are called here that have other names with us."""


class Grammar(Body):
    """What the output must be: JSON by a schema, or a text that matches a regular expression. `value` is the schema, as
    an object or as text, or the expression; with `json_schema` an object with `schema`."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Any

    def outputs(self) -> dict[str, Any]:
        """As `StructuredOutputs`. Raises `InvalidRequest`."""
        value = self.value
        if self.type == "json_schema" and isinstance(value, dict) and "schema" in value:
            value = value["schema"]
        if self.type == "regex" and not (isinstance(value, str) and value):
            raise InvalidRequest("grammar", "`grammar`: `value` of type regex must be a regular expression")
        if not isinstance(value, str | dict) or not value:
            raise InvalidRequest("grammar", f"`grammar`: `value` of type {self.type} must be a JSON schema")
        if self.type == "regex":
            return {"regex": value}
        return {"json": value, **COMPACT}


class GenerateParameters(Body):
    best_of: Annotated[int, integer(minimum=1, maximum=MAX_BEST_OF)] | None = None
    temperature: Annotated[float, number(exclusiveMinimum=0)] | None = None
    repetition_penalty: Annotated[float, number(exclusiveMinimum=0)] | None = None
    frequency_penalty: Annotated[float, number(minimum=-2, maximum=2)] | None = None
    top_k: Annotated[int, integer(minimum=1)] | None = None
    top_p: Annotated[float, number(exclusiveMinimum=0, exclusiveMaximum=1)] | None = None
    typical_p: Annotated[Any, Only("typical sampling is not supported")] = None
    do_sample: bool | None = None
    max_new_tokens: Annotated[int, integer(minimum=1)] | None = None
    return_full_text: bool | None = None
    stop: _Stops | None = None
    stop_sequences: _Stops | None = None
    """`stop`, as older clients spell it."""
    truncate: Annotated[int, integer(minimum=1)] | None = None
    watermark: Annotated[Any, Only("watermarks are not supported", False)] = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int, integer(minimum=0, maximum=2**64 - 1)] | None = None
    top_n_tokens: Annotated[int, integer(minimum=0, maximum=MAX_TOP_TOKENS)] | None = None
    grammar: Grammar | None = None
    adapter_id: Annotated[Any, Only("adapters are not supported", "")] = None

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn; else the likeliest is taken. A temperature of 1 changes nothing, so it alone does
        not ask for it."""
        return (
            bool(self.do_sample)
            or self.temperature not in (None, 1)
            or self.top_k is not None
            or self.top_p is not None
        )

    @property
    def stops(self) -> tuple[str, ...]:
        return (*(self.stop or ()), *(self.stop_sequences or ()))

    @property
    def detailed(self) -> bool:
        return bool(self.details or self.decoder_input_details)

    def check(self, stream: bool) -> None:
        """What neither types nor `SamplingParams.check` say. Raises `InvalidRequest`."""

        def need(ok: bool, field: str, message: str) -> None:
            if not ok:
                raise InvalidRequest(field, message)

        for field in ("temperature", "repetition_penalty", "top_k", "max_new_tokens", "truncate"):
            value = getattr(self, field)
            need(value is None or value > 0, field, f"`{field}` must be strictly positive")
        need(self.top_p is None or 0 < self.top_p < 1, "top_p", "`top_p` must be > 0.0 and < 1.0")
        penalty = self.frequency_penalty or 0
        need(-2 <= penalty <= 2, "frequency_penalty", "`frequency_penalty` must be >= -2.0 and <= 2.0")
        seed, stops, top = self.seed, self.stops, self.top_n_tokens or 0
        need(seed is None or 0 <= seed < 2**64, "seed", "`seed` must be an unsigned 64-bit integer")
        need(
            len(stops) <= MAX_STOP_SEQUENCES,
            "stop",
            f"`stop` supports up to {MAX_STOP_SEQUENCES} stop sequences. Given: {len(stops)}",
        )
        need(
            0 <= top <= MAX_TOP_TOKENS,
            "top_n_tokens",
            f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_TOKENS}. Given: {top}",
        )
        best_of = 1 if self.best_of is None else self.best_of
        need(0 < best_of <= MAX_BEST_OF, "best_of", f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {best_of}")
        if best_of > 1:
            asked = self.sampled or self.temperature is not None
            need(asked, "best_of", "you must use sampling when `best_of` is > 1")
            need(seed is None, "seed", "`seed` must not be set when `best_of` > 1")
            need(not stream, "best_of", "`best_of` != 1 is not supported when streaming tokens")
        need(
            not (stream and self.decoder_input_details),
            "decoder_input_details",
            "`decoder_input_details` == true is not supported when streaming tokens",
        )

    def sampling(self, seed: int | None, logprobs: bool) -> dict[str, Any]:
        """The fields of `SamplingParams`. What the checkpoint suggests is not among the defaults here. seed: of the
        draw; logprobs: whether they are needed."""
        fields = {
            "temperature": (self.temperature or 1.0) if self.sampled else 0.0,
            "top_p": self.top_p or 1.0,
            "top_k": self.top_k or 0,
            "min_p": 0.0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "frequency_penalty": self.frequency_penalty,
            "seed": seed if seed is None or seed < 2**63 else seed - 2**64,
            "max_tokens": self.max_new_tokens,
            "stop": self.stops,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,  # stop sequences are found in them, too; `tgi` leaves them out
            "logprobs": (self.top_n_tokens or 0) if logprobs else None,
            "prompt_logprobs": 0 if self.decoder_input_details else None,
            "structured_outputs": self.grammar.outputs() if self.grammar is not None else None,
        }
        return {name: value for name, value in fields.items() if value is not None}


class GenerateRequest(Sender):
    inputs: _Text
    parameters: GenerateParameters | None = None
    stream: bool | None = None

    def ask(self, seed: int | None, stream: bool) -> Ask:
        """seed: of the draw. Raises `InvalidRequest`."""
        parameters = self.parameters or GenerateParameters()
        parameters.check(stream)
        best_of = parameters.best_of or 1
        fields = parameters.sampling(seed, stream or parameters.detailed or best_of > 1)
        cut = None if parameters.truncate is None else Cut(parameters.truncate)
        return Ask(fields, names=NAMES, best_of=best_of, truncate=cut, usual_tokens=MAX_NEW_TOKENS, **self.sender())


class BenchmarkRequest(GenerateParameters, Sender):
    """`inputs` with `parameters`, or `prompt` with parameters beside it: how small benchmark clients ask. Those give
    temperature 0 or `do_sample` false for greedy decoding, and leave nothing out with `top_p` 1."""

    inputs: _Text | None = None
    parameters: GenerateParameters | None = None
    stream: bool | None = None
    prompt: _Text | None = None

    @property
    def flat(self) -> bool:
        return self.inputs is None and self.prompt is not None

    def request(self) -> GenerateRequest:
        """In the other form. Raises `InvalidRequest`."""
        sender = {name: getattr(self, name) for name in Sender.model_fields}
        if not self.flat:
            if self.prompt is not None:
                raise InvalidRequest("prompt", "`prompt` and `inputs` exclude one another; leave out one of them")
            if self.inputs is None:
                raise InvalidRequest("inputs", "`inputs` is required, or else `prompt`")
            return GenerateRequest(inputs=self.inputs, parameters=self.parameters, stream=self.stream, **sender)
        assert self.prompt is not None
        values = {name: getattr(self, name) for name in GenerateParameters.model_fields}
        if values["top_p"] == 1:
            values["top_p"] = None
        if self.do_sample is False or self.temperature == 0:
            values |= dict.fromkeys(("do_sample", "temperature", "top_p", "top_k"))
        elif self.temperature is not None:
            values["do_sample"] = True
        return GenerateRequest(
            inputs=self.prompt, parameters=GenerateParameters(**values), stream=self.stream, **sender
        )


# Answers


class PrefillToken(TypedDict):
    id: int
    text: str
    logprob: float | None


class Token(TypedDict):
    id: int
    text: str
    logprob: float
    special: bool


FinishReason = Literal["length", "eos_token", "stop_sequence"]


class StreamDetails(TypedDict):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class SequenceDetails(TypedDict):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    """Of the draw: null if nothing was drawn."""
    prefill: list[PrefillToken]
    """Of the prompt: empty unless `decoder_input_details`."""
    tokens: list[Token]
    top_tokens: NotRequired[list[list[Token]]]


class BestOfSequence(SequenceDetails):
    generated_text: str


class Details(SequenceDetails):
    best_of_sequences: list[BestOfSequence] | None


class GenerateResponse(TypedDict):
    generated_text: str
    details: NotRequired[Details]


class BenchmarkResponse(TypedDict):
    generated_text: str
    num_output_tokens: int
    total_time_s: float


class StreamResponse(TypedDict):
    index: int
    token: Token
    top_tokens: NotRequired[list[Token]]
    generated_text: str | None
    details: StreamDetails | None


class ErrorResponse(TypedDict):
    error: str
    error_type: str


class Info(TypedDict):
    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_input_length: int
    max_total_tokens: int
    max_batch_total_tokens: int
    max_batch_size: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
