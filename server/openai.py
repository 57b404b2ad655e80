"""The OpenAI dialect: /v1/models, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from http.client import responses
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from framework import Logprobs, Tokenizer
from framework.detokenizer import Delta

from .body import JsonRoute
from .errors import Problem, unknown_model
from .generation import Ask, Choice, Generation, Serving, route
from .schemas import ChatRequest, CompletionRequest, GenerationRequest
from .sse import Reply

FLOOR = -9999.0
"""JSON has no infinity: the least log-probability that is told."""


def spell(problem: Problem) -> tuple[int, dict[str, Any]]:
    """{"error": {message, type, param, code}}."""
    status, message, field, _ = problem
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
        options = request.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
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
            "choices": choices,
        }

    def body(self) -> dict[str, Any]:
        choices = [
            {**self.choice(c), "finish_reason": c.finish_reason, "stop_reason": c.stop_reason}
            for c in self.generation.choices
        ]
        return {**self._envelope(self.object, choices), "usage": self.usage()}

    def events(self, choice: Choice, delta: Delta) -> Iterable[dict[str, Any]]:
        for piece in self.deltas(choice, delta):
            chunk = self._envelope(self.chunk_object, [piece])
            if self.continuous_usage:
                chunk["usage"] = self.usage()
            elif self.include_usage:
                chunk["usage"] = None
            yield chunk

    def closing(self) -> Iterable[dict[str, Any]]:
        if self.include_usage:
            yield {**self._envelope(self.chunk_object, []), "usage": self.usage()}


class _Completion(_Reply):
    object = chunk_object = "text_completion"
    request: CompletionRequest

    async def prompts(self) -> Sequence[list[int]]:
        given, encode = self.request.prompt, self.serving.inputs.encode
        special = self.request.add_special_tokens is not False
        size = sum(len(prompt) for prompt in given)
        ids = await self.generation.tokenize(lambda: [encode(prompt, special) for prompt in given], size)
        self._echo = [self._text(prompt) for prompt in given] if self.request.echo else []
        self._started: set[int] = set()
        return ids

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.serving.tokenizer.decode(prompt)

    def _prefix(self, choice: Choice) -> str:
        return self._echo[choice.index // (self.request.n or 1)] if self._echo else ""

    def _logprobs(self, logprobs: Sequence[Logprobs], offsets: Sequence[int]) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        tokenizer = self.serving.tokenizer
        tops = []
        for entry in logprobs:
            top: dict[str, float] = {}
            for id, value in (*entry.top, (entry.token, entry.logprob)):
                top.setdefault(_token(tokenizer, id), max(value, FLOOR))
            tops.append(top)
        return {
            "tokens": [_token(tokenizer, entry.token) for entry in logprobs],
            "token_logprobs": [max(entry.logprob, FLOOR) for entry in logprobs],
            "top_logprobs": tops,
            "text_offset": list(offsets),
        }

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": self._prefix(choice) + "".join(choice.text),
            "logprobs": self._logprobs(choice.logprobs, choice.offsets),
        }

    def deltas(self, choice: Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        text = delta.text
        if self._echo and choice.index not in self._started:
            self._started.add(choice.index)
            text = self._prefix(choice) + text
        if text or delta.logprobs or delta.finish_reason is not None or self.continuous_usage:
            yield {
                "index": choice.index,
                "text": text,
                "logprobs": self._logprobs(delta.logprobs, delta.offsets),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }


class _Chat(_Reply):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    request: ChatRequest

    async def prompts(self) -> Sequence[list[int]]:
        messages, template = self.request.chat(), self.request.template()
        self._greeted: set[int] = set()
        render = self.serving.inputs.render
        return [await self.generation.tokenize(lambda: render(messages, **template), self.request.size)]

    def _logprobs(self, logprobs: Sequence[Logprobs]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        tokenizer = self.serving.tokenizer
        return {
            "content": [
                {
                    **_chat_token(tokenizer, entry.token, entry.logprob),
                    "top_logprobs": [_chat_token(tokenizer, id, value) for id, value in entry.top],
                }
                for entry in logprobs
            ]
        }

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.text)},
            "logprobs": self._logprobs(choice.logprobs),
        }

    def deltas(self, choice: Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        if choice.index not in self._greeted:
            self._greeted.add(choice.index)
            yield self._delta(choice, {"role": "assistant", "content": ""})
        if delta.text or delta.logprobs or self.continuous_usage:
            yield self._delta(choice, {"content": delta.text}, self._logprobs(delta.logprobs))
        if delta.finish_reason is not None:
            yield {
                **self._delta(choice, {}),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }

    @staticmethod
    def _delta(choice: Choice, content: dict[str, str], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": choice.index, "delta": content, "logprobs": logprobs, "finish_reason": None}


def _token(tokenizer: Tokenizer, id: int) -> str:
    """The token as text; where its bytes are no UTF-8 by themselves, as bytes:\\x.."""
    data = tokenizer.token_bytes(id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_token(tokenizer: Tokenizer, id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": _token(tokenizer, id),
        "logprob": max(logprob, FLOOR),
        "bytes": list(tokenizer.token_bytes(id)),
    }


def router(serving: Serving) -> APIRouter:
    """The routes under /v1."""
    routes = APIRouter(prefix="/v1", route_class=Route, tags=["OpenAI"])
    cards = {
        name: {
            "id": name,
            "object": "model",
            "created": serving.created,
            "owned_by": "framework",
            "root": serving.model,
            "parent": None,
            "max_model_len": serving.inputs.info.max_model_len,
        }
        for name in serving.names
    }

    def reply(kind: type[_Reply], body: GenerationRequest, request: Request) -> Response:
        serving.check_model(body.model)
        generation: Generation = request.state.generation
        return Reply(generation, kind(serving, generation, body), bool(body.stream))

    async def models() -> Response:
        return JSONResponse({"object": "list", "data": list(cards.values())})

    async def model(name: str) -> Response:
        if name not in cards:
            raise unknown_model(name, serving.names)
        return JSONResponse(cards[name])

    async def completions(body: CompletionRequest, request: Request) -> Response:
        return reply(_Completion, body, request)

    async def chat(body: ChatRequest, request: Request) -> Response:
        return reply(_Chat, body, request)

    routes.add_api_route("/models", models)
    routes.add_api_route("/models/{name:path}", model)
    for path, handler, operation, prefix in (
        ("/completions", completions, "text_completion", "cmpl"),
        ("/chat/completions", chat, "chat", "chatcmpl"),
    ):
        kind = route(Route, serving, operation, prefix)
        routes.add_api_route(path, handler, methods=["POST"], route_class_override=kind)
    return routes
