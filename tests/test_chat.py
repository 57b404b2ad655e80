"""`framework chat` against servers that follow a script, the real one, and on a terminal."""

from __future__ import annotations

import http.server
import json
import os
import pty
import re
import select
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from echo_engine import EchoProcess
from framework.server.keys import Keys
from serving import eventually, running
from test_server_tls import made
from typer.testing import CliRunner

from framework import cli
from framework.settings import Settings

Script = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """Lists one model; answers chats as the server's script says."""

    server: Any

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers), None))
        if self.path.endswith("/models"):
            self.reply(200, {"data": [{"id": "first"}, {"id": "second"}]})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        self.server.script(self)

    def reply(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, *lines: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for line in lines:
            self.wfile.write(line.encode() + b"\n\n")
            self.wfile.flush()

    def address_string(self) -> str:
        return "client"

    def log_message(self, format: str, *args: object) -> None:
        pass


def piece(finish: str | None = None, **delta: str) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def hello(handler: Handler) -> None:
    usage = 'data:{"choices": [], "usage": {}}'  # without a space, as some send it
    handler.stream(
        ": keep-alive", piece(role="assistant", content=""), piece(content="Hel"), piece(content="lo"), piece("stop"),
        usage, "data: [DONE]",
    )  # fmt: skip


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@contextmanager
def scripted(script: Script = hello, uds: Path | None = None) -> Iterator[Any]:
    kind: Any = UnixServer if uds else http.server.ThreadingHTTPServer
    with kind(str(uds) if uds else ("127.0.0.1", 0), Handler) as server:
        server.script, server.asked = script, []
        if not uds:
            server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FRAMEWORK_API_KEY", "OPENAI_API_KEY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


def chat(*arguments: str, input: str | bytes | None = None, **env: str) -> Any:
    return CliRunner(env={"COLUMNS": "400", "NO_COLOR": "1", **env}).invoke(cli.app, ["chat", *arguments], input=input)


def test_one_message() -> None:
    with scripted() as server:
        done = chat("hi", "--url", server.url, "--system", "be brief", "--temperature", "0", "--max-tokens", "9")
        assert (done.exit_code, done.stdout, done.stderr) == (0, "Hello\n", "")
        paths = [path for path, _, _ in server.asked]
        assert paths == ["/health", "/v1/models", "/v1/chat/completions"]
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        assert server.asked[-1][2] == {
            "model": "first", "messages": messages, "temperature": 0, "max_tokens": 9, "stream": True,
        }  # fmt: skip
        assert not [headers for _, headers, _ in server.asked if "Authorization" in headers]


def test_the_message_may_come_through_a_pipe() -> None:
    with scripted() as server:
        for arguments in ((), ("-",)):
            assert chat(*arguments, "--url", server.url, "--model", "mine", input="two\nlines\n").stdout == "Hello\n"
            assert server.asked[-1][2]["messages"] == [{"role": "user", "content": "two\nlines"}]
            assert server.asked[-1][2]["model"] == "mine"
        done = chat("--url", server.url, input=b"a\xff")
        assert (done.exit_code, done.stderr) == (2, "error: the message on standard input is not UTF-8: see byte 1\n")
        done = chat("--url", server.url, input=" \n")
        assert (done.exit_code, done.stderr) == (2, "error: the message is empty\n")


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("", "/v1"),
        ("/", "/v1"),
        ("/v1", "/v1"),
        ("/v1/", "/v1"),
        ("/llm/v1", "/llm/v1"),
        ("/beta/openai/", "/beta/openai"),
    ],
)
def test_base_urls(given: str, base: str) -> None:
    with scripted() as server:
        assert chat("hi", "--url", server.url + given, "--model", "m").stdout == "Hello\n"
        assert server.asked[-1][0] == f"{base}/chat/completions"


def test_the_key_is_that_of_the_environment() -> None:
    with scripted() as server:
        for env, key in (
            ({"OPENAI_API_KEY": "sk-2"}, "sk-2"),
            ({"OPENAI_API_KEY": "sk-2", "FRAMEWORK_API_KEY": "sk-1\n"}, "sk-1"),
        ):
            assert chat("hi", "--url", server.url, **env).exit_code == 0
            assert all(headers["Authorization"] == f"Bearer {key}" for _, headers, _ in server.asked)
            server.asked.clear()
        done = chat("hi", "--url", server.url, OPENAI_API_KEY="a b")
        assert done.exit_code == 2 and "a key is ASCII without spaces" in done.stderr and "a b" not in done.stderr


