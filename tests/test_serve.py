"""`framework serve` as a process: start, signals, the death of either process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rogue import install
from serving import eventually

from framework.machine import cores, list_cpus

pytestmark = pytest.mark.slow
LONG = {"prompt": "The", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 4}


class Served:
    """A `framework serve` process; `output` is what it printed, stderr included."""

    def __init__(
        self, model: Path | str, tmp_path: Path, *flags: str, threads: str = "1", mask: set[int] | None = None
    ) -> None:
        self.log = tmp_path / f"serve-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "framework", "serve", "--model", str(model), "--port", "0", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        if mask:  # inherited
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, mask)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        if mask:
            os.sched_setaffinity(0, before)
        self.url = ""

    @property
    def output(self) -> str:
        return self.log.read_text()

    def ready(self) -> None:
        def url() -> Any:
            assert self.process.poll() is None, self.output
            return re.search(r"URL +(http://\S+)/v1", self.output)

        self.url = eventually(url, 60)[1]

    def engines(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: int, within: float = 5) -> int:
        """Send a signal; the exit code. Fails if it takes longer, complains, or leaves a process behind."""
        engines = self.engines()
        self.process.send_signal(number)
        code = self.process.wait(within)
        _, alive = psutil.wait_procs(engines, 3)
        assert not alive
        assert "Traceback" not in self.output, self.output
        return code


@contextmanager
def serve(model: Path | str, tmp_path: Path, *flags: str, **process: Any) -> Iterator[Served]:
    served = Served(model, tmp_path, *flags, **process)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()


@pytest.mark.parametrize("moment", ["spawned", "loading", "early"])
def test_ctrl_c_while_it_starts(tiny_llama: Path, tmp_path: Path, moment: str) -> None:
    with serve(tiny_llama, tmp_path) as served:
        if moment == "spawned":
            eventually(served.engines)
        elif moment == "loading":
            eventually(lambda: "load weights" in served.output, 60)
        else:  # what is imported first; before that it is the interpreter's own start, which has words of its own
            maps = Path(f"/proc/{served.process.pid}/maps")
            eventually(lambda: "/site-packages/" in maps.read_text(), 60)
        assert served.stop(signal.SIGINT) in (130, -signal.SIGINT)  # the latter while it imports
        assert "is ready" not in served.output


def test_not_ready_while_it_starts(tiny_llama: Path, tmp_path: Path) -> None:
    """Nor is anybody else served before it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serve(tiny_llama, tmp_path, "--port", str(port)) as served:
        url = f"http://127.0.0.1:{port}"

        def status() -> int:
            try:
                return httpx.get(f"{url}/ready", timeout=30).status_code
            except httpx.ConnectError:
                return 0

        assert eventually(status, 60) == 503
        body = {"prompt": "The", "max_tokens": 3}
        early = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert early.status_code == 503 and early.headers["Retry-After"]
        served.ready()
        assert status() == 200
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3


def test_ctrl_c_tells_those_who_wait(tiny_llama: Path, tmp_path: Path) -> None:
    with serve(tiny_llama, tmp_path) as served:
        served.ready()
        with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG, timeout=30) as response:
            chunks = response.iter_text()
            first = next(chunks)
            assert served.stop(signal.SIGINT) == 130
            text = first + "".join(chunks)
        assert '"error"' in text and "shutting down" in text and text.endswith("data: [DONE]\n\n")


def test_sigterm_lets_what_has_begun_finish(tiny_llama: Path, tmp_path: Path) -> None:
    with serve(tiny_llama, tmp_path) as served, httpx.Client() as idle:
        served.ready()
        assert idle.get(f"{served.url}/health").status_code == 200
        body = {**LONG, "max_tokens": 200}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
            chunks = response.iter_text()
            first = next(chunks)
            assert served.stop(signal.SIGTERM, within=40) == 0
            text = first + "".join(chunks)
        assert text.count('"finish_reason":"length"') == 4 and '"error"' not in text
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")


def test_sigterm_ends_what_takes_longer(tiny_llama: Path, tmp_path: Path) -> None:
    slow = ("--executor", "scripted", "--executor-opt", "delay=0.05")
    with serve(tiny_llama, tmp_path, *slow, "--drain-seconds", "1") as served:
        served.ready()
        with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG, timeout=60) as response:
            chunks = response.iter_text()
            first = next(chunks)
            assert served.stop(signal.SIGTERM, within=8) == 0
            text = first + "".join(chunks)
        assert text.count('"finish_reason":"abort"') == 4 and '"error"' not in text
        assert text.endswith("data: [DONE]\n\n")


def test_two_signals_end_a_step_in_silence(tiny_llama: Path, tmp_path: Path) -> None:
    """The engine is ended within it: nothing is computed again."""
    slow = ("--executor", "scripted", "--executor-opt", "delay=0.05", "--log-level", "debug")
    with serve(tiny_llama, tmp_path, *slow) as served:
        served.ready()
        with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG, timeout=60) as response:
            chunks = response.iter_text()  # whoever drops it hangs up
            next(chunks)
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert served.stop(signal.SIGTERM) == 0
        assert "ending at once" in served.output and "failed" not in served.output


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=str)
def test_a_thread_that_does_not_end_holds_nothing_up(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: list[int]
) -> None:
    with serve(tiny_llama, tmp_path, *rogue(tmp_path, monkeypatch)) as served:
        served.ready()
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{served.url}/stuck", timeout=0.5)
        for number in signals[:-1]:
            served.process.send_signal(number)
            time.sleep(0.3)
        assert served.stop(signals[-1], within=12) == (130 if signals == [signal.SIGINT] else 0)


def rogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Flags of a server whose engine does what requests say."""
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "plugins")))
    return ("--executor", "scripted", "--plugin", "rogue")


def ask(served: Served, **extra: Any) -> httpx.Response:
    body = {"prompt": "The", "max_tokens": 3, "extra": extra}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)


def healthy(served: Served) -> bool:
    return httpx.get(f"{served.url}/health").status_code == 200


def test_the_death_of_the_engine(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is told why, and another engine takes its place; what the dead one had started is gone, too."""
    with serve(tiny_llama, tmp_path, *rogue(tmp_path, monkeypatch)) as served:
        served.ready()
        assert healthy(served)
        assert ask(served, child=True).status_code == 200
        children = served.engines()
        assert len(children) == 2
        with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG, timeout=5) as response:
            chunks = response.iter_text()
            first = next(chunks)
            children[0].kill()
            text = first + "".join(chunks)
        assert "SIGKILL" in text and text.endswith("data: [DONE]\n\n")
        health = httpx.get(f"{served.url}/health")
        assert health.status_code == 503 and "SIGKILL" in health.json()["error"]["message"]
        assert "framework_engine_up 0" in httpx.get(f"{served.url}/metrics").text
        _, alive = psutil.wait_procs(children, 3)
        assert not alive
        eventually(lambda: healthy(served), 60)
        assert ask(served).status_code == 200
        assert "SIGSEGV" in ask(served, signal=signal.SIGSEGV).json()["error"]["message"]
        eventually(lambda: healthy(served), 60)
        assert "framework_engine_restarts_total 2" in httpx.get(f"{served.url}/metrics").text
        assert served.stop(signal.SIGTERM) == 0
        for cause in ("SIGKILL", "SIGSEGV"):
            assert f"ended by {cause}" in served.output


def test_an_engine_that_cannot_be_started_again_ends_the_server(tiny_llama: Path, tmp_path: Path) -> None:
    """As when its files are gone."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    with serve(model, tmp_path) as served:
        served.ready()
        (model / "config.json").unlink()
        (engine,) = served.engines()
        engine.kill()
        assert served.process.wait(60) == 1, served.output
        assert re.search(
            r"^error: the engine ended and did not start again in 5 tries; the last: ", served.output, re.M
        )
        assert "Traceback" not in served.output


@pytest.mark.parametrize("moment", ["loading", "serving", "frozen", "restarting"])
def test_the_death_of_the_server_ends_everything(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The engine, whatever it does, and what it has started."""
    with serve(tiny_llama, tmp_path, *rogue(tmp_path, monkeypatch)) as served:
        if moment == "loading":
            eventually(served.engines, 60)
        else:
            served.ready()
            assert ask(served, child=True).status_code == 200
        found = served.engines()
        assert len(found) == (1 if moment == "loading" else 2)
        if moment == "frozen":
            found[0].suspend()
        elif moment == "restarting":
            found[0].kill()
            found += eventually(lambda: [p for p in served.engines() if p not in found and p.cmdline()], 60)
        served.process.kill()
        _, alive = psutil.wait_procs(found, 5)
        assert not alive


def test_errors_are_one_line(tiny_llama: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ((tiny_llama, "--port", str(port)), rf"--port {port}: already in use"),
            ((tiny_llama, "--host", "no.such.host.invalid"), r"--host no\.such\.host\.invalid"),
            ((tiny_llama, "--host", "192.0.2.1"), r"--host 192\.0\.2\.1"),
            ((tmp_path / "missing",), r"--model \S+missing: no such file"),
            ((tiny_llama, "--kv-blocks", "1", "--max-model-len", "100"), r"--max-model-len 100"),
        ]
        started = [(Served(model, tmp_path, *flags), expected) for (model, *flags), expected in cases]
        for served, expected in started:
            assert served.process.wait(60) == 2, served.output
            errors = [line for line in served.output.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and re.search(expected, errors[0]), served.output
            assert "Traceback" not in served.output


def _complete(served: Served) -> None:
    body = {"prompt": "The", "ignore_eos": True, "max_tokens": 30}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 30


def test_one_core(tiny_llama: Path, tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    with serve(tiny_llama, tmp_path, threads="", mask={cpu}) as served:
        served.ready()
        assert f", 1 thread on CPU {cpu}\n" in served.output
        _complete(served)
        (engine,) = served.engines()
        assert engine.cpu_affinity() == psutil.Process(served.process.pid).cpu_affinity() == [cpu]
        assert served.stop(signal.SIGTERM) == 0


@pytest.mark.skipif(len(cores()) < 2, reason="needs two cores")
def test_the_server_keeps_off_the_cores_of_the_engine(tiny_llama: Path, tmp_path: Path) -> None:
    engine_core, server_core = cores()[:2]
    mask = {*engine_core, *server_core}
    with serve(tiny_llama, tmp_path, "--threads", "1", threads="", mask=mask) as served:
        served.ready()
        _complete(served)
        server = psutil.Process(served.process.pid)
        (engine,) = served.engines()
        assert (engine.cpu_affinity(), server.cpu_affinity()) == (engine_core, server_core)
        assert f", 1 thread on {list_cpus(engine_core)}\n" in served.output
        for thread in server.threads():
            assert os.sched_getaffinity(thread.id) == set(server_core)
        assert served.stop(signal.SIGTERM) == 0
