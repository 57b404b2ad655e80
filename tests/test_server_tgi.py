"""The TGI routes over an engine whose output the prompt dictates: shapes, stop sequences, characters, ends, errors."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from echo_engine import EchoProcess
from framework.server import limits, tgi_schemas
from huggingface_hub.errors import ValidationError
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from serving import Running, check_tgi_error, checked, running, tgi_events

from framework.settings import Settings


@pytest.fixture(scope="module")
def bytelevel(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


@pytest.fixture(scope="module")
def pieces(tiny_llama_spm: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama_spm), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


@pytest.fixture(params=["bytelevel", "pieces"])
def server(request: pytest.FixtureRequest) -> Running:
    found: Running = request.getfixturevalue(request.param)
    return found


def generate(server: Running, inputs: str, extra: dict[str, Any] | None = None, **parameters: Any) -> Any:
    """The answer with details. Ask in every way, and check that all say the same."""
    body = {"inputs": inputs, "extra": extra, "parameters": {**parameters, "details": True}}
    response = server.post("/generate", **body)
    assert response.status_code == 200, response.text
    whole = checked(tgi_schemas.GenerateResponse, response.json())
    assert server.post("/", **body).json() == [whole]
    plain = {**body, "parameters": parameters}
    assert server.post("/generate", **plain).json() == {"generated_text": whole["generated_text"]}
    details = whole["details"]
    for path, more in (("/generate_stream", {}), ("/", {"stream": True}), ("/generate", {"stream": True})):
        streamed = tgi_events(server.post(path, **body, **more))
        assert [event["index"] for event in streamed] == list(range(1, len(streamed) + 1))
        assert [event["token"] for event in streamed] == details["tokens"]
        assert [event.get("top_tokens") for event in streamed] == details.get("top_tokens", [None] * len(streamed))
        *before, last = streamed
        assert all(event["generated_text"] is event["details"] is None for event in before)
        assert last["generated_text"] == whole["generated_text"]
        assert last["details"] == {
            **{name: details[name] for name in ("finish_reason", "generated_tokens", "seed")},
            "input_length": int(response.headers["x-prompt-tokens"]),
        }
    texts = [token["text"] for token in details["tokens"] if not token["special"]]
    prefix = inputs if parameters.get("return_full_text") else ""
    assert prefix + "".join(texts) == whole["generated_text"]
    assert len(details["tokens"]) == details["generated_tokens"] == int(response.headers["x-generated-tokens"])
    return whole


def going_on(server: Running, text: str) -> str:
    """`text`, as the engine makes it follow a text: with a space before the first word, where words have one."""
    return f" {text}" if server.serving.inputs.encode("a")[0] == server.tokenizer.bos_token_id else text


# Text


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_stop_sequences_across_tokens(server: Running, chunk: int) -> None:
    extra = {"chunk": chunk}
    answer = generate(server, "one two three END four", extra, stop=["ee END", "never"])
    assert answer["generated_text"] == going_on(server, "one two three END")
    assert answer["details"]["finish_reason"] == "stop_sequence"
    both = generate(server, "one two three END four", extra, stop=["four"], stop_sequences=["o th"])
    assert both["generated_text"] == going_on(server, "one two th")  # of whichever ends first


def test_text_of_a_stop_sequence_that_does_not_come_is_not_late(bytelevel: Running) -> None:
    body = {"inputs": "abcdefgh", "parameters": {"stop": ["bcdefghi"]}, "extra": {"pace": 0.2}}
    with bytelevel.http.stream("POST", "/generate_stream", json=body) as response:
        came = [time.monotonic() for line in response.iter_lines() if line]
    assert all(later - sooner > 0.1 for sooner, later in pairwise(came[:-1]))  # the engine does not wait with the end
    assert len(came) == len(bytelevel.ids("abcdefgh"))


@pytest.mark.parametrize("chunk", [1, 2])
def test_characters_across_tokens(server: Running, chunk: int) -> None:
    text = "ok 🙂 漢字 done"
    answer = generate(server, text, {"chunk": chunk})
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == (going_on(server, text), "length")
    texts = [token["text"] for token in answer["details"]["tokens"]]
    assert "" in texts and "\ufffd" not in "".join(texts)
    cut = next(i for i, text in enumerate(texts) if "🙂" in text)
    unfinished = generate(server, text, max_new_tokens=cut)["generated_text"]
    assert unfinished.endswith("\ufffd") and unfinished.rstrip("\ufffd") == going_on(server, "ok ")


def test_ends_and_special_tokens(bytelevel: Running) -> None:
    (eos,) = bytelevel.tokenizer.eos_token_ids
    answer = generate(bytelevel, "abc<|im_end|>d")
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == ("abc", "eos_token")
    last = answer["details"]["tokens"][-1]
    assert (last["id"], last["text"], last["special"]) == (eos, "<|im_end|>", True)
    assert generate(bytelevel, "abc<|im_end|>d", stop=["<"])["details"]["finish_reason"] == "eos_token"
    answer = generate(bytelevel, "a<|im_start|>b<|im_start|>c", stop=["b<|im_start|>"])
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == ("ab", "stop_sequence")
    assert [token["text"] for token in answer["details"]["tokens"]] == ["a", "<|im_start|>", "b", "<|im_start|>"]


def test_the_prompt_before_the_text(server: Running) -> None:
    whole = going_on(server, "ab c")
    assert generate(server, "ab c", return_full_text=True)["generated_text"] == f"ab c{whole}"
    assert generate(server, "ab c", return_full_text=False)["generated_text"] == whole


WORDS = ["a", "b", " ", "\n", "🙂", "漢", "é", "<|im_start|>", "<|endoftext|>", "<s>", "th", "\ufffd"]


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map("".join),
    st.lists(st.text("ab \n🙂th<", min_size=1, max_size=3), max_size=3),
    st.integers(1, 5),
    st.integers(1, 20),
)
def test_any_text_is_the_same_in_every_way(server: Running, text: str, stops: list[str], chunk: int, most: int) -> None:
    answer = generate(server, text, {"chunk": chunk}, stop=stops, max_new_tokens=most)
    details = answer["details"]
    ids = server.serving.inputs.encode(text)[:most]
    prompt = server.serving.inputs.encode(text)
    before, after = (server.tokenizer.decode(all, skip_special_tokens=False) for all in (prompt, prompt + ids))
    shown = after.removeprefix(before)
    ends = [i for stop in stops for i in range(len(shown) + 1) if shown[:i].endswith(stop)]
    assert details["finish_reason"] == ("stop_sequence" if ends else "length")
    assert [token["id"] for token in details["tokens"]] == ids[: details["generated_tokens"]]
    bos = server.tokenizer.special.get("bos_token", "") if ids[0] == server.tokenizer.bos_token_id else ""
    if not set(ids[1:] if bos else ids) & server.tokenizer.special_ids and "\ufffd" not in shown:
        assert answer["generated_text"] == shown[: min(ends, default=len(shown))][len(bos) :]


def test_truncate_keeps_the_end(server: Running) -> None:
    ids = server.serving.inputs.encode("one two three four")
    answer = generate(server, "one two three four", truncate=4)
    bos = [id for id in ids[:1] if id == server.tokenizer.bos_token_id]
    assert [token["id"] for token in answer["details"]["tokens"]] == [*bos, *ids[-4 + len(bos) :]]
    assert server.post("/generate", inputs="one " * 300, parameters={"truncate": 5}).status_code == 200


# Details


def test_log_probabilities_and_likeliest_tokens(bytelevel: Running) -> None:
    answer = generate(bytelevel, "<|endoftext|>ab", top_n_tokens=2)
    tokens, tops = answer["details"]["tokens"], answer["details"]["top_tokens"]
    assert [token["logprob"] for token in tokens] == [-9999.0] + [-0.5] * (len(tokens) - 1)
    assert tops == [
        [
            {"id": 0, "text": "<|endoftext|>", "logprob": -1.0, "special": True},
            {"id": 1, "text": "<|im_start|>", "logprob": -2.0, "special": True},
        ]
    ] * len(tokens)
    assert "top_tokens" not in generate(bytelevel, "ab", top_n_tokens=0)["details"]


def test_seeds_are_told_of_draws_only(bytelevel: Running) -> None:
    assert generate(bytelevel, "a", seed=7)["details"]["seed"] is None
    assert generate(bytelevel, "a", seed=7, temperature=1.0)["details"]["seed"] is None  # which changes nothing
    assert generate(bytelevel, "a", seed=2**64 - 1, do_sample=True)["details"]["seed"] == 2**64 - 1
    for parameters in ({"do_sample": True}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}):
        body = {"inputs": "a", "parameters": {**parameters, "details": True}}
        seeds = {bytelevel.post("/generate", **body).json()["details"]["seed"] for _ in range(3)}
        assert len(seeds) == 3 and all(0 <= seed < 2**64 for seed in seeds)


def test_what_reaches_the_engine(bytelevel: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the checkpoint suggests."""
    seen: list[Any] = []
    send = bytelevel.engine.generate
    monkeypatch.setattr(bytelevel.engine, "generate", lambda adds, record: (seen.extend(adds), send(adds, record))[1])
    suggested = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.3}
    given = bytelevel.serving.inputs.params(suggested)
    monkeypatch.setattr(bytelevel.serving.inputs, "defaults", given)

    def params(**parameters: Any) -> Any:
        response = bytelevel.post("/generate", inputs="a b", parameters=parameters)
        assert response.status_code == 200, response.text
        return seen.pop().params

    names = tuple(suggested)
    greedy = params()
    assert [getattr(greedy, name) for name in names] == [0, 1, 0, 0, 1] and greedy.max_tokens == 256 - 2
    assert greedy.logprobs is None and params(details=True).logprobs == 0
    assert [getattr(params(do_sample=True), name) for name in names] == [1, 1, 0, 0, 1]
    assert [getattr(params(temperature=0.5, repetition_penalty=1.1), name) for name in names] == [0.5, 1, 0, 0, 1.1]
    assert [getattr(params(top_k=3, top_p=0.5, frequency_penalty=1), name) for name in names] == [1, 0.5, 3, 0, 1]
    assert params(seed=2**63 + 5, do_sample=True).seed == -(2**63) + 5
    assert params(max_new_tokens=9).max_tokens == 9


