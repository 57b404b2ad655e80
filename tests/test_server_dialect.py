"""The OpenAI routes over an engine whose output the prompt dictates: shapes, stop strings, characters, ends, errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from echo_engine import EchoProcess
from framework.server import client
from serving import Running, eventually, running

from framework.settings import Settings

BASE = {"max_tokens": 200}


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


def events(response: httpx.Response) -> list[Any]:
    """Data of all events; the stream must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def completion(server: Running, prompt: object, **body: Any) -> dict[int, dict[str, Any]]:
    """Ask twice, whole and streamed; check that both say the same; return the choices by index."""
    request = {"prompt": prompt, **BASE, **body}
    response = server.post("/v1/completions", **request)
    assert response.status_code == 200, response.text
    whole = response.json()
    chunks = events(server.post("/v1/completions", **request, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None and chunk["object"] == whole["object"] == "text_completion"
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": None})
            assert choice.get("finish_reason") is None, "something came after the end"
            choice["text"] += piece["text"]
            choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
            if piece["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {key: [] for key in piece["logprobs"]}
                for key, values in piece["logprobs"].items():
                    choice["logprobs"][key] += values
    assert choices == {choice["index"]: choice for choice in whole["choices"]}
    return choices


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_stop_strings_across_tokens(server: Running, chunk: int) -> None:
    prompt = server.ids("one two three END four")
    choice = completion(server, prompt, stop=["ee END", "never"], extra={"chunk": chunk})[0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one two thr", "stop", "ee END")
    kept = completion(server, prompt, stop="two", include_stop_str_in_output=True, extra={"chunk": chunk})[0]
    assert (kept["text"], kept["stop_reason"]) == ("one two", "two")


def test_nothing_of_a_stop_string_is_sent_and_what_is_ruled_out_is(server: Running) -> None:
    prompt = server.ids("abcdefgh")
    chunks = events(server.post("/v1/completions", prompt=prompt, stop=["defX", "ghZ"], stream=True, **BASE))
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "abcdefgh"
    sent = ""
    for text in texts[:-1]:
        sent += text
        assert not sent.endswith(("d", "de", "def", "g", "gh"))


def test_min_tokens_holds_for_stop_strings(server: Running) -> None:
    prompt = server.ids("a\na\na\n")
    assert completion(server, prompt, stop="\n", min_tokens=3)[0]["text"] == "a\na"


@pytest.mark.parametrize("chunk", [1, 2])
def test_characters_across_tokens(server: Running, chunk: int) -> None:
    text = "ok 🙂 漢字 done"
    choice = completion(server, server.ids(text), extra={"chunk": chunk})[0]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": server.ids(text), "stream": True, **BASE}
    ) as response:
        assert "\ufffd" not in response.read().decode()


def test_ends(server: Running) -> None:
    (eos,) = server.tokenizer.eos_token_ids
    prompt = [*server.ids("abc"), eos, *server.ids("d")]
    ended = completion(server, prompt)[0]
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("abc", "stop", None)
    assert completion(server, prompt, ignore_eos=True)[0]["text"] == "abcd"
    whole = completion(server, prompt, ignore_eos=True, skip_special_tokens=False)[0]
    assert whole["text"] == "abc<|im_end|>d"
    assert completion(server, server.ids("abc"), max_tokens=2)[0]["finish_reason"] == "length"


def test_batches_and_n(server: Running) -> None:
    prompts = [server.ids("first one"), server.ids("second")]
    choices = completion(server, prompts, n=3)
    assert [choices[i]["text"] for i in range(6)] == ["first one"] * 3 + ["second"] * 3
    assert completion(server, ["x y", "z"], echo=True)[1]["text"] == "zz"


def test_usage(server: Running) -> None:
    prompts = [server.ids("first one"), server.ids("second")]
    counted = [len(p) for p in prompts]
    body = server.post("/v1/completions", prompt=prompts, n=2, **BASE).json()
    prompt, output = sum(counted), 2 * sum(counted)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    chunks = events(server.post("/v1/completions", prompt=prompts, stream=True, stream_options={}, **BASE))
    assert all("usage" not in chunk for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server.post("/v1/completions", prompt=prompts, stream=True, stream_options=options, **BASE))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == sum(counted)
    # A stop string ends the count, even if the engine was ahead.
    stopped = server.post("/v1/completions", prompt=server.ids("a b c d e f"), stop=" b", extra={"chunk": 50}, **BASE)
    assert stopped.json()["usage"]["completion_tokens"] == len(server.ids("a b"))


def test_completion_logprobs(server: Running) -> None:
    text = "ab 🙂 END"
    ids = server.ids(text)
    logprobs = completion(server, [0, *ids], logprobs=2, skip_special_tokens=False)[0]["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["token_logprobs"][:2] == [-9999.0, -0.5]
    assert all(len(top) == 3 or i < 2 for i, top in enumerate(logprobs["top_logprobs"]))
    full = "<|endoftext|>" + text
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or full[offset:].startswith(token)
    stopped = completion(server, ids, logprobs=0, stop=["END"], extra={"chunk": 50})[0]
    assert stopped["text"] == "ab 🙂 "
    assert max(stopped["logprobs"]["text_offset"]) <= len(stopped["text"])


def test_chat_logprobs(server: Running) -> None:
    messages = [{"role": "user", "content": "🙂"}]
    body = server.post("/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=2, **BASE).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert "🙂".encode() in b"".join(bytes(entry["bytes"]) for entry in content)
    plain = server.post("/v1/chat/completions", messages=messages, logprobs=True, **BASE).json()
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_chat(server: Running) -> None:
    messages: Any = [
        {"role": "system", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "hi 🙂"},
    ]
    rendered = "system\nbe\nbrief\nuser\nhi 🙂\nassistant\n"
    options: Any = {"model": "echo", "messages": messages, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    whole = server.openai.chat.completions.create(**options, n=2)
    assert [choice.message.content for choice in whole.choices] == [rendered, rendered]
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    texts: dict[int, str] = {}
    roles, ends, usage = [], [], []
    for chunk in server.openai.chat.completions.create(
        **options, n=2, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            roles += [choice.index] if choice.delta.role else []
            ends += [choice.index] if choice.finish_reason else []
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        usage += [chunk.usage] if chunk.usage else []
    assert texts == {0: rendered, 1: rendered} and sorted(roles) == sorted(ends) == [0, 1]
    assert usage == [whole.usage]


def test_null_means_default_and_unknown_fields_are_ignored(server: Running) -> None:
    fields = ("max_tokens", "temperature", "top_p", "n", "seed", "stop", "logit_bias", "logprobs", "stream", "echo",
              "presence_penalty", "stream_options", "user", "model", "min_tokens", "stop_token_ids")  # fmt: skip
    body = {**dict.fromkeys(fields), "prompt": server.ids("abc"), "future": {"x": 1}, "best_of": None}
    assert server.post("/v1/completions", **body).json()["choices"][0]["text"] == "abc"


# Errors

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
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"prompt": "a", "min_tokens": 10**40}, "min_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": 10**400}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 1.5}, "min_p"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 10_000_000}, "n"),
    ({"prompt": "a", "seed": 2**63}, "seed"),
    ({"prompt": "a", "seed": 2**63, "n": 2}, "seed"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": -1}, "logprobs"),
    ({"prompt": "a", "logprobs": 1_000_000}, "logprobs"),
    ({"prompt": "a", "logprobs": 1, "echo": True}, "logprobs"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": ["a", ""]}, "stop"),
    ({"prompt": "a", "stop": [1]}, "stop"),
    ({"prompt": "a", "stop": {"a": 1}}, "stop"),
    ({"prompt": "a", "stop": ["a"] * 100}, "stop"),
    ({"prompt": "a", "stop": "a" * 10_000}, "stop"),
    ({"prompt": "a", "stop_token_ids": [512]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": ["a"] * 1000}, "stop_token_ids.0"),
    ({"prompt": "a", "logit_bias": {"9999999": 5}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"x": 5}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 1e9}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "priority": 2**63}, "priority"),
    ({"prompt": "a", "priority": 1}, "priority"),
    ({"prompt": "a", "priority": -1}, "priority"),
    ({"prompt": "a", "priority": 0.5}, "priority"),
    ({"prompt": "a", "tenant": "a" * 257}, "tenant"),
    ({"prompt": "a", "tenant": 7}, "tenant"),
    ({"prompt": "a", "cache_salt": "a" * 257}, "cache_salt"),
    ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt"),
    ({"prompt": "a", "extra": {"a": 10**30}}, "extra"),
    ({"prompt": "a", "stream_options": {}}, "stream_options"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
]
BAD_CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}, 1]}, "messages.1"),
    ({"messages": [{"content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "word " * 300}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "a"}], "logprobs": 5}, "logprobs"),
    ({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 9999}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, "tools"),
    ({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}, "response_format"),
]


def check_error(response: httpx.Response, status: int, param: str | None) -> str:
    assert response.status_code == status, response.text
    assert len(response.content) < 4000
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, status)
    assert error["message"] and "Traceback" not in error["message"]
    return str(error["message"])


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


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"null", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000])
def test_bad_bodies(server: Running, body: bytes) -> None:
    response = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    check_error(response, 400, None)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "x"])
