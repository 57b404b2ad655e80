"""The TGI dialect: /generate, /generate_stream, / and /info, as text-generation-inference answers them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.client import responses
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from framework import InvalidRequest, Rejected, __version__
from framework.detokenizer import Delta
from framework.messages import seed_of

from .body import JsonRoute
from .errors import Problem
from .generation import Ask, Choice, Generation, Serving, route
from .limits import MAX_BEST_OF, MAX_SEQUENCES, MAX_STOP_SEQUENCES
from .scores import FLOOR
from .sse import Reply
from .tgi_schemas import (
    BenchmarkRequest,
    BenchmarkResponse,
    BestOfSequence,
    ErrorResponse,
    FinishReason,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
    Info,
    PrefillToken,
    SequenceDetails,
    StreamResponse,
    Token,
)

PATHS = frozenset({"/", "/generate", "/generate_stream", "/info"})
"""Whoever asks for these expects errors in this form."""

_SPELT = {
    400: (422, "validation", "Input validation error: "),
    415: (415, "validation", "Input validation error: "),
    429: (429, "overloaded", "Model is overloaded: "),
    499: (500, "incomplete_generation", "Incomplete generation: "),
    500: (424, "generation", "Request failed during generation: "),
    503: (503, "healthcheck", "unhealthy: "),
    504: (504, "incomplete_generation", "Incomplete generation: "),
}
"""By the status that a problem has elsewhere: status, `error_type`, and how the message begins."""


def spell(problem: Problem) -> tuple[int, ErrorResponse]:
    """{error, error_type}."""
    phrase = responses.get(problem.status, "error").lower().replace(" ", "_")
    status, kind, begin = _SPELT.get(problem.status, (problem.status, phrase, ""))
    if problem.status == 400 and problem.field in (None, "Content-Type"):  # no JSON at all
        status = 400 if problem.field is None else 415
    return status, {"error": begin + problem.message, "error_type": kind}


_EVENTS = {"text/event-stream": {"schema": {"$ref": "#/components/schemas/StreamResponse"}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": meaning,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
    }
    for status, meaning in (
        (400, "The body is no JSON object"),
        (401, "No API key of this server's"),
        (403, "`tenant` is not the name of the API key"),
        (405, "Another method"),
        (408, "The request came too slowly"),
        (413, "The body is too large"),
        (415, "The body is not said to be JSON, or is compressed"),
        (422, "A field is wrong, or asks for what there is not"),
        (424, "Generating failed"),
        (429, "The queue is full"),
        (431, "The headers are too large"),
        (500, "The request was ended by somebody else"),
        (503, "The engine is gone, or the server is ending"),
        (504, "The time of the request is over"),
    )
}


class _Events(JSONResponse):
    """For the documentation: `Reply` is what is sent."""

    media_type = "text/event-stream"


class Route(JsonRoute):
    """Of every route whose errors are spelt as TGI's."""

    spell = staticmethod(spell)