def test_headers(bytelevel: Running) -> None:
    response = bytelevel.post("/generate", inputs="abcd é", extra={"pace": 0.02})
    headers = response.headers
    whole = [
        int(headers[f"x-{name}"])
        for name in ("total-time", "validation-time", "queue-time", "inference-time", "time-per-token")
    ]
    total, *parts, each = whole
    assert sum(parts) <= total <= sum(parts) + 2 and total >= 20 * (int(headers["x-generated-tokens"]) - 1)
    assert each == pytest.approx(parts[-1] / int(headers["x-generated-tokens"]), abs=1)
    assert float(headers["x-compute-time"]) == pytest.approx(total / 1000, abs=0.1)
    assert headers["x-compute-characters"] == "6" and headers["x-compute-type"] == "cpu"
    assert int(headers["x-prompt-tokens"]) == len(bytelevel.ids("abcd é"))
    streamed = bytelevel.post("/generate_stream", inputs="abcd é").headers
    assert streamed["x-compute-characters"] == "6" and "x-total-time" not in streamed


def test_records(bytelevel: Running) -> None:
    for path, body, stream in (
        ("/generate", {"inputs": "a b"}, False),
        ("/generate", {"prompt": "a b"}, False),
        ("/generate_stream", {"inputs": "a b"}, True),
        ("/", {"inputs": "a b", "stream": True}, True),
    ):
        id = bytelevel.post(path, **body).headers["x-request-id"]
        record = bytelevel.record(f"gen-{id}")
        assert (record.operation, record.status, record.stream) == ("text_completion", 200, stream)
        assert (record.prompt_tokens, record.output_tokens, record.finish_reasons) == (2, 2, ["length"])
        assert record.attributes["gen_ai.request.temperature"] == 0
    id = bytelevel.post("/generate", inputs="a", parameters={"top_k": 0}).headers["x-request-id"]
    assert bytelevel.record(f"gen-{id}").status == 422


