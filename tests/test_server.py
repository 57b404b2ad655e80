"""The server over the real engine and a tiny model, driven by the `openai` client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from rogue import install
from serving import Running, completion, eventually, running

from framework.settings import Settings

MESSAGES: Any = [{"role": "user", "content": "Tell me of the fox."}]


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(model=str(tiny_llama), served_model_name="tiny", dtype="float32", kv_blocks=64, max_num_seqs=16)
    with running(settings) as found:
        yield found


def gauge(server: Running, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"framework_{name} ")))


def streamed(server: Running, **body: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in server.openai.completions.create(model="tiny", stream=True, **body):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def test_min_tokens_holds_for_stop_tokens_and_the_end(server: Running) -> None:
    asked = {"prompt": "The quick", "temperature": 0, "max_tokens": 9, "return_token_ids": True}
    second = completion(server, **asked, ignore_eos=True)[0]["token_ids"][1]
    [end, *_] = server.tokenizer.eos_token_ids
    for token, options in ((second, {"stop_token_ids": [second]}), (end, {"logit_bias": {str(end): 100}})):
        early, late = (completion(server, **asked, **options, min_tokens=least)[0] for least in (0, 5))
        assert early["finish_reason"] == "stop" and early["token_ids"][-1] == token and len(early["token_ids"]) <= 2
        assert len(late["token_ids"]) > 5 and token not in late["token_ids"][:5]


def test_logits_that_are_not_finite_fail_one_request(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With status 500, or an event in a stream that has begun; a neighbour's tokens are as if it were alone."""
    folder = install(tmp_path / "plugins")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    settings = Settings(model=str(tiny_llama), dtype="float32", kv_blocks=64, plugin=("rogue",))
    body = {"prompt": "The quick", "max_tokens": 40, "ignore_eos": True, "seed": 4}
    with running(settings) as server, ThreadPoolExecutor(1) as others:
        alone = completion(server, **body)
        for stream in (False, True):
            neighbour = others.submit(completion, server, **body)
            response = server.post("/v1/completions", **body, stream=stream, extra={"nan": True})
            assert "the model's logits are not finite" in response.text
            assert response.status_code == (200 if stream else 500)
            assert not stream or response.text.endswith("data: [DONE]\n\n")
            assert neighbour.result(30) == alone
        eventually(lambda: server.engine.stats.running == 0 == server.engine.stats.kv_holding)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 7, "n": 3},
        {"temperature": 0.8, "seed": -1, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"seed": 3, "extra_body": {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 5}},
        {"temperature": 0, "logit_bias": {"40": 5, "41": -100}, "stop": ["e", "a"]},
    ],
)
def test_streaming_equals_not_streaming(server: Running, options: dict[str, Any]) -> None:
    body = {"prompt": ["The quick brown", "Once upon a time"], "max_tokens": 24, **options}
    whole = server.openai.completions.create(model="tiny", **body)
    assert streamed(server, **body) == {choice.index: choice.text for choice in whole.choices}
    assert whole.usage and whole.usage.completion_tokens <= 24 * len(whole.choices)


def test_chat_streaming_equals_not_streaming(server: Running) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "seed": 11, "max_completion_tokens": 20}
    whole = server.openai.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    chunks = list(server.openai.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
    # The second time the prompt is in the prefix cache: a product over fewer rows rounds its last bits elsewhere.
    for entry, other in zip(entries, whole.choices[0].logprobs.content, strict=True):
        assert entry.token == other.token and entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [top.token for top in entry.top_logprobs] == [top.token for top in other.top_logprobs]
    assert len(entries) == whole.usage.completion_tokens == 20  # type: ignore[union-attr]
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]


def test_choices_are_independent_draws(server: Running) -> None:
    ask: Any = {"model": "tiny", "prompt": "The", "max_tokens": 16, "n": 4}
    for seed in ({}, {"seed": 5}):
        texts = [c.text for c in server.openai.completions.create(**ask, **seed).choices]
        assert len(set(texts)) == 4
    again = [c.text for c in server.openai.completions.create(**ask, seed=5).choices]
    assert again == texts
    assert server.openai.completions.create(**{**ask, "n": 1}, seed=5).choices[0].text == texts[0]


def test_logprobs(server: Running) -> None:
    choice = server.openai.completions.create(
        model="tiny", prompt="The quick", max_tokens=8, temperature=0, logprobs=3
    ).choices[0]
    logprobs = choice.logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.text_offset
    assert len(logprobs.tokens) == len(logprobs.text_offset) == 8
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and max(top.values()) == top[token] == value  # greedy takes the likeliest


