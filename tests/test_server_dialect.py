"""The OpenAI routes over an engine whose output the prompt dictates: shapes, stop strings, characters, ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_engine import EchoProcess
from framework.server import limits, schemas
from serving import BASE, Running, completion, events, running

from framework.settings import Settings


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_llama_spm"])
def spelled(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Of each kind of tokenizer."""
    settings = Settings(model=str(request.getfixturevalue(request.param)), served_model_name="echo")
    with running(settings, spawn=EchoProcess) as found:
        yield found


def lead(server: Running) -> str:
    """What a text begins with, where it goes on from another: sentencepiece's tokens begin with a blank."""
    return " " if any(server.tokenizer.token_bytes(id).startswith(b" ") for id in server.ids("a")) else ""


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_stop_strings_across_tokens(spelled: Running, chunk: int) -> None:
    prompt = spelled.ids("one two three END four")
    choice = completion(spelled, prompt, stop=["ee END", "never"], extra={"chunk": chunk})[0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        lead(spelled) + "one two thr",
        "stop",
        "ee END",
    )
    kept = completion(spelled, prompt, stop="two", include_stop_str_in_output=True, extra={"chunk": chunk})[0]
    assert (kept["text"], kept["stop_reason"]) == (lead(spelled) + "one two", "two")


def test_nothing_of_a_stop_string_is_sent_and_what_is_ruled_out_is(spelled: Running) -> None:
    prompt = spelled.ids("abcdefgh")
    chunks = events(spelled.post("/v1/completions", prompt=prompt, stop=["defX", "ghZ"], stream=True, **BASE))
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == lead(spelled) + "abcdefgh"
    sent = ""
    for text in texts[:-1]:
        sent += text
        assert not sent.endswith(("d", "de", "def", "g", "gh"))


def test_min_tokens_holds_for_stop_strings(server: Running) -> None:
    prompt = server.ids("a\na\na\n")
    assert completion(server, prompt, stop="\n", min_tokens=3)[0]["text"] == "a\na"


@pytest.mark.parametrize("chunk", [1, 2])
def test_characters_across_tokens(spelled: Running, chunk: int) -> None:
    text = "ok 🙂 漢字 done"
    choice = completion(spelled, spelled.ids(text), extra={"chunk": chunk})[0]
    assert (choice["text"], choice["finish_reason"]) == (lead(spelled) + text, "length")
    with spelled.http.stream(
        "POST", "/v1/completions", json={"prompt": spelled.ids(text), "stream": True, **BASE}
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


def test_every_field_and_limit_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs/http-api.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented >= set(schemas.CompletionRequest.model_fields) | set(schemas.ChatRequest.model_fields)
    plain = ("BAD_WORD", "BAD_WORDS", "BIASES", "CHOICES", "DOCUMENTS", "MESSAGES", "REQUEST_ID", "SEQUENCES", "STOPS",
             "STOP_IDS", "STOP_LENGTH", "USER")  # fmt: skip
    for name in plain:
        assert re.search(rf"\b{getattr(limits, f'MAX_{name}')}\b", page), name
    for name, shown in (("BODY", "10 MiB"), ("SENT", "20 MiB"), ("EXTRA", "64 KiB"), ("GRAMMAR", "64 KiB")):
        size, unit = shown.split()
        assert getattr(limits, f"MAX_{name}") == int(size) * {"KiB": 2**10, "MiB": 2**20}[unit] and shown in page
    assert limits.MAX_SCORED == 2**20 and re.search(r"2\^20\s+`prompt_logprobs`", page)


def test_models_version_health(server: Running) -> None:
    (card,) = server.openai.models.list().data
    assert card.id == "echo" and card.model_extra and card.model_extra["max_model_len"] == 256
    (permission,) = card.model_extra["permission"]  # the document says what else is in it
    assert permission["object"] == "model_permission" and permission["allow_sampling"]
    assert server.openai.models.retrieve("echo").id == "echo"
    assert "version" in server.http.get("/version").json()
    assert server.http.get("/health").status_code == server.http.get("/ping").status_code == 200
    assert server.http.get("/openapi.json").json()["paths"]["/v1/chat/completions"]