def test_bad_content_types(server: Running, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    body = b'{"prompt": "a", "max_tokens": 1}'
    check_error(server.http.post("/v1/completions", content=body, headers=headers), 400, "Content-Type")
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.http.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_limited_body(server: Running) -> None:
    body = (b"a" * 2**20 for _ in range(40))
    with pytest.raises((httpx.WriteError, AssertionError)):  # the server may stop reading before all is sent
        response = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        check_error(response, 413, None)
        raise AssertionError
    assert server.http.get("/health").status_code == 200


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


def test_models_version_health(server: Running) -> None:
    (card,) = server.openai.models.list().data
    assert card.id == "echo" and card.model_extra and card.model_extra["max_model_len"] == 256
    assert server.openai.models.retrieve("echo").id == "echo"
    assert "version" in server.http.get("/version").json()
    assert server.http.get("/health").status_code == server.http.get("/ping").status_code == 200
    assert server.http.get("/openapi.json").json()["paths"]["/v1/chat/completions"]


def test_a_silent_engine_is_unhealthy_only_while_somebody_waits(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STALLED_AFTER", 0.1)

    def healthy() -> bool:
        return server.http.get("/health").status_code == 200

    def wait() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "extra": {"hold": True}}, timeout=2)

    assert healthy()  # silent, but idle
    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: not healthy())
    thread.join()
    eventually(healthy)