def test_unset_max_tokens_of_a_chat_means_what_remains(server: Running) -> None:
    choice = server.post("/v1/chat/completions", messages=MESSAGES, ignore_eos=True).json()
    limit = server.serving.inputs.info.max_model_len
    assert choice["usage"]["total_tokens"] == limit and choice["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("length", "most"), [(9, 16), (500, 12)])
def test_unset_max_tokens_of_a_completion_means_16_or_what_remains(server: Running, length: int, most: int) -> None:
    choice = server.post("/v1/completions", prompt=[5] * length, ignore_eos=True).json()
    assert choice["usage"]["completion_tokens"] == most and choice["choices"][0]["finish_reason"] == "length"


def test_many_at_once(server: Running) -> None:
    """More than there are seats; each answer is the one it gets alone."""
    prompts = [f"The fox number {i}" for i in range(24)]
    alone = [server.post("/v1/completions", prompt=p, seed=i, max_tokens=12).json() for i, p in enumerate(prompts)]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked = [
                client.completions.create(model="tiny", prompt=p, seed=i, max_tokens=12) for i, p in enumerate(prompts)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == [body["choices"][0]["text"] for body in alone]
    assert gauge(server, "requests_running") == gauge(server, "requests_waiting") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_disconnects_free_everything(server: Running, stream: bool) -> None:
    """Running ones and queued ones: 40 sequences, 16 seats."""

    began = threading.Event()

    def leave() -> None:
        body = {"prompt": ["The"] * 20, "n": 2, "max_tokens": 300, "ignore_eos": True, "stream": stream}
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=0.5) as response:
                pieces = response.iter_raw()  # kept: its end is the connection's
                next(pieces)
                began.wait(10)
        except httpx.ReadTimeout:
            pass

    before = server.engine.stats.step
    thread = threading.Thread(target=leave)
    thread.start()
    eventually(lambda: server.engine.stats.step > before)
    began.set()
    thread.join()
    eventually(lambda: gauge(server, "requests_running") == gauge(server, "requests_waiting") == 0)
    assert gauge(server, "kv_cache_usage") == 0
    assert server.post("/v1/completions", prompt="The", max_tokens=3).status_code == 200


def test_a_request_larger_than_the_pool_is_refused(tiny_llama: Path) -> None:
    settings = Settings(model=str(tiny_llama), kv_blocks=4, block_size=4)
    with running(settings) as server:
        limit = server.serving.inputs.info.max_model_len
        response = server.post("/v1/completions", prompt=[5] * (limit - 1), max_tokens=2)
        assert response.status_code == 400 and str(limit) in response.json()["error"]["message"]
        assert server.post("/v1/completions", prompt=[5] * 3, max_tokens=4).status_code == 200


def test_usage_tells_what_the_prefix_cache_had(server: Running) -> None:
    ask: Any = {"prompt": [17] * 40, "max_tokens": 2, "n": 3}
    cached = [
        server.post("/v1/completions", **ask).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached == [0, 32]


def test_n_aborted_half_way_frees_everything(server: Running) -> None:
    """Some of four end by a stop string, the others when the client leaves."""
    ask: Any = {"model": "tiny", "prompt": "The", "n": 4, "max_tokens": 300, "seed": 5}
    with server.openai.completions.create(
        **ask, stop=["e", "a"], extra_body={"ignore_eos": True}, stream=True
    ) as stream:
        for _, _chunk in zip(range(12), stream, strict=False):
            pass
    eventually(lambda: gauge(server, "requests_running") == gauge(server, "requests_waiting") == 0)
    assert gauge(server, "kv_cache_usage") == 0


def test_token_ids_are_those_of_the_text(server: Running) -> None:
    for choice in completion(
        server, ["The quick brown", "Once"], n=2, seed=3, max_tokens=16, return_token_ids=True
    ).values():
        decoded = server.tokenizer.decode(choice["prompt_token_ids"] + choice["token_ids"])
        assert decoded == server.tokenizer.decode(choice["prompt_token_ids"]) + choice["text"]
        given = choice["prompt_token_ids"]
        again = completion(server, given, max_tokens=16, temperature=0, return_token_ids=True)[0]
        assert again["prompt_token_ids"] == given and len(again["token_ids"]) <= 16


def test_allowed_token_ids_and_bad_words(server: Running) -> None:
    ask: dict[str, Any] = {"prompt": "The quick brown", "seed": 4, "max_tokens": 32, "ignore_eos": True}
    allowed = server.ids("abc") + server.ids(" the")
    choice = completion(server, **ask, allowed_token_ids=allowed, return_token_ids=True)[0]
    assert set(choice["token_ids"]) <= set(allowed) and len(set(choice["token_ids"])) > 1
    plain = completion(server, **ask, return_token_ids=True)[0]
    bad = next(id for id in plain["token_ids"] if server.ids(text := server.tokenizer.decode([id])) == [id])
    other = completion(server, **ask, bad_words=[text], return_token_ids=True)[0]
    assert bad in plain["token_ids"] and bad not in other["token_ids"] and len(other["token_ids"]) == 32


def test_a_cut_prompt_is_generated_from_as_what_is_left_of_it(server: Running) -> None:
    ids = server.ids("Once upon a time there was a small engine that served many requests at the same time.")
    ask: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    for cut, left in (({}, ids[-6:]), ({"truncation_side": "right"}, ids[:6])):
        found = completion(server, ids, truncate_prompt_tokens=6, **cut, **ask)[0]
        assert found == completion(server, left, **ask)[0]
    limit = server.serving.inputs.info.max_model_len
    body = server.post("/v1/completions", prompt=ids * 40, truncate_prompt_tokens=-1, max_tokens=7, ignore_eos=True)
    assert body.json()["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": limit - 7,
        "completion_tokens": 7,
        "total_tokens": limit,
        "prompt_tokens_details": None,
    }


def test_what_ended_it_is_told(server: Running) -> None:
    drawn = completion(server, "The", temperature=0, max_tokens=24, return_token_ids=True, ignore_eos=True)[0]
    token = drawn["token_ids"][5]
    stopped = completion(server, "The", temperature=0, max_tokens=24, stop_token_ids=[token], ignore_eos=True)[0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", token)
    text = drawn["text"][3:5]
    stopped = completion(server, "The", temperature=0, max_tokens=24, stop=[text], ignore_eos=True)[0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", text)
    assert (drawn["finish_reason"], drawn["stop_reason"]) == ("length", None)
    (eos,) = server.tokenizer.eos_token_ids
    ended = completion(server, "The", temperature=0, max_tokens=4, logit_bias={str(eos): 100})[0]
    assert (ended["finish_reason"], ended["stop_reason"], ended["text"]) == ("stop", None, "")


def test_values_outside_the_vocabulary_harm_nobody(server: Running) -> None:
    """They are refused, or as good as the vocabulary's size; who runs beside them gets what it gets alone."""
    vocab = server.serving.inputs.info.vocab_size
    ask: Any = {"prompt": "The quick", "seed": 8, "max_tokens": 200, "ignore_eos": True}
    alone = server.post("/v1/completions", **ask).json()["choices"]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(server.post("/v1/completions", **ask).json()["choices"]))
    thread.start()
    for path, asked in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        for field, wrong in (
            ("stop_token_ids", [vocab]),
            ("logit_bias", {"9999999": 5}),
            ("allowed_token_ids", [vocab]),
            ("allowed_token_ids", [0] * (2**20 + 1)),
            ("prompt_logprobs", 1_000_000),
        ):
            response = server.post(path, **asked, min_tokens=1, max_tokens=3, **{field: wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    response = server.post("/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=1_000_000)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")
    wide = [completion(server, "The", seed=3, max_tokens=8, top_k=k)[0] for k in (9_999_999, 0)]
    assert wide[0] == wide[1]
    thread.join()
    assert found == [alone]


def test_fields_of_the_client_library(server: Running) -> None:
    scored = server.openai.completions.create(model="tiny", prompt="The quick", echo=True, logprobs=1, max_tokens=0)
    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text == "The quick" and logprobs and logprobs.token_logprobs
    assert logprobs.token_logprobs[0] is None and scored.usage and scored.usage.completion_tokens == 0
    best = server.openai.completions.create(model="tiny", prompt="The", best_of=3, n=2, max_tokens=4)
    assert len(best.choices) == 2 and best.usage and best.usage.completion_tokens <= 12
    extra = {"return_token_ids": True, "prompt_logprobs": 0, "request_id": "mine", "echo": True}
    answer = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, extra_body=extra)
    assert answer.id == "chatcmpl-mine" and answer.choices[0].model_extra and answer.model_extra
    assert len(answer.choices[0].model_extra["token_ids"]) == answer.usage.completion_tokens  # type: ignore[union-attr]
    assert len(answer.model_extra["prompt_logprobs"]) == len(answer.model_extra["prompt_token_ids"])
