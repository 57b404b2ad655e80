"""/openapi.json: what it says of fields, answers and errors is what the server does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from echo_engine import EchoProcess
from framework.server import schemas, tgi_schemas
from framework.server.keys import Keys
from framework.server.shapes import ERRORS
from pydantic import ValidationError
from serving import Running, events, running

from framework import InvalidRequest
from framework.settings import Settings

CHAT = [{"role": "user", "content": "hi 🙂"}]
Validator = Callable[..., Any]


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


@pytest.fixture(scope="module")
def document(server: Running) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def validator(document: dict[str, Any]) -> Validator:
    """Of a schema in the document. Keys that the schema does not name are an error in objects that name any."""

    def closed(schema: Any) -> Any:
        if isinstance(schema, list):
            return [closed(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        schema = {key: closed(value) for key, value in schema.items()}
        if isinstance(schema.get("properties"), dict) and schema.get("title") != "TokenizerInfo":
            schema.setdefault("additionalProperties", False)
        return schema

    def make(schema: dict[str, Any], strict: bool = True) -> Any:
        whole = {**schema, "components": document["components"]}
        return jsonschema_rs.Draft202012Validator(closed(whole) if strict else whole)

    return make


def content(document: dict[str, Any], path: str, method: str, status: int, kind: str = "application/json") -> Any:
    return document["paths"][path][method]["responses"][str(status)]["content"][kind]["schema"]


def test_every_route_says_how_it_fails(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            assert "200" in responses
            if path != "/metrics" and "TGI" not in operation["tags"]:  # a plugin's, and a dialect with other errors
                assert set(responses) >= {str(status) for status in ERRORS}
                assert all(responses[str(s)]["content"] == responses["400"]["content"] for s in ERRORS)
                assert ("422" in responses) == (path == "/tokenize")  # which takes TGI's bodies, too
    for path in ("/v1/completions", "/v1/chat/completions", "/", "/generate", "/generate_stream"):
        responses = document["paths"][path]["post"]["responses"]
        assert set(responses) >= {"405", "408", "431", "504"}
        assert all(responses[s]["content"] == responses["400"]["content"] for s in ("405", "408", "431", "504"))
    assert "504" in document["paths"]["/tokenize"]["post"]["responses"]  # it is bounded in time as a response is
    assert "504" not in document["paths"]["/tokenizer_info"]["get"]["responses"]
    assert "HTTPValidationError" not in json.dumps(document)
    assert document["paths"]["/health"]["get"]["responses"]["200"].get("content") is None


def test_every_operation_has_a_name_and_says_what_it_does(document: dict[str, Any]) -> None:
    named = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            named[operation["operationId"]] = method + re.sub(r"\W+", "_", path).rstrip("_")
            assert operation["summary"][-1] == "." and " " in operation["summary"], operation
    assert all(id == name for id, name in named.items())
    assert len(named) == sum(map(len, document["paths"].values()))
    assert {"post", "post_v1_chat_completions", "get_v1_models_name"} <= set(named)


def test_what_needs_a_key(document: dict[str, Any], tiny_llama: Path) -> None:
    assert "securitySchemes" not in document["components"]
    settings = Settings(model=str(tiny_llama), served_model_name="echo")
    with running(settings, Keys([("ann", "sk-1")]), spawn=EchoProcess) as server:
        authorized = {"Authorization": "Bearer sk-1"}
        found = server.http.get("/openapi.json", headers=authorized).json()
        [(name, scheme)] = found["components"]["securitySchemes"].items()
        assert scheme == {"type": "http", "scheme": "bearer"}
        for path, operations in found["paths"].items():
            for method, operation in operations.items():
                closed = server.http.request(method, path).status_code == 401
                assert operation.get("security") == ([{name: []}] if closed else None), path
    for operations in found["paths"].values():
        for operation in operations.values():
            operation.pop("security", None)
    del found["components"]["securitySchemes"]
    assert found == document


GETS = ["/v1/models", "/v1/models/echo", "/version", "/load", "/tokenizer_info"]
POSTS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "a b", "return_token_strs": True}),
    ("/tokenize", {"messages": CHAT}),
    ("/tokenize", {"inputs": "a b"}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/chat_tokenize", {"messages": CHAT}),
    ("/abort_requests", {"request_ids": []}),
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2, "echo": True, "n": 2},
    {"prompt_logprobs": 1, "return_token_ids": True},
    {"prompt_logprobs": 0},
    {"stop_token_ids": [5], "return_token_ids": True},
    {"stop": "b", "stream_options": {"include_usage": True}},
    {"max_tokens": 0, "echo": True, "logprobs": 0},
]
CHATS: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 1},
    {"prompt_logprobs": 0, "return_token_ids": True},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True, "n": 2},
]


def test_answers(server: Running, document: dict[str, Any], validator: Validator) -> None:
    for path in GETS:
        documented = path if path in document["paths"] else "/v1/models/{name}"
        validator(content(document, documented, "get", 200)).validate(server.http.get(path).json())
    for path, body in POSTS:
        response = server.post(path, **body)
        assert response.status_code == 200, response.text
        validator(content(document, path, "post", 200)).validate(response.json())
    for kind in document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]:
        sent = server.http.get("/metrics", headers={"accept": kind}).headers["content-type"]
        assert sent.partition(";")[0] == kind


@pytest.mark.parametrize("stream", [False, True])
def test_generated_answers(server: Running, document: dict[str, Any], validator: Validator, stream: bool) -> None:
    for path, always, cases in (
        ("/v1/completions", {"prompt": "abc 🙂"}, COMPLETIONS),
        ("/v1/chat/completions", {"messages": CHAT}, CHATS),
    ):
        for case in cases:
            body = {**always, **case, "stream": stream}
            if stream and case.get("prompt_logprobs"):
                del body["prompt_logprobs"]
            if not stream:
                body.pop("stream_options", None)
            response = server.post(path, **body)
            assert response.status_code == 200, response.text
            if not stream:
                validator(content(document, path, "post", 200)).validate(response.json())
                continue
            described = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"][
                "itemSchema"
            ]
            chunk_or_error = described["properties"]["data"]["anyOf"][0]["contentSchema"]["anyOf"]
            chunks = events(response)
            check = validator(chunk_or_error[0])
            for chunk in chunks:
                check.validate(chunk)
            assert chunks


def test_errors(server: Running, document: dict[str, Any], validator: Validator) -> None:
    for response, path, method in (
        (server.post("/v1/completions", prompt=""), "/v1/completions", "post"),
        (server.post("/v1/chat/completions", messages=CHAT, model="x"), "/v1/chat/completions", "post"),
        (server.post("/tokenize"), "/tokenize", "post"),
        (server.post("/tokenize", inputs=5), "/tokenize", "post"),
        (server.http.get("/v1/models/x"), "/v1/models/{name}", "get"),
        (server.http.post("/version"), "/version", "get"),
    ):
        assert response.status_code >= 400
        validator(content(document, path, method, response.status_code)).validate(response.json())


VALUES: list[Any] = [
    None, True, False, -(2**64), -(2**63), -101, -100, -3, -2, -1, 0, 1, 2, 3, 20, 21, 100, 101, 128, 129, 2**62, 2**64,
    -0.5, 0.5, 1.5, 2.0, 2.5, 1e6, [5.0], [5.5], [[5.0]],
    "", "a", "a b", "left", "dummy", "a" * 256, "a" * 257, "a" * 1025, [], {}, [""], ["a"],
    ["a"] * 65, [5], [-1], [True], [5] * 1025, [[5]], [[]], [{}], ["text"], {"5": 1}, {"5": 101}, {"a": 1}, {"": []},
    [{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"content": "a"}],
]  # fmt: skip
ELSEWHERE: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, str),  # known or not
    "prompt": lambda value: len(value) > 200,  # the context's end
    "priority": bool,  # this scheduler ignores it
    "max_tokens": lambda value: value is not None and value > 200,
    "max_completion_tokens": lambda value: value is not None and value > 200,
    "min_tokens": lambda value: value is not None and value > 200,
    "truncate_prompt_tokens": lambda value: value is not None and value > 200,
    "top_logprobs": bool,  # needs logprobs
    "tools": lambda value: value is not None,
    "tool_choice": lambda value: value is not None,
    "response_format": lambda value: value is not None,
    "structured_outputs": lambda value: value is not None,
}
"""What is not the schema's to say, if the value is of the right type."""


