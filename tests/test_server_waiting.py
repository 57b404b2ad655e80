"""The queue is bounded: what waits, who is refused, and that every place comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from echo_engine import EchoProcess
from framework.server.waiting import Waiting
from hypothesis import given
from hypothesis import strategies as st
from serving import Running, check_error, eventually, running

from framework import EngineDead, Rejected
from framework.settings import Settings

REQUESTS, TOKENS = 4, 40
HOLD = {"extra": {"hold": True}}
BOMB = "|".join(f"[a-z]{{{i}}}" for i in range(1, 3000))
"""Takes for ever to compile."""


@pytest.fixture
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(
        model=str(tiny_llama), served_model_name="echo", max_queued_requests=REQUESTS, max_queued_tokens=TOKENS
    )
    with running(settings, spawn=EchoProcess) as found:
        yield found


@given(
    st.lists(
        st.one_of(
            st.dictionaries(st.integers(0, 9).map(str), st.integers(0, 7), min_size=1, max_size=4),
            st.integers(0, 9).map(str),
            st.none(),
        ),
        max_size=30,
    )
)
def test_the_count_is_that_of_what_waits(actions: list[dict[str, int] | str | None]) -> None:
    """Beside a plain dictionary that is counted anew each time. Ids come once only, as the client's do."""
    queue, model = Waiting(5, 12), dict[str, int]()
    for round, action in enumerate(actions):
        if action is None:
            queue.clear(EngineDead("gone"))
            model.clear()
        elif isinstance(action, str):  # also ids that have left, or never came
            for id in [id for id in model if id.startswith(action)] or [action]:
                queue.leave(id)
                queue.leave(id)
                model.pop(id, None)
        else:
            new = {f"{id}-{round}": tokens for id, tokens in action.items()}
            fits = len(model) + len(new) <= 5 and sum(model.values()) + sum(new.values()) <= 12
            if not model or fits:
                queue.enter(new)
                model |= new
            else:
                with pytest.raises(Rejected) as refused:
                    queue.enter(new)
                assert refused.value.status == 429 and refused.value.retry_after == 1
        assert (len(queue), queue.tokens) == (len(model), sum(model.values()))


def waiting(server: Running) -> tuple[int, int]:
    return len(server.engine.waiting), server.engine.waiting.tokens


def check_full(response: httpx.Response, limit: str) -> None:
    assert limit in check_error(response, 429, None)
    assert response.headers["retry-after"] == "1"


GENERATING = [
    ("completions", {"prompt": [5]}),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
]


async def test_no_two_take_the_last_place(server: Running) -> None:
    """Many at once: as many wait as there are places, the others are told; who leaves makes room again."""
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        bodies = [{"prompt": [5], "stream": bool(number % 2), **HOLD} for number in range(20)]
        tasks = {asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies}
        while len(tasks) > REQUESTS:
            done, tasks = await asyncio.wait(tasks, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            assert done, "too many wait"
            for task in done:
                check_full(task.result(), f"--max-queued-requests {REQUESTS}")
        assert waiting(server) == (REQUESTS, REQUESTS)
        for route, body in GENERATING:
            for stream in (True, False):
                check_full(server.post(f"/v1/{route}", stream=stream, **body), f"{REQUESTS} sequences wait")
        with pytest.raises(openai.RateLimitError):
            server.openai.completions.create(model="echo", prompt="a")
        tasks.pop().cancel()
        await asyncio.to_thread(eventually, lambda: waiting(server) == (REQUESTS - 1, REQUESTS - 1))
        assert server.post("/v1/completions", prompt=[5]).status_code == 200
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(eventually, lambda: waiting(server) == (0, 0))


async def test_who_waits_for_a_grammar_has_a_place(server: Running) -> None:
    """Also if all wait for the same one, and nothing has been sent to the engine yet."""
    body = {"prompt": [5], "structured_outputs": {"regex": BOMB}}
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        tasks = {asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(REQUESTS + 2)}
        while len(tasks) > REQUESTS:
            done, tasks = await asyncio.wait(tasks, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                check_full(task.result(), f"--max-queued-requests {REQUESTS}")
        assert waiting(server) == (REQUESTS, 0) and server.supervisor.load == REQUESTS
        assert (await client.get("/load")).json() == {"server_load": REQUESTS}
        check_full(await client.post("/v1/completions", json={"prompt": [5]}), f"{REQUESTS} sequences wait")
        tasks.pop().cancel()
        await asyncio.to_thread(eventually, lambda: waiting(server) == (REQUESTS - 1, 0))
        assert (await client.post("/v1/completions", json={"prompt": [5]})).status_code == 200
        server.process.kill()
        for task in tasks:
            assert "SIGKILL" in check_error(await task, 503, None)
        await asyncio.to_thread(eventually, lambda: waiting(server) == (0, 0) and server.supervisor.load == 0)


async def test_tokens_are_limited_too(server: Running) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        body = {"prompt": [5] * 30, "n": 2, **HOLD}
        held = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.to_thread(eventually, lambda: waiting(server) == (2, 30))  # each choice, but the prompt once
        check_full(server.post("/v1/completions", prompt=[5] * 11), f"30 tokens wait, --max-queued-tokens {TOKENS}")
        assert server.post("/v1/completions", prompt=[5] * 10).status_code == 200
        held.cancel()
    eventually(lambda: waiting(server) == (0, 0))


def test_what_exceeds_a_limit_by_itself_is_served_when_nothing_waits(server: Running) -> None:
    assert len(server.post("/v1/completions", prompt=[[5]] * 3, n=2).json()["choices"]) == 6
    assert server.post("/v1/completions", prompt=[5] * 100).status_code == 200
    assert waiting(server) == (0, 0)


def test_who_has_a_token_does_not_wait(server: Running) -> None:
    prompt = (server.ids("word ") * TOKENS)[:TOKENS]
    body = {"prompt": prompt, "max_tokens": TOKENS, "stream": True, "extra": {"pace": 0.2}}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: its end would be the response's
        assert next(lines).startswith("data: ")
        assert len(server.engine._sequences) == 1  # it goes on
        assert waiting(server) == (0, 0)
        assert server.post("/v1/completions", prompt=[5] * TOKENS, max_tokens=1).status_code == 200
    eventually(lambda: not server.engine._sequences)
    assert waiting(server) == (0, 0)


def test_refusals_and_bad_requests_take_no_place(server: Running) -> None:
    for _ in range(2 * REQUESTS):
        check_error(server.post("/v1/completions", prompt="a", extra={"error": "no", "status": 429}), 429, None)
        check_error(server.post("/v1/completions", prompt="a", top_p=0), 400, "top_p")
        check_error(server.post("/v1/completions", prompt=[[5]] * 4096, extra={"a": "b" * 10_000}), 400, None)
    assert waiting(server) == (0, 0)


def test_the_end_of_the_engine_empties_the_queue(server: Running) -> None:
    with ThreadPoolExecutor() as pool:
        held = [pool.submit(server.post, "/v1/completions", prompt=[5], **HOLD) for _ in range(REQUESTS - 1)]
        eventually(lambda: waiting(server) == (REQUESTS - 1, REQUESTS - 1))
        check_error(server.post("/v1/completions", prompt=[5, 6], extra={"die": 0}), 503, None)
        assert [response.result().status_code for response in held] == [503] * (REQUESTS - 1)
    assert waiting(server) == (0, 0)