def test_no_proxy_leads_to_this_machine() -> None:
    with scripted() as server:
        proxies = {"HTTP_PROXY": "http://127.0.0.1:1", "ALL_PROXY": "http://127.0.0.1:1"}
        assert chat("hi", "--url", server.url, **proxies).stdout == "Hello\n"


def test_a_unix_socket(tmp_path: Path) -> None:
    with scripted(uds=tmp_path / "socket") as server:
        assert chat("hi", "--uds", str(tmp_path / "socket")).stdout == "Hello\n"
        assert server.asked[-1][0] == "/v1/chat/completions"
    done = chat("hi", "--uds", str(tmp_path / "none"))
    assert (
        done.exit_code == 1
        and f"/v1 on {tmp_path / 'none'}: " in done.stderr
        and f"`framework serve --uds {tmp_path / 'none'}`" in done.stderr
    )
    assert "--url" not in done.stderr


def test_reasoning_is_no_part_of_a_piped_answer() -> None:
    def script(handler: Handler) -> None:
        handler.stream(piece(reasoning_content="hm"), piece(reasoning="hm"), piece(content="Yes"), piece("stop"))

    with scripted(script) as server:
        assert chat("hi", "--url", server.url).stdout == "Yes\n"


def test_a_server_that_knows_no_streams() -> None:
    def script(handler: Handler) -> None:
        message = {"role": "assistant", "content": "whole"}
        handler.reply(200, {"choices": [{"index": 0, "message": message, "finish_reason": "length"}]})

    with scripted(script) as server:
        done = chat("hi", "--url", server.url)
        assert (done.exit_code, done.stdout) == (0, "whole\n") and done.stderr.startswith("cut off: ")


REFUSALS: list[tuple[Script, str]] = [
    (lambda h: h.reply(400, {"error": {"message": "too long", "type": "x"}}), "refuses (400): too long"),
    (
        lambda h: h.reply(401, {"error": {"message": "no key"}}),
        "(401): no key; set FRAMEWORK_API_KEY or OPENAI_API_KEY",
    ),
    (lambda h: h.reply(404, {"detail": "Not Found"}), "(404): Not Found; is the path of --url right?"),
    (
        lambda h: h.reply(429, {"error": "Model is overloaded", "error_type": "overloaded"}),
        "(429): Model is overloaded",
    ),
    (lambda h: h.reply(503, b"<html>upstream\n is away"), "(503): <html>upstream is away"),
    (lambda h: h.reply(500, b""), "(500): Internal Server Error"),
    (
        lambda h: h.reply(307, {}, location="https://example.org/v1/chat/completions"),
        "redirects (307) to https://example.org/v1/chat/completions; name the server there with --url",
    ),
    (lambda h: h.reply(302, b"moved", location="/else where"), "/else%20where; name the server there with --url"),
    (lambda h: h.reply(304, b""), "refuses (304): Not Modified"),
    (lambda h: h.reply(404, {"error": "model 'first' not found"}), "(404): model 'first' not found; is --model right?"),
    (lambda h: h.reply(500, b"\x1b]0;title\x07no"), "(500): ]0;titleno"),
    (lambda h: h.reply(400, b"[" * 100_000), "refuses (400): [[["),
    (lambda h: h.reply(200, b"[" * 100_000), "not in the OpenAI dialect"),
    (lambda h: h.reply(200, b"no gzip", content_encoding="gzip"), "DecodingError: Error -3 while decompressing"),
    (lambda h: h.reply(400, b"no gzip", content_encoding="gzip"), "DecodingError: Error -3 while decompressing"),
    (lambda h: h.connection.close(), "Error: "),
    (lambda h: h.reply(200, b"[]"), "not in the OpenAI dialect"),
    (lambda h: h.stream("data: nonsense"), "not in the OpenAI dialect"),
    (lambda h: h.stream("data: [1]"), "not in the OpenAI dialect"),
    (
        lambda h: h.stream(piece(content="Hel"), 'data: {"error": {"message": "engine died"}}', "data: [DONE]"),
        "engine died",
    ),
    (lambda h: h.stream(piece(content="Hel")), "the answer broke off"),
    (lambda h: h.stream(piece(content="Hel"), "data: [DONE]"), "the answer broke off"),
]


