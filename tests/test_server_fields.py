"""Fields of the OpenAI routes over an engine whose output the prompt dictates: what they change, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_engine import EchoProcess
from framework.server.fields import AbsentOfChats, AbsentOfCompletions
from framework.server.limits import MAX_BAD_WORD, MAX_BAD_WORDS, MAX_DOCUMENTS
from serving import BASE, Running, check_error, completion, events, eventually, running

from framework.settings import Settings

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content + '' }}{% endfor %}"
    "{% if reasoning_effort == 'most' %}{{ raise_exception('no such effort') }}{% endif %}"
    "{{ documents }}|{{ reasoning_effort }}|{{ tone }}"
)


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


@pytest.fixture(scope="module")
def templated(tiny_llama_spm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A checkpoint with a BOS token, and a template that does not write it."""
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    settings = Settings(model=str(tiny_llama_spm), served_model_name="echo", chat_template=str(file))
    with running(settings, spawn=EchoProcess) as found:
        yield found


def chat(server: Running, messages: list[dict[str, Any]] = CHAT, **body: Any) -> dict[str, Any]:
    """The answer to a chat, checked to be the same when streamed."""
    request = {"messages": messages, "ignore_eos": True, "skip_special_tokens": False, **BASE, **body}
    response = server.post("/v1/chat/completions", **request)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    if "prompt_logprobs" not in body:
        chunks = events(server.post("/v1/chat/completions", **request, stream=True))
        texts, ids = ["".join(c["delta"].get("content", "") for c in one["choices"]) for one in chunks], []
        for chunk in chunks:
            ids += chunk["choices"][0].get("token_ids", [])
        assert "".join(texts) == whole["choices"][0]["message"]["content"]
        assert ids == whole["choices"][0].get("token_ids", [])
        assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [
            whole[name] for name in whole if name == "prompt_token_ids"
        ]
    return whole


def said(server: Running, messages: list[dict[str, Any]], **body: Any) -> str:
    return str(chat(server, messages, **body)["choices"][0]["message"]["content"])


# How many


def test_best_of(server: Running) -> None:
    ids = server.ids("abc")
    body = server.post(
        "/v1/completions", prompt=[ids, ids], n=2, best_of=3, logprobs=0, extra={"scores": [-3, -1, -2]}, **BASE
    ).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in body["choices"]] == [-1, -2] * 2
    assert body["usage"]["completion_tokens"] == 6 * len(ids) and body["usage"]["prompt_tokens"] == 2 * len(ids)
    body = server.post("/v1/completions", prompt=ids, best_of=2, extra={"scores": [-3, -1]}, **BASE).json()
    assert len(body["choices"]) == 1 and body["choices"][0]["logprobs"] is None  # they were not asked for
    assert len(completion(server, ids, n=2, best_of=2)) == 2
    for wrong, message in (({"best_of": 1, "n": 2}, "at least n"), ({"best_of": 2, "stream": True}, "stream")):
        assert message in check_error(server.post("/v1/completions", prompt=ids, **wrong), 400, "best_of")
    check_error(server.post("/v1/completions", prompt=[ids] * 40, best_of=128), 400, "prompt")


@pytest.mark.parametrize("unset", [{}, {"max_tokens": None}])
def test_usual_length(server: Running, unset: dict[str, Any]) -> None:
    """Of completions 16 tokens, or what fits; of chats what fits."""
    text = "abcdefghijklmnop " * 60
    ids = server.ids(text)

    def length(path: str, **ask: Any) -> int:
        body = server.post(path, ignore_eos=True, **ask, **unset).json()
        assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
        return int(body["usage"]["completion_tokens"])

    assert [length("/v1/completions", prompt=ids[:count]) for count in (100, 240, 241, 255)] == [16, 16, 15, 1]
    assert length("/v1/completions", prompt=[ids[:100], ids[:250]]) == 2 * 6
    assert length("/v1/completions", prompt=ids, truncate_prompt_tokens=-1) == 16  # which leaves room for them
    assert length("/v1/completions", prompt=ids[:100], echo=True) == 16
    messages = [{"role": "user", "content": server.tokenizer.decode(ids[:80])}]
    assert length("/v1/chat/completions", messages=messages) > 80  # the engine repeats the prompt


# Numbers


