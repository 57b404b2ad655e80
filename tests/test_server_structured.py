"""Structured output over HTTP: every way to ask for it, every way to ask for it wrongly, and the process that tries
grammars out, whatever they do to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil
import pytest
from serving import Running, check_error, check_tgi_error, completion, eventually, running

from framework import InvalidRequest
from framework.settings import Settings

TIMEOUT = 2.0
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CHAT = [{"role": "user", "content": "Say something."}]
TAG = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[ab]"}, "end": ">"}
BOMB = "|".join(f"[a-z]{{{i}}}" for i in range(1, 3000))
"""Takes for ever to compile, or all memory that a trial may have."""


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(model=str(tiny_llama), dtype="float32", kv_blocks=300, grammar_timeout=TIMEOUT)
    with running(settings) as server:
        yield server


def trials() -> list[psutil.Process]:
    """The process that tries grammars out, and its forks; the server runs in this process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "framework.trials" in child.cmdline():
                found.append(child)
    return found


def gone(processes: list[psutil.Process]) -> bool:
    """Nobody may have taken note of their end, where the first process of a machine takes none."""

    def ended(process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return all(map(ended, processes))


def fine(server: Running, **fields: Any) -> None:
    """A good request is served, with a grammar that nobody asked for before."""
    word = f"w{time.monotonic_ns()}"
    body = {"prompt": "x", "max_tokens": 40, "structured_outputs": {"choice": [word]}, **fields}
    response = server.post("/v1/completions", **body)
    assert response.status_code == 200 and response.json()["choices"][0]["text"] == word


def refused(server: Running, param: str, **fields: Any) -> str:
    begin = time.monotonic()
    message = check_error(server.post("/v1/completions", prompt="x", **fields), 400, param)
    assert time.monotonic() - begin < TIMEOUT + 8, "was not bounded in time"
    assert not re.search(r"/project|\.cc|\.py|\[\d\d:", message), "of the library's own business"
    return message


def test_nobody_who_needs_none_pays_for_it(server: Running) -> None:
    assert completion(server, "x", max_tokens=3, seed=1, response_format={"type": "text"}, guided_json_object=False)
    assert trials() == []


ASKED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, "json"),
    ({"structured_outputs": {"regex": "[0-9]{3}-[a-c]"}}, "[0-9]{3}-[a-c]"),
    ({"structured_outputs": {"choice": ["yes", "no"], "json_object": False}}, "yes|no"),
    ({"structured_outputs": {"choice": ["yes"], "disable_additional_properties": False}}, "yes"),
    ({"structured_outputs": {"grammar": 'root ::= "<" ("a" | "b") ">"'}}, "<[ab]>"),
    ({"structured_outputs": {"structural_tag": {"format": TAG}}}, "<[ab]>"),
]


@pytest.mark.parametrize(("fields", "what"), ASKED)
def test_completions_streamed_and_not(server: Running, fields: dict[str, Any], what: str) -> None:
    choices = completion(server, ["x", "In 1984"], n=2, seed=3, max_tokens=100, **fields)
    assert len(choices) == 4
    for choice in choices.values():
        assert choice["finish_reason"] == "stop"
        if what == "json":
            jsonschema.validate(json.loads(choice["text"]), SCHEMA)
            assert " " not in choice["text"]
        else:
            assert re.fullmatch(what, choice["text"])


OF_TGI: list[dict[str, Any]] = [
    {"type": "json_object", "value": SCHEMA},
    {"type": "json", "value": SCHEMA},
    {"type": "json", "value": json.dumps(SCHEMA)},
    {"type": "json_schema", "value": {"name": "s", "schema": SCHEMA}},
]
FORMATS: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
    {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}},
]


@pytest.mark.parametrize("form", FORMATS)
def test_response_formats_of_both_routes(server: Running, form: dict[str, Any]) -> None:
    vocab = range(server.serving.inputs.info.vocab_size)
    blank = [id for id in vocab if server.tokenizer.token_bytes(id).isspace()]  # of which such a model makes no end
    bias = dict.fromkeys(map(str, blank), -100)
    body = {"response_format": form, "seed": 1, "max_tokens": 200, "logit_bias": bias}
    answer = server.openai.chat.completions.create(model="", messages=CHAT, **body)  # type: ignore[call-overload]
    texts = [answer.choices[0].message.content]
    pieces = server.openai.chat.completions.create(model="", messages=CHAT, stream=True, **body)  # type: ignore[call-overload]
    texts.append("".join(piece.choices[0].delta.content or "" for piece in pieces))
    assert texts[0] == texts[1]
    texts += [choice["text"] for choice in completion(server, "x", **body).values()]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("form", OF_TGI)
