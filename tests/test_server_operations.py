"""Names of the model, and the routes of those who run the server."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from echo_engine import EchoProcess
from serving import Running, check_error, check_tgi_error, events, eventually, running

from framework.settings import Settings

NAMES = ("echo", "org/second", "third")


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(model=str(tiny_llama), served_model_name=NAMES)
    with running(settings, spawn=EchoProcess) as found:
        yield found


def test_every_name_is_listed(server: Running) -> None:
    cards = server.openai.models.list().data
    assert [card.id for card in cards] == list(NAMES)
    for card in cards:
        assert server.openai.models.retrieve(card.id) == card
        assert card.model_dump()["root"] == "echo" and card.model_dump()["max_model_len"] == 256
    assert server.http.get("/v1/models/").json() == server.http.get("/v1/models").json()
    for name in ("dummy", "Third", "echo/"):
        check_error(server.http.get(f"/v1/models/{name}"), 404, "model")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_every_name_is_accepted_and_the_first_shown(server: Running, path: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    for name in (*NAMES, None, "", "dummy", "tgi"):
        response = server.post(path, **body, model=name)
        assert response.status_code == 200, response.text
        assert response.json().get("model", "echo") == "echo"
    message = check_error(server.post(path, **body, model="fourth"), 404, "model")
    assert message == 'model: "fourth" is not served here; available: echo, org/second, third'


def test_a_path_is_told_to_nobody(tiny_llama: Path) -> None:
    """Its last part is the name, and the whole is accepted: whoever starts the server may well ask by it."""
    given = f"{tiny_llama}/"
    settings = Settings(model=given, executor="scripted", metrics_compat="vllm", kv_blocks=64)
    with running(settings) as server:
        name, answers = tiny_llama.name, []
        for path in (name, given, f"%2F{given[1:-1]}%2F"):
            answers.append(server.http.get(f"/v1/models/{path}"))
            assert answers[-1].json()["id"] == answers[-1].json()["root"] == name
        for body in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
            route = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            for model in (name, given):
                answers.append(server.post(route, **body, model=model, max_tokens=2))
                assert answers[-1].json()["model"] == name
                answers.append(server.post(route, **body, model=model, max_tokens=2, stream=True))
                assert {chunk["model"] for chunk in events(answers[-1])} == {name}
            answers.append(server.post(route, **body, model="other"))
            message = f'model: "other" is not served here; available: {name}'
            assert check_error(answers[-1], 404, "model") == message
        answers.append(server.post("/generate", inputs="a", parameters={"max_new_tokens": 2}))
        gets = [path for path, methods in server.http.get("/openapi.json").json()["paths"].items() if "get" in methods]
        answers += [server.http.get(path) for path in (*gets, "/openapi.json", "/docs", "/v1/models/other")]
        assert server.http.get("/info").json()["model_id"] == name
        metrics = server.http.get("/metrics").text
        assert f',model="{name}",' in metrics and f'model_name="{name}"' in metrics
        assert not [answer.url for answer in answers if str(tiny_llama.parent) in answer.text + str(answer.headers)]


def test_where_names_are_given_there_are_no_others(server: Running, tiny_llama: Path) -> None:
    for name in (str(tiny_llama), tiny_llama.name):
        check_error(server.post("/v1/completions", prompt="a", model=name), 404, "model")
        check_error(server.http.get(f"/v1/models/{name}"), 404, "model")


def test_ready_until_no_more_should_come(server: Running) -> None:
    assert server.http.get("/ready").status_code == 200
    server.supervisor.draining = "the server is shutting down"
    try:
        assert check_error(server.http.get("/ready"), 503, None) == "the server is shutting down"
        assert server.http.get("/health").status_code == 200  # what has begun goes on
    finally:
        server.supervisor.draining = None


def test_a_dead_engine_is_not_ready(tiny_llama: Path) -> None:
    with running(Settings(model=str(tiny_llama)), spawn=EchoProcess) as server:
        server.post("/v1/completions", prompt="a b", extra={"die": 1})
        assert "exit code 3" in check_error(server.http.get("/ready"), 503, None)
        assert server.http.get("/load").json() == {"server_load": 0}


class Asked:
    """Requests that wait, each in a thread; `answers` by their ids."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.threads: list[Thread] = []
        self.answers: dict[str, httpx.Response] = {}

    def ask(self, id: str, path: str = "/v1/completions", **body: Any) -> None:
        def run() -> None:
            headers = {"X-Request-Id": id}
            self.answers[id] = httpx.post(self.server.url + path, json=body, headers=headers, timeout=30)

        load = self.load
        self.threads.append(Thread(target=run))
        self.threads[-1].start()
        eventually(lambda: self.load == load + 1)

    @property
    def load(self) -> int:
        return int(self.server.http.get("/load").json()["server_load"])

    def abort(self, *ids: str) -> int:
        return int(self.server.post("/abort_requests", request_ids=ids).json()["aborted"])

    def join(self) -> None:
        for thread in self.threads:
            thread.join(30)