def test_whole_numbers_are_integers(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are written; what is passed on within objects stays as it is."""
    adds: list[Any] = []
    send = server.engine.generate
    monkeypatch.setattr(server.engine, "generate", lambda some, record: (adds.extend(some), send(some, record))[1])
    ids = server.ids("abcdef")
    extra = {"chunk": 2, "kept": [1.0, {"a": 2.0}]}
    whole = {"max_tokens": 4, "n": 2, "seed": 2, "stop_token_ids": [7], "top_k": -1, "min_tokens": 0}
    chat = {**whole, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2}
    for path, body in (
        ("/v1/completions", {**whole, "prompt": ids, "logprobs": 1, "truncate_prompt_tokens": 5}),
        ("/v1/completions", {**whole, "prompt": [ids, ids[:2]], "best_of": 2, "allowed_token_ids": ids}),
        ("/v1/chat/completions", {**chat, "messages": CHAT}),
        ("/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 2, "truncate": 2, "seed": 3, "top_k": 5}}),
        ("/detokenize", {"tokens": ids}),
    ):
        pair = []
        for value in (body, json.loads(re.sub(r"(?<=[ \[])(-?\d+)(?=[,\]}])", r"\1.0", json.dumps(body)))):
            response = server.post(path, **value, **({} if path == "/detokenize" else {"extra": extra}))
            assert response.status_code == 200, response.text
            pair.append({name: one for name, one in response.json().items() if name not in ("id", "created")})
            if path != "/detokenize":
                assert adds and all(str(add.extra) == str(extra) for add in adds)
            pair.append([(add.prompt, repr(add.params)) for add in adds])
            adds.clear()
        assert pair[:2] == pair[2:]
    for wrong, told in ((4.5, "4.5"), (True, "true"), ("4", '"4"'), ("4.0", '"4.0"')):
        for path, ask, field in (("completions", {"prompt": "a"}, "max_tokens"), ("completions", {"prompt": "a"}, "n")):
            message = check_error(server.post(f"/v1/{path}", **ask, **{field: wrong}), 400, field)
            assert message == f"{field}: must be an integer, got {told}"
        message = check_error(server.post("/detokenize", tokens=[1.0, wrong]), 400, "tokens.1")
        assert message == f"tokens.1: must be an integer, got {told}"


def test_values_beyond_what_has_an_effect(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    adds: list[Any] = []
    send = server.engine.generate
    monkeypatch.setattr(server.engine, "generate", lambda some, record: (adds.extend(some), send(some, record))[1])
    given = {"5": 1e9, "6": -100.5, "7": 3, "8": 100, "9": -1e300}
    for path, ask in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
        body = {**ask, "logit_bias": given, "temperature": 1e6, "cache_salt": "s" * 1024, **BASE}
        assert server.post(path, **body).status_code == 200
        add = adds.pop()
        assert add.params.logit_bias == {5: 100, 6: -100, 7: 3, 8: 100, 9: -100}
        assert (add.params.temperature, add.cache_salt) == (1e6, b"s" * 1024)
    assert server.post("/generate", inputs="a", parameters={"temperature": 1e6}).status_code == 200
    assert adds.pop().params.temperature == 1e6


# How prompts are cut


def test_truncated_prompts(server: Running) -> None:
    text = "abcdefghijklmnop " * 60
    ids = server.ids(text)
    decoded = server.tokenizer.decode
    for prompt in (text, ids):
        assert completion(server, prompt, truncate_prompt_tokens=5)[0]["text"] == decoded(ids[-5:])
        cut = {"truncate_prompt_tokens": 5, "truncation_side": "right"}
        assert completion(server, prompt, **cut)[0]["text"] == decoded(ids[:5])
        assert completion(server, prompt, truncate_prompt_tokens=-1, max_tokens=250)[0]["text"] == decoded(ids[-6:])
    assert completion(server, "abc", truncate_prompt_tokens=256)[0]["text"] == "abc"
    messages = [{"role": "user", "content": text}]
    assert said(server, messages, truncate_prompt_tokens=-1).endswith("<|im_end|>\n<|im_start|>assistant\n")
    for wrong in (0, -2, 257, 10**30):
        message = check_error(server.post("/v1/completions", prompt=ids, truncate_prompt_tokens=wrong), 400,
                              "truncate_prompt_tokens")  # fmt: skip
        assert "between 1 and the limit of 256 tokens" in message and "-1" in message
    response = server.post("/v1/completions", prompt=ids, truncate_prompt_tokens=5, truncation_side="up")
    check_error(response, 400, "truncation_side")


# What is told of tokens


def test_token_ids(server: Running) -> None:
    prompts = [server.ids("ab 🙂 c"), server.ids("de")]
    for options in ({}, {"n": 2}, {"echo": True}, {"stop": "b"}, {"extra": {"chunk": 3}}):
        choices = completion(server, prompts, return_token_ids=True, **options)
        n = options.get("n", 1)
        for index, choice in choices.items():
            prompt = prompts[index // n]
            assert choice["prompt_token_ids"] == prompt
            most = server.ids("ab") if "stop" in options and index == 0 else prompt
            assert choice["token_ids"] == most
    whole = chat(server, return_token_ids=True)
    assert whole["prompt_token_ids"] == whole["choices"][0]["token_ids"] != []
    assert "token_ids" not in completion(server, prompts)[0]


def test_tokens_as_token_ids(server: Running) -> None:
    ids = server.ids("ab 🙂")
    logprobs = completion(server, ids, logprobs=1, return_tokens_as_token_ids=True)[0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{id}" for id in ids]
    assert all(
        set(top) == {f"token_id:{id}", "token_id:0"} for id, top in zip(ids, logprobs["top_logprobs"], strict=True)
    )
    whole = chat(server, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    (choice,) = whole["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{id}" for id in choice["token_ids"]]
    assert content[0]["top_logprobs"][0]["token"] == "token_id:0"


def test_usage_so_far_comes_with_every_chunk(server: Running) -> None:
    ids = server.ids("abcdef")
    for path, ask in (("/v1/completions", {"prompt": ids}), ("/v1/chat/completions", {"messages": CHAT})):
        options = {"continuous_usage_stats": True, "include_usage": True}
        chunks = events(server.post(path, **ask, stream=True, stream_options=options, ignore_eos=True, **BASE))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and set(counts) >= set(range(1, counts[-1] + 1))
        assert all(
            u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in (c["usage"] for c in chunks)
        )
        assert chunks[-1]["choices"] == [] and all(chunk["choices"] for chunk in chunks[:-1])
        for alone in ({"continuous_usage_stats": True}, {**options, "include_usage": False}):
            chunks = events(server.post(path, **ask, stream=True, stream_options=alone, **BASE))
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


def test_spaces_between_special_tokens_have_no_effect(server: Running) -> None:
    prompt = [*server.ids("ab"), *server.tokenizer.eos_token_ids, *server.ids("c")]
    texts = {
        completion(server, prompt, ignore_eos=True, skip_special_tokens=False, spaces_between_special_tokens=spaces)[0][
            "text"
        ]
        for spaces in (True, False, None)
    }
    assert len(texts) == 1


# Ids


def test_request_ids_of_bodies(server: Running) -> None:
    ask = {"prompt": server.ids("ab"), **BASE}
    response = server.post("/v1/completions", request_id="of-body", **ask)
    assert response.json()["id"] == "cmpl-of-body" and response.headers["x-request-id"] == "of-body"
    assert server.record("cmpl-of-body").status == 200
    response = server.http.post(
        "/v1/completions", json={"request_id": "of-body", **ask}, headers={"X-Request-Id": "of-header"}
    )
    assert response.json()["id"] == "cmpl-of-header" and response.headers["x-request-id"] == "of-header"
    refused = server.post("/v1/completions", request_id="refused", model="other", prompt="a")
    check_error(refused, 404, "model")
    assert refused.headers["x-request-id"] == "refused" and server.record("cmpl-refused").status == 404
    for wrong in ("", "a b", "a\n", "ä", "a" * 129):
        check_error(server.post("/v1/completions", request_id=wrong, **ask), 400, "request_id")
    stream = server.post("/v1/chat/completions", request_id="chat", messages=CHAT, stream=True, **BASE)
    assert {chunk["id"] for chunk in events(stream)} == {"chatcmpl-chat"}


def test_a_duplicate_of_an_unfinished_id_harms_nobody(server: Running) -> None:
    body = {"prompt": server.ids("first"), "request_id": "twice", "stream": True, "extra": {"pace": 0.05}, **BASE}
    with server.http.stream("POST", "/v1/completions", json=body) as first:
        lines = first.iter_lines()
        next(lines)
        second = server.post("/v1/completions", prompt=server.ids("second"), request_id="twice", **BASE).json()
        assert (second["id"], second["choices"][0]["text"]) == ("cmpl-twice", "second")
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in rest).endswith("st")
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    eventually(lambda: server.engine.stats.running == 0)


# Chats


def test_what_the_template_gets(templated: Running) -> None:
    assert said(templated, [{"role": "user", "content": "a"}]).strip() == "[user]aNone||"
    body = {"documents": [{"text": "d"}], "reasoning_effort": "low", "chat_template_kwargs": {"tone": "dry"}}
    assert said(templated, [{"role": "user", "content": "a"}], **body).strip() == "[user]a[{'text': 'd'}]|low|dry"
    tokens = templated.post("/tokenize", messages=[{"role": "user", "content": "a"}], **body).json()["tokens"]
    assert templated.tokenizer.decode(tokens) == "[user]a[{'text': 'd'}]|low|dry"
    refused = templated.post("/v1/chat/completions", messages=CHAT, reasoning_effort="most")
    assert "no such effort" in check_error(refused, 400, "messages")
    too_many = templated.post("/v1/chat/completions", messages=CHAT, documents=[{}] * (MAX_DOCUMENTS + 1))
    check_error(too_many, 400, "documents")
    check_error(templated.post("/v1/chat/completions", messages=CHAT, documents=["a"]), 400, "documents.0")


def test_messages_of_every_kind(templated: Running, server: Running) -> None:
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "refusal": None, "name": "n"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, "d", ""]},
    ]
    expected = "[system]x[user]a\nb[assistant][assistant][user]c[assistant]no\nd\n"
    assert said(templated, messages, max_tokens=150).strip().startswith(expected)
    assert said(server, messages, max_tokens=150).startswith(
        "<|im_start|>system\nx<|im_end|>\n<|im_start|>user\na\nb<|im_end|>"
    )


def test_bos_of_chats(templated: Running) -> None:
    bos = templated.tokenizer.bos_token_id
    plain = chat(templated, return_token_ids=True)["prompt_token_ids"]
    asked = chat(templated, return_token_ids=True, add_special_tokens=True)["prompt_token_ids"]
    assert asked == [bos, *plain] and bos not in plain
    twice = chat(templated, [{"role": "user", "content": "<s>"}], add_special_tokens=True, return_token_ids=True)
    assert twice["prompt_token_ids"][:2] != [bos, bos]


def test_echoed_chats(server: Running) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Once upon"}]
    plain = said(server, messages, continue_final_message=True)
    assert plain.endswith("assistant\nOnce upon")  # the engine repeats the prompt
    assert said(server, messages, continue_final_message=True, echo=True) == "Once upon" + plain
    assert said(server, messages, echo=True).startswith("Once upon<|im_start|>")
    assert said(server, CHAT, echo=True) == said(server, CHAT)  # the answer is another role's


def test_what_plugins_read_has_two_names(server: Running) -> None:
    for path, ask in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
        wanted = {"error": "quota", "status": 429}
        for more in ({}, {"extra": None}, {"extra": {}}, {"extra": wanted}):
            assert check_error(server.post(path, **ask, vllm_xargs=wanted, **more), 429, None) == "quota"
        check_error(server.post(path, **ask, vllm_xargs={}, extra=wanted), 429, None)
        assert server.post(path, **ask, max_tokens=1, vllm_xargs={}).status_code == 200
        message = check_error(server.post(path, **ask, vllm_xargs=wanted, extra={"chunk": 1}), 400, "vllm_xargs")
        assert "leave out one" in message


def test_options_of_streams_that_ask_for_nothing(server: Running) -> None:
    for options in ({}, {"include_usage": None}, {"future": 1}):
        answer = server.post("/v1/completions", prompt="a", stream_options=options)
        assert answer.json()["choices"][0]["text"] == "a"
        chunks = events(server.post("/v1/completions", prompt="a", stream_options=options, stream=True))
        assert chunks and all("usage" not in chunk for chunk in chunks)


# What is refused


def test_values_of_any_depth(server: Running) -> None:
    """Each is either taken or refused, just below the depth that the parser refuses, too."""
    statuses = set()
    for depth in (10, 200, *range(400, 1100, 20)):
        nest = "[" * depth + "]" * depth
        for field in (
            "chat_template_kwargs",
            "extra",
            "documents",
            "messages",
            "tools",
            "response_format",
            "vllm_xargs",
        ):
            value = f'{{"a": {nest}}}'
            value = value if field not in ("documents", "messages", "tools") else f"[{value}]"
            if field == "messages":
                value = value.replace('"a"', '"role": "user", "content": "a", "a"')
            ask = {"messages": CHAT, "max_tokens": 1}
            ask.pop(field, None)
            body = f'{json.dumps(ask)[:-1]}, "{field}": {value}}}'
            response = server.http.post(
                "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            assert response.status_code in (200, 400), (depth, field, response.text)
            statuses.add(response.status_code)
    assert statuses == {200, 400}


COUNTED = [
    ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, "bad_words"),
    ({"bad_words": ["a" * (MAX_BAD_WORD + 1)]}, "bad_words.0"),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"bad_words": ["\ud800"]}, "bad_words.0"),
    ({"bad_words": "a"}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids.0"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"echo": "yes"}, "echo"),
]


@pytest.mark.parametrize(("body", "field"), COUNTED)
def test_bounds(server: Running, body: dict[str, Any], field: str) -> None:
    for path, ask in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
        content = json.dumps({**ask, **body}).encode()
        response = server.http.post(path, content=content, headers={"content-type": "application/json"})
        check_error(response, 400, field)


def test_logprobs_of_the_other_route(server: Running) -> None:
    for value in (True, False):
        message = check_error(server.post("/v1/completions", prompt="a", logprobs=value), 400, "logprobs")
        assert "must be a number" in message and "/v1/chat/completions" in message
    for value in (0, 5):
        message = check_error(server.post("/v1/chat/completions", messages=CHAT, logprobs=value), 400, "logprobs")
        assert "must be true or false" in message and "top_logprobs" in message


ASKED: dict[str, list[Any]] = {
    "use_beam_search": [True, 0],
    "length_penalty": [0.5, True],
    "logprob_token_ids": [[1]],
    "modalities": [["text", "audio"], "text"],
    "store": [True],
    "functions": [[{"name": "f"}]],
    "function_call": ["auto", {"name": "f"}],
    "suffix": ["b"],
    "thinking_token_budget": [0, 5, -1.5],
    "chat_template": ["{{ 1 }}", ""],
}


def test_what_is_not_there_is_refused_by_name_and_its_neutral_values_pass(server: Running) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    routes = (
        ("/v1/completions", {"prompt": "a"}, AbsentOfCompletions, "CompletionRequest"),
        ("/v1/chat/completions", {"messages": CHAT}, AbsentOfChats, "ChatRequest"),
    )
    for path, ask, absent, schema in routes:
        assert len(absent.model_fields) > 10
        for name in absent.model_fields:
            neutral = schemas[schema]["properties"][name]["enum"]
            assert None in neutral
            for value in neutral:
                assert server.post(path, **ask, max_tokens=1, **{name: value}).status_code == 200, (name, value)
            for value in ASKED.get(name, ["x", {"a": 1}, 7]):
                message = check_error(server.post(path, **ask, max_tokens=1, **{name: value}), 400, name)
                assert message.startswith(f"{name}: ") and "leave it out" in message
    check_error(server.post("/tokenize", messages=CHAT, chat_template="{{ 1 }}"), 400, "chat_template")


@pytest.mark.parametrize(
    "kind", ["image_url", "input_audio", "video_url", "file", "input_text", None, 5, [], "x" * 1000]
)
def test_parts_that_are_no_text(server: Running, kind: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, "image_url": {"url": "x"}}]}]
    message = check_error(server.post("/v1/chat/completions", messages=messages), 400, "messages.0.content")
    assert json.dumps(kind)[:30] in message and '"text" only' in message


def test_parts_without_their_text(server: Running) -> None:
    for part in (5, None, ["a"], {"type": "text"}, {"type": "refusal", "text": "a"}, {"type": "text", "text": ["a"]}):
        messages = [{"role": "user", "content": ["a", part]}]
        check_error(server.post("/v1/chat/completions", messages=messages), 400, "messages.0.content")
    body = json.dumps({"messages": [{"role": "user", "content": ["\ud800"]}]}).encode()
    response = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    check_error(response, 400, "messages.0.content")


def test_routes_of_other_models(server: Running) -> None:
    for path in ("/v1/responses", "/v1/embeddings", "/v1/audio/transcriptions"):
        message = check_error(server.post(path, input="a"), 404, None)
        assert message.startswith(f"{path} is not there") and "generates text only, at /v1/chat/completions" in message
        assert not re.search(path, json.dumps(server.http.get("/openapi.json").json()["paths"]))