def test_response_formats_of_tgi_in_both_routes(server: Running, form: dict[str, Any]) -> None:
    """As in /generate, JSON has no blanks: such a model would make no end of them."""
    body = {"response_format": form, "seed": 1, "max_tokens": 100}
    choices = [*completion(server, "x", **body).values()]
    choices += server.post("/v1/chat/completions", messages=CHAT, **body).json()["choices"]
    for choice in choices:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        jsonschema.validate(json.loads(text), SCHEMA)
        assert " " not in text and choice["finish_reason"] == "stop"


def test_regexes_of_tgi_in_both_routes(server: Running) -> None:
    body = {"response_format": {"type": "regex", "value": "[0-9]{3}-[a-c]"}, "max_tokens": 100}
    (choice,) = completion(server, "x", **body, seed=1).values()
    (other,) = server.post("/v1/chat/completions", messages=CHAT, **body).json()["choices"]
    for text in (choice["text"], other["message"]["content"]):
        assert re.fullmatch("[0-9]{3}-[a-c]", text)


def test_json_object(server: Running) -> None:
    answer = server.post("/v1/chat/completions", messages=CHAT, response_format={"type": "json_object"}, max_tokens=20)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize("executor", ["scripted", "checking"])
def test_without_logits_nobody_is_promised_a_grammar(tiny_llama: Path, executor: str) -> None:
    with running(Settings(model=str(tiny_llama), executor=executor)) as server:
        why = f"the executor here, '{executor}', computes no logits, so no output follows a grammar; leave it out"
        wanted = {"choice": ["ja", "nein"]}
        for fields, param in (
            ({"structured_outputs": wanted}, "structured_outputs"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"structured_outputs": wanted, "stream": True}, "structured_outputs"),
        ):
            assert refused(server, param, **fields) == f"{param}: {why}"
            check_error(server.post("/v1/chat/completions", messages=CHAT, **fields), 400, param)
        grammar = {"type": "regex", "value": "a"}
        answer = server.post("/generate", inputs="x", parameters={"grammar": grammar})
        check_tgi_error(answer, 422, "validation", f"grammar: {why}")
        plain = server.post("/v1/completions", prompt="x", max_tokens=2, response_format={"type": "text"})
        assert plain.status_code == 200
        eventually(lambda: server.engine.load == 0)


BAD: list[tuple[dict[str, Any], str]] = [
    *(
        ({"response_format": form}, "response_format")
        for form in (
            {},
            {"type": "json"},
            {"type": "json", "value": 3},
            {"type": "json", "value": "{"},
            {"type": "regex"},
            {"type": "regex", "value": ["a"]},
            {"type": "regex", "value": "foo**"},
            {"type": "regex", "value": ""},
            {"type": "json_schema", "value": {"name": "x"}},
            {"type": "json_schema", "value": "{}"},
            {"type": 3},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "x"}},
            {"type": "json_schema", "json_schema": None},
            {"type": "json_schema", "json_schema": {"schema": [1]}},
            {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}},
            {"type": "json_object", "value": 3},
            {"type": "structural_tag"},
            {"type": "structural_tag", "format": {"type": "nothing"}},
            {"type": "structural_tag", "structures": [3], "triggers": []},
        )
    ),
    *(
        ({"structured_outputs": wanted}, "structured_outputs")
        for wanted in (
            {},
            {"regex": None},
            {"json_object": False},
            {"regex": "a", "choice": ["a"]},
            {"regex": 3},
            {"choice": "abc"},
            {"choice": []},
            {"choice": ["a", 3]},
            {"choice": ["a", ""]},
            {"json": "{"},
            {"json": 3},
            {"json": {"type": "array", "uniqueItems": True}},
            {"json": {"$ref": "#/nothing"}},
            {"json": {"$ref": "#"}},
            {"json": '{"type":"array","items":' * 5000 + "{}" + "}" * 5000},
            {"json": {"enum": ["x" * 70000]}},
            {"json": {"maximum": 10**40, "type": "integer"}},
            {"regex": "foo**"},
            {"regex": "(" * 3000 + ")" * 3000},
            {"regex": "\ud800"},
            {"regex": "a\0b"},
            {"regex": ""},
            {"regex": "((((a*)*)*)*)*"},
            {"grammar": "root ::= nothing"},
            {"grammar": "start ::= 'a'"},
            {"grammar": 'root ::= root root root | root root | "a" | ""'},
            {"structural_tag": "x"},
            {"json": {"type": "object"}, "whitespace_pattern": "x"},
            {"json": {"type": "object"}, "disable_additional_properties": True},
            {"json": {"type": "object"}, "disable_additional_properties": 0},
        )
    ),
    ({"response_format": OF_TGI[0], "structured_outputs": {"regex": "a"}}, "response_format"),
    *(({name: "a"}, name) for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")),
]