@pytest.mark.parametrize(("script", "why"), REFUSALS)
def test_what_goes_wrong_is_one_line(script: Script, why: str) -> None:
    with scripted(script) as server:
        done = chat("hi", "--url", server.url)
    assert done.exit_code == 1 and why in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert done.stdout in ("", "Hel\n")


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_redirect_on_the_way_is_named(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    def moved(handler: Handler) -> None:
        handler.reply(*((308, b"") if handler.path == path else (404, b"")), location=f"https://example.org{path}")

    monkeypatch.setattr(Handler, "do_GET", moved)
    with scripted(lambda h: h.reply(301, b"", location="https://example.org/")) as server:
        model = ("--model", "m") if path == "/health" else ()
        done = chat("hi", "--url", server.url, *model)
    where = "/" if path == "/health" else path
    assert (done.exit_code, done.stdout) == (1, "")
    assert f") to https://example.org{where}; name the server there with --url\n" in done.stderr


@pytest.mark.parametrize("proxy", ["ftp://a", "http://a:b"])
def test_a_proxy_that_is_none(proxy: str) -> None:
    done = chat("hi", "--url", "http://192.0.2.1", HTTP_PROXY=proxy)
    assert done.exit_code == 2 and done.stderr.startswith("error: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY: ")
    assert done.stderr.count("\n") == 1


def test_nobody_listens() -> None:
    with scripted() as server:
        url = server.url
    done = chat("hi", "--url", url)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: cannot connect to {url}/v1: ") and "framework serve" in done.stderr


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:b", ""])
def test_what_is_no_url(url: str) -> None:
    done = chat("hi", "--url", url)
    assert done.exit_code == 2 and done.stderr.startswith(f"error: --url {url}") and "Traceback" not in done.stderr


def test_a_server_that_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def loading(handler: Handler) -> None:
        handler.reply(503, {"error": {"message": "Loading model"}})

    monkeypatch.setattr(Handler, "do_GET", loading)
    with scripted() as server:
        done = chat("hi", "--url", server.url)
    assert (done.exit_code, done.stderr) == (1, f"error: {server.url}/v1 is not ready: Loading model\n")


def test_our_server_with_a_key_and_a_certificate(tiny_llama: Path, tmp_path: Path) -> None:
    """What it echoes is the conversation as the chat template has it."""
    certificate, key = made(tmp_path, "own")
    settings = Settings(
        model=str(tiny_llama), served_model_name="echo", ssl_certfile=certificate, ssl_keyfile=key, root_path="/llm"
    )
    with running(settings, Keys([("ann", "sk-1")]), spawn=EchoProcess) as server:
        url = server.url.replace("http:", "https:")
        trusted = {"FRAMEWORK_API_KEY": "sk-1", "SSL_CERT_FILE": str(certificate)}
        for base in (url, f"{url}/llm/v1"):
            done = chat("what is new?", "--url", base, **trusted)
            assert done.exit_code == 0 and "what is new?" in done.stdout
        done = chat("hi", "--url", url, "--ca-file", str(certificate))
        assert done.exit_code == 1 and "(401): an API key is needed" in done.stderr
        done = chat("hi", "--url", url, FRAMEWORK_API_KEY="sk-1")
        assert done.exit_code == 1 and "--ca-file or SSL_CERT_FILE" in done.stderr
        done = chat("hi", "--url", server.url)
        assert done.exit_code == 1 and done.stderr.endswith("; if it speaks TLS, its --url is https://\n")
    with scripted() as plain:
        done = chat("hi", "--url", plain.url.replace("http:", "https:"))
        assert done.exit_code == 1 and done.stderr.endswith("; if it speaks no TLS, its --url is http://\n")
    for file, why in ((tmp_path / "none", "cannot read"), (key, "holds no certificate")):
        done = chat("hi", "--url", url, "--ca-file", str(file))
        assert done.exit_code == 2 and why in done.stderr


# On a terminal


class Terminal:
    """`framework chat` on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.shown = self._raw = ""
        self.seen = 0
        pid, self.file = pty.fork()
        if pid == 0:
            environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
            os.execve(sys.executable, [sys.executable, "-m", "framework", "chat", *arguments], environment)
        self.pid = pid

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def expect(self, pattern: str, seconds: float = 30) -> re.Match[str]:
        """The next place where the pattern is shown."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown[self.seen :])):
            assert time.monotonic() < end, f"not shown: {pattern}; but {self.shown[self.seen :]!r}"
            if select.select([self.file], [], [], 0.1)[0]:
                self._raw += os.read(self.file, 4096).decode("utf-8", "replace")
                self.shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", self._raw)  # without styles
        self.seen += found.end()
        return found

    def waits(self) -> None:
        """Returns once it waits for a key."""
        eventually(lambda: psutil.Process(self.pid).status() == psutil.STATUS_SLEEPING)

    def ended(self) -> int:
        """The exit code."""
        while select.select([self.file], [], [], 10)[0]:
            try:
                os.read(self.file, 4096)
            except OSError:  # it has closed its end
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.file)