def test_load_and_abort(server: Running) -> None:
    """Two choices of each of two prompts are one request; streamed or not, who waits is told."""
    asked, hold = Asked(server), {"hold": True}
    assert asked.load == 0
    asked.ask("one", prompt=["a", "b"], n=2, extra=hold)
    asked.ask("two", "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], stream=True, extra=hold)
    asked.ask("three", prompt="a", extra=hold)
    assert asked.abort("nobody", "thre", "") == asked.abort() == 0 and asked.load == 3
    assert asked.abort("one", "chatcmpl-two", "nobody") == 2
    eventually(lambda: asked.load == 1)
    assert asked.abort("chatcmpl-three") == 0 and asked.abort("three", "cmpl-three") == 2
    asked.join()
    assert [c["finish_reason"] for c in asked.answers["one"].json()["choices"]] == ["abort"] * 4
    assert events(asked.answers["two"])[-1]["choices"][0]["finish_reason"] == "abort"
    assert asked.answers["three"].json()["choices"][0]["finish_reason"] == "abort"
    assert asked.abort("one", "two", "three") == asked.load == 0
    record = server.record("cmpl-one")
    assert (record.status, record.finish_reasons) == (200, ["abort"] * 4)


def test_abort_of_what_was_not_sent_yet(server: Running) -> None:
    """Here a grammar that takes for ever to try out: there is nothing to give."""
    asked = Asked(server)
    bomb = {"regex": "|".join(f"[a-z]{{{i}}}" for i in range(1, 3000))}
    asked.ask("ann", prompt="a", structured_outputs=bomb)
    asked.ask("ben", prompt="a", structured_outputs=bomb, stream=True)
    asked.ask("cem", "/generate", inputs="a", parameters={"grammar": {"type": "regex", "value": bomb["regex"]}})
    assert asked.abort("nobody") == 0 and asked.load == 3
    assert asked.abort("ann", "cmpl-ben", "gen-cem", "cem") == 4
    asked.join()
    for id in ("ann", "ben"):
        assert check_error(asked.answers[id], 499, None) == "the request was aborted"
        assert server.record(f"cmpl-{id}").status == 499
    check_tgi_error(asked.answers["cem"], 500, "incomplete_generation", "the request was aborted")
    assert asked.abort("ann", "ben", "cem") == asked.load == 0


def test_abort_of_running_and_queued_requests(tiny_llama: Path) -> None:
    """In the real engine, with one seat: what was generated is given, and everything is free again."""
    settings = Settings(model=str(tiny_llama), dtype="float32", kv_blocks=64, max_num_seqs=1)
    with running(settings) as server:
        asked = Asked(server)
        for id in ("runs", "waits"):
            asked.ask(id, prompt="The", max_tokens=400, ignore_eos=True, n=2, seed=1)
        eventually(lambda: server.engine.stats.generation_tokens > 3)
        assert asked.abort("runs", "waits") == 2
        asked.join()
        runs, waits = (asked.answers[id].json() for id in ("runs", "waits"))
        for body in (runs, waits):
            assert [choice["finish_reason"] for choice in body["choices"]] == ["abort", "abort"]
        assert 3 < runs["usage"]["completion_tokens"] < 400 and runs["choices"][0]["text"]
        assert waits["usage"]["completion_tokens"] == 0 and waits["choices"][0]["text"] == ""
        eventually(lambda: server.engine.stats.running == server.engine.stats.waiting == 0)
        assert server.engine.stats.kv_holding == 0
        assert server.post("/v1/completions", prompt="The", max_tokens=3).status_code == 200


def test_an_abort_says_what_is_wrong(server: Running) -> None:
    for ids in (None, "a", [1], ["a"] * 5000):
        check_error(
            server.post("/abort_requests", request_ids=ids), 400, "request_ids.0" if ids == [1] else "request_ids"
        )


def test_head_is_get_without_its_body(server: Running) -> None:
    paths = ["/health", "/ping", "/ready", "/metrics", "/version", "/load", "/v1/models", "/v1/models/echo", "/info"]
    for path in [*paths, "/tokenizer_info", "/docs", "/openapi.json"]:
        head, get = server.http.head(path), server.http.get(path)
        assert (head.status_code, head.content) == (200, b"") and get.status_code == 200
        assert head.headers["content-type"] == get.headers["content-type"] if get.content else True
        if path != "/metrics":
            assert head.headers["content-length"] == get.headers["content-length"]
    assert server.http.head("/v1/models/none").status_code == server.http.head("/none").status_code == 404
    assert server.http.head("/v1/completions").status_code == 405
    assert not any("head" in methods for methods in server.http.get("/openapi.json").json()["paths"].values())


def test_docs_load_nothing(server: Running) -> None:
    response = server.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    page, paths = response.text, server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/tokenize", "/ready", "/abort_requests"} <= set(paths)
    assert all(f"{method.upper()} {path}<" in page for path, methods in paths.items() for method in methods)
    assert all(escape(one["summary"]) in page for methods in paths.values() for one in methods.values())
    assert "<code>logit_bias</code>" in page and "list of integer" in page
    assert "://" not in page and "src=" not in page and "<script" not in page
