"""Log-probabilities of prompts, echoed or by themselves: shapes over an engine whose output the prompt dictates, values
over the real one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_engine import EchoProcess
from framework.server.scores import Echo
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import BASE, Running, check_error, completion, events, eventually, running

from framework.checkpoint import open_checkpoint
from framework.registry import load_plugins
from framework.settings import Settings
from framework.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def echo(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    flags: dict[str, Any] = {"kv_blocks": 64, "block_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 32}
    with running(Settings(model=str(tiny_llama), served_model_name="tiny", dtype="float32", **flags)) as found:
        yield found


# Where the tokens of a prompt stand


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return open_checkpoint(Settings(model=str(tiny_llama)), load_plugins()).tokenizer()


@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=1, max_size=30) | st.sampled_from(["  a  b\n\n c", "🙂🙂 漢 字", "x<|im_end|>y "]))
def test_offsets_point_at_tokens(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    kept = tokenizer.decode(ids, skip_special_tokens=False)
    for whole in (
        Echo.of_text(tokenizer, text, ids, True),
        Echo.of_tokens(tokenizer, ids, False),
    ):
        assert whole.text == text == kept
        assert len(whole.offsets) == len(ids) and list(whole.offsets) == sorted(whole.offsets)
        data = b""
        for id, offset in zip(ids, whole.offsets, strict=True):
            # The bytes before a token are those of the text before it, but for a character that has begun.
            before = text[:offset].encode()
            assert data.startswith(before) and len(data) - len(before) < 4
            data += tokenizer.token_bytes(id)


def test_offsets_where_a_bos_token_is_added(tiny_llama_spm: Path) -> None:
    tokenizer = open_checkpoint(Settings(model=str(tiny_llama_spm)), load_plugins()).tokenizer()
    text = "The quick fox"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    found = Echo.of_text(tokenizer, text, ids, True)
    again = Echo.of_tokens(tokenizer, ids, True)
    assert found == again and found.offsets[:2] == [0, 0] and len(found.offsets) == len(ids)


# Shapes


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"extra": {"chunk": 100}}, {"stop": "brown"}])
def test_echo_with_logprobs(echo: Running, options: dict[str, Any]) -> None:
    """`completion` asks whole and streamed, and compares."""
    text = "The quick 🙂 brown 漢字 fox"
    ids = echo.ids(text)
    for prompt in (text, ids, [ids, ids[:3]]):
        for index, choice in completion(echo, prompt, echo=True, logprobs=2, **options).items():
            own = ids[:3] if isinstance(prompt[0], list) and index >= options.get("n", 1) else ids
            shown, logprobs = echo.tokenizer.decode(own), choice["logprobs"]
            assert choice["text"].startswith(shown)
            lengths = {len(values) for values in logprobs.values()}
            generated = len(own) if "stop" not in options or len(own) == 3 else len(echo.ids("The quick 🙂 brown"))
            assert lengths == {len(own) + generated}
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            assert all(value == -0.5 for value in logprobs["token_logprobs"][1:])
            assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"][1:])
            for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
                rest = choice["text"][offset:]  # a stop string cuts tokens in two
                assert token.startswith("bytes:") or rest.startswith(token) or (options and token.startswith(rest))


def test_scoring_a_prompt(echo: Running) -> None:
    text = "The quick brown fox"
    ids = echo.ids(text)
    for options in ({}, {"min_tokens": 0, "stop": "T", "stop_token_ids": [5], "ignore_eos": False}):
        for prompt in (text, [ids, ids]):
            choices = completion(echo, prompt, echo=True, logprobs=1, max_tokens=0, **options)
            for choice in choices.values():
                assert choice["text"] == text and choice["finish_reason"] == "length" and choice["stop_reason"] is None
                assert len(choice["logprobs"]["tokens"]) == len(ids)
    body = echo.post("/v1/completions", prompt=[ids, ids], echo=True, logprobs=0, max_tokens=0).json()
    count = 2 * len(ids)
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["total_tokens"] == count
    assert echo.record(body["id"]).output_tokens == 0
    plain = completion(echo, text, echo=True, max_tokens=0)[0]
    assert (plain["text"], plain["logprobs"]) == (text, None)
    eventually(lambda: echo.engine.stats.running == 0)


def test_an_echoed_prompt_without_text_has_its_scores(echo: Running) -> None:
    (start,) = echo.ids("<|im_start|>")
    for prompt in ([start], [start, start], [[start], echo.ids("The")]):
        first = completion(echo, prompt, echo=True, logprobs=1, max_tokens=1)[0]
        count = len(prompt) if isinstance(prompt[0], int) else 1
        assert first["text"] == "" and first["logprobs"]["tokens"] == ["<|im_start|>"] * (count + 1)
        assert first["logprobs"]["token_logprobs"] == [None] + [-0.5] * count


def test_no_work_for_offsets_that_nobody_gets(echo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds for millions of tokens."""
    made = []
    of_tokens = Echo.of_tokens
    monkeypatch.setattr(Echo, "of_tokens", lambda *given: made.append(given) or of_tokens(*given))
    ids = echo.ids("The fox 🙂 漢字")
    scored = completion(echo, ids, echo=True, logprobs=0, max_tokens=1)[0]
    assert len(made) == 2
    assert completion(echo, ids, echo=True, max_tokens=1)[0]["text"] == scored["text"]
    refused = echo.post("/v1/completions", prompt=[ids[:1] * 200] * 30, n=120, echo=True, logprobs=1)
    assert "log-probabilities" in check_error(refused, 400, "logprobs")
    assert len(made) == 2


