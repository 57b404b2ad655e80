"""What the server refuses, and how it says so."""

from __future__ import annotations

import gzip
import http.client
import json
import math
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from echo_engine import EchoProcess
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from framework.server import schemas, tgi_schemas
from framework.server.errors import _RULES, problem
from framework.server.limits import MAX_BODY
from pydantic import BaseModel, ValidationError
from serving import Running, check_error, check_tgi_error, completion, running
from test_server_document import VALUES

from framework import SamplingParams, hookimpl
from framework.settings import Settings


class Own:
    """A plugin whose routes read bodies as FastAPI and Starlette do."""

    @hookimpl
    def routes(self, client: Any) -> list[APIRouter]:
        async def model(body: dict[str, int]) -> int:
            return len(body)

        async def raw(request: Request) -> int:
            return len(await request.body())

        router = APIRouter(prefix="/own")
        router.add_api_route("/model", model, methods=["POST"])
        router.add_api_route("/raw", raw, methods=["POST"])
        return [router]


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(model=str(tiny_llama), served_model_name="echo")
    with running(settings, extra=[("own", Own())], spawn=EchoProcess) as found:
        yield found


BAD_KEYS = ("x", "", " 1 ", "1_0", "+1", "-1", "1.0", "\u0661", "9" * 5000)
BAD: list[tuple[dict[str, Any], str | None]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, 1.5]}, "prompt"),
    ({"prompt": [1.0, "a"]}, "prompt"),
    ({"prompt": [1.0, True]}, "prompt"),
    ({"prompt": [[[1.0]]]}, "prompt"),
    ({"prompt": 1.0}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": [1] * 256}, "prompt"),
    ({"prompt": [1] * 100_000}, "prompt"),
    ({"prompt": ["a"] * 5000}, "prompt"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 5.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 256}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**40}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1e300}, "max_tokens"),
    ({"prompt": "a", "max_tokens": math.inf}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5.0"}, "max_tokens"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "a", "min_tokens": 10**40}, "min_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": 10**400}, "temperature"),
    ({"prompt": "a", "temperature": math.inf}, "temperature"),
    ({"prompt": "a", "temperature": math.nan}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 1.5}, "min_p"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 129.0}, "n"),
    ({"prompt": "a", "n": 10_000_000}, "n"),
    ({"prompt": "a", "seed": 2**63}, "seed"),
    ({"prompt": "a", "seed": 2**63, "n": 2}, "seed"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": -1}, "logprobs"),
    ({"prompt": "a", "logprobs": 1_000_000}, "logprobs"),
    ({"prompt": "a", "logprobs": 21, "echo": True}, "logprobs"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1_000_000}, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": [[5] * 250] * 250, "prompt_logprobs": 20}, "prompt_logprobs"),
    ({"prompt": [[5] * 250] * 32, "prompt_logprobs": 1, "n": 128}, "prompt_logprobs"),
    ({"prompt": [[5] * 250] * 250, "logprobs": 20, "echo": True}, "logprobs"),
    ({"prompt": "a", "max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": ["a", ""]}, "stop"),
    ({"prompt": "a", "stop": [1]}, "stop"),
    ({"prompt": "a", "stop": {"a": 1}}, "stop"),
    ({"prompt": "a", "stop": ["a"] * 100}, "stop"),
    ({"prompt": "a", "stop": "a" * 10_000}, "stop"),
    ({"prompt": "a", "stop_token_ids": [512]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": ["a"] * 1000}, "stop_token_ids.0"),
    ({"prompt": "a", "logit_bias": {"9999999": 5}}, "logit_bias"),
    *(({"prompt": "a", "logit_bias": {key: 5}}, "logit_bias") for key in BAD_KEYS),
    ({"prompt": "a", "logit_bias": {"1": 5, "01": -5}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": math.inf}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": math.nan}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 10**400}}, "logit_bias.1"),
    ({"prompt": "a", "logit_bias": {"1": "5"}}, "logit_bias.1"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "priority": 2**63}, "priority"),
    ({"prompt": "a", "priority": 1}, "priority"),
    ({"prompt": "a", "priority": -1}, "priority"),
    ({"prompt": "a", "priority": 0.5}, "priority"),
    ({"prompt": "a", "tenant": "a" * 257}, "tenant"),
    ({"prompt": "a", "tenant": 7}, "tenant"),
    ({"prompt": "a", "cache_salt": "a" * 1025}, "cache_salt"),
    ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt"),
    ({"prompt": "a", "extra": {"a": 10**30}}, "extra"),
    ({"prompt": "a", "vllm_xargs": {"a": 10**30}}, "vllm_xargs"),
    ({"prompt": "a", "vllm_xargs": {"a": 1}, "extra": {"a": 2}}, "vllm_xargs"),
    ({"prompt": "a", "vllm_xargs": [1]}, "vllm_xargs"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream_options": {"continuous_usage_stats": False}}, "stream_options"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "user": "\ud800"}, "user"),
    ({"prompt": "a", "user": "a" * 1000}, "user"),
    ({"prompt": "a", "user": 5}, "user"),
    ({"prompt": "a", "logit_bias": dict.fromkeys(range(2000), 1)}, "logit_bias"),
    ({"prompt": "a", "stop_token_ids": [1] * 2000}, "stop_token_ids"),
    ({"prompt": "a", "extra": {"a": "b" * 100_000}}, "extra"),
    ({"prompt": [[5]] * 4096, "extra": {"a": "b" * 10_000}}, None),
    ({"prompt": [[5]] * 4096, "stop": ["b" * 1000] * 64}, None),
]
BAD_CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}, 1]}, "messages.1"),
    ({"messages": [{"content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
    *(
        (
            {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "a", **bad}]},
            f"messages.1{field}",
        )
        for bad, field in (
            ({"role": "\ud800"}, ".role"),
            ({"name": "\ud800"}, ".name"),
            ({"\udfff": 1}, ""),
            ({"tool_call_id": "\ud800"}, ".tool_call_id"),
            ({"tool_calls": [{"id": "1", "function": {"name": "\ud800", "arguments": "{}"}}]}, ".tool_calls"),
            ({"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": "\ud800"}}}]}, ".tool_calls"),
        )
    ),
    ({"messages": [{"role": "user", "content": "a"}], "documents": [{"a": "\ud800"}]}, "documents"),
    ({"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "\ud800"}, "reasoning_effort"),
    ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs"),
    (
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}],
        },
        "tools",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "word " * 300}]}, "messages"),
    ({"messages": [{"role": "user", "content": ""}] * 5000}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "a"}], "logprobs": 5}, "logprobs"),
    ({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 9999}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "a"}], "priority": 1}, "priority"),
    ({"messages": [{"role": "user", "content": "a"}], "priority": -1, "n": 2}, "priority"),
    ({"messages": [{"role": "user", "content": "a"}], "tenant": "a" * 257}, "tenant"),
    ({"messages": [{"role": "user", "content": "a"}], "cache_salt": "a" * 1025}, "cache_salt"),
    ({"messages": [{"role": "user", "content": "a"}], "n": 0}, "n"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, "tools.0.function"),
    ({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}}, "response_format"),
]


