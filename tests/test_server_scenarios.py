"""Seven scenarios that a serving engine must get right, over HTTP with an engine process: without a model, every slot
that is read checked; and with one, marked slow.

The same with the planner alone are in test_scenarios.py. Each test asserts that its scenario occurred and that every
client got what it gets alone; `crowd`, that everything is free afterwards.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Running, eventually, running

from framework.messages import EngineStats, Outputs
from framework.settings import Settings

EXECUTORS: dict[str, dict[str, Any]] = {"checking": {"executor_opt": {"delay": 0.004}}, "torch": {}}
SERVERS: dict[str, dict[str, Any]] = {
    "two seats": {"max_num_seqs": 2, "kv_blocks": 400},
    "two seats, ageing": {"max_num_seqs": 2, "kv_blocks": 400, "scheduler_opt": {"aging": 0.05}},
    "80 tokens": {"max_num_seqs": 8, "kv_blocks": 20, "preemption": "swap", "swap_space": "0.3"},
}


class Step(NamedTuple):
    """What the engine said after a step: its figures, the ids of who got a token, and of who ended."""

    stats: EngineStats
    served: set[str]
    ended: list[str]


class Answer(NamedTuple):
    """One choice. `tokens` as logprobs spell them: these tell all bytes apart, the text does not."""

    text: str
    tokens: list[str]
    finish_reason: str


class Crowd:
    """The clients of a server, and all that its engine said since they came.

    A request's id begins with the name that its client gave.
    """

    def __init__(self, server: Running, clients: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.http = server.http
        self.engine = server.engine
        self.start = clients.submit
        self.steps: list[Step] = []
        self._before = self.metrics()
        deliver = server.engine._deliver

        def spy(message: Outputs) -> None:
            served = {output.id for output in message.outputs if output.tokens}
            ended = [output.id for output in message.outputs if output.finish_reason]
            self.steps.append(Step(message.stats, served, ended))
            deliver(message)

        monkeypatch.setattr(server.engine, "_deliver", spy)

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def metrics(self) -> dict[str, float]:
        """What /metrics says, by name, without its prefix, and label."""
        return {
            "/".join((sample.name.removeprefix("framework_"), *sample.labels.values())): sample.value
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
        }

    def count(self, *counters: str) -> float:
        """By how much these have grown, together."""
        now = self.metrics()
        return sum(now[name] - self._before[name] for name in counters)

    def preemptions(self) -> float:
        return self.count("preemptions_total/swap", "preemptions_total/recompute")

    def post(self, name: str, prompt: object, **body: Any) -> httpx.Response:
        body = {"prompt": prompt, "temperature": 0, "seed": 5, "ignore_eos": True, "logprobs": 0, **body}
        return self.http.post("/v1/completions", json=body, headers={"X-Request-Id": name})

    def ask(self, name: str, *prompts: list[int], **body: Any) -> list[Answer]:
        """The answers to prompts that come at once."""
        response = self.post(name, prompts, **body)
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        return [Answer(c["text"], c["logprobs"]["tokens"], c["finish_reason"]) for c in choices]

    def alone(self, *prompts: list[int], **body: Any) -> list[Answer]:
        """The same, one after the other."""
        return [answer for prompt in prompts for answer in self.ask("alone", prompt, **body)]

    def served(self, name: str) -> list[int]:
        """The steps, of those that were told, in which a client got tokens."""
        return [i for i, step in enumerate(self.steps) if any(id.startswith(name) for id in step.served)]

    @property
    def ended(self) -> list[str]:
        """Ids in the order in which they ended."""
        return [id for step in self.steps for id in step.ended]

    def check_free(self) -> None:
        eventually(lambda: self.stats.running == self.stats.waiting == 0)
        found = self.metrics()
        gauges = ["requests_running", "requests_waiting", "kv_cache_usage", "kv_token_usage"]
        for gauge in (*gauges, "kv_blocks/holding", "kv_blocks/reserved", "kv_blocks/swapped"):
            assert found[gauge] == 0, f"everybody has left, and {gauge} is {found[gauge]}"
        assert found["kv_blocks/free"] + found["kv_blocks/cached"] == self.stats.kv_blocks
        assert found["failed_steps_total"] == 0 and not [name for name in found if name.startswith("plugin_faults")]
        assert len(self.ended) == len(set(self.ended)), "somebody ended twice"


@pytest.fixture(
    scope="module", params=[pytest.param(e, marks=[pytest.mark.slow] if e == "torch" else []) for e in EXECUTORS]
)
def servers(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Callable[[str], Running]]:
    """Those of `SERVERS`, each started when it is first asked for."""
    with ExitStack() as stack:
        started: dict[str, Running] = {}

        def server(name: str) -> Running:
            if name not in started:
                common = {"scheduler": "priority", "dtype": "float32", "block_size": 4, "strict_plugins": True}
                flags = {"executor": request.param, **EXECUTORS[request.param], **common, **SERVERS[name]}
                started[name] = stack.enter_context(running(Settings(model=str(tiny_llama), **flags)))
            return started[name]

        yield server


@pytest.fixture
def crowd(
    request: pytest.FixtureRequest, servers: Callable[[str], Running], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Crowd]:
    with ThreadPoolExecutor(16) as clients:
        crowd = Crowd(servers(request.param), clients, monkeypatch)
        yield crowd
    crowd.check_free()


def on(*servers: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("crowd", servers, indirect=True)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 90 + 33 for i in range(length)]


@on("two seats", "two seats, ageing")
def test_starvation(crowd: Crowd, request: pytest.FixtureRequest) -> None:
    """A request among better ones, of which a dozen and more always wait: with ageing it ends while they do, without
    once they stop coming."""
    ageing = "ageing" in request.node.callspec.params["crowd"]
    over = threading.Event()

    def stream(k: int) -> None:
        while not over.is_set():
            crowd.ask("better", *[prompt(8, k)] * 64, max_tokens=3)  # so many that clients need not be quick

    body = {"prompt": prompt(8), "n": 2, "max_tokens": 480, "ignore_eos": True, "stream": True}
    streams: list[Future[None]] = []
    try:
        with crowd.http.stream("POST", "/v1/completions", json=body) as seated:
            chunks = seated.iter_raw()  # as long as this is kept, the client stays
            next(chunks)
            low = crowd.start(crowd.ask, "low", prompt(8, 3), priority=1, max_tokens=6)
            eventually(lambda: crowd.stats.waiting == 1)
            streams += [crowd.start(stream, k) for k in range(3)]
            eventually(lambda: crowd.stats.waiting > 16)
        if ageing:
            low.result()
        else:
            before = len(crowd.steps)
            eventually(lambda: len(crowd.steps) > before + 150)
            assert not low.done()
    finally:
        over.set()
    for one in streams:
        one.result()
    assert low.result() == crowd.alone(prompt(8, 3), max_tokens=6)
    start, last = crowd.served("low")[0], crowd.served("better")[-1]
    assert (start < last and crowd.steps[start].stats.waiting >= 12) if ageing else start > last
    assert crowd.preemptions() == 0


@on("80 tokens")
def test_ping_pong(crowd: Crowd) -> None:
    """Two requests that come to need 14 of the 20 blocks each."""
    prompts = [prompt(8), prompt(8, 1)]
    answers = crowd.ask("both", *prompts, max_tokens=48)
    assert 1 <= crowd.preemptions() <= 2
    assert answers == crowd.alone(*prompts, max_tokens=48)


@on("two seats")
def test_urgent_at_the_full_sequence_limit(crowd: Crowd) -> None:
    """It takes the seat of the one worse request, in the first step or the second, although memory is plentiful."""
    worse = crowd.start(crowd.ask, "worse", prompt(8), max_tokens=300)
    eventually(lambda: crowd.stats.running == 1)
    equal = crowd.start(crowd.ask, "equal", prompt(8, 1), priority=-1, max_tokens=300)
    eventually(lambda: crowd.stats.running == 2)
    urgent = crowd.ask("urgent", prompt(8, 2), priority=-1, max_tokens=4)
    answers = [*worse.result(), *equal.result(), *urgent]
    came = next(i for i, step in enumerate(crowd.steps) if step.stats.running + step.stats.waiting == 3)
    start = crowd.served("urgent")[0]
    assert start <= came + 1
    assert {id.partition("-")[0] for id in crowd.steps[start].served} == {"urgent", "equal"}
    stats = crowd.steps[start].stats
    assert stats.kv_holding + stats.kv_reserved < stats.kv_blocks / 2
    assert crowd.ended[0].startswith("urgent") and crowd.preemptions() == 1
    assert answers[:2] == crowd.alone(prompt(8), prompt(8, 1), max_tokens=300)
    assert answers[2:] == crowd.alone(prompt(8, 2), max_tokens=4)


@on("80 tokens")
def test_swap_exhausted(crowd: Crowd) -> None:
    """Four requests that come to need 10 of the 20 blocks each, and room for 6 on the host."""
    assert crowd.metrics()["kv_host_blocks"] == 6
    prompts = [prompt(8, k) for k in range(4)]
    answers = crowd.ask("four", *prompts, max_tokens=32)
    assert crowd.count("preemptions_total/swap") >= 1
    assert crowd.count("preemptions_total/recompute") == crowd.count("swaps_exhausted_total") >= 1
    assert answers == crowd.alone(*prompts, max_tokens=32)


@on("80 tokens")
def test_pool_smaller_than_one_request(crowd: Crowd) -> None:
    (model,) = crowd.http.get("/v1/models").json()["data"]
    assert model["max_model_len"] == 80  # what the pool holds: the model could do more
    large: dict[str, Any] = {"max_tokens": 90, "priority": -1}
    for length, body, field, numbers in (
        (8, large, "max_tokens", ("8 prompt", "+ 90 exceed", "80 tokens", "at most 72")),
        (100, {}, "prompt", ("100 tokens", "80 tokens")),
    ):
        response = crowd.post("large", prompt(length), **body)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == field
        assert all(number in error["message"] for number in numbers), error["message"]
    answers = crowd.ask("two", prompt(8), prompt(8, 1), max_tokens=72)  # both at once
    assert [(len(answer.tokens), answer.finish_reason) for answer in answers] == [(72, "length")] * 2
    assert crowd.preemptions() >= 1
    assert answers == crowd.alone(prompt(8), prompt(8, 1), max_tokens=72)


@on("two seats", "80 tokens")
def test_equal_priorities(crowd: Crowd) -> None:
    """Two of eight fit at once, for want of seats or of blocks: each needs 10 of them from its first step on."""
    prompts = [prompt(37, 5 * k) for k in range(8)]
    answers = crowd.ask("equal", *prompts, priority=3, max_tokens=4)
    assert max(step.stats.running for step in crowd.steps) == 2
    assert max(step.stats.waiting for step in crowd.steps) >= 5
    assert crowd.preemptions() == 0
    arrival = [sorted(int(id.rpartition("-")[2]) for id in step.served) for step in crowd.steps]
    order = list(dict.fromkeys(number for step in arrival for number in step))
    assert order == list(range(order[0], order[0] + 8))
    assert answers == crowd.alone(*prompts, max_tokens=4)


@on("80 tokens")
def test_n_4_aborted_half_way(crowd: Crowd) -> None:
    """Its client leaves while the four stream, some of them swapped out; another's request goes on beside them."""
    beside = crowd.start(crowd.ask, "beside", prompt(8), priority=-1, max_tokens=64)
    eventually(lambda: crowd.stats.running == 1)
    body = {"prompt": prompt(10, 1), "max_tokens": 70, "n": 4, "seed": 5, "ignore_eos": True, "stream": True}
    heard: set[int] = set()
    with crowd.http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "four"}) as response:
        for line in filter(None, response.iter_lines()):
            heard |= {choice["index"] for choice in json.loads(line.removeprefix("data: "))["choices"]}
            if crowd.stats.kv_swapped and len(heard) == 4:
                break
    eventually(lambda: crowd.count("request_success_total/abort") == 4)
    assert beside.result() == crowd.alone(prompt(8), max_tokens=64)
    assert len([id for id in crowd.ended if id.startswith("four")]) == 4
    assert crowd.count("preemptions_total/swap") >= 1
    (whole,) = crowd.ask("whole", prompt(4, 2), max_tokens=76)
    assert len(whole.tokens) == 76  # the whole pool can be had again
