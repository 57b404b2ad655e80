"""Names of the model, and the routes of those who run the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_engine import EchoProcess
from serving import Running, check_error, running

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
    for name in ("", "dummy", "Third", "echo/"):
        check_error(server.http.get(f"/v1/models/{name}"), 404, "model")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_every_name_is_accepted_and_the_first_shown(server: Running, path: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    for name in (*NAMES, None, "", "dummy", "tgi"):
        response = server.post(path, **body, model=name)
        assert response.status_code == 200, response.text
        assert response.json().get("model", "echo") == "echo"
    message = check_error(server.post(path, **body, model="fourth"), 404, "model")
    assert message == "model: 'fourth' is not served here; available: echo, org/second, third"
