"""The `text-generation` package, in an environment of its own, which `make test` makes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from echo_engine import EchoProcess
from serving import Running, eventually, running

from framework.settings import Settings

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv/clients/bin/python"


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(model=str(tiny_llama), served_model_name="echo", max_queued_requests=4)
    with running(settings, spawn=EchoProcess) as found:
        yield found


def check(server: Running, *names: str) -> None:
    assert PYTHON.exists(), "this test's environment is missing: run `make .venv/.clients`"
    script = Path(__file__).with_name("text_generation_client.py")
    command = [PYTHON, script, server.url, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("name", ["text", "streamed", "chat", "errors", "asynchronous"])
def test_text_generation(server: Running, name: str) -> None:
    check(server, name)


def test_a_full_queue(server: Running) -> None:
    held = {"inputs": "a", "extra": {"hold": True}}
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(server.post, "/generate", **held) for _ in range(4)]
        eventually(lambda: len(server.engine.waiting) == 4)
        check(server, "overloaded")
        ids = [sequence.stream.record.id for sequence in server.engine._sequences.values()]
        server.post("/abort_requests", request_ids=ids)
        for response in waiting:
            assert response.result().json()["error_type"] == "incomplete_generation"