def test_prompt_logprobs(echo: Running) -> None:
    ids = echo.ids("The fox 🙂")
    body = echo.post("/v1/completions", prompt=[ids, ids[:2]], n=2, prompt_logprobs=2, **BASE).json()
    assert [len(choice["prompt_logprobs"]) for choice in body["choices"]] == [len(ids)] * 2 + [2] * 2
    first, *rest = body["choices"][0]["prompt_logprobs"]
    assert first is None
    for id, entry in zip(ids[1:], rest, strict=True):
        assert list(entry) == list(dict.fromkeys([str(id), "0", "1"]))
        assert entry[str(id)]["logprob"] == -0.5 and entry[str(id)]["rank"] == 1
        assert entry["1"] == {"logprob": -2.0, "rank": 2, "decoded_token": echo.tokenizer.token_bytes(1).decode()}
    whole = echo.post("/v1/chat/completions", messages=CHAT, prompt_logprobs=0, return_token_ids=True, **BASE).json()
    assert [set(e) if e else e for e in whole["prompt_logprobs"]] == [
        None,
        *({str(id)} for id in whole["prompt_token_ids"][1:]),
    ]
    assert "prompt_logprobs" not in whole["choices"][0]
    for path, ask in (("/v1/completions", {"prompt": ids}), ("/v1/chat/completions", {"messages": CHAT})):
        assert "prompt_logprobs" not in str(echo.post(path, **ask, **BASE).json())
        message = check_error(echo.post(path, **ask, prompt_logprobs=1, stream=True), 400, "prompt_logprobs")
        assert "stream" in message
    for n in (1, 2):
        for path, ask in (("/v1/completions", {"prompt": ids}), ("/v1/chat/completions", {"messages": CHAT})):
            ask = {**ask, "prompt_logprobs": 0, "n": n, **BASE}
            plain = echo.post(path, **ask).json()
            told = [
                (piece["index"], (chunk | piece)["prompt_logprobs"])
                for chunk in events(echo.post(path, **ask, stream=True))
                for piece in chunk["choices"]
                if "prompt_logprobs" in chunk | piece
            ]
            expected = plain["choices"][0].get("prompt_logprobs") or plain["prompt_logprobs"]
            assert told == [(k, expected) for k in range(n)] and len(expected) == plain["usage"]["prompt_tokens"]
    both = echo.post("/v1/completions", prompt=ids, echo=True, logprobs=1, prompt_logprobs=3, **BASE).json()["choices"][
        0
    ]
    assert all(len(entry) in (3, 4) for entry in both["prompt_logprobs"][1:])
    assert all(len(top) in (1, 2) for top in both["logprobs"]["top_logprobs"][1:])


