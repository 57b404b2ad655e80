"""API keys: the file and the variable, who is let in where, and whose tenant they are."""

from __future__ import annotations

import asyncio
import hmac
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import openai
import pytest
from echo_engine import EchoProcess
from fastapi import APIRouter
from framework.server import tgi
from framework.server.keys import OPEN, Keys
from serving import Running, check_error, eventually, running

from framework import ConfigError, hookimpl
from framework.environment import variables
from framework.settings import Settings, unknown_variables

ANN, BEN = "sk-ann-\x7e!:", "sk-ben"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Adding:
    """A plugin with a route of its own."""

    @hookimpl
    def routes(self, client: Any) -> list[APIRouter]:
        router = APIRouter()
        router.add_api_route("/added", lambda: "added", methods=["GET"])
        return [router]


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    keys = Keys([("ann", ANN), ("ben", BEN)])
    settings = Settings(model=str(tiny_llama), served_model_name="echo")
    with running(settings, keys, [("adding", Adding())], spawn=EchoProcess) as found:
        yield found


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FRAMEWORK_API_KEY", raising=False)


# Where the keys come from


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "keys"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_the_file_and_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, f"\ufeff# who: what\n\n ann : {ANN} \r\nben@x.org:{BEN}#1\n")
    monkeypatch.setenv("FRAMEWORK_API_KEY", "third")
    keys = Keys.load(path)
    given = (ANN, f"{BEN}#1", "third", BEN, "", "third ", ANN + "x", ANN[:-1])
    assert [keys.name(key.encode()) for key in given] == ["ann", "ben@x.org", "default", *[None] * 5]
    assert keys.name(b"\xff\x00") is None
    assert "FRAMEWORK_API_KEY" not in os.environ  # nothing that is started later sees it
    assert keys.shown == "$FRAMEWORK_API_KEY" and Keys.load(path).shown == f"<a key of {path}>"
    assert not Keys.load(None) and not Keys.load(None).shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no key; write lines such as name:key"),
        ("# ann:secret\n\n", "holds no key"),
        ("ann:secret\nsecret2", r"line 2 of \S+: write it as name:key"),
        ("ann:secret\n\nann:secret2", r"line 3 of \S+: the name 'ann' is that of --api-key-file: line 1 of \S+ too"),
        ("ann:secret\nben:secret", r"line 2 of \S+: the key is that of --api-key-file: line 1 of \S+ too"),
        ("ann:", r"line 1 of \S+: the key is empty; give one"),
        (":secret", r"line 1 of \S+: the name must be 1 to 256 letters"),
        ("a b:secret", r"line 1 of \S+: the name must"),
        ("ann:secret secret", r"line 1 of \S+: the key must be 1 to 1024 characters of ASCII"),
        ("ann:secretß", r"line 1 of \S+: the key must"),
        ("ann:" + "secret" * 200, r"line 1 of \S+: the key must"),
        (b"ann:secret\xff", "is not UTF-8"),
        ("#" * 2**20 + "#", "is larger than 1048576 bytes"),
        ("default:secret2", r"FRAMEWORK_API_KEY: the name 'default' is that of --api-key-file: line 1 of \S+ too"),
        ("ann:by-variable", r"FRAMEWORK_API_KEY: the key is that of --api-key-file: line 1 of \S+ too"),
    ],
)
def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes, why: str) -> None:
    monkeypatch.setenv("FRAMEWORK_API_KEY", "by-variable")
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=why) as error:
        Keys.load(path)
    told = str(error.value).replace(str(path), "")  # pytest names the folder after the parameters
    assert "secret" not in told and "by-variable" not in told


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"^--api-key-file: cannot read"):
            Keys.load(path)


def test_an_empty_variable_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMEWORK_API_KEY", "")
    with pytest.raises(ConfigError, match="FRAMEWORK_API_KEY: the key is empty"):
        Keys.load(None)


def test_the_key_is_no_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FRAMEWORK_API_KEY", "secret")
    assert unknown_variables() == []
    assert "secret" not in repr(Settings.load()) and "secret" not in repr(list(variables(os.environ)))
    config = written(tmp_path, "api_key: secret")
    with pytest.raises(ConfigError, match=r"^api_key in .*unknown setting") as error:
        Settings.load(config)
    assert "secret" not in str(error.value)