# Disconnects, ids, records


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_a_client_that_leaves_frees_its_request(server: Running, stream: bool, hold: bool) -> None:
    seen = len(server.recorder.records)
    extra = {"hold": True} if hold else {"pace": 0.05}
    body = {"prompt": [[5] * 200] * 2, "n": 2, "stream": stream, "extra": extra}
    timeout = httpx.Timeout(30, read=0.3)
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=timeout) as response:
            next(response.iter_raw())
            assert stream
    except httpx.ReadTimeout:
        pass
    record = eventually(lambda: server.recorder.records[seen:])[0]
    assert (record.status, record.error) == (499, None) and "abort" in record.finish_reasons
    eventually(lambda: server.engine.stats.running == 0)
    assert completion(server, server.ids("next"))[0]["text"] == "next"


def test_duplicate_ids_never_meet(server: Running) -> None:
    headers = {"X-Request-Id": "mine"}
    body = {"prompt": server.ids("same"), **BASE}
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=headers) as first:
        second = server.http.post("/v1/completions", json=body, headers=headers)
        assert second.headers["x-request-id"] == first.headers["x-request-id"] == "mine"
        assert second.json()["id"] == "cmpl-mine" and second.json()["choices"][0]["text"] == "same"
        assert first.read().decode().count("finish_reason") > 1
    odd = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "a b" * 100})
    assert odd.headers["x-request-id"] != "a b" * 100 and odd.json()["id"].startswith("cmpl-")
    assert server.http.get("/nothing").headers["x-request-id"]


