"""/tokenize, /detokenize, /tokenizer_info and /chat_tokenize, beside what transformers says of the same checkpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from echo_engine import EchoProcess
from framework.server.limits import INLINE_TEXT, MAX_TEXT, MAX_TEXTS, MAX_TOKENS
from serving import Running, check_error, check_tgi_error, eventually, running

from framework.inputs import InputProcessor
from framework.settings import Settings

TEXTS = ["The quick brown fox", "ok 🙂 漢字 done", "", " a\n\nb ", "<|im_start|>user", "word " * 3000]
CHAT = [{"role": "user", "content": "Tell me of the fox 🙂."}, {"role": "assistant", "content": "It is  "}]


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(Settings(model=str(tiny_llama), served_model_name="echo"), spawn=EchoProcess) as found:
        yield found


@pytest.fixture(scope="module")
def spm(tiny_llama_spm: Path) -> Iterator[Running]:
    """Its tokenizer adds BOS, as does its chat template."""
    with running(Settings(model=str(tiny_llama_spm)), spawn=EchoProcess) as found:
        yield found


@pytest.fixture(scope="module")
def theirs(tiny_llama: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def theirs_spm(tiny_llama_spm: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_llama_spm)


def post(server: Running, path: str, **body: Any) -> Any:
    response = server.post(path, **body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("special", [None, True, False])
def test_a_prompt(server: Running, spm: Running, theirs: Any, theirs_spm: Any, text: str, special: bool | None) -> None:
    for ours, other in ((server, theirs), (spm, theirs_spm)):
        expected = other.encode(text, add_special_tokens=special is not False)
        body = post(ours, "/tokenize", prompt=text, add_special_tokens=special, return_token_strs=True, model=None)
        assert body == {
            "count": len(expected),
            "max_model_len": 256,
            "tokens": expected,
            "token_strs": other.convert_ids_to_tokens(expected),
        }
        again = post(ours, "/detokenize", tokens=expected)
        assert again == {"prompt": other.decode(expected, skip_special_tokens=False)}
    assert post(server, "/detokenize", tokens=post(server, "/tokenize", prompt=text)["tokens"])["prompt"] == text


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("special", [None, True, False])
def test_inputs_of_tgi(
    server: Running, spm: Running, theirs: Any, theirs_spm: Any, text: str, special: bool | None
) -> None:
    for ours, other in ((server, theirs), (spm, theirs_spm)):
        expected = other(text, add_special_tokens=special is not False, return_offsets_mapping=True)
        parameters = {"truncate": 1, "max_new_tokens": 5}  # TGI's own clients send them, TGI reads none of them here
        body = {"inputs": text, "parameters": parameters, "add_special_tokens": special, "model": "ignored"}
        assert post(ours, "/tokenize", **body) == [
            {"id": id, "text": text[start:stop], "start": start, "stop": stop}
            for id, (start, stop) in zip(expected["input_ids"], expected["offset_mapping"], strict=True)
        ]


def test_inputs_of_tgi_are_tokenised_as_generate_does(spm: Running) -> None:
    """BOS is there once, where the text begins with it already."""
    tokens = post(spm, "/tokenize", inputs="<s>a b")
    answer = post(spm, "/generate", inputs="<s>a b", parameters={"max_new_tokens": 1, "decoder_input_details": True})
    assert [token["id"] for token in tokens] == [token["id"] for token in answer["details"]["prefill"]]
    assert [token["text"] for token in tokens[:1]] == ["<s>"]
    assert post(spm, "/tokenize", inputs="") == [{"id": tokens[0]["id"], "text": "", "start": 0, "stop": 0}]
    assert post(spm, "/tokenize", inputs="", add_special_tokens=False) == []


def test_errors_of_inputs_are_tgi_s(server: Running) -> None:
    for body, message in (
        ({"inputs": 5}, "inputs: must be a string"),
        ({"inputs": "\ud800"}, "inputs: must be valid Unicode"),
        ({"inputs": "a", "prompt": "a"}, "prompt and inputs exclude one another"),
        ({"inputs": "a", "messages": CHAT}, "messages and inputs exclude one another"),
        ({"inputs": "a", "add_special_tokens": 1}, "add_special_tokens: must be true or false"),
        ({"inputs": "a" * (MAX_TEXT + 1)}, "inputs: "),
    ):
        headers = {"Content-Type": "application/json"}
        response = server.http.post("/tokenize", content=json.dumps(body), headers=headers)
        assert check_tgi_error(response, 422, "validation", message).startswith("Input validation error: ")


TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize("path", ["/tokenize", "/chat_tokenize", "/v1/chat/completions"])
def test_tools_that_the_template_would_drop(server: Running, path: str) -> None:
    """One answer on every route."""
    message = check_error(server.post(path, messages=CHAT, tools=TOOLS), 400, "tools")
    assert message.startswith("tools: the chat template of this model has no place for tools")


def test_token_strings_are_null_unless_asked_for(server: Running) -> None:
    assert post(server, "/tokenize", prompt="a b")["token_strs"] is None


@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "add_generation_prompt": False},
    ],
)
def test_a_chat(server: Running, spm: Running, theirs: Any, theirs_spm: Any, options: dict[str, Any]) -> None:
    for ours, other in ((server, theirs), (spm, theirs_spm)):
        expected = other.apply_chat_template(CHAT, tokenize=True, return_dict=False, **options)
        text = other.apply_chat_template(CHAT, tokenize=False, **options)
        assert post(ours, "/tokenize", messages=CHAT, **options)["tokens"] == expected
        body = post(ours, "/chat_tokenize", messages=CHAT, **options)
        assert body["templated_text"] == text
        assert [token["id"] for token in body["tokenize_response"]] == expected
        for token in body["tokenize_response"]:
            assert token["text"] == text[token["start"] : token["stop"]]
        covered = {i for token in body["tokenize_response"] for i in range(token["start"], token["stop"])}
        assert covered == set(range(len(text)))


def test_the_tokens_are_those_of_a_request(server: Running, spm: Running) -> None:
    """Defaults included, and BOS once, where the text begins with it already."""
    for ours in (server, spm):
        counts = post(ours, "/tokenize", messages=CHAT)["count"], post(ours, "/tokenize", prompt="<s>a b")["count"]
        chat = post(ours, "/v1/chat/completions", messages=CHAT, max_tokens=1)
        prompt = post(ours, "/v1/completions", prompt="<s>a b", max_tokens=1)
        assert counts == (chat["usage"]["prompt_tokens"], prompt["usage"]["prompt_tokens"])
    both = {"messages": CHAT, "continue_final_message": True}
    answer = post(server, "/v1/chat/completions", **both, max_tokens=200, ignore_eos=True)
    assert answer["choices"][0]["message"]["content"].endswith("It is  ")  # the engine repeats the prompt
    assert post(server, "/tokenize", **both)["count"] == answer["usage"]["prompt_tokens"]


def test_what_the_template_reads(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content | trim }}{{ tools | length if tools else '' }}{{ extra | default('') }}")
    with running(Settings(model=str(tiny_llama), chat_template=file), spawn=EchoProcess) as server:

        def text(**body: Any) -> Any:
            return post(server, "/chat_tokenize", messages=[{"role": "user", "content": " ab "}], **body)[
                "templated_text"
            ]

        assert text() == "ab" and text(tools=[{}, {}]) == "ab2" and text(chat_template_kwargs={"extra": "x"}) == "abx"
        assert text(continue_final_message=True) == "ab"  # a template that strips texts


def test_half_a_character_is_refused(server: Running) -> None:
    body = b'{"messages": [{"role": "\\ud83d", "content": "a"}]}'
    response = server.http.post("/chat_tokenize", content=body, headers={"Content-Type": "application/json"})
    assert "without lone surrogates" in check_error(response, 400, "messages.0.role")


def test_what_a_client_is_told_of_the_tokenizer(server: Running, spm: Running, theirs: Any, theirs_spm: Any) -> None:
    for ours, other in ((server, theirs), (spm, theirs_spm)):
        info = ours.http.get("/tokenizer_info").json()
        assert (info["eos_token"], info.get("bos_token")) == (other.eos_token, other.bos_token)
        assert info["chat_template"] == other.chat_template and info["model_max_length"] == 256
        assert info["eos_token_ids"] == [other.eos_token_id]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": None, "messages": None, "inputs": None}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": CHAT}, "messages"),
    ("/tokenize", {"prompt": [1]}, "prompt"),
    ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    ("/tokenize", {"prompt": "a" * (MAX_TEXT + 1)}, "prompt"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
    ("/tokenize", {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message"),
    ("/tokenize", {"messages": [{"role": "assistant", "content": None}], "continue_final_message": True}, "messages"),
    ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"continue_final_message": True}},
     "chat_template_kwargs"),
    ("/tokenize", {"messages": CHAT, "chat_template": "x"}, "chat_template"),
    ("/tokenize", {"messages": CHAT, "tools": "x"}, "tools"),
    ("/v1/chat/completions", {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message"),
    ("/chat_tokenize", {}, "messages"),
    ("/chat_tokenize", {"messages": []}, "messages"),
    ("/chat_tokenize", {"messages": [{"role": "user", "content": "a" * (MAX_TEXT + 1)}]}, "messages"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [512]}, "tokens"),
    ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ("/detokenize", {"tokens": [1] * (MAX_TOKENS + 1)}, "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), BAD, ids=range(len(BAD)))
def test_errors_name_the_field(server: Running, path: str, body: dict[str, Any], field: str) -> None:
    headers = {"Content-Type": "application/json"}
    message = check_error(server.http.post(path, content=json.dumps(body), headers=headers), 400, field)
    assert field in message


def test_another_model_is_not_tokenised_for(server: Running) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        assert server.post(path, **body, model="echo").status_code == 200
        check_error(server.post(path, **body, model="other"), 404, "model")


LONG = "word " * 1000


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": LONG, "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "name": LONG}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"messages": CHAT, "chat_template_kwargs": {"variable": LONG}},
        {"messages": CHAT, "documents": [{"text": LONG}]},
    ],
    ids=str,
)
def test_long_texts_go_to_a_thread(server: Running, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]) -> None:
    """Wherever they stand: others are served meanwhile."""
    threads: list[str] = []
    kind = type(server.tokenizer)
    render = kind.render

    def noted(*given: Any, **more: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(*given, **more)

    monkeypatch.setattr(kind, "render", noted)
    for path in ("/tokenize", "/chat_tokenize", "/v1/chat/completions"):
        more = {"max_tokens": 1, "truncate_prompt_tokens": 9} if path.startswith("/v1") else {}
        post(server, path, **body, **more)
        post(server, path, messages=CHAT, **more)
    assert [name.startswith(("asyncio_", "texts_")) for name in threads] == [True, False] * 3


def test_clients_that_leave_and_the_others(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few texts at once, each with its place in the queue; nothing is done for who has left, or was told to end."""
    real, over, begun = InputProcessor.tokenize, threading.Event(), []

    def tokenize(self: InputProcessor, text: str, *more: Any) -> list[int]:
        begun.append(text[0])
        if text[0] in "ab":
            assert over.wait(60)
        return real(self, text[:9], *more)

    monkeypatch.setattr(InputProcessor, "tokenize", tokenize)

    def ask(letter: str, id: str = "") -> httpx.Response:
        headers = {"X-Request-Id": id} if id else {}
        return httpx.post(
            f"{server.url}/tokenize", json={"prompt": letter * (INLINE_TEXT + 1)}, headers=headers, timeout=30
        )

    with ThreadPoolExecutor() as pool:
        busy = [pool.submit(ask, "a") for _ in range(MAX_TEXTS)]
        eventually(lambda: len(begun) == MAX_TEXTS)
        told = pool.submit(ask, "c", "mine")
        eventually(lambda: server.supervisor.load == MAX_TEXTS + 1)
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/tokenize", json={"prompt": "b" * (INLINE_TEXT + 1)}, timeout=0.2)
        eventually(lambda: server.supervisor.load == MAX_TEXTS + 1)
        assert server.http.get("/load").json() == {"server_load": MAX_TEXTS + 1}
        long = {"prompt": "d" * (INLINE_TEXT + 1), "max_tokens": 1, "truncate_prompt_tokens": 9}
        assert server.post("/v1/completions", **long).status_code == 200  # has threads of its own
        assert server.post("/abort_requests", request_ids=["mine"]).json() == {"aborted": 1}
        assert told.result().status_code == 499
        over.set()
        assert [one.result().status_code for one in busy] == [200] * MAX_TEXTS
    assert begun == ["a"] * MAX_TEXTS + ["d"]
    assert server.supervisor.load == 0 == len(server.supervisor.waiting)


def test_a_full_queue_and_the_end_are_told(tiny_llama: Path) -> None:
    asks = [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/chat_tokenize", {"messages": CHAT}),
    ]
    with running(Settings(model=str(tiny_llama), max_queued_requests=1), spawn=EchoProcess) as server:
        server.supervisor.waiting.enter({"another": 1})
        for path, body in asks:
            refusal = server.post(path, **body)
            assert "the queue is full" in check_error(refusal, 429, None) and refusal.headers["retry-after"]
        server.supervisor.waiting.leave("another")
        server.supervisor.draining = "the server is shutting down"
        for path, body in asks:
            check_error(server.post(path, **body), 503, None)
