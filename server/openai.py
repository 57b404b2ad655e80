"""The OpenAI dialect: /v1/models, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.client import responses
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from framework import Logprobs, __version__
from framework.detokenizer import Delta

from . import shapes
from .body import JsonRoute
from .calls import Calls, ToolUse
from .errors import Problem, unknown_model
from .generation import Ask, Choice, Generation, Serving, route
from .limits import INLINE_PROMPT, MAX_SCORED
from .schemas import ChatRequest, CompletionRequest, GenerationRequest
from .scores import Echo, Scores
from .sse import Reply

ABSENT = (
    "/responses",
    "/embeddings",
    "/rerank",
    "/score",
    "/classify",
    "/pooling",
    "/moderations",
    "/images/generations",
    "/audio/speech",
    "/audio/transcriptions",
    "/audio/translations",
)
"""Routes of OpenAI's API and of other servers, most for other kinds of models: 404, which nobody repeats."""


def spell(problem: Problem) -> tuple[int, dict[str, Any]]:
    """{"error": {message, type, param, code}}."""
    status, message, field, _ = problem
    if status == 401:  # what clients look for
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
        return status, {"error": error}
    kind = responses.get(status, "").replace(" ", "").replace("-", "")
    kind = kind.removesuffix("Error") + "Error"
    return status, {"error": {"message": message, "type": kind, "param": field, "code": status}}


class Route(JsonRoute):
    """Of every route whose errors are spelt as OpenAI's."""

    spell = staticmethod(spell)


class _Reply:
    """What both routes do alike. Subclasses say how a choice looks."""

    done = b"data: [DONE]\n\n"
    object = ""
    chunk_object = ""

    def __init__(self, serving: Serving, generation: Generation, request: GenerationRequest) -> None:
        self.serving = serving
        self.generation = generation
        self.request = request
        self.scores = Scores(serving.tokenizer, bool(request.return_tokens_as_token_ids))
        self._begun: set[int] = set()
        options = request.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(self.include_usage and options and options.continuous_usage_stats)
        self.every_token = self.continuous_usage or bool(request.return_token_ids)
        """Whether tokens without text are told, too."""
        self.created = int(time.time())

    async def prompts(self) -> Sequence[list[int]]:
        raise NotImplementedError

    def choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def deltas(self, choice: Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def ask(self) -> Ask:
        self.request.check()
        return self.request.ask()

    def first(self, choice: Choice) -> bool:
        """Whether this is the first piece of a choice."""
        if choice.index in self._begun:
            return False
        self._begun.add(choice.index)
        return True

    def prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """As a field, if it is asked for."""
        count = self.request.prompt_logprobs
        return {} if count is None else {"prompt_logprobs": self.scores.prompt(choice.prompt_logprobs, count)}

    def usage(self) -> dict[str, Any]:
        prompt, output = self.generation.prompt_tokens, self.generation.output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self.generation.cached_tokens},
        }

    def _envelope(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.generation.record.id,
            "object": object,
            "created": self.created,
            "model": self.serving.model,
            "system_fingerprint": f"framework-{__version__}",
            "choices": choices,
        }

    def body(self) -> dict[str, Any]:
        choices = [
            {**self.choice(c), "finish_reason": c.finish_reason, "stop_reason": c.stop_reason}
            for c in self.generation.choices
        ]
        return {**self._envelope(self.object, choices), "usage": self.usage()}

    def _chunk(self, piece: dict[str, Any]) -> dict[str, Any]:
        chunk = self._envelope(self.chunk_object, [piece])
        if self.continuous_usage:
            chunk["usage"] = self.usage()
        elif self.include_usage:
            chunk["usage"] = None
        return chunk

    def headers(self) -> Mapping[str, str]:
        return {}

    def events(self, choice: Choice, delta: Delta) -> Iterable[dict[str, Any]]:
        return map(self._chunk, self.deltas(choice, delta))

    def closing(self) -> Iterable[dict[str, Any]]:
        if self.include_usage:
            yield {**self._envelope(self.chunk_object, []), "usage": self.usage()}