def test_bad_ones(server: Running) -> None:
    for fields, param in BAD:
        try:
            refused(server, param, **fields)
        except UnicodeEncodeError:
            content = json.dumps({"prompt": "x", **fields}).encode()
            response = server.http.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            check_error(response, 400, param)
    for name, value in (("whitespace_pattern", "x"), ("disable_additional_properties", True)):
        said = refused(server, "structured_outputs", structured_outputs={"regex": "a", name: value})
        assert said == f"structured_outputs: {name} is not supported"
    message = refused(server, "structured_outputs", structured_outputs={"regex": "foo**"})
    assert "regex: Regex parsing error at position 5: Two consecutive" in message
    assert "structured_outputs" in refused(server, "guided_regex", guided_regex="a")
    fine(server)
    assert server.engine.stats.running == server.engine.stats.waiting == 0


def test_what_takes_too_long_is_ended(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    fine(server)
    [process] = trials()
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.grammars, "_seconds", 0.1)  # less than the machine needs to fill the memory
        message = refused(server, "structured_outputs", structured_outputs={"regex": BOMB})
        assert "takes longer than 0.1 s to compile (--grammar-timeout)" in message
    assert trials() == [process], "a trial outlived its time"
    fine(server)


def test_what_takes_long_delays_nobody_else(server: Running) -> None:
    fine(server)
    [process] = trials()
    with ThreadPoolExecutor(8) as clients:
        bombs = [
            clients.submit(refused, server, "structured_outputs", structured_outputs={"regex": BOMB + f"|{i}"})
            for i in range(3)
        ]
        eventually(lambda: len(trials()) == 4)
        begin = time.monotonic()
        fine(server)
        assert time.monotonic() - begin < TIMEOUT
        assert not any(bomb.done() for bomb in bombs)
        told = [bomb.result() for bomb in bombs]  # whichever comes first on this machine
        assert all("takes longer than 2 s to compile" in one or "too much memory" in one for one in told), told
    assert trials() == [process], "a trial outlived its time"
    fine(server)


def test_memory_is_bounded(server: Running) -> None:
    fine(server)
    [process] = trials()
    before, most = process.memory_info().rss, 0
    wide = {"properties": {f"p{i}": {} for i in range(400)}, "minProperties": 200}
    with ThreadPoolExecutor(1) as client:
        bomb = client.submit(refused, server, "structured_outputs", structured_outputs={"json": wide})
        while not bomb.done():
            for one in trials():
                with contextlib.suppress(psutil.NoSuchProcess):
                    most = max(most, one.memory_info().rss)
            time.sleep(0.005)
        assert re.search("memory|longer than", bomb.result())
    assert most < before + 600 * 2**20
    fine(server)


def test_a_trial_that_crashes_is_refused(server: Running) -> None:
    fine(server)
    [process] = trials()
    with ThreadPoolExecutor(1) as client:
        bomb = client.submit(refused, server, "structured_outputs", structured_outputs={"regex": BOMB + "|x"})
        [fork] = eventually(lambda: [one for one in trials() if one.pid != process.pid])
        fork.send_signal(signal.SIGABRT)
        assert "cannot cope with it" in bomb.result()
    fine(server)
    assert trials() == [process]


def test_the_process_is_started_again(server: Running) -> None:
    fine(server)
    [process] = trials()
    with ThreadPoolExecutor(1) as client:
        bomb = client.submit(server.post, "/v1/completions", prompt="x", structured_outputs={"regex": BOMB + "|y"})
        eventually(lambda: len(trials()) == 2)
        process.kill()
        response = bomb.result()
    assert "try again" in check_error(response, 503, None) and response.headers["retry-after"]
    eventually(lambda: gone([process]))
    fine(server)
    assert len(trials()) == 1 and trials() != [process]


