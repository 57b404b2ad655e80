"""Text to token ids and back, with the tokenizer and the chat template of the generating routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from framework import InvalidRequest

from . import shapes, tgi
from .calls import check_takes_tools
from .generation import Serving
from .keys import caller
from .limits import INLINE_TEXT, MAX_TEXT, MAX_TEXTS
from .openai import Route
from .schemas import ChatTokenizeRequest, DetokenizeRequest, TokenizeRequest
from .sse import attended
from .tgi_schemas import ErrorResponse


def router(serving: Serving) -> APIRouter:
    """Lengths have limits of their own here: a text may be longer than what the model takes."""
    routes = APIRouter(route_class=Route, tags=["tokens"], responses=shapes.ERRORS)
    inputs, tokenizer = serving.inputs, serving.tokenizer

    def tokenized(body: TokenizeRequest) -> Any:
        if body.prompt is not None:
            ids = inputs.tokenize(_limited(body.prompt, "prompt"), body.add_special_tokens is not False)
        else:
            text = tokenizer.render(body.chat(), **body.template())
            ids = inputs.tokenize(_limited(text, "messages"), body.add_special_tokens is True)
        return {
            "count": len(ids),
            "max_model_len": inputs.info.max_model_len,
            "tokens": ids,
            "token_strs": [tokenizer.id_to_token(id) for id in ids] if body.return_token_strs else None,
        }

    def detokenized(body: DetokenizeRequest) -> Any:
        inputs.check_ids(body.tokens, "tokens")
        return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}

    def spans(text: str, add_special_tokens: bool) -> list[shapes.Span]:
        found = tokenizer.encode_spans(text, add_special_tokens)
        if add_special_tokens:  # a BOS that is in the text already is left out at the front, as for requests
            found = found[-len(inputs.tokenize(text)) :]
        return [{"id": id, "text": text[start:stop], "start": start, "stop": stop} for id, start, stop in found]

    def chat_spans(body: ChatTokenizeRequest) -> Any:
        text = _limited(tokenizer.render(body.chat(), **body.template()), "messages")
        return {"tokenize_response": spans(text, False), "templated_text": text}

    def check(body: ChatTokenizeRequest) -> None:
        serving.check_model(body.model)
        if body.tools and body.messages:
            check_takes_tools(tokenizer)

    texts = ThreadPoolExecutor(MAX_TEXTS, "texts")

    async def answer(request: Request, work: Callable[[], Any], size: int) -> Response:
        """What `work` gives, as JSON: in a thread if it deals with many characters or ids. It has a place in the queue
        meanwhile, and ends with its client."""

        async def encoded() -> bytes:
            async with serving.client.prepare(f"tok-{state.request_id}", caller(request), state.start):
                if size <= INLINE_TEXT:
                    return msgspec.json.encode(work())
                return await asyncio.wrap_future(texts.submit(lambda: msgspec.json.encode(work())))

        state = request.state
        return Response(await attended(request.receive, encoded()), media_type="application/json")

    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The token ids of a text or a chat."""
        body.check()
        text, special = body.inputs, body.add_special_tokens is not False
        if text is not None:  # TGI's body has no model
            return await answer(request, lambda: spans(_limited(text, "inputs"), special), len(text))
        check(body)
        return await answer(request, lambda: tokenized(body), len(body.prompt or "") + body.size)

    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids."""
        serving.check_model(body.model)
        return await answer(request, lambda: detokenized(body), len(body.tokens))

    async def chat_tokenize(body: ChatTokenizeRequest, request: Request) -> Response:
        """What the chat template makes of a chat, and where each token stands in it."""
        check(body)
        body.check()
        return await answer(request, lambda: chat_spans(body), body.size)

    async def tokenizer_info() -> Response:
        """Special tokens, chat template and vocabulary."""
        info = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # what a tokenizer.json is to transformers
            "model_max_length": inputs.info.max_model_len,
            "vocab_size": inputs.info.vocab_size,
            "chat_template": tokenizer.chat_template,
            "eos_token_ids": tokenizer.eos_token_ids,
            **tokenizer.special,
        }
        return JSONResponse(info)

    routes.add_api_route(
        "/tokenize",
        tokenize,
        methods=["POST"],
        response_model=shapes.Tokenized | list[shapes.Span],
        responses={
            **shapes.LATE,
            422: {"model": ErrorResponse, "description": "A field is wrong, and `inputs` is among them"},
        },
        dependencies=[Depends(_as_asked)],
    )
    routes.add_api_route(
        "/detokenize", detokenize, methods=["POST"], response_model=shapes.Detokenized, responses=shapes.LATE
    )
    routes.add_api_route(
        "/chat_tokenize", chat_tokenize, methods=["POST"], response_model=shapes.Spans, responses=shapes.LATE
    )
    routes.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"], response_model=shapes.TokenizerInfo)
    return routes


async def _as_asked(request: Request) -> None:
    """Whoever sends `inputs` expects errors as TGI spells them."""
    if (await request.json()).get("inputs") is not None:
        request.state.spell = tgi.spell


def _limited(text: str, field: str) -> str:
    if len(text) > MAX_TEXT:
        raise InvalidRequest(field, f"{field}: {len(text)} characters, at most {MAX_TEXT} are possible; send parts")
    return text
