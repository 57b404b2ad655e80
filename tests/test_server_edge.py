"""The server as proxies and browsers meet it: prefixes, other origins, Unix sockets, IPv6."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from echo_engine import EchoProcess
from fastapi import APIRouter, Request
from framework.server.keys import Keys
from framework.server.main import _listen, _url, bind
from framework.server.unix import unix_socket
from serving import Running, events, eventually, running

from framework import ConfigError, hookimpl
from framework.settings import Settings

ORIGIN = "https://chat.example.org"
KEY = {"Authorization": "Bearer sk-1"}


class Links:
    """A plugin with a link and a route that redirects."""

    @hookimpl
    def routes(self) -> list[APIRouter]:
        async def link(request: Request) -> str:
            return str(request.url_for("link"))

        router = APIRouter()
        router.add_api_route("/own/link", link, name="link")
        return [router]


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    """With keys, behind a prefix, for one origin."""
    settings = Settings(model=str(tiny_llama), served_model_name="echo", root_path="/llm", cors_origin=ORIGIN)
    with running(settings, Keys([("ann", "sk-1")]), extra=[("links", Links())], spawn=EchoProcess) as found:
        yield found


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_the_prefix_may_be_taken_away_or_not(server: Running, prefix: str) -> None:
    http = server.http
    assert http.get(f"{prefix}/health").status_code == 200  # without a key
    assert http.get(f"{prefix}/v1/models").status_code == 401
    body = {"prompt": server.ids("fine"), "max_tokens": 9, "stream": True}
    answer = http.post(f"{prefix}/v1/completions", json=body, headers=KEY)
    assert "".join(chunk["choices"][0]["text"] for chunk in events(answer)) == "fine"
    assert http.get(f"{prefix}/llm/health", headers=KEY).status_code == (404 if prefix else 200)
    assert http.get(f"{prefix}/llmx/health", headers=KEY).status_code == 404
    for root in {"/llm", "/llm/"} if prefix else {"/"}:
        answer = http.post(root, json={"inputs": "fine", "parameters": {"max_new_tokens": 2}}, headers=KEY)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_links_have_the_prefix(server: Running, prefix: str) -> None:
    http = server.http
    assert http.get(f"{prefix}/openapi.json", headers=KEY).json()["servers"] == [{"url": "/llm"}]
    assert http.get(f"{prefix}/own/link", headers=KEY).json() == f"{server.url}/llm/own/link"
    moved = http.get(f"{prefix}/own/link/", headers=KEY)
    assert (moved.status_code, moved.headers["location"]) == (307, f"{server.url}/llm/own/link")
    page = http.get(f"{prefix}/docs", headers=KEY)
    for link in re.findall(r'href="([^"]+)"', page.text):
        assert http.get(httpx.URL(f"{server.url}/llm/docs").join(link), headers=KEY).status_code == 200


@pytest.mark.parametrize(("location", "upstream"), [("/llm/", "/llm/"), ("/llm/", "/"), ("/", "/")])
def test_the_documented_proxy_closes_what_only_operators_need(server: Running, location: str, upstream: str) -> None:
    """With the prefix left in the path, taken away, and without one in the proxy: the rule of docs/deployment.md, with
    a model of what nginx does, which is to take a path as it is once its slashes are merged."""
    page = Path(__file__).parents[1].joinpath("docs/deployment.md").read_text("utf-8")
    (rule,) = re.findall(r"^ +location ~ (\S+) \{\n +return 404;", page, re.MULTILINE)
    seen, closed = set(), set()
    for before in ("", "/llm", "/llm/llm", "/llm/llm/llm", "/llm/x/llm", "/llm/v1"):
        for route in ("/metrics", "/load", "/abort_requests", "/health", "/v1/models"):
            path = before + route
            if not path.startswith(location):
                continue
            if re.search(rule, path):
                closed.add(path)
                continue
            answer = server.http.get(upstream + path.removeprefix(location), headers=KEY)
            if answer.status_code != 404:
                seen.add(route)
    assert seen == {"/health", "/v1/models"} and closed


def test_without_a_prefix_there_is_none(tiny_llama: Path) -> None:
    settings = Settings(model=str(tiny_llama), served_model_name="echo")
    with running(settings, extra=[("links", Links())], spawn=EchoProcess) as server:
        assert "servers" not in server.http.get("/openapi.json").json()
        assert server.http.get("/own/link").json() == f"{server.url}/own/link"
        preflight = server.http.options("/v1/models", headers=PREFLIGHT)
        assert preflight.status_code == 405
        for answer in (preflight, server.http.get("/v1/models", headers={"Origin": ORIGIN})):
            assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("prefix", ["llm", "/", "/llm/", "/a//b", "/a?b", "/a b", "https://h/llm"])
def test_what_is_no_prefix(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"^--root-path: .* is no prefix such as /llm"):
        Settings.load(root_path=prefix)


# Other origins

PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-request-id",
}


def test_a_preflight_needs_no_key(server: Running) -> None:
    answer = server.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN and "Origin" in answer.headers["vary"]
    assert "POST" in answer.headers["access-control-allow-methods"].split(", ")
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in ("authorization", "content-type", "x-request-id"))
    assert "access-control-allow-credentials" not in answer.headers


def test_other_origins_are_not_let_in(server: Running) -> None:
    for other in ("https://evil.example.org", ORIGIN + ".evil.org", "http://chat.example.org", "null"):
        answer = server.http.options("/v1/models", headers={**PREFLIGHT, "Origin": other})
        assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers
        answer = server.http.get("/v1/models", headers={**KEY, "Origin": other})
        assert "access-control-allow-origin" not in answer.headers


def test_a_page_can_read_answers_and_errors(server: Running) -> None:
    for headers, status in ((KEY, 200), ({}, 401)):
        answer = server.http.get("/v1/models", headers={**headers, "Origin": ORIGIN})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["access-control-expose-headers"] == "*"
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    answer = server.http.post("/v1/completions", json=body, headers={**KEY, "Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN and events(answer)


def test_every_origin(tiny_llama: Path) -> None:
    settings = Settings(model=str(tiny_llama), served_model_name="echo", cors_origin="*")
    with running(settings, Keys([("ann", "sk-1")]), spawn=EchoProcess) as server:
        preflight = server.http.options("/v1/models", headers=PREFLIGHT)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "*")
        answer = server.http.get("/v1/models", headers={**KEY, "Origin": ORIGIN})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize("origin", ["", "null", "example.org", "https://example.org/", "https://a.org,https://b.org"])
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"^--cors-origin: .* is neither \* nor an origin"):
        Settings.load(cors_origin=(origin,))


def test_origins_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, origins in (
        ("http://a", ("http://a",)),
        ('["http://a", "tauri://localhost"]', ("http://a", "tauri://localhost")),
    ):
        monkeypatch.setenv("FRAMEWORK_CORS_ORIGIN", text)
        assert Settings.load().cors_origin == origins


# What stands between the server and its clients


def test_streams_are_not_buffered(server: Running) -> None:
    message = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    for path, body in (("/v1/chat/completions", message), ("/v1/completions", {"prompt": "a", "stream": True})):
        answer = server.http.post(path, json=body, headers=KEY)
        assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"


# Where it listens


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o755), (0o077, 0o700), (0o007, 0o770)])
def test_the_umask_says_who_may_connect(tmp_path: Path, mask: int, mode: int) -> None:
    path = tmp_path / "socket"
    before = os.umask(mask)
    try:
        with unix_socket(path):
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with unix_socket(path) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        listener.accept()[0].close()
        with pytest.raises(ConfigError, match=f"^--uds: {path} is in use by another server"), unix_socket(path):
            pass
        assert path.exists()
    assert not path.exists()


def test_a_socket_of_somebody_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with unix_socket(path):
        path.unlink()
        path.write_text("other")
    assert path.read_text() == "other"


def test_where_no_socket_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path, why in (
        (tmp_path / "file", "exists and is no socket"),
        (tmp_path, "exists and is no socket"),
        (tmp_path / "none" / "socket", "No such file or directory"),
        (tmp_path / "file" / "socket", "Not a directory"),
        (tmp_path / ("a" * 120), "too long"),
    ):
        with pytest.raises(ConfigError, match=rf"^--uds: .*{why}"), unix_socket(path):
            pass
    assert (tmp_path / "file").read_text() == "kept"


def test_a_socket_excludes_an_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--uds: .*leave out --port$"):
        _listen(Settings(uds=tmp_path / "socket", port=1))
    with _listen(Settings(uds=tmp_path / "socket")) as listener:
        assert listener.family == socket.AF_UNIX


@pytest.mark.parametrize("host", ["::1", "::"])
def test_ipv6(host: str) -> None:
    with bind(host, 0) as listener:
        url = _url(Settings(host=host), listener)
        assert re.fullmatch(r"http://\[::1\]:[1-9]\d*", url)
        with socket.create_connection(("::1", httpx.URL(url).port or 0)):
            pass
        four = ("127.0.0.1", httpx.URL(url).port or 0)
        if host == "::":
            socket.create_connection(four).close()
        else:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(four)


def test_a_real_server_on_a_socket(tiny_llama: Path, tmp_path: Path) -> None:
    """The command as users run it, and the request that its banner shows."""
    path, log = tmp_path / "socket", tmp_path / "log"
    command = [sys.executable, "-m", "framework", "serve", "--model", str(tiny_llama), "--uds", str(path)]
    command += ["--kv-blocks", "64", "--dtype", "float32", "--root-path", "/llm"]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            eventually(lambda: process.poll() is not None or "curl" in log.read_text(), 60)
            line = next(line for line in log.read_text().splitlines() if "curl" in line)
            assert line.startswith(f"  curl --unix-socket {path} http://localhost/v1/chat/completions")
            assert f"http://localhost/v1 on the Unix socket {path}" in log.read_text()
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://h", timeout=60) as http:
                body = {"prompt": "a", "max_tokens": 2}
                headers = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.7"}
                assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
                moved = http.get("/docs/", headers=headers)
                assert moved.headers["location"] == "https://h/llm/docs"
            assert re.search(r"client=192\.0\.2\.7 ", log.read_text())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    assert process.returncode == 0 and not path.exists()