class _Answer:
    """How a sequence looks as JSON, and as events: one for each token."""

    done = b""

    def __init__(self, serving: Serving, generation: Generation, request: GenerateRequest) -> None:
        self.serving = serving
        self.generation = generation
        self.request = request
        self.parameters = request.parameters or GenerateParameters()
        seed = secrets.randbits(64) if self.parameters.seed is None else self.parameters.seed
        self._seed = seed if self.parameters.sampled else None
        self._prefix = request.inputs if self.parameters.return_full_text else ""
        self._count = 0  # events
        self._length = 0  # characters of all tokens that were sent
        self._text: list[str] = []  # of those that are not special

    def ask(self) -> Ask:
        ask = self.request.ask(self._seed, self.generation.record.stream)
        most, kept = self.serving.inputs.info.max_model_len, 1 if ask.truncate is None else ask.truncate.tokens
        if kept > most:  # `InputProcessor.cut` would speak of -1, too
            why = f"truncate must be between 1 and the limit of {most} tokens (prompt and output), got {kept}"
            raise InvalidRequest("truncate", why)
        return ask

    async def prompts(self) -> Sequence[list[int]]:
        inputs, encode, cut = self.request.inputs, self.serving.inputs.encode, self.generation.cut
        return [await self.generation.tokenize(lambda: encode(inputs, cut=cut), len(inputs))]

    def body(self) -> Any:
        (best,) = self.generation.choices
        answer: GenerateResponse = {"generated_text": self._generated(best)}
        if self.parameters.detailed:
            others: list[BestOfSequence] = [
                {"generated_text": self._generated(other), **self._details(other)}
                for other in self.generation.drawn
                if other is not best
            ]
            answer["details"] = {**self._details(best), "best_of_sequences": others or None}
        return answer

    def events(self, choice: Choice, delta: Delta) -> Iterator[StreamResponse]:
        texts = _texts(delta.text, delta.offsets, self._length)
        self._length += len(delta.text)
        ended = delta.finish_reason not in (None, "abort")  # what is cut off keeps its tokens: see `closing`
        end = self._finish_reason(choice) if ended else None
        for number, (entry, text) in enumerate(zip(delta.logprobs, texts, strict=True), 1):
            token = self._token(entry.token, text, entry.logprob)
            self._text += [] if token["special"] else [text]
            self._count += 1
            event: StreamResponse = {"index": self._count, "token": token, "generated_text": None, "details": None}
            if self.parameters.top_n_tokens:
                event["top_tokens"] = self._tokens(entry.top)
            if end is not None and number == len(texts):
                event["generated_text"] = self._prefix + "".join(self._text)
                if self.parameters.details:
                    event["details"] = {
                        "finish_reason": end,
                        "generated_tokens": choice.num_tokens,
                        "seed": self._seed,
                        "input_length": len(choice.prompt),
                    }
            yield event

    def closing(self) -> Iterable[StreamResponse]:
        for choice in self.generation.choices:
            self._finish_reason(choice)
        return ()

    def headers(self) -> Mapping[str, str]:
        headers = {
            "x-compute-type": self.serving.inputs.info.device_type,
            "x-compute-characters": str(len(self.request.inputs)),
        }
        return headers if self.generation.record.stream else headers | self._times()

    def _times(self) -> dict[str, str]:
        """Milliseconds, but for the first."""
        record, (best,) = self.generation.record, self.generation.choices
        now = time.monotonic_ns()
        queued = max(end for name, _, end in record.stages if name == "tokenize")
        times = record.times.get(self._place(best))
        admitted = queued if times is None else max(queued, times.admitted)
        spans = {
            "x-total-time": now - record.start,
            "x-validation-time": queued - record.start,
            "x-queue-time": admitted - queued,
            "x-inference-time": now - admitted,
            "x-time-per-token": (now - admitted) // max(1, best.num_tokens),
        }
        return {
            "x-compute-time": str((now - record.start) / 1e9),
            **{name: str(span // 1_000_000) for name, span in spans.items()},
            "x-prompt-tokens": str(len(best.prompt)),
            "x-generated-tokens": str(best.num_tokens),
        }

    def _generated(self, choice: Choice) -> str:
        self._finish_reason(choice)
        special = self.serving.tokenizer.special_ids
        texts = _texts("".join(choice.text), choice.offsets, 0)
        return self._prefix + "".join(text for id, text in zip(choice.tokens, texts, strict=True) if id not in special)

    def _details(self, choice: Choice) -> SequenceDetails:
        decode = self.serving.tokenizer.decode
        texts = _texts("".join(choice.text), choice.offsets, 0)
        prefill: list[PrefillToken] = [
            {
                "id": id,
                "text": decode([id], skip_special_tokens=False),
                "logprob": None if entry is None else max(entry.logprob, FLOOR),
            }
            for id, entry in zip(choice.prompt, choice.prompt_logprobs or (), strict=False)
        ]
        details: SequenceDetails = {
            "finish_reason": self._finish_reason(choice),
            "generated_tokens": choice.num_tokens,
            "seed": None if self._seed is None else seed_of(self._seed, self._place(choice)),
            "prefill": prefill,
            "tokens": [
                self._token(entry.token, text, entry.logprob)
                for entry, text in zip(choice.logprobs, texts, strict=True)
            ],
        }
        if self.parameters.top_n_tokens:
            details["top_tokens"] = [self._tokens(entry.top) for entry in choice.logprobs]
        return details

    def _finish_reason(self, choice: Choice) -> FinishReason:
        """Raises `Rejected` if it was ended by somebody else: there is no such reason here."""
        if choice.finish_reason == "length":
            return "length"
        if choice.finish_reason != "stop":
            raise self.generation.cause or Rejected("the request was aborted", 499)
        # A stop sequence that is found in the text of the end token did not end it.
        ended = choice.stop_reason is None or choice.tokens[-1] in self.serving.tokenizer.eos_token_ids
        return "eos_token" if ended else "stop_sequence"

    def _place(self, choice: Choice) -> int:
        """Which of all draws it is."""
        return next(k for k, drawn in enumerate(self.generation.drawn) if drawn is choice)

    def _token(self, id: int, text: str, logprob: float) -> Token:
        special = id in self.serving.tokenizer.special_ids
        return {"id": id, "text": text, "logprob": max(logprob, FLOOR), "special": special}

    def _tokens(self, top: Iterable[tuple[int, float]]) -> list[Token]:
        decode = self.serving.tokenizer.decode
        return [self._token(id, decode([id], skip_special_tokens=False), logprob) for id, logprob in top]


class _InList(_Answer):
    """As the inference API answers: for models of several tasks."""

    def body(self) -> Any:
        return [super().body()]


class _Benchmarked(_Answer):
    def body(self) -> Any:
        (best,) = self.generation.choices
        answer: BenchmarkResponse = {
            "generated_text": self._generated(best),
            "num_output_tokens": best.num_tokens,
            "total_time_s": (time.monotonic_ns() - self.generation.record.start) / 1e9,
        }
        return answer


def _texts(text: str, offsets: Sequence[int], start: int) -> list[str]:
    """Of each token: `text`, from character `start` of a sequence on, is that of the tokens at `offsets`. A token that
    ends within a character has none: it comes with the last of those that make it up."""
    ends = [*offsets[1:], start + len(text)]
    return [text[a - start : b - start] for a, b in zip(offsets, ends, strict=False)]


def _info(serving: Serving) -> Info:
    info = serving.inputs.info
    return {
        "model_id": serving.model,
        "model_sha": None,
        "model_dtype": f"torch.{info.dtype}",
        "model_device_type": info.device_type,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": info.max_num_seqs + serving.client.waiting.max_requests,
        "max_best_of": MAX_BEST_OF,
        "max_stop_sequences": MAX_STOP_SEQUENCES,
        "max_input_tokens": info.max_model_len - 1,
        "max_input_length": info.max_model_len - 1,
        "max_total_tokens": info.max_model_len,
        "max_batch_total_tokens": info.kv_blocks * info.block_size,
        "max_batch_size": info.max_num_seqs,
        "validation_workers": 1,
        "max_client_batch_size": MAX_SEQUENCES,
        "router": "framework",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=Route, tags=["TGI"])

    def reply(kind: type[_Answer], body: GenerateRequest, request: Request, stream: bool | None) -> Response:
        generation: Generation = request.state.generation
        generation.call(body.request_id)
        return Reply(generation, kind(serving, generation, body), bool(stream))

    async def generate(body: BenchmarkRequest, request: Request) -> Response:
        """A text that goes on from `inputs`; as events with `stream`. With `prompt`, the parameters stand beside it."""
        return reply(_Benchmarked if body.flat else _Answer, body.request(), request, body.stream)

    async def generate_stream(body: GenerateRequest, request: Request) -> Response:
        """As /generate: an event for each token, the last with the whole text."""
        return reply(_Answer, body, request, True)

    async def compatible(body: GenerateRequest, request: Request) -> Response:
        """As /generate, in a list; as events with `stream`."""
        return reply(_InList, body, request, body.stream)

    async def info() -> Response:
        """What is served, and its limits."""
        return JSONResponse(_info(serving))

    kind = route(Route, serving, "text_completion", "gen")
    for path, handler, shown in (
        ("/generate", generate, {"model": GenerateResponse | BenchmarkResponse, "content": _EVENTS}),
        ("/", compatible, {"model": list[GenerateResponse], "content": _EVENTS}),
        ("/generate_stream", generate_stream, {"model": StreamResponse}),
    ):
        routes.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_class=_Events if handler is generate_stream else JSONResponse,
            responses={200: shown, **_ERRORS},
            route_class_override=kind,
        )
    routes.add_api_route(
        "/info", info, methods=["GET"], responses={200: {"model": Info}, 401: {"model": ErrorResponse}}
    )
    return routes
