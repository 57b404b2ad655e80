"""The TGI routes over the real engine and tiny models: beside transformers, and beside themselves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from checkpoints import tiny_checkpoint
from framework.server import tgi_schemas
from oracle import CLOSE, reference
from serving import Running, check_tgi_error, checked, running, tgi_events

from framework.settings import Settings

PROMPT = "The quick brown fox"
SUGGESTED = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.5}


@pytest.fixture(scope="module", params=["bytelevel", "sentencepiece"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that suggests to sample, and penalties."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("suggesting"), tokenizer=request.param)
    config = path / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SUGGESTED))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(Settings(model=str(folder), dtype="float32", kv_blocks=64, max_num_seqs=8)) as found:
        yield found


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found.generation_config = transformers.GenerationConfig()
    return found


def generate(server: Running, inputs: str = PROMPT, **parameters: Any) -> Any:
    """The details, and the text beside them; whole and streamed alike."""
    body = {"inputs": inputs, "parameters": {"details": True, "max_new_tokens": 24, **parameters}}
    response = server.post("/generate", **body)
    assert response.status_code == 200, response.text
    answer = checked(tgi_schemas.GenerateResponse, response.json())
    details = answer["details"]
    texts = [token["text"] for token in details["tokens"] if not token["special"]]
    assert "".join(texts) == answer["generated_text"]
    if "best_of" not in parameters and "decoder_input_details" not in parameters and details["seed"] is None:
        streamed = tgi_events(server.post("/generate_stream", **body))
        for event, token in zip(streamed, details["tokens"], strict=True):
            assert {**event["token"], "logprob": 0} == {**token, "logprob": 0}
            assert event["token"]["logprob"] == pytest.approx(token["logprob"], abs=CLOSE)  # the prompt is cached now
        assert streamed[-1]["generated_text"] == answer["generated_text"]
    return {**details, "generated_text": answer["generated_text"]}


def ids(details: Any) -> list[int]:
    return [token["id"] for token in details["tokens"]]


def test_greedy_is_what_transformers_says(server: Running, model: Any) -> None:
    prompt = server.serving.inputs.encode(PROMPT)
    expected = reference(model, prompt, 24)
    details = generate(server, top_n_tokens=5)
    found = ids(details)
    assert found == expected.tokens[: len(found)] and details["seed"] is None
    assert len(found) == 24 or details["finish_reason"] == "eos_token"
    for token, tops, likeliest in zip(details["tokens"], expected.tops, details["top_tokens"], strict=False):
        assert token["logprob"] == pytest.approx(tops[token["id"]], abs=CLOSE)
        assert [(top["id"], pytest.approx(top["logprob"], abs=CLOSE)) for top in likeliest] == list(tops.items())[:5]
    body = {"prompt": PROMPT, "max_new_tokens": 24, "temperature": 0.0, "do_sample": False}
    assert server.post("/generate", **body).json()["generated_text"] == details["generated_text"]
    plain = server.post("/v1/completions", prompt=PROMPT, max_tokens=24, temperature=0, repetition_penalty=1)
    assert plain.json()["choices"][0]["text"] == details["generated_text"]


def test_penalties_are_those_that_are_asked_for(server: Running, model: Any) -> None:
    prompt = server.serving.inputs.encode(PROMPT)
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, repetition_penalty=1.3, pad_token_id=0
    )
    found = ids(generate(server, repetition_penalty=1.3))
    assert found == out[0, len(prompt) :].tolist()[: len(found)]


def test_the_prompt_s_log_probabilities(server: Running, model: Any) -> None:
    prompt = server.serving.inputs.encode(PROMPT)
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    expected = [logprobs[i, id].item() for i, id in enumerate(prompt[1:])]
    details = generate(server, decoder_input_details=True, max_new_tokens=2)
    assert [token["id"] for token in details["prefill"]] == prompt
    assert details["prefill"][0]["logprob"] is None
    assert [token["logprob"] for token in details["prefill"][1:]] == pytest.approx(expected, abs=CLOSE)
    texts = [token["text"] for token in details["prefill"]]
    assert texts == [server.tokenizer.decode([id], skip_special_tokens=False) for id in prompt]
    body = {"inputs": PROMPT, "parameters": {"decoder_input_details": True}}
    assert len(server.post("/", **body).json()[0]["details"]["prefill"]) == len(prompt)  # it asks for details
    assert generate(server, max_new_tokens=2)["prefill"] == []


@pytest.mark.parametrize("parameters", [{"do_sample": True}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 20}])
def test_a_draw_can_be_drawn_again_by_its_seed(server: Running, parameters: dict[str, Any]) -> None:
    draws = [generate(server, **parameters) for _ in range(3)]
    assert len({draw["generated_text"] for draw in draws}) > 1
    for draw in draws:
        assert ids(generate(server, **parameters, seed=draw["seed"])) == ids(draw)


def test_the_better_of_two(server: Running) -> None:
    for _ in range(3):
        details = generate(server, best_of=2, temperature=1.3, top_n_tokens=1)
        (other,) = details["best_of_sequences"]
        assert details["seed"] != other["seed"]

        def mean(sequence: Any) -> float:
            return math.fsum(token["logprob"] for token in sequence["tokens"]) / len(sequence["tokens"])

        assert mean(details) >= mean(other)
        for one in (details, other):
            again = generate(server, temperature=1.3, seed=one["seed"])
            assert (ids(again), again["generated_text"]) == (ids(one), one["generated_text"])
            assert len(one["top_tokens"]) == one["generated_tokens"]
    response = server.post("/generate", inputs=PROMPT, parameters={"best_of": 2, "do_sample": True})
    assert set(response.json()) == {"generated_text"}


def test_stop_sequences(server: Running) -> None:
    whole = generate(server)["generated_text"]
    stop = whole[5:8]
    details = generate(server, stop=[stop, "never there"])
    assert details["generated_text"] == whole[: whole.index(stop) + 3]
    assert details["finish_reason"] == "stop_sequence"


def test_times_of_the_engine(server: Running) -> None:
    headers = server.post("/generate", inputs=PROMPT, parameters={"max_new_tokens": 20}).headers
    assert int(headers["x-queue-time"]) + int(headers["x-inference-time"]) <= int(headers["x-total-time"])
    assert int(headers["x-inference-time"]) > 0 and headers["x-compute-type"] == "cpu"
    info = server.http.get("/info").json()
    assert (info["model_dtype"], info["model_device_type"], info["max_total_tokens"]) == ("torch.float32", "cpu", 512)


KIND = {"properties": {"kind": {"enum": ["fox", "dog"]}}, "required": ["kind"], "additionalProperties": False}
SCHEMA = {"type": "object", **KIND}


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_schema", "value": {"name": "animal", "schema": SCHEMA}},
        {"type": "json_object", "value": SCHEMA},
    ],
)
def test_grammars_of_json(server: Running, grammar: dict[str, Any]) -> None:
    for parameters in ({}, {"do_sample": True, "seed": 5}):
        details = generate(server, grammar=grammar, max_new_tokens=60, **parameters)
        assert json.loads(details["generated_text"])["kind"] in ("fox", "dog")
        assert details["finish_reason"] == "eos_token" and details["tokens"][-1]["special"]


def test_grammars_of_text(server: Running) -> None:
    regex = {"type": "regex", "value": "[0-9]{3}-[a-c]{2}"}
    details = generate(server, grammar=regex, best_of=2, do_sample=True)
    for one in (details, *details["best_of_sequences"]):
        assert re.fullmatch("[0-9]{3}-[a-c]{2}", one["generated_text"]) and one["finish_reason"] == "eos_token"
    with huggingface_hub.InferenceClient(model=server.url, timeout=20) as client:
        grammar = huggingface_hub.TextGenerationInputGrammarType(**regex)
        assert re.fullmatch("[0-9]{3}-[a-c]{2}", client.text_generation(PROMPT, grammar=grammar))
    for bad in (
        {"type": "regex", "value": "(a"},
        {"type": "json", "value": {"type": "nothing"}},
        {"type": "json", "value": "{"},
    ):
        response = server.post("/generate", inputs=PROMPT, parameters={"grammar": bad})
        assert check_tgi_error(response, 422, "validation", "grammar").startswith("Input validation error: grammar: ")
