"""One generation request, whatever its dialect: prompts in, pieces of text out, and the record of what happened."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from structlog.contextvars import bind_contextvars

from framework import FrameworkError, InvalidRequest, Logprobs, ResponseRecord, SamplingParams, Tokenizer, ToolParser
from framework.detokenizer import Assembler, Delta
from framework.inputs import Cut, InputProcessor
from framework.log import get_logger
from framework.messages import Add

from .body import JsonRoute
from .errors import GONE, Forbidden, Problem, Spelling, problem, unknown_model
from .keys import caller
from .limits import INLINE_TEXT, MAX_EXTRA, MAX_SCORED
from .supervisor import Supervisor
from .traceparent import parse

log = get_logger(__name__)
T = TypeVar("T")

NO_NAME = ("", "dummy", "tgi")
"""What clients send as the model when their user named none."""


class Serving(NamedTuple):
    """What every dialect needs."""

    client: Supervisor
    inputs: InputProcessor
    tokenizer: Tokenizer
    model: str
    """Name that clients call the model by."""
    created: int
    """Unix time at which the model was ready."""
    aliases: Sequence[str] = ()
    """Its further names."""
    tool_parser: type[ToolParser] | None = None
    """What reads the calls of tools in its answers; None: nothing is known that could."""
    given: str | None = None
    """--model, where no other names are given: accepted as a name, too, and told to nobody, as it may be a path."""

    @property
    def names(self) -> list[str]:
        """Every name of the model, the one that is shown first."""
        return list(dict.fromkeys((self.model, *self.aliases)))

    def check_model(self, name: str | None) -> None:
        """Raise `UnknownModel` unless `name` is one of the served model's, or left out: see `NO_NAME`."""
        if name is not None and name not in NO_NAME and name not in (*self.names, self.given):
            raise unknown_model(name, self.names)


class Ask(NamedTuple):
    """What a request asks of each prompt."""

    fields: Mapping[str, Any]
    """Those fields of `SamplingParams` that are set."""
    n: int = 1
    """Choices of each prompt. They are independent draws, with a seed too; the first has the request's own seed."""
    priority: int = 0
    tenant: str = ""
    """Left out: `user`, or else who brought the API key."""
    cache_salt: str = ""
    extra: dict[str, Any] | None = None
    names: Mapping[str, str] = {}
    """How the client spells fields, where it is not as we do."""
    user: str = ""
    """Whom the client acts for: the tenant, where the server knows no API keys."""
    best_of: int = 0
    """More than `n`: so many sequences are drawn, and the choices are the `n` whose tokens have the highest mean
    log-probability, the best first."""
    truncate: Cut | None = None
    """What is left of longer prompts; errors call it "truncate". `Generation.cut` has it for `InputProcessor`."""
    usual_tokens: int | None = None
    """max_tokens of those who give none, or less where less fits; None: what fits."""
    score: bool = False
    """Generate nothing: the prompt's log-probabilities are wanted. The engine's one token is dropped."""
    keep: Collection[str] = ()
    """Special tokens that are not left out of the text."""


class Prompt(NamedTuple):
    """`n` sequences to generate: what comes before them, and how to choose their tokens."""

    ids: list[int]
    params: SamplingParams
    n: int = 1


class Choice:
    """A sequence being generated, and what came of it so far."""

    def __init__(self, index: int, tokenizer: Tokenizer, prompt: Prompt, keep: Collection[str] = ()) -> None:
        self.index = index
        self.prompt = prompt.ids
        self.prompt_logprobs: list[Logprobs | None] | None = None
        """Of each prompt token, None for the first; there before the first piece of any choice of this prompt."""
        self.cached_tokens = 0
        self._begin = partial(Assembler, tokenizer, prompt.params, prompt.ids, keep)
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.offsets: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @cached_property
    def assembler(self) -> Assembler:
        return self._begin()  # with its first output: of thousands not all at once

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.tokens)

    @property
    def mean_logprob(self) -> float:
        """Of the output tokens; minus infinity if there are none."""
        values = [entry.logprob for entry in self.logprobs]
        return sum(values) / len(values) if values else -math.inf