def _refused(kind: Any, always: dict[str, Any], name: str, value: Any, server: Running) -> bool:
    parameters = {"do_sample": True, name: value} if name == "best_of" else {name: value}
    try:
        ask = kind.model_validate({**always, "parameters": parameters}).ask(None, False)
        inputs = server.serving.inputs
        if ask.truncate is not None:
            inputs.cut(ask.truncate)
        inputs.complete(inputs.params(ask.fields), [5])
    except (ValidationError, InvalidRequest):
        return True
    return False


def test_a_parameter_s_schema_and_the_server_take_the_same(
    server: Running, document: dict[str, Any], validator: Validator
) -> None:
    """Of the TGI dialect."""
    schema = document["components"]["schemas"]["GenerateParameters"]
    differ = []
    for name, field in schema["properties"].items():
        check = validator(field, strict=False)
        for value in VALUES:
            valid = check.is_valid(value)
            if valid and isinstance(value, int | float) and value > 200 and name in ("max_new_tokens", "truncate"):
                continue  # the context's end
            if value == 2**64:
                continue  # the validator knows 64 bits only
            if _refused(tgi_schemas.GenerateRequest, {"inputs": "a"}, name, value, server) == valid:
                differ.append((name, value))
    assert not differ


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_field_s_schema_and_the_server_take_the_same(
    server: Running, document: dict[str, Any], validator: Validator, route: str
) -> None:
    kind: Any = schemas.CompletionRequest if route == "/v1/completions" else schemas.ChatRequest
    always: dict[str, Any] = {"prompt": "a"} if route == "/v1/completions" else {"messages": CHAT}
    inputs = server.serving.inputs

    def taken(body: dict[str, Any]) -> bool:
        try:
            request = kind.model_validate({**always, **body})
            request.check()
            ask = request.ask()
            if ask.truncate is not None:
                inputs.cut(ask.truncate)
            for prompt in getattr(request, "prompt", ()):
                inputs.encode(prompt)
            inputs.routing(ask.priority, ask.tenant, ask.cache_salt)
            inputs.complete(inputs.params({**ask.fields, **({"max_tokens": 1} if ask.score else {})}), [5])
        except (ValidationError, InvalidRequest):
            return False
        return True

    schema = document["components"]["schemas"][kind.__name__]
    assert set(schema["properties"]) == set(kind.model_fields)
    differ = []
    for name, field in schema["properties"].items():
        check = validator(field, strict=False)
        for value in VALUES:
            valid = check.is_valid(value)
            if valid and name in ELSEWHERE and ELSEWHERE[name](value):
                continue
            more = {"echo": True} if name == "max_tokens" and value == 0 else {}
            if taken({name: value, **more}) != valid:
                differ.append((name, value))
    assert not differ