def test_bad_values(server: Running) -> None:
    for path, cases in (("/v1/completions", BAD), ("/v1/chat/completions", BAD_CHAT)):
        for body, param in cases:
            for stream in ({}, {"stream": True}):
                if not (stream and {"stream", "stream_options"} & set(body)):
                    content = json.dumps({**body, **stream}).encode()
                    response = server.http.post(path, content=content, headers={"content-type": "application/json"})
                    check_error(response, 400, param)
    assert completion(server, server.ids("fine"))[0]["text"] == "fine"


def test_over_long_requests_name_both_numbers(server: Running) -> None:
    message = check_error(server.post("/v1/completions", prompt=[5] * 100, max_tokens=157), 400, "max_tokens")
    assert "100 " in message and "157 " in message and "256" in message
    message = check_error(server.post("/v1/completions", prompt=[5] * 300), 400, "prompt")
    assert "300 " in message and "256" in message
    assert completion(server, [5] * 100, max_tokens=156)[0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is empty"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"3", "must be a JSON object"),
        (b"{", "is not valid JSON: .* at character 1"),
        (b'{"a": "\xff"}', "is not valid UTF-8: .* at byte 7"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "more than 4300 digits"),
    ],
)
def test_bad_bodies(server: Running, body: bytes, message: str) -> None:
    response = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert re.search(f"the body .*{message}", check_error(response, 400, None))


def test_problems_are_in_the_words_of_json(server: Running) -> None:
    body: dict[str, Any] = {"messages": [], "temperature": [], "n": 999, "extra": 1, "stream": "yes"}
    message = check_error(server.post("/v1/chat/completions", **body), 400, "extra")
    assert message == (
        'extra: must be an object, got 1; stream: must be true or false, got "yes"; '
        "n: must be at most 128, got 999; temperature: must be a number, got []; "
        "messages: must have 1 to 4096 elements, got 0"
    )


