"""What a client says stays out of logs, what the server is made of stays out of answers: on every route there is."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from echo_engine import EchoProcess
from framework.server.generation import Serving
from serving import Running, eventually, running

from framework.settings import Settings

SECRET = "wisteria-9041"
"""In every text, name and key that is sent."""
BASES: list[dict[str, Any]] = [
    {"prompt": SECRET, "max_tokens": 3},
    {"prompt": [SECRET, f"{SECRET} again"], "max_tokens": 3, "stream": True},
    {"messages": [{"role": "user", "content": SECRET, "name": SECRET}], "max_tokens": 3},
    {"messages": [{"role": SECRET, "content": [{"type": "text", "text": SECRET}]}], "stream": True, "max_tokens": 3},
    {"inputs": SECRET, "parameters": {"max_new_tokens": 3}},
    {"tokens": [1, 2, 3]},
]
WRONG: list[Any] = [
    SECRET,
    SECRET * 500,
    [SECRET],
    {SECRET: SECRET},
    [{SECRET: [SECRET] * 300}],
    10**30,
    -1,
    None,
    True,
]
INSIDE = re.compile(r'Traceback|File "|\.py\b|site-packages|/(?:home|work|usr|tmp|root)/|0x[0-9a-f]{6,}| object at ')


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(model=str(tiny_llama), served_model_name="echo", metrics_compat="vllm", cors_origin="*")
    with running(settings, spawn=EchoProcess) as found:
        yield found


def routes(server: Running) -> list[tuple[str, str, list[str]]]:
    """(method, path, names of the body's fields)."""
    api = server.http.get("/openapi.json").json()
    found = []
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = schema.get("$ref", "").rpartition("/")[2]
            fields = api["components"]["schemas"][name]["properties"] if name else {}
            found.append((method.upper(), re.sub(r"\{.*?\}", SECRET, path), list(fields)))
    assert len(found) > 10
    return found


def bodies(fields: list[str]) -> Iterator[Any]:
    yield from BASES
    yield from ([], SECRET, None, {}, {SECRET: SECRET}, [SECRET] * 1000, {"model": SECRET, "prompt": SECRET})
    for base, (field, value) in zip(itertools.cycle(BASES[:5]), itertools.product(fields, WRONG), strict=False):
        yield {**base, field: value}


def check(answer: httpx.Response) -> None:
    assert answer.status_code != 500, answer.text
    if answer.status_code >= 400:
        assert len(answer.content) < 4000 and not INSIDE.search(answer.text), answer.text


def test_nothing_that_is_said_is_logged_and_nothing_inside_is_told(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Bodies that are fine and bodies that are wrong in one field, with all logs there are."""
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore"):  # the client's own
        caplog.set_level(logging.WARNING, name)
    sent = 0
    for method, path, fields in routes(server):
        for body in bodies(fields) if method == "POST" else [None]:
            check(server.http.request(method, path, json=body))
            sent += 1
    for method, path in itertools.product(("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"), ("/", "/v1/nothing")):
        check(server.http.request(method, path, json={"prompt": SECRET} if method != "GET" else None))
    head = {"content-type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        for data in (SECRET, f'{{"prompt": "{SECRET}', f'{{"prompt": "{SECRET}\\ud800"}}', f'{{"a": {"9" * 5000}}}'):
            check(server.http.post(path, content=data.encode(), headers=head))
        check(server.http.post(path, content=SECRET.encode(), headers={"content-type": f"text/{SECRET}"}))
    eventually(lambda: server.engine.load == 0)
    assert sent > 500
    for record in caplog.records:
        line = logging.Formatter("%(message)s").format(record)  # with its traceback
        if record.name == "uvicorn.access" and isinstance(record.args, tuple):
            line = line.replace(str(record.args[2]), "")  # the path, which is no secret
        assert SECRET not in line
        assert record.levelno < logging.ERROR, line


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_of_ours_tells_neither_side_of_the_other(
    server: Running, stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has where it happened; values of variables stand nowhere."""

    def broken(text: str, *arguments: Any) -> list[int]:
        del text
        raise RuntimeError("a bug in /home/ann/inputs.py")

    serving: Serving = server.serving
    monkeypatch.setattr(serving.inputs, "encode", broken)
    answer = server.post("/v1/completions", prompt=f"{SECRET} {stream}", stream=stream)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error; the server's log has the details"
    assert answer.headers["connection"] == "close"
    eventually(lambda: "a bug in /home/ann/inputs.py" in caplog.text)
    assert "Traceback" in caplog.text and SECRET not in caplog.text


def test_a_real_server_at_its_most_talkative(tiny_llama: Path, tmp_path: Path) -> None:
    """Both processes, what they print included; nor are token ids there."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "framework", "serve", "--model", str(tiny_llama), "--port", "0"]
    command += ["--kv-blocks", "64", "--dtype", "float32", "--log-level", "debug"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            found = eventually(
                lambda: process.poll() is not None or re.search(r"URL +(http\S+)/v1", log.read_text()), 60
            )
            with httpx.Client(base_url=found[1], timeout=60) as http:
                ids = http.post("/tokenize", json={"prompt": SECRET}).json()["tokens"]
                for body in BASES:
                    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                        for more in (
                            {},
                            {"stop": SECRET},
                            {"temperature": SECRET},
                            {"user": SECRET},
                            {"extra": {SECRET: 1}},
                        ):
                            check(http.post(path, json={**body, **more}))
                cut = httpx.Timeout(30, read=0.05)
                for _ in range(2):
                    with suppress(httpx.ReadTimeout):
                        body = {"prompt": SECRET, "max_tokens": 200, "ignore_eos": True}
                        http.post("/v1/completions", json=body, timeout=cut)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    text = log.read_text()
    assert "http request" in text and SECRET not in text
    assert ", ".join(map(str, ids)) not in text and "Traceback" not in text