def test_records(server: Running) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    for flag in ("01", "00"):
        response = server.http.post(
            "/v1/completions",
            json={"prompt": server.ids("ab 🙂"), "n": 2, "temperature": 0.5, **BASE},
            headers={"traceparent": f"00-{trace}-{parent}-{flag}"},
        )
        record = server.record(response.json()["id"])
        assert (record.trace_id, record.parent_span_id, record.sampled) == (trace, parent, flag == "01")
        assert record.traceparent == f"00-{trace}-{record.span_id}-{flag}" and record.span_id != parent
    count = len(server.ids("ab 🙂"))
    assert (record.prompt_tokens, record.output_tokens, record.choices) == (count, 2 * count, 2)
    assert server.recorder.tokens[record.id] == 2 * count
    assert record.finish_reasons == ["length", "length"] and record.status == 200 and record.error is None
    assert record.attributes == {"gen_ai.request.max_tokens": 200, "gen_ai.request.temperature": 0.5}
    names = [name for name, _, _ in record.stages]
    assert names == ["http.receive", "tokenize", "http.send"]
    times = [record.start, *(t for _, start, end in record.stages[:2] for t in (start, end)), record.first_token]
    assert times == sorted(times) and record.first_token <= record.last_token <= record.end
    fresh = server.record(server.post("/v1/completions", prompt="a", max_tokens=1).json()["id"])
    assert fresh.parent_span_id is None and fresh.sampled and len(fresh.trace_id) == 32
    broken = {"traceparent": "00-" + "0" * 32 + "-zz-01"}
    response = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=broken)
    assert server.record(response.json()["id"]).parent_span_id is None


def test_failures_are_recorded_once(server: Running) -> None:
    seen = len(server.recorder.records)
    server.post("/v1/completions", prompt="")
    server.post("/v1/completions", prompt="a", extra={"error": "no", "status": 429}, stream=True)
    eventually(lambda: len(server.recorder.records) == seen + 2)
    assert [(r.status, r.error) for r in server.recorder.records[seen:]] == [
        (400, "prompt: empty; give at least one token"),
        (429, "no"),
    ]


# The engine's death: last, for this server does not survive it


@pytest.mark.parametrize("fatal", [None, "out of memory"])
def test_the_death_of_the_engine_fails_everybody(tiny_llama: Path, fatal: str | None) -> None:
    settings = Settings(model=str(tiny_llama), served_model_name="echo")
    extra = {"die": 2} | ({"fatal": fatal} if fatal else {})
    expected = fatal or "exit code 3"
    with running(settings, spawn=EchoProcess) as server:
        waiting = server.http.build_request("POST", "/v1/completions", json={"prompt": "a", "extra": {"hold": True}})
        found: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: found.append(httpx.Client(timeout=30).send(waiting)))
        thread.start()
        eventually(lambda: server.engine.stats.running == 1)
        chunks = events(server.post("/v1/completions", prompt=server.ids("a b c d"), extra=extra, stream=True))
        assert chunks[0]["choices"][0]["text"] == "a"
        assert expected in chunks[-1]["error"]["message"] and chunks[-1]["error"]["code"] == 503
        thread.join(30)
        assert expected in check_error(found[0], 503, None)
        assert expected in check_error(server.http.get("/health"), 503, None)
        check_error(server.post("/v1/completions", prompt="a"), 503, None)
        assert server.http.get("/v1/models").status_code == 200
        assert not server.engine.alive