# The flat body of benchmark clients


def test_flat_bodies(bytelevel: Running) -> None:
    body = {"prompt": "ab c", "max_new_tokens": 3, "temperature": 0.0, "top_p": 1.0, "do_sample": False}
    answer = checked(tgi_schemas.BenchmarkResponse, bytelevel.post("/generate", **body).json())
    assert answer["generated_text"] == "ab " and answer["num_output_tokens"] == 3
    assert 0 < answer["total_time_s"] < 5
    streamed = tgi_events(bytelevel.post("/generate", **body, stream=True))
    assert "".join(event["token"]["text"] for event in streamed) == streamed[-1]["generated_text"] == "ab "
    assert bytelevel.post("/generate", prompt="ab c", stop=["b"], seed=None).json()["generated_text"] == "ab"
    for more, message in (
        ({"max_new_tokens": 999}, "max_new_tokens"),
        ({"temperature": "hot"}, "temperature: must be"),
        ({"top_p": 1.5}, "`top_p`"),
        ({"prompt": None}, "`inputs` is required, or else `prompt`"),
        ({"prompt": ""}, "inputs: empty"),
        ({"inputs": "b"}, "`prompt` and `inputs` exclude one another"),
    ):
        check_tgi_error(bytelevel.post("/generate", **{"prompt": "a", **more}), 422, "validation", message)
    check_tgi_error(bytelevel.post("/generate_stream", prompt="a"), 422, "validation", "inputs: is required")