def test_a_conversation() -> None:
    """History, an answer that is stopped, an error that costs nothing, commands, the end."""
    left = threading.Event()

    def script(handler: Handler) -> None:
        said = handler.server.asked[-1][2]["messages"][-1]["content"]
        if said == "endless":
            handler.stream(piece(content="begin"))
            try:
                while True:
                    handler.wfile.write(b": still\n\n")
                    time.sleep(0.02)
            except OSError:
                left.set()
        elif said == "fail":
            handler.reply(400, {"error": {"message": "not that"}})
        else:
            handler.stream(piece(content=f"\x1b]0;title\x07re: {said}"), piece("stop"), "data: [DONE]")

    with scripted(script) as server:

        def sent() -> list[str]:
            return [f"{m['role'][0]}:{m['content']}" for m in server.asked[-1][2]["messages"]]

        with Terminal("--url", server.url) as terminal:
            terminal.expect(rf"first at {server.url}/v1; .*\r\n> ")
            terminal.type("one\n")
            terminal.expect("re: one\r\n> ")
            terminal.type("endless\n")
            terminal.expect("begin")
            terminal.type("\x03")
            terminal.expect("stopped\r\n> ")
            assert left.wait(10), "the request was not ended"
            terminal.type("fail\n")
            terminal.expect(r"error: .*\(400\): not that\r\n> ")
            terminal.type("two\n")
            terminal.expect("re: two\r\n> ")
            told = ["u:one", "a:\x1b]0;title\x07re: one", "u:endless", "a:begin", "u:two"]
            assert sent() == told
            terminal.type("/system be brief\n")
            terminal.expect("noted\r\n> ")
            terminal.type("/reset\n")
            terminal.expect("forgotten\r\n> ")
            terminal.type(" /three\n")
            terminal.expect("re: /three\r\n> ")
            assert sent() == ["s:be brief", "u:/three"]
            terminal.type("/what\n")
            terminal.expect("/what is no command: .*\r\n> ")
            terminal.type("half a line")
            terminal.expect("half a line")
            terminal.waits()  # else the interpreter may hear of it with the next key only
            terminal.type("\x03")
            terminal.expect("Ctrl-D or /exit leaves\r\n> ")
            assert sent()[-1] == "u:/three"
            terminal.type("/exit\n")
            assert terminal.ended() == 0
    assert "\x1b]0;" not in terminal.shown and "Traceback" not in terminal.shown


def test_the_end_of_the_input_ends_it() -> None:
    with scripted() as server, Terminal("--url", server.url) as terminal:
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.ended() == 0


def test_ctrl_c_ends_a_single_answer() -> None:
    left = threading.Event()

    def script(handler: Handler) -> None:
        handler.stream(piece(content="begin"))
        try:
            while True:
                handler.wfile.write(b": still\n\n")
                time.sleep(0.02)
        except OSError:
            left.set()

    with scripted(script) as server:
        command = [sys.executable, "-m", "framework", "chat", "hi", "--url", server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.read(5) == b"begin"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (130, b"\n", b"")
        eventually(left.is_set)