def test_what_remains_of_a_prompt_is_echoed(echo: Running) -> None:
    text = "abcdefghijklmnop " * 60
    ids = echo.ids(text)[-5:]
    choice = completion(echo, text, echo=True, logprobs=0, truncate_prompt_tokens=5, max_tokens=0)[0]
    assert choice["text"] == echo.tokenizer.decode(ids)
    assert choice["logprobs"]["tokens"] == [echo.tokenizer.decode([id]) for id in ids]


# Values


def test_the_scores_of_a_text_are_those_of_generating_it(server: Running) -> None:
    """And a prompt has them alone and in a batch, prefix-cached or not, in one slice or in many, streamed or not."""
    asked = {"temperature": 0, "max_tokens": 40, "logprobs": 3, "return_token_ids": True, "ignore_eos": True}
    drawn = server.post("/v1/completions", prompt="The quick brown fox", **asked).json()["choices"][0]
    ids = drawn["prompt_token_ids"] + drawn["token_ids"]
    expected = drawn["logprobs"]["token_logprobs"]
    for prompt in (ids, [ids, ids], [ids[:9], ids]):
        ask: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 3, "max_tokens": 0}
        last = len(prompt) - 1 if prompt is not ids else 0
        whole = server.post("/v1/completions", **ask).json()["choices"][last]
        # Compared here: slices of a prompt depend on what runs beside it, and the last bits on the slices.
        pieces = [chunk["choices"][0] for chunk in events(server.post("/v1/completions", **ask, stream=True))]
        (streamed,) = [piece for piece in pieces if piece["index"] == last]
        for found in (whole["logprobs"], streamed["logprobs"]):
            assert len(found["tokens"]) == len(ids) and found["token_logprobs"][0] is None
            assert found["tokens"][-40:] == drawn["logprobs"]["tokens"]
            assert found["text_offset"] == whole["logprobs"]["text_offset"]
            assert found["token_logprobs"][-40:] == pytest.approx(expected, abs=1e-4)
            for top, other in zip(found["top_logprobs"][-40:], drawn["logprobs"]["top_logprobs"], strict=True):
                assert top == pytest.approx(other, abs=1e-4)
    body = server.post("/v1/completions", prompt=ids, prompt_logprobs=3, max_tokens=1, n=2).json()
    for choice in body["choices"]:
        scores = choice["prompt_logprobs"][-40:]
        assert [scores[i][str(ids[i - 40])]["logprob"] for i in range(40)] == pytest.approx(expected, abs=1e-4)
        assert all(score[str(id)]["rank"] == 1 for score, id in zip(scores, ids[-40:], strict=True))
    eventually(lambda: server.engine.stats.running == server.engine.stats.kv_holding == 0)


def test_the_best_are_those_of_all_draws(server: Running) -> None:
    asked: dict[str, Any] = {"prompt": ["The", "Once"], "max_tokens": 12, "seed": 5, "logprobs": 0}
    every = server.post("/v1/completions", **asked, n=5).json()
    best = server.post("/v1/completions", **asked, n=2, best_of=5).json()
    for first in (0, 1):
        draws = every["choices"][5 * first : 5 * first + 5]

        def mean(choice: dict[str, Any]) -> float:
            values = choice["logprobs"]["token_logprobs"]
            return float(sum(values) / len(values))

        expected = sorted(draws, key=mean, reverse=True)[:2]
        assert [c["text"] for c in best["choices"][2 * first :][:2]] == [c["text"] for c in expected]
        assert len({choice["text"] for choice in draws}) == 5
    assert best["usage"] == every["usage"] | {"prompt_tokens_details": best["usage"]["prompt_tokens_details"]}


def test_chunks_hold_the_whole_prompt_once(server: Running) -> None:
    """Also where several choices share it, and the prompt takes several steps."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    asked = {"prompt": prompt, "n": 3, "seed": 2, "max_tokens": 5, "logprobs": 0, "echo": True, "stream": True}
    chunks = events(server.post("/v1/completions", **asked))
    pieces = [piece for chunk in chunks for piece in chunk["choices"]]
    for index in range(3):
        own = [piece for piece in pieces if piece["index"] == index]
        assert own[0]["text"].startswith(prompt) and own[0]["logprobs"]["token_logprobs"].count(None) == 1
        told = functools.reduce(operator.iadd, (piece["logprobs"]["token_logprobs"] for piece in own), [])
        assert len(told) == len(server.ids(prompt)) + 5