class _Completion(_Reply):
    object = chunk_object = "text_completion"
    request: CompletionRequest

    async def prompts(self) -> Sequence[list[int]]:
        request, encode, cut = self.request, self.serving.inputs.encode, self.generation.cut
        given, special = request.prompt, request.add_special_tokens is not False
        size = sum(len(prompt) + INLINE_PROMPT for prompt in given)
        each = (request.n or 1) * (1 + (request.logprobs or 0)) if request.scored else 0

        def work() -> tuple[list[list[int]], list[Echo]]:
            ids = [encode(prompt, special, cut) for prompt in given]
            if not request.echo or each * sum(map(len, ids)) > MAX_SCORED:  # which is refused before anything is sent
                return ids, []
            return ids, [self._echo(*pair) for pair in zip(given, ids, strict=True)]

        ids, self._echoes = await self.generation.tokenize(work, size)
        return ids

    def _echo(self, prompt: str | list[int], ids: list[int]) -> Echo:
        request, tokenizer, cut = self.request, self.serving.tokenizer, self.generation.cut
        if isinstance(prompt, list) or (cut is not None and len(ids) == cut.tokens):
            skip = request.skip_special_tokens is not False
            return Echo.of_tokens(tokenizer, ids, skip) if request.scored else Echo(tokenizer.decode(ids, skip))
        if not request.scored:
            return Echo(prompt)
        return Echo.of_text(tokenizer, prompt, ids, request.add_special_tokens is not False)

    def _piece(self, choice: Choice, new: Choice | Delta, text: str, first: bool) -> dict[str, Any]:
        """What is new of a choice. The first piece begins with the prompt, if that is echoed."""
        request, ids = self.request, [entry.token for entry in new.logprobs]
        entries: list[Logprobs | None] = [*new.logprobs]
        echo = self._echoes[choice.index // (request.n or 1)] if self._echoes else Echo()
        offsets = [len(echo.text) + offset for offset in new.offsets]
        if first and self._echoes:
            text = echo.text + text
            ids, offsets = choice.prompt + ids, [*echo.offsets, *offsets]
            entries = [*(choice.prompt_logprobs or [None] * len(choice.prompt)), *entries]
        count = request.logprobs
        logprobs = None if count is None else self.scores.completion(ids, entries, offsets, count)
        piece = {"index": choice.index, "text": text, "logprobs": logprobs}
        if request.return_token_ids:
            piece |= {"token_ids": list(new.tokens)} | ({"prompt_token_ids": choice.prompt} if first else {})
        return piece | (self.prompt_logprobs(choice) if first else {})

    def choice(self, choice: Choice) -> dict[str, Any]:
        return self._piece(choice, choice, "".join(choice.text), True)

    def deltas(self, choice: Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        first = self.first(choice)
        piece = self._piece(choice, delta, delta.text, first)
        # what is told of the prompt's tokens is told even if they have no text
        prompt = first and (bool(self._echoes) or self.request.prompt_logprobs is not None)
        if piece["text"] or delta.logprobs or delta.finish_reason is not None or self.every_token or prompt:
            yield {**piece, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


class _Chat(_Reply):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    request: ChatRequest

    def ask(self) -> Ask:
        ask = super().ask()
        self._tools: ToolUse | None = None
        self._calls: dict[int, Calls] = {}
        if self.request.choice.mode == "none":
            return ask
        self._tools = ToolUse(self.request, self.serving.tool_parser, self.serving.tokenizer)
        ask = ask._replace(keep=self._tools.keep)
        asked = ask.fields.get("structured_outputs")
        wanted = self._tools.structured(asked)
        if wanted is asked:
            return ask
        names = {**ask.names, "structured_outputs": "tools"}
        return ask._replace(fields={**ask.fields, "structured_outputs": wanted}, names=names)

    async def prompts(self) -> Sequence[list[int]]:
        request, cut, render = self.request, self.generation.cut, self.serving.inputs.render
        special = bool(request.add_special_tokens)

        def work() -> list[int]:
            return render(request.chat(), cut, special, **request.template())

        return [await self.generation.tokenize(work, request.size)]

    def _logprobs(self, logprobs: Sequence[Logprobs]) -> dict[str, Any] | None:
        return self.scores.chat(logprobs) if self.request.logprobs else None

    def _tokens(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self.request.return_token_ids else {}

    def _read(self, choice: Choice, text: str, finished: bool) -> list[dict[str, Any]]:
        """What `text` adds to the message of a choice. At the end, its reason becomes what it is for clients."""
        if self._tools is None:
            return [{"content": text}] if text else []
        if choice.index not in self._calls:
            self._calls[choice.index] = self._tools.calls()
        calls = self._calls[choice.index]
        pieces = calls.push(text, finished)
        if finished:
            choice.finish_reason = self._tools.reason(calls, choice.finish_reason)
        return pieces

    def choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        self._read(choice, text, finished=True)
        message = {"content": text} if self._tools is None else self._calls[choice.index].message
        if self.request.prefix:
            message["content"] = self.request.prefix + (message["content"] or "")
        return {
            "index": choice.index,
            "message": {"role": "assistant", **message},
            "logprobs": self._logprobs(choice.logprobs),
            **self._tokens(choice.tokens),
        }

    def body(self) -> dict[str, Any]:
        first = self.generation.choices[0]
        tokens = {"prompt_token_ids": first.prompt} if self.request.return_token_ids else {}
        return super().body() | self.prompt_logprobs(first) | tokens

    def events(self, choice: Choice, delta: Delta) -> Iterable[dict[str, Any]]:
        fresh = self.first(choice)
        if fresh:
            greeting = self._chunk(self._delta(choice, {"role": "assistant", "content": ""}))
            if self.request.return_token_ids:
                greeting["prompt_token_ids"] = choice.prompt
            yield greeting | self.prompt_logprobs(choice)
            if self.request.prefix:
                yield self._chunk(self._delta(choice, {"content": self.request.prefix}))
        yield from super().events(choice, delta)

    def deltas(self, choice: Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        pieces = self._read(choice, delta.text, delta.finish_reason is not None)
        if not pieces and (delta.logprobs or self.every_token):
            pieces = [{"content": ""} if self._tools is None else {}]
        for i, piece in enumerate(pieces):
            first = i == 0  # what is told of tokens comes with it
            logprobs = self._logprobs(delta.logprobs) if first else None
            yield self._delta(choice, piece, logprobs) | self._tokens(delta.tokens if first else ())
        if delta.finish_reason is not None:
            yield {
                **self._delta(choice, {}),
                "finish_reason": choice.finish_reason,
                "stop_reason": delta.stop_reason,
            }

    @staticmethod
    def _delta(choice: Choice, content: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": choice.index, "delta": content, "logprobs": logprobs, "finish_reason": None}


def _permission(serving: Serving, name: str) -> dict[str, Any]:
    """The same for everybody; clients of former versions of OpenAI's API read it."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": serving.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


def router(serving: Serving) -> APIRouter:
    """The routes under /v1."""
    routes = APIRouter(prefix="/v1", route_class=Route, tags=["OpenAI"], responses=shapes.ERRORS)
    cards = {
        name: {
            "id": name,
            "object": "model",
            "created": serving.created,
            "owned_by": "framework",
            "root": serving.model,
            "parent": None,
            "max_model_len": serving.inputs.info.max_model_len,
            "permission": [_permission(serving, name)],
        }
        for name in serving.names
    }

    def reply(kind: type[_Reply], body: GenerationRequest, request: Request) -> Response:
        generation: Generation = request.state.generation
        generation.call(body.request_id)
        serving.check_model(body.model)
        return Reply(generation, kind(serving, generation, body), bool(body.stream))

    async def models() -> Response:
        """The models that are served."""
        return JSONResponse({"object": "list", "data": list(cards.values())})

    async def model(name: str) -> Response:
        """One of the models that are served."""
        shown = serving.model if name == serving.given else name
        if shown not in cards:
            raise unknown_model(name, serving.names)
        return JSONResponse(cards[shown])

    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Texts that go on from prompts; as events with `stream`."""
        return reply(_Completion, body, request)

    async def chat(body: ChatRequest, request: Request) -> Response:
        """The next message of a chat; as events with `stream`."""
        return reply(_Chat, body, request)

    routes.add_api_route("/models", models, response_model=shapes.Models)
    routes.add_api_route("/models/", models, include_in_schema=False)  # else the model without a name
    routes.add_api_route("/models/{name:path}", model, response_model=shapes.Model)
    for path, handler, operation, prefix, shape in (
        ("/completions", completions, "text_completion", "cmpl", shapes.Completion),
        ("/chat/completions", chat, "chat", "chatcmpl", shapes.ChatCompletion),
    ):
        kind = route(Route, serving, operation, prefix)
        routes.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=shape,
            responses=shapes.LATE,
            route_class_override=kind,
        )
    return routes


def absent() -> APIRouter:
    """The routes in `ABSENT`."""
    routes = APIRouter(prefix="/v1", route_class=Route)

    async def answer(request: Request) -> Response:
        known = "/v1/chat/completions and /v1/completions"
        raise HTTPException(404, f"{request.url.path} is not there: this server generates text only, at {known}")

    for path in ABSENT:
        routes.add_api_route(path, answer, methods=["POST"], include_in_schema=False)
    return routes
