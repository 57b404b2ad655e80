"""Priorities, tenants and salts over HTTP: a real engine that goes by them, on two seats and a small pool."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Running, eventually, running

from framework.messages import Add
from framework.settings import Settings

LONG = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
SHORT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(
        model=str(tiny_llama),
        scheduler="priority",
        scheduler_opt={"aging": 0.5},
        dtype="float32",
        max_num_seqs=2,
        kv_blocks=40,
        block_size=16,
        strict_plugins=True,
    )
    with running(settings) as found:
        yield found


def complete(server: Running, prompt: str, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", prompt=prompt, **body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def preemptions(server: Running) -> int:
    stats = server.engine.stats
    return stats.preemptions_swap + stats.preemptions_recompute


def start(server: Running, pool: ThreadPoolExecutor, *prompts: str, **body: Any) -> list[Any]:
    """Requests that run."""
    found = [pool.submit(complete, server, prompt, **body) for prompt in prompts]
    eventually(lambda: server.engine.stats.running == len(prompts))
    return found


def test_an_urgent_chat_too(server: Running) -> None:
    before = preemptions(server)
    with ThreadPoolExecutor() as pool:
        long = start(server, pool, "One", "Two", **LONG)
        messages = [{"role": "user", "content": "Now"}]
        response = server.post("/v1/chat/completions", messages=messages, priority=-3, **SHORT)
        assert response.status_code == 200, response.text
        assert not any(response.done() for response in long)
        assert [response.result()["finish_reason"] for response in long] == ["length", "length"]
    assert preemptions(server) == before + 1


def sent(server: Running, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str] | None = None, **body: Any) -> Add:
    """What the engine is sent for a request."""
    seen: list[Add] = []
    generate = server.engine.generate

    def spy(adds: Any, record: Any) -> Any:
        seen.extend(adds)
        return generate(adds, record)

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "generate", spy)
        route = "chat/completions" if "messages" in body else "completions"
        body = {"max_tokens": 1, **({} if "messages" in body else {"prompt": "a"}), **body}
        response = httpx.post(f"{server.url}/v1/{route}", json=body, headers=headers, timeout=30)
    assert response.status_code == 200, response.text
    return seen[0]


@pytest.mark.parametrize("route", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}], ids=list)
def test_what_the_engine_is_told(server: Running, monkeypatch: pytest.MonkeyPatch, route: dict[str, Any]) -> None:
    told = {"priority": -2, "tenant": "blue", "cache_salt": "s\u00e4lz", "user": "ann", "n": 2}
    add = sent(server, monkeypatch, **route, **told)
    assert (add.priority, add.tenant, add.cache_salt, add.n) == (-2, "blue", "s\u00e4lz".encode(), 2)
    add = sent(server, monkeypatch, **route)
    assert (add.priority, add.tenant, add.cache_salt, add.n) == (0, "", b"", 1)


def test_the_tenant_is_the_user_or_else_the_key(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [{"Authorization": f"Bearer sk-{i}"} for i in range(2)]
    assert sent(server, monkeypatch, keys[0], user="ann").tenant == "ann"
    one, again, other = (sent(server, monkeypatch, key).tenant for key in (keys[0], keys[0], keys[1]))
    assert one == again != other and one.startswith("key-") and "sk-" not in one
    assert sent(server, monkeypatch, {"Authorization": "Basic abc"}).tenant == ""


def test_the_openai_client_can_say_all_of_it(server: Running) -> None:
    extra = {"priority": 1, "tenant": "green", "cache_salt": "x"}
    answer = server.openai.completions.create(model=server.serving.model, prompt="a", max_tokens=2, extra_body=extra)
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        server.openai.completions.create(model=server.serving.model, prompt="a", extra_body={"cache_salt": "x" * 9999})