MODELS: list[type[BaseModel]] = [
    schemas.CompletionRequest, schemas.ChatRequest, schemas.TokenizeRequest, schemas.ChatTokenizeRequest,
    schemas.DetokenizeRequest, schemas.AbortRequest, tgi_schemas.GenerateRequest, tgi_schemas.BenchmarkRequest,
]  # fmt: skip
MORE: list[Any] = [
    2**63, -(2**63) - 1, "\ud800", ["\ud800"], "a" * 2000, ["a" * 2000], ["a"] * 5000, [5] * 5000, [{}] * 5000, [None],
    [{"function": {"name": ""}}], [{"type": "x", "function": {"name": "a"}}], [{"function": {"name": "a"}}] * 2, [],
    [{"function": {"name": "a", "parameters": {"type": "string"}}}], [{"function": 5}], [{"role": 5}], {"type": "x"},
    {"type": "json"}, {"include_usage": 1}, float("nan"), float("inf"), {"a": "\ud800"}, "right",
]  # fmt: skip
PYTHON = re.compile(r"[Ii]nput should|(?i:string|list|dictionary|value) (should|error)|None|True|False|\(\)|[\[( ]'")


@pytest.mark.parametrize("model", MODELS)
def test_every_problem_of_a_type_is_in_the_words_of_json(model: type[BaseModel]) -> None:
    """All that pydantic can say of any field has words of ours."""
    kinds: set[str] = set()

    def check(body: dict[str, Any]) -> None:
        try:
            model.model_validate(body)
        except ValidationError as error:
            kinds.update(found["type"] for found in error.errors())
            message = problem(RequestValidationError(error.errors())).message
            assert not PYTHON.search(message), (body, message)

    assert isinstance(model, type)
    for value in (*VALUES, *MORE):
        for name in model.model_fields:
            check({name: value})
        if "parameters" in model.model_fields:
            for name in tgi_schemas.GenerateParameters.model_fields:
                check({"inputs": "a", "parameters": {name: value}})
    assert kinds - {"value_error"} <= set(_RULES) and len(kinds) > 2


def test_sampling_parameters_are_quoted_as_json(server: Running) -> None:
    for field, value, words in (
        ("stop", ["a", ""], 'stop must be made of non-empty strings, got ["a", ""]'),
        ("bad_words", [""], 'bad_words.0: must have a length of at least 1, got ""'),
        ("logprobs", 21, "logprobs must be between 0 and 20, got 21"),
        ("truncation_side", "up", 'truncation_side: must be "left" or "right", got "up"'),
    ):
        message = check_error(
            server.post("/v1/completions", prompt="a", **{field: value}), 400, words.split(":")[0].split()[0]
        )
        assert message == words