class Generation:
    """One response. An async context manager that reports to the plugins exactly once, however it ends."""

    def __init__(self, serving: Serving, request: Request, operation: str, prefix: str) -> None:
        self.serving = serving
        self.choices: list[Choice] = []
        """What the client gets; with `Ask.best_of` only once all is generated."""
        self.drawn: list[Choice] = []
        """All sequences: what is counted."""
        self.cut: Cut | None = None
        """What to keep of the prompts; set before they are tokenised."""
        self.cause: FrameworkError | None = None
        """Why the server has cut it off, if it has."""
        self._refusal: Problem | None = None  # what it became instead of a whole response
        self._state = request.state
        self._prefix = prefix
        self._spell: Spelling = request.state.spell
        self._caller = caller(request)
        self._known = hasattr(request.state, "tenant")  # by an API key of the server's
        parent = parse(request.headers.getlist("traceparent"))
        self.record = ResponseRecord(
            id=f"{prefix}-{request.state.request_id}",
            operation=operation,
            model=serving.model,
            trace_id=parent.trace_id if parent else secrets.token_hex(16),
            span_id=secrets.token_hex(8),
            parent_span_id=parent.span_id if parent else None,
            sampled=parent.sampled if parent else True,
            start=request.state.start,
        )

    def call(self, id: str | None) -> None:
        """Go by this id, if the client has not given one in a header already."""
        if id is not None and not self._state.named:
            self._state.request_id = id
            self.record.id = f"{self._prefix}-{id}"
            bind_contextvars(request_id=id)

    async def __aenter__(self) -> Self:
        self.record.stages.append(("http.receive", self.record.start, time.monotonic_ns()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record = self.record
        record.end = time.monotonic_ns()
        if isinstance(error, asyncio.CancelledError | ClientDisconnect):
            record.status = 499  # the client went away
        elif error is not None:
            self.failed(error)
        record.prompt_tokens = self.prompt_tokens
        record.output_tokens = self.output_tokens
        record.finish_reasons = [choice.finish_reason or "abort" for choice in self.drawn]
        self._log()
        self.serving.client.notify("response_done", record=record)

    def _log(self) -> None:
        """Why it is not whole; what was wrong with a request is told to its client alone: that may quote it."""
        record, refusal = self.record, self._refusal
        if refusal is not None:
            cause = refusal.message if refusal.status in (429, 499) or refusal.status >= 500 else None
        elif record.status == 499:
            cause = GONE
        elif "abort" in record.finish_reasons:
            cause = str(self.cause or "the engine ended it")
        else:
            cause = None
        if cause is not None:
            log.info("response ended early", status=record.status, cause=cause, output_tokens=record.output_tokens)

    def failed(self, error: BaseException) -> Any:
        """Note an error; what to tell the client of it, as its dialect has it."""
        found = self._refusal = problem(error)
        self.record.status, body = self._spell(found)
        self.record.error = str(error) or type(error).__name__ if found.status >= 500 else found.message
        return body

    async def tokenize(self, work: Callable[[], T], size: int) -> T:
        """Run `work`, which tokenises texts of `size` characters: long ones in a thread, so that the event loop goes on
        serving others."""
        begin = time.monotonic_ns()
        result = work() if size <= INLINE_TEXT else await asyncio.to_thread(work)
        self.record.stages.append(("tokenize", begin, time.monotonic_ns()))
        return result

    async def run(
        self, ask: Ask, tokenize: Callable[[], Awaitable[Sequence[list[int]]]]
    ) -> AsyncGenerator[list[tuple[Choice, Delta]], None]:
        """Generate `ask.n` choices of each prompt that `tokenize` gives: what is new, in lists of what came together.

        Ends when all sequences have; leaving it early aborts them, at once if it is `aclosing`.
        """
        record, tokenizer = self.record, self.serving.tokenizer
        record.attributes = _attributes(ask)
        with _naming(ask):
            _check_extra(ask.extra)
        routing = self.serving.inputs.routing(ask.priority, self._tenant(ask), ask.cache_salt)
        async with self.serving.client.prepare(record.id, routing.tenant, record.start):
            if ask.truncate is not None:
                with _naming(ask):
                    self.cut = self.serving.inputs.cut(ask.truncate, ask.fields.get("max_tokens", ask.usual_tokens))
            with _naming(ask):
                ids = await tokenize()
            words = sum(map(len, ask.fields.get("bad_words", ())))  # to be tokenised, too
            inline = words <= INLINE_TEXT
            prompts = self._prompts(ask, ids) if inline else await asyncio.to_thread(self._prompts, ask, ids)
            await self._try_grammar(ask, prompts, routing.tenant)
        every = [prompt for prompt in prompts for _ in range(prompt.n)]
        record.choices = len(every)
        shared = {**routing._asdict(), "extra": ask.extra or {}, "trace": record.traceparent}
        adds = [
            Add(self._state.request_id, prompt.ids, prompt.params, record.start, **shared, n=prompt.n)
            for prompt in prompts
        ]
        async with self.serving.client.generate(adds, record) as stream:
            self.choices = self.drawn = [Choice(i, tokenizer, prompt, ask.keep) for i, prompt in enumerate(every)]
            async for outputs in stream:
                self.cause = stream.cause
                begin = time.monotonic_ns()
                for index, output in outputs:
                    if output.prompt_logprobs is not None:
                        self._scored(index, max(ask.n, ask.best_of), output.prompt_logprobs)
                news = []
                for index, output in outputs:
                    choice = self.drawn[index]
                    choice.cached_tokens += output.cached_tokens
                    if ask.score:
                        output.tokens, output.logprobs = [], None
                    delta = choice.assembler.push(output)
                    choice.text.append(delta.text)
                    choice.tokens += delta.tokens
                    choice.logprobs += delta.logprobs
                    choice.offsets += delta.offsets
                    choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
                    if delta.finish_reason is not None and output.finish_reason is None:
                        stream.stop(index)
                    news.append((choice, delta))
                record.detokenize_ns += time.monotonic_ns() - begin
                yield news
        if ask.best_of > ask.n:
            self.choices = self._best(ask)

    def _scored(self, index: int, draws: int, logprobs: list[Logprobs | None]) -> None:
        """One of those who share a prompt tells it for all."""
        first = index - index % draws
        for choice in self.drawn[first : first + draws]:
            choice.prompt_logprobs = logprobs

    def _best(self, ask: Ask) -> list[Choice]:
        best: list[Choice] = []
        for first in range(0, len(self.drawn), ask.best_of):
            draws = self.drawn[first : first + ask.best_of]
            best += sorted(draws, key=lambda choice: -choice.mean_logprob)[: ask.n]
        for index, choice in enumerate(best):
            choice.index = index
        return best

    async def _try_grammar(self, ask: Ask, prompts: Sequence[Prompt], tenant: str) -> None:
        wanted = prompts[0].params.structured_outputs if prompts else None
        if wanted is not None:
            begin = time.monotonic_ns()
            try:
                with _naming(ask):
                    await self.serving.client.grammars.check(wanted, self.serving.inputs, tenant)
            finally:
                self.record.stages.append(("grammar", begin, time.monotonic_ns()))

    def _tenant(self, ask: Ask) -> str:
        if not self._known:
            return ask.tenant or ask.user or self._caller
        if ask.tenant not in ("", self._caller):
            raise Forbidden("tenant", f"tenant: this API key is that of {self._caller!r}; leave tenant out")
        return self._caller

    def _prompts(self, ask: Ask, every: Sequence[list[int]]) -> list[Prompt]:
        inputs = self.serving.inputs
        fields = {**ask.fields, "max_tokens": 1} if ask.score else ask.fields
        if ask.usual_tokens is not None:
            room = inputs.info.max_model_len - max(map(len, every))
            fields = {"max_tokens": min(room, ask.usual_tokens), **fields}
        with _naming(ask):
            params = inputs.complete(inputs.params(fields), *every)
            each = 0 if params.prompt_logprobs is None else ask.n * (1 + params.prompt_logprobs)
            scored = each * sum(map(len, every))
            if scored > MAX_SCORED:
                raise InvalidRequest(
                    "prompt_logprobs",
                    f"prompt_logprobs: {scored} log-probabilities of prompt tokens in one request, at most "
                    f"{MAX_SCORED} are possible; ask for fewer of them, or for fewer prompts or choices at once",
                )
        if ask.score:  # whatever the token is
            params = replace(params, min_tokens=0, ignore_eos=True, stop_token_ids=(), stop=())
        if ask.best_of > ask.n and params.logprobs is None:
            params = replace(params, logprobs=0)
        return [Prompt(ids, params, max(ask.n, ask.best_of)) for ids in every]

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; those of further choices of one prompt count once."""
        return sum(len(p) for p in {id(choice.prompt): choice.prompt for choice in self.drawn}.values())

    @property
    def cached_tokens(self) -> int:
        """Those of `prompt_tokens` that were found in the prefix cache."""
        return sum(choice.cached_tokens for choice in self.drawn)

    @property
    def output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.drawn)


def route(base: type[JsonRoute], serving: Serving, operation: str, prefix: str) -> type[JsonRoute]:
    """The class of a route that generates: its handler finds the `Generation` in `request.state.generation`.

    A request that fails before its handler has given a `Reply`, bad JSON included, is reported to the plugins too.
    """

    class GenerationRoute(base):  # type: ignore[misc, valid-type]
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler: Callable[[Request], Coroutine[Any, Any, Response]] = super().get_route_handler()

            async def handle(request: Request) -> Response:
                request.state.spell = self.spell
                generation = request.state.generation = Generation(serving, request, operation, prefix)
                try:
                    return await handler(request)
                except BaseException:
                    async with generation:
                        raise

            return handle

    return GenerationRoute


@contextmanager
def _naming(ask: Ask) -> Iterator[None]:
    """Errors name fields as the client does: at their front, for further on the same word may mean something else."""
    try:
        yield
    except InvalidRequest as error:
        name = ask.names.get(error.field, error.field)
        raise InvalidRequest(name, re.sub(rf"^{re.escape(error.field)}\b", name, str(error))) from None


def _check_extra(extra: Mapping[str, Any] | None) -> None:
    try:
        size = len(msgspec.msgpack.encode(extra))
    except (OverflowError, RecursionError, TypeError, UnicodeEncodeError) as error:
        raise InvalidRequest("extra", f"extra: cannot be passed on: {error}") from None
    if size > MAX_EXTRA:
        raise InvalidRequest("extra", f"extra: {size} bytes, at most {MAX_EXTRA} are possible")


def _attributes(ask: Ask) -> dict[str, str | int | float | bool]:
    """What is asked for under its OpenTelemetry name, where it has one."""
    params = ask.fields
    named = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
    found = {f"gen_ai.request.{name}": params[name] for name in named if name in params}
    if ask.n != 1:
        found["gen_ai.request.choice.count"] = ask.n
    if "stop" in params:
        found["gen_ai.request.stop_sequences"] = msgspec.json.encode(params["stop"]).decode()
    return found