def test_a_bad_file_ends_start_up(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "framework", "serve", "--api-key-file", str(written(tmp_path, "ann"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "line 1" in done.stderr and "Traceback" not in done.stderr


# Who is let in


def check_closed(response: httpx.Response, message: str) -> None:
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer" and response.headers["x-request-id"]
    error = response.json()["error"]
    if response.url.path in tgi.PATHS:
        assert response.json() == {"error": error, "error_type": "unauthorized"} and message in error
        return
    assert error == {
        "message": error["message"],
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    assert message in error["message"]


def test_every_route_needs_a_key_but_the_probes(server: Running) -> None:
    paths = [
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/docs",
        "/openapi.json",
        "/added",
        "/none",
        *tgi.PATHS,
    ]
    odd = ["/health/", "//health", "/health/../v1/models", "/HEALTH", "/metrics%2f..%2fv1/models"]
    for path in [*paths, *odd]:
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            response = server.http.request(method, path)
            assert response.status_code == 401, path
            if method != "HEAD":
                check_closed(response, "an API key is needed")
    for path in OPEN - {"/ready"}:
        assert server.http.get(path).status_code == 200, path
    assert server.http.get("/added", headers=bearer(ANN)).json() == "added"
    assert server.http.get("/none", headers=bearer(BEN)).status_code == 404


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("Bearer", "is needed"),
        (BEN, "is needed"),
        (f"Basic {BEN}", "is needed"),
        (f"Bearer {BEN}x", "not known"),
        (f"Bearer {BEN[:-1]}", "not known"),
        (f"Bearer {BEN.upper()}", "not known"),
        (f"Bearer {BEN} {BEN}", "not known"),
        ("Bearer ann", "not known"),
        ("Bearer \xff\xfe", "not known"),
        ("Bearer " + "x" * 10_000, "not known"),
    ],
)
def test_wrong_keys(server: Running, header: str, message: str) -> None:
    response = server.http.get("/v1/models", headers={"Authorization": header.encode("latin-1")})
    check_closed(response, message)
    assert BEN not in response.text


def test_how_long_it_takes_tells_nothing_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compared with, whichever it is, by what takes the same time wherever they differ."""
    compared: list[tuple[bytes, bytes]] = []

    def spy(a: bytes, b: bytes, compare: Any = hmac.compare_digest) -> Any:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    keys = Keys([("ann", ANN), ("ben", BEN), ("third", "third")])
    for key, name in ((ANN, "ann"), (BEN, "ben"), ("third", "third"), ("none", None)):
        compared.clear()
        assert keys.name(key.encode()) == name
        assert len(compared) == len({known for _, known in compared}) == 3
        assert all(len(a) == len(b) for a, b in compared), "their length tells something"


def test_two_keys_are_none(server: Running) -> None:
    headers = [("Authorization", f"Bearer {ANN}"), ("Authorization", f"Bearer {BEN}")]
    check_closed(server.http.get("/v1/models", headers=headers), "is needed")


def test_the_scheme_in_any_case(server: Running) -> None:
    for scheme in ("bearer", "BEARER", "Bearer "):
        assert server.http.get("/v1/models", headers={"Authorization": f"{scheme} {ANN}"}).status_code == 200


def test_the_openai_client(server: Running) -> None:
    with pytest.raises(openai.AuthenticationError) as error:
        server.openai.models.list()
    assert error.value.code == "invalid_api_key"
    client = server.openai.with_options(api_key=ANN)
    answer = client.completions.create(model="echo", prompt=server.ids("fine"), max_tokens=20)
    assert answer.choices[0].text == "fine"


# Whose tenant they are


def tenant(server: Running, monkeypatch: pytest.MonkeyPatch, **body: Any) -> str:
    seen: list[str] = []
    generate = server.engine.generate

    def spy(adds: Any, record: Any) -> Any:
        seen.extend(add.tenant for add in adds)
        return generate(adds, record)

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "generate", spy)
        response = server.http.post("/v1/completions", json={"prompt": "a", **body}, headers=bearer(ANN))
    assert response.status_code == 200, response.text
    return seen[0]


def test_the_tenant_is_the_key_s_name(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for body in ({}, {"user": "ben"}, {"tenant": "ann"}, {"tenant": ""}, {"tenant": None}):
        assert tenant(server, monkeypatch, **body) == "ann"


@pytest.mark.parametrize("stream", [False, True])
def test_no_other_tenant(server: Running, stream: bool) -> None:
    messages = [{"role": "user", "content": "a"}]
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": messages})):
        body = {**body, "tenant": "ben", "stream": stream}
        response = server.http.post(f"/v1/{path}", json=body, headers=bearer(ANN))
        assert "'ann'" in check_error(response, 403, "tenant")


@pytest.mark.parametrize("where", ["engine", "grammar"])
def test_a_key_ends_its_own_requests_only(server: Running, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Those that are made ready, too: here a grammar is tried out for ever."""
    answers: list[httpx.Response] = []

    async def check(*_: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(server.engine.grammars, "check", check)
    fields = {"engine": {"extra": {"hold": True}}, "grammar": {"structured_outputs": {"regex": "a"}}}

    def ask() -> None:
        body, headers = {"prompt": "a", **fields[where]}, bearer(ANN) | {"X-Request-Id": "of-ann"}
        answers.append(server.http.post("/v1/completions", json=body, headers=headers, timeout=30))

    def aborted(key: str) -> int:
        done = server.http.post("/abort_requests", json={"request_ids": ["of-ann"]}, headers=bearer(key))
        return int(done.json()["aborted"])

    thread = Thread(target=ask)
    thread.start()
    load = partial(server.http.get, "/load", headers=bearer(BEN))
    eventually(lambda: load().json()["server_load"] == 1)
    assert (aborted(BEN), load().json()["server_load"]) == (0, 1)
    assert aborted(ANN) == 1
    thread.join(30)
    if where == "engine":
        assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
    else:
        assert "aborted" in check_error(answers[0], 499, None)