def test_max_tokens_that_are_too_many(server: Running) -> None:
    """They go by the client's name, and are put first; clients that shorten chats look for the words on the prompt."""
    message = "max_tokens: too large, or the prompt is too long: 5 prompt tokens + 9000 exceed the limit of 256 tokens "
    message += "(prompt and output); ask for at most 251"
    assert check_error(server.post("/v1/completions", prompt=[5] * 5, max_tokens=9000), 400, "max_tokens") == message
    chat = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 9000}
    found = check_error(server.post("/v1/chat/completions", **chat), 400, "max_completion_tokens")
    assert found.startswith("max_completion_tokens: too large, ") and "max_tokens" not in found
    found = server.post("/generate", inputs="a", parameters={"max_new_tokens": 9000}).json()["error"]
    assert "max_new_tokens: too large, " in found and "max_tokens" not in found.replace("max_new_tokens", "")
    assert "too long" in check_error(server.post("/v1/completions", prompt=[5] * 300), 400, "prompt")


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity", "x" * 500, ""])
def test_bodies_that_are_compressed(server: Running, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    body = gzip.compress(b'{"prompt": "a", "inputs": "a"}')
    response = server.http.post("/v1/completions", content=body, headers=headers)
    message = check_error(response, 415, None)
    assert f"Content-Encoding: {encoding.lower()[:100] or 'none'} is not read" in message
    assert response.headers["accept-encoding"] == "identity"
    check_tgi_error(server.http.post("/generate", content=body, headers=headers), 415, "validation", "Content-Encoding")
    headers["content-encoding"] = "Identity"
    assert server.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_a_large_batch_is_checked_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check goes through all biases and stop ids: in the event loop, so not for every prompt."""
    checks, check = [], SamplingParams.check

    def counted(params: SamplingParams, vocab_size: int) -> None:
        checks.append(params)
        check(params, vocab_size)

    monkeypatch.setattr(SamplingParams, "check", counted)
    body = {"prompt": [server.ids("a")] * 50, "n": 3, "logit_bias": {"5": 1}, "seed": 3}
    assert len(server.post("/v1/completions", **body).json()["choices"]) == 150
    assert len(checks) == 1


def exchange(server: Running, data: bytes) -> http.client.HTTPResponse:
    with socket.create_connection(("127.0.0.1", server.http.base_url.port), timeout=20) as connection:
        connection.sendall(data)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        answer.body = answer.read()  # type: ignore[attr-defined]
    return answer


def test_what_is_no_http_gets_the_same_envelope(server: Running) -> None:
    answer = exchange(server, b"nonsense\r\n\r\n")
    error = json.loads(answer.body)["error"]  # type: ignore[attr-defined]
    assert answer.status == error["code"] == 400 and "HTTP" in error["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "x"])
def test_bad_content_types(server: Running, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    body = b'{"prompt": "a", "max_tokens": 1}'
    check_error(server.http.post("/v1/completions", content=body, headers=headers), 400, "Content-Type")
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.http.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_limited_body(server: Running) -> None:
    """The server stops reading: who sends on may find the connection closed, who then reads finds the answer."""
    with socket.create_connection(("127.0.0.1", server.http.base_url.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nX-Request-Id: large\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % (64 * 2**20) + b"a" * (MAX_BODY + 1))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 413
        assert json.load(answer)["error"]["message"] == f"the body is larger than {MAX_BODY} bytes"
    record = server.record("cmpl-large")
    assert record.status == 413
    exact = b'{"prompt": "a", "max_tokens": 1}'.ljust(MAX_BODY)
    response = server.http.post("/v1/completions", content=exact, headers={"content-type": "application/json"})
    assert response.status_code == 200


ENDLESS = b" " * (MAX_BODY + 1)


def test_limited_bodies_without_a_length(server: Running) -> None:
    """Also on routes that read their bodies in ways of their own."""
    for path in ("/v1/completions", "/own/model", "/own/raw"):
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        answer = exchange(server, f"{head}Transfer-Encoding: chunked\r\n\r\n{MAX_BODY + 1:x}\r\n".encode() + ENDLESS)
        assert answer.status == 413
        message = json.loads(answer.body)["error"]["message"]  # type: ignore[attr-defined]
        assert message == f"the body is larger than {MAX_BODY} bytes"


def test_a_body_that_says_its_length_is_not_read(server: Running) -> None:
    for path in ("/v1/completions", "/own/model", "/own/raw"):
        for length in (MAX_BODY + 1, 10**30):
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            answer = exchange(server, f"{head}Content-Length: {length}\r\nExpect: 100-continue\r\n\r\n".encode())
            expected = 413 if length < 2**63 else 400  # no parser of HTTP takes the other one
            assert answer.status == expected
            assert json.loads(answer.body)["error"]["code"] == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("OSError: /home/ann/.cache/x.py: denied", "OSError: x.py: denied"),
        ("cannot open '/etc/a b/c' (~/keys/d.txt)", "cannot open 'a b/c' (d.txt)"),
        ("ratio 3/4 of https://x.org/a/b", "ratio 3/4 of https://x.org/a/b"),
        ('broke\nTraceback (most recent call last):\n  File "/srv/a.py", line 3', "broke"),
        ("C:\\Users\\ann\\x.py", "x.py"),
    ],
)
def test_what_fails_inside_is_told_without_paths_and_traces(server: Running, error: str, told: str) -> None:
    for status in (500, 503):
        extra = {"error": error, "status": status}
        response = server.post("/v1/completions", prompt="a", extra=extra)
        assert check_error(response, status, None) == told


def test_unknown_model_route_and_method(server: Running) -> None:
    check_error(server.post("/v1/completions", model="other", prompt="a"), 404, "model")
    check_error(server.http.get("/v1/models/other"), 404, "model")
    check_error(server.http.get("/v2/nothing"), 404, None)
    check_error(server.http.get("/v1/completions"), 405, None)
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="other", prompt="a")


def test_refusals_of_the_engine(server: Running) -> None:
    for stream in (False, True):
        extra = {"error": "queue is full", "status": 429}
        response = server.post("/v1/completions", prompt="a", stream=stream, extra=extra)
        assert check_error(response, 429, None) == "queue is full"
        assert response.headers["retry-after"] == "2"
    check_error(server.post("/v1/completions", prompt="a", extra={"error": "broke", "status": 500}), 500, None)


def test_refusals_that_no_plugin_should_make(server: Running) -> None:
    """A status that is no error's, a delay that is none."""
    for status in (200, 0, 1000):
        check_error(server.post("/v1/completions", prompt="a", extra={"error": "no", "status": status}), 500, None)
    for delay in (-1.0, math.nan, math.inf):
        body = json.dumps({"prompt": "a", "extra": {"error": "no", "status": 429, "retry_after": delay}})
        response = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        check_error(response, 429, None)
        assert "retry-after" not in response.headers