def test_the_end_of_the_process_is_no_request_s_line(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Not that of the one it was started for either, which was answered long before."""
    for _ in range(2):  # the second is started here
        fine(server)
        killed = trials()
        caplog.clear()
        for process in killed:
            process.kill()
        eventually(lambda: "the compiler of grammars has ended" in caplog.text)
        eventually(lambda: gone(killed))  # noqa: B023 - called at once
    assert "request_id" not in caplog.text


def test_the_second_time_costs_nothing(server: Running) -> None:
    wanted = {"regex": f"[0-9]{{3}}{time.monotonic_ns()}"}
    bad = {"regex": f"foo**{time.monotonic_ns()}"}
    assert completion(server, "x", seed=1, structured_outputs=wanted)
    message = refused(server, "structured_outputs", structured_outputs=bad)
    killed = trials()
    for process in killed:
        process.kill()
    eventually(lambda: gone(killed))
    response = server.post("/v1/completions", prompt="x", structured_outputs=wanted)
    assert response.status_code == 200
    assert refused(server, "structured_outputs", structured_outputs=bad) == message
    assert trials() == []
    stages = [name for name, *_ in server.record(response.json()["id"]).stages]
    assert stages[:3] == ["http.receive", "tokenize", "grammar"]


def test_a_trial_ends_with_the_last_who_waits(server: Running) -> None:
    fine(server)
    [process] = trials()
    held, opened = server.engine.grammars, process.num_fds()

    def forks() -> list[int]:
        return sorted(one.pid for one in trials() if one.pid != process.pid)

    def waiting() -> int:
        return sum(len(trying.waiting) for trying in held._trying.values())

    async def ask() -> None:
        same = {"prompt": "x", "structured_outputs": {"regex": BOMB + "|same"}}
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            first, second = (asyncio.create_task(http.post("/v1/completions", json=same)) for _ in range(2))
            others = [{**same, "structured_outputs": {"regex": BOMB + f"|{i}"}} for i in range(20)]
            [fork] = await asyncio.to_thread(eventually, forks)
            psutil.Process(fork).suspend()  # it takes neither time nor memory now
            await asyncio.to_thread(eventually, lambda: waiting() == 2)
            first.cancel()
            await asyncio.to_thread(eventually, lambda: waiting() == 1)
            many = [asyncio.create_task(http.post("/v1/completions", json=body)) for body in others]
            await asyncio.to_thread(eventually, lambda: waiting() > 10)  # some may be refused before all are there
            for task in many:
                task.cancel()
            await asyncio.to_thread(eventually, lambda: waiting() == 1 and forks() == [fork])
            fine(server)
            assert forks() == [fork] and not second.done(), "a trial that somebody waits for was ended"
            second.cancel()

    asyncio.run(ask())
    eventually(lambda: not forks() and not (held._trying or held._queue or held._placed))
    eventually(lambda: process.num_fds() == opened)
    assert trials() == [process] and not server.engine.waiting.preparing
    fine(server)


def test_nobody_waits_behind_another_tenant_s(server: Running) -> None:
    fine(server)
    with ThreadPoolExecutor(16) as clients:
        bombs = [
            clients.submit(
                refused, server, "structured_outputs", structured_outputs={"regex": f"{BOMB}|t{i}"}, user="a"
            )
            for i in range(12)
        ]
        eventually(lambda: len(server.engine.grammars._queue) >= 6)  # of 8, of which one may have its turn already
        fine(server, user="b")
        assert sum(not bomb.done() for bomb in bombs) >= 4, "it came behind them"
        server.engine.grammars.fail(InvalidRequest("structured_outputs", "structured_outputs: enough"))
        for bomb in bombs:
            bomb.result()


def test_what_was_ended_is_tried_again(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of the grammar; least of all that the engine may have it."""
    fine(server)
    monkeypatch.setattr(server.engine.grammars, "_seconds", 0.1)
    monkeypatch.setattr(server.engine, "generate", None)
    for _ in range(2):
        message = refused(server, "structured_outputs", structured_outputs={"regex": BOMB + "|again"})
        assert "takes longer than 0.1 s" in message


def test_nothing_is_left_behind(tiny_llama: Path) -> None:
    with ThreadPoolExecutor(1) as client:
        with running(Settings(model=str(tiny_llama), dtype="float32", kv_blocks=300, grammar_timeout=60)) as server:
            others = trials()  # of another server's
            fine(server)
            waiting = client.submit(server.post, "/v1/completions", prompt="x", structured_outputs={"regex": BOMB})
            left = eventually(lambda: found if len(found := [p for p in trials() if p not in others]) == 2 else None)
        with contextlib.suppress(httpx.HTTPError):
            waiting.result()
    eventually(lambda: gone(left))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_server(tiny_llama: Path, number: signal.Signals) -> None:
    others = trials()  # of another server's
    flags = ["--model", str(tiny_llama), "--port", "0", "--grammar-timeout", "60"]
    command = [sys.executable, "-m", "framework", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(found[0] for line in process.stdout if (found := re.search(r"http://[\d.:]+", line)))
            with ThreadPoolExecutor(1) as client:
                body = {"prompt": "x", "structured_outputs": {"regex": BOMB}}
                waiting = client.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
                left = eventually(lambda: f if len(f := [p for p in trials() if p not in others]) == 2 else None, 60)
                os.kill(process.pid, number)
                with contextlib.suppress(httpx.HTTPError):
                    waiting.result()
            process.wait(60)
        finally:
            process.kill()
    eventually(lambda: gone(left))  # sooner than their time is up
