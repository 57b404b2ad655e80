"""One generation request, whatever its dialect: prompts in, pieces of text out, and the record of what happened."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import Request

from framework import Logprobs, ResponseRecord, SamplingParams, Tokenizer
from framework.detokenizer import Assembler, Delta
from framework.inputs import InputProcessor, Routing
from framework.messages import Add

from .client import EngineClient
from .errors import UnknownModel, status_of

T = TypeVar("T")

INLINE_TEXT = 4096
"""Longer texts (in characters) are tokenised in a thread: the event loop goes on serving others."""


class Serving(NamedTuple):
    """What every dialect needs."""

    client: EngineClient
    inputs: InputProcessor
    tokenizer: Tokenizer
    model: str
    """Name that clients call the model by."""
    created: int
    """Unix time at which the model was ready."""

    def check_model(self, name: str | None) -> None:
        """Raise `UnknownModel` unless `name` is the served model's, or left out."""
        if name is not None and name != self.model:
            raise UnknownModel(f"model: {name!r} is not served here; available: {self.model}")


class Prompt(NamedTuple):
    """`n` sequences to generate: what comes before them, and how to choose their tokens."""

    ids: list[int]
    params: SamplingParams
    n: int = 1


class Choice:
    """A sequence being generated, and what came of it so far."""

    def __init__(self, index: int, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self.index = index
        self.prompt = prompt.ids
        self.cached_tokens = 0
        self.assembler = Assembler(tokenizer, prompt.params, prompt.ids)
        self.text: list[str] = []
        self.logprobs: list[Logprobs] = []
        self.offsets: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self.assembler.num_tokens


class Generation:
    """One response. An async context manager that reports to the plugins exactly once, however it ends."""

    def __init__(self, serving: Serving, request: Request, operation: str, prefix: str, **options: Any) -> None:
        self.serving = serving
        self.choices: list[Choice] = []
        self.caller = _caller(request)
        parent = trace.get_current_span(_PROPAGATOR.extract(dict(request.headers))).get_span_context()
        start = request.state.start
        self.record = ResponseRecord(
            id=f"{prefix}-{request.state.request_id}",
            operation=operation,
            model=serving.model,
            trace_id=f"{parent.trace_id:032x}" if parent.is_valid else secrets.token_hex(16),
            span_id=secrets.token_hex(8),
            parent_span_id=f"{parent.span_id:016x}" if parent.is_valid else None,
            sampled=parent.trace_flags.sampled if parent.is_valid else True,
            start=start,
            stages=[("http.receive", start, time.monotonic_ns())],
            **options,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record = self.record
        record.end = time.monotonic_ns()
        if isinstance(error, asyncio.CancelledError):
            record.status = 499  # the client went away
        elif error is not None:
            self.failed(error)
        record.prompt_tokens = self.prompt_tokens
        record.output_tokens = self.output_tokens
        record.finish_reasons = [choice.finish_reason or "abort" for choice in self.choices]
        self.serving.client.notify("response_done", record=record)

    def failed(self, error: BaseException) -> None:
        """Note an error that the client was told of."""
        self.record.status = status_of(error)
        self.record.error = str(error) or type(error).__name__

    async def tokenize(self, work: Callable[[], T], size: int) -> T:
        """Run `work`, which tokenises texts of `size` characters."""
        begin = time.monotonic_ns()
        result = work() if size <= INLINE_TEXT else await asyncio.to_thread(work)
        self.record.stages.append(("tokenize", begin, time.monotonic_ns()))
        return result

    async def run(
        self, prompts: Sequence[Prompt], routing: Routing = Routing(), extra: dict[str, Any] | None = None
    ) -> AsyncIterator[list[tuple[Choice, Delta]]]:
        """Generate: what is new, in lists of what came together. Ends when all sequences have; leaving it early
        aborts them."""
        record, tokenizer = self.record, self.serving.tokenizer
        every = [prompt for prompt in prompts for _ in range(prompt.n)]
        record.choices = len(every)
        self.choices = [Choice(i, tokenizer, prompt) for i, prompt in enumerate(every)]
        common: dict[str, Any] = {
            **routing._asdict(),
            "extra": extra or {},
            "trace": record.traceparent,
        }
        adds = [Add(record.id, p.ids, p.params, record.start, n=p.n, **common) for p in prompts]
        async with self.serving.client.generate(adds, record) as stream:
            async for outputs in stream:
                begin = time.monotonic_ns()
                news = []
                for index, output in outputs:
                    choice = self.choices[index]
                    if choice.finish_reason is not None:
                        continue  # a stop string ended it within this list
                    choice.cached_tokens += output.cached_tokens
                    delta = choice.assembler.push(output)
                    choice.text.append(delta.text)
                    choice.logprobs += delta.logprobs
                    choice.offsets += delta.offsets
                    choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
                    if delta.finish_reason is not None and output.finish_reason is None:
                        stream.stop(index)
                    news.append((choice, delta))
                record.detokenize_ns += time.monotonic_ns() - begin
                yield news

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; those of further choices of one prompt count once."""
        return sum(len(p) for p in {id(choice.prompt): choice.prompt for choice in self.choices}.values())

    @property
    def cached_tokens(self) -> int:
        """Those of `prompt_tokens` that were found in the prefix cache."""
        return sum(choice.cached_tokens for choice in self.choices)

    @property
    def output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)


def _caller(request: Request) -> str:
    """Who asks, where the body does not say: a digest of the API key, so that the key itself goes nowhere."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        return ""
    return "key-" + hashlib.blake2b(key.strip().encode(), digest_size=8).hexdigest()


_PROPAGATOR = TraceContextTextMapPropagator()