def test_how_flat_bodies_ask_for_draws() -> None:
    def sampled(**fields: Any) -> bool:
        request = tgi_schemas.BenchmarkRequest(prompt="a", **fields).request()
        assert request.parameters is not None
        return request.parameters.sampled

    assert not sampled() and not sampled(top_p=1.0) and not sampled(temperature=0, do_sample=True, top_k=5)
    assert not sampled(do_sample=False, temperature=0.7, top_p=0.9)
    assert sampled(temperature=1) and sampled(do_sample=True) and sampled(top_p=0.9) and sampled(temperature=0.7)


# What is served


def test_info(bytelevel: Running) -> None:
    info = checked(tgi_schemas.Info, bytelevel.http.get("/info").json())
    assert info["model_id"] == "echo" and info["model_pipeline_tag"] == "text-generation"
    assert (info["max_total_tokens"], info["max_input_tokens"], info["max_batch_size"]) == (256, 255, 8)
    assert (info["max_best_of"], info["max_stop_sequences"]) == (2, 4)
    assert info["max_concurrent_requests"] == 1024 + 8
    assert all(info[name] is None for name in ("model_sha", "sha", "docker_label"))


def test_the_documentation_for_machines(bytelevel: Running) -> None:
    api = bytelevel.http.get("/openapi.json").json()
    schemas = api["components"]["schemas"]
    for path in ("/generate", "/generate_stream", "/"):
        operation = api["paths"][path]["post"]
        assert {int(status) for status in operation["responses"]} >= {200, 401, 413, 415, 422, 424, 429, 500, 503}
        for reference in re.findall(r"#/components/schemas/(\w+)", json.dumps(operation)):
            assert reference in schemas
        events = operation["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
        told = events["properties"]["data"]["anyOf"][0]["contentSchema"]["anyOf"]
        assert told == [{"$ref": f"#/components/schemas/{name}"} for name in ("StreamResponse", "ErrorResponse")]
    assert set(schemas["GenerateParameters"]["properties"]) == set(tgi_schemas.GenerateParameters.model_fields)
    assert set(api["paths"]["/info"]["get"]["responses"]) == {"200", "401"}


def test_every_field_and_limit_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs/tgi-api.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    models = (tgi_schemas.GenerateParameters, tgi_schemas.GenerateRequest, tgi_schemas.BenchmarkRequest)
    assert documented >= {name for model in models for name in model.model_fields}
    for name in ("STOP_SEQUENCES", "BEST_OF", "TOP_TOKENS", "NEW_TOKENS"):
        assert re.search(rf"\b{getattr(limits, f'MAX_{name}')}\b", page), name


# A client


@pytest.mark.usefixtures("offline")
def test_the_client_of_the_hub(bytelevel: Running) -> None:
    text = "one 🙂 two STOP three"
    with huggingface_hub.InferenceClient(model=bytelevel.url, timeout=20) as client:
        assert client.text_generation(text, max_new_tokens=50) == text
        assert client.text_generation(text, stop=["STOP"], return_full_text=True) == text + "one 🙂 two STOP"
        options: Any = {"stop": ["STOP"], "top_n_tokens": 2, "seed": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9}
        whole = client.text_generation(text, details=True, **options)
        assert whole.generated_text == "one 🙂 two STOP" and whole.details
        assert (whole.details.finish_reason, whole.details.seed) == ("stop_sequence", 5)
        assert len(whole.details.tokens) == len(whole.details.top_tokens or []) == whole.details.generated_tokens
        assert "".join(client.text_generation(text, stream=True, stop=["STOP"])) == whole.generated_text
        *before, last = client.text_generation(text, details=True, stream=True, **options)
        assert "".join(event.token.text for event in [*before, last]) == last.generated_text == whole.generated_text
        assert last.details and last.details.finish_reason == "stop_sequence"
        assert last.details.input_length == len(bytelevel.ids(text))
        assert not any(event.details or event.generated_text for event in before)
        with pytest.raises(ValidationError, match="`best_of` must be > 0"):
            client.text_generation("a", best_of=9)
    with huggingface_hub.InferenceClient(base_url=bytelevel.url, timeout=20) as client:
        assert client.text_generation(text) == text
