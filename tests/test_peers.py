"""benchmarks/peers.py: its clients, its processes, and what it computes from what they say."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from serving import eventually, running

from framework.settings import Settings

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def load() -> ModuleType:
    import load

    return load


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(1, 100))
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    from common import percentile

    assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")


class TestClients:
    def test_every_token_of_a_server_counts(self, load: ModuleType, tiny_llama: Path) -> None:
        with running(Settings(model=str(tiny_llama), kv_blocks=256, block_size=16)) as server:
            figures = asyncio.run(load.load(server.url, 3, 8, seed=5, vocab=500))
            generated = sum(output for _, output in load.requests(5, 8, 500))
            eventually(lambda: sum(server.recorder.tokens.values()) == generated)
            assert len(server.recorder.tokens) == 8
            with pytest.raises(ExceptionGroup) as failed:
                asyncio.run(load.load(server.url, 1, 1, seed=5, vocab=40000))
        assert figures.rate * figures.seconds == pytest.approx(generated)
        assert 1 <= figures.tokens_per_event < 3  # an event without text carries no token that is counted
        assert 0 < figures.gap <= figures.gap_p99 <= 1e3 * figures.seconds
        assert 0 < figures.first <= figures.first_p99 <= 1e3 * figures.seconds
        assert "400" in str(failed.value.exceptions[0])

    def test_requests_repeat_with_the_seed_only(self, load: ModuleType) -> None:
        some = load.requests(1, 200, 1000)
        assert some == load.requests(1, 200, 1000) != load.requests(2, 200, 1000)
        lengths, outputs = {len(prompt) for prompt, _ in some}, {output for _, output in some}
        assert (min(lengths) >= 50, max(lengths) <= 200, min(outputs) >= 32, max(outputs) <= 96) == (True,) * 4
        assert {token for prompt, _ in some for token in prompt} <= set(range(300, 1000))

    def test_times_are_those_of_the_engine_behind(self, load: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
        """Over the stand-in of OpenVINO's server, with an engine that steps at known times."""
        import openvino_server

        ours, theirs = multiprocessing.Pipe()
        engine = threading.Thread(target=_metronome, args=(theirs, 0.05, 0.01))
        frontend = threading.Thread(target=lambda: asyncio.run(openvino_server.Frontend(ours).serve("a metronome")))
        engine.start()
        frontend.start()
        printed = eventually(lambda: re.search(r"URL +(http://\S+)/v1", capsys.readouterr().out))
        figures = asyncio.run(load.load(printed[1], 1, 4, seed=3, vocab=1000))
        ours.send(None)
        for thread in (engine, frontend):
            thread.join(10)
            assert not thread.is_alive()
        outputs = [output for _, output in load.requests(3, 4, 1000)]
        assert figures.tokens_per_event == pytest.approx(sum(outputs) / sum(math.ceil(n / 2) for n in outputs))
        assert 60 <= figures.first < 250
        assert 10 <= figures.gap < 50


def _metronome(pipe: Connection, first: float, gap: float) -> None:
    """Two tokens for every request, `first` seconds after it began to work and then every `gap`. Ends on None."""
    live: dict[int, int] = {}
    while True:
        while not live or pipe.poll():
            asked = pipe.recv()
            if asked is None:
                pipe.close()
                return
            if not live:
                time.sleep(first)
            live[asked[0]] = asked[2]
        time.sleep(gap)
        counts = {id: min(2, left) for id, left in live.items()}
        live = {id: left - counts[id] for id, left in live.items()}
        pipe.send([(id, count, not live[id]) for id, count in counts.items()])
        live = {id: left for id, left in live.items() if left}


def test_an_engine_reads_all_weights_and_what_it_has_seen(tiny_llama: Path) -> None:
    from engines import Setup
    from peers import Engine

    setup = Setup(str(tiny_llama), 1, {"kernel": "torch", "dtype": "float32"}, (200, 500))
    engine = Engine(sys.executable, "framework", setup)
    try:
        figures = engine.measure(1)
    finally:
        engine.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())  # tied: the head is all of it once
    config = model.config
    seen = 128 + np.mean(np.arange(1, 64))  # before each token after the first, itself included
    token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert engine.about.read == pytest.approx(weights + seen * token)
    assert "float32, kernel torch" in engine.about.settings
    assert all(value > 0 for value in figures)


def test_turns_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    import peers

    order: list[tuple[str, int]] = []

    def engine(name: str) -> Any:
        return lambda seed: order.append((name, seed)) or len(order)

    found = peers.in_turns(3, {name: engine(name) for name in "ab"})
    assert [name for name, _ in order] == ["a", "b", "b", "a", "a", "b"]
    assert [seed for _, seed in order] == [1000, 1000, 2000, 2000, 3000, 3000]
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert peers.row("x", [1, 4, 5], [2, 2, 4], "an aim") == 1.25  # of 0.5, 2 and 1.25
    assert re.sub(" +", " ", capsys.readouterr().out) == "x 4.0 [1.0, 5.0] 2.0 [2.0, 4.0] 1.25 [0.50, 2.00] an aim\n"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_server_ends_with_who_started_it() -> None:
    server = "import os, time; print(f'pid {os.getpid()} URL http://x/v1', flush=True); time.sleep(60)"
    script = f"""
import sys, time
from common import server
with server([sys.executable, "-c", {server!r}]) as (url, output):
    print(url, output.split()[1], flush=True)
    time.sleep(60)
"""
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        url, pid = parent.stdout.readline().split()
        assert url == "http://x" and psutil.pid_exists(int(pid))
        parent.send_signal(signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == "zombie")
