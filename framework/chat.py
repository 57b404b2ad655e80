"""`framework chat`: a conversation in the terminal, with any server that speaks the OpenAI dialect."""

from __future__ import annotations

import importlib
import json
import os
import re
import ssl
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import typer

from .errors import ConfigError, FrameworkError, brief, one_line
from .settings import API_KEY, variable

CONNECT = 10.0
"""Seconds to wait for a connection, and for an answer to whether the server is ready. Tokens may take any time."""
HELP = """\
/system TEXT  begin with this instruction from now on; without a text: with none
/reset        forget the conversation
/exit         leave, as Ctrl-D does
Ctrl-C stops an answer."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal would obey. Models repeat what they have read."""


class ChatError(FrameworkError):
    """The server is not there, is not ready, or refuses."""


class Server:
    """A connection. A context manager."""

    def __init__(self, url: str, uds: Path | None = None, ca_file: Path | None = None) -> None:
        """`url`: with the version of the API (http://host/v1), which is added where there is no path.

        Raises `ConfigError`.
        """
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url {brief(url, 200)}: {one_line(error)}") from None
        if base.scheme not in ("http", "https") or not base.host:
            raise ConfigError(f"--url {brief(url, 200)}: expected a URL such as http://127.0.0.1:8000")
        self.url = str(base.copy_with(path=base.path.rstrip("/") or "/v1"))
        self._where = f"{self.url} on {uds}" if uds else self.url
        key = os.environ.get(variable(API_KEY)) or os.environ.get("OPENAI_API_KEY")
        if key and not re.fullmatch(r"[\x21-\x7e]+", key.strip()):
            raise ConfigError(f"{variable(API_KEY)}, OPENAI_API_KEY: a key is ASCII without spaces")
        verify = _trust(ca_file)
        direct = httpx.HTTPTransport(verify=verify, uds=str(uds) if uds else None)
        near = ("localhost", "127.0.0.1", "[::1]")  # no proxy leads there
        self._uds = uds
        self._heard = False  # whether it speaks HTTP at all
        try:
            self._http = httpx.Client(
                headers={"Authorization": f"Bearer {key.strip()}"} if key else {},
                timeout=httpx.Timeout(None, connect=CONNECT),
                verify=verify,
                mounts={"all://": direct} if uds else {f"all://{host}": direct for host in near},
            )
        except (ValueError, ImportError, httpx.InvalidURL) as error:
            raise ConfigError(f"HTTP_PROXY, HTTPS_PROXY, ALL_PROXY: {one_line(error)}") from None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def check(self) -> None:
        """Raise `ChatError` if nobody is there, or the server says that it is not ready; others have no such route."""
        health = re.sub(r"/v\d+$", "", self.url) + "/health"
        with self._reported(), suppress(httpx.ReadTimeout):
            answer = self._http.get(health, timeout=CONNECT)
            self._heard = True
            if answer.status_code == 503:
                raise ChatError(f"{self._where} is not ready: {_said(answer)}")

    def model(self) -> str:
        """The first that is served. Raises `ChatError`."""
        with self._reported():
            answer = self._http.get(f"{self.url}/models")
            self._refused(answer)
            try:
                return str(answer.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ChatError(f"{self._where} lists no model; name one with --model") from None

    def answer(self, body: Mapping[str, Any]) -> Generator[tuple[str, str], None, None]:
        """(kind, text) of each piece: "content", "reasoning", and at last "finish" with the reason.

        Raises `ChatError`, also for an answer that breaks off. Leaving it early ends the request.
        """
        url = f"{self.url}/chat/completions"
        with self._reported(), self._http.stream("POST", url, json={**body, "stream": True}) as response:
            if not response.is_success:
                response.read()
            self._refused(response)
            finish = ""
            for event in _events(response):
                if event.get("error"):
                    raise ChatError(_message(event))
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or choice.get("message") or {}
                    for kind, names in (("reasoning", ("reasoning_content", "reasoning")), ("content", ("content",))):
                        text = next((delta[name] for name in names if delta.get(name)), "")
                        if text:
                            yield kind, str(text).encode("utf-8", "replace").decode()
                    finish = choice.get("finish_reason") or finish
            if not finish:
                raise ChatError("the answer broke off: the server ended it without a reason")
            yield "finish", finish

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """What goes wrong on the way as a `ChatError`."""
        try:
            yield
        except httpx.ConnectError as error:
            raise ChatError(f"cannot connect to {self._where}: {self._unconnected(one_line(error))}") from None
        except httpx.RequestError as error:
            silent = isinstance(error, httpx.ReadError | httpx.RemoteProtocolError) and not self._heard
            hint = "; if it speaks TLS, its --url is https://" if silent and self.url.startswith("http:") else ""
            raise ChatError(f"{self._where}: {type(error).__name__}: {one_line(error)}{hint}") from None
        except (ValueError, TypeError, AttributeError, RecursionError):  # JSON of some other kind
            raise ChatError(f"{self._where} gave an answer that is not in the OpenAI dialect") from None

    def _unconnected(self, why: str) -> str:
        """With what is to be done about it."""
        if "CERTIFICATE_VERIFY_FAILED" in why:
            return f"{why}; name whoever vouches for the server with --ca-file or SSL_CERT_FILE"
        if "[SSL" in why:
            return f"{why}; if it speaks no TLS, its --url is http://"
        if self._uds:
            return f"{why}; start a server with `framework serve --uds {self._uds}`, or name its socket with --uds"
        return f"{why}; start a server with `framework serve`, or name another one with --url"

    def _refused(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        status, said, hint = answer.status_code, _said(answer), ""
        if answer.next_request is not None:
            target = brief(str(answer.next_request.url), 200)
            raise ChatError(f"{self._where} redirects ({status}) to {target}; name the server there with --url")
        if status == 401:
            hint = f"; set {variable(API_KEY)} or OPENAI_API_KEY"
        elif status == 404:
            hint = "; is --model right?" if "model" in said.lower() else "; is the path of --url right?"
        raise ChatError(f"{self._where} refuses ({status}): {said}{hint}")


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    if ca_file is None:
        return httpx.create_ssl_context()  # heeds SSL_CERT_FILE
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except ssl.SSLError:
        raise ConfigError(f"--ca-file: {ca_file} holds no certificate in PEM") from None
    except OSError as error:
        raise ConfigError(f"--ca-file: cannot read {ca_file}: {error.strerror}") from None


def _said(answer: httpx.Response) -> str:
    """Why, in the server's words."""
    try:
        return _message(answer.json())
    except (ValueError, RecursionError):
        return _CONTROL.sub("", brief(" ".join(answer.text.split()), 200)) or answer.reason_phrase


def _message(body: Any) -> str:
    while isinstance(body, dict):
        body = next((body[name] for name in ("error", "message", "detail") if body.get(name)), json.dumps(body))
    return _CONTROL.sub("", brief(str(body), 2000))


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Those of a stream; the whole answer where a server knows no streams."""
    if response.headers.get("content-type", "").startswith("application/json"):
        yield json.loads(response.read())
        return
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


class Chat:
    """A conversation: what was said so far, and how to ask on."""

    def __init__(self, server: Server, model: str, system: str | None, options: Mapping[str, Any]) -> None:
        self.model = model
        self.system = system
        self._server = server
        self._options = options
        self._said: list[dict[str, str]] = []

    def say(self, text: str) -> None:
        """Ask, and print the answer as it comes. What fails was never said; of what is stopped, so much as came.

        Raises `ChatError`, and `KeyboardInterrupt`.
        """
        asked = {"role": "user", "content": text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")}
        first = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*first, *self._said, asked], **self._options}
        paper, content = _Paper(), []
        try:
            with closing(self._server.answer(body)) as pieces:
                for kind, piece in pieces:
                    if kind == "finish":
                        paper.end()
                        _explain(piece)
                        continue
                    if kind == "content":
                        content.append(piece)
                    paper.write(kind, piece)
        except ChatError:
            content.clear()
            raise
        finally:
            paper.end()
            if content:
                self._said += [asked, {"role": "assistant", "content": "".join(content)}]

    def command(self, line: str) -> bool:
        """Do what a line that begins with / says; False if it is to end."""
        name, _, text = line.strip().partition(" ")
        match name:
            case "/exit":
                return False
            case "/reset":
                self._said.clear()
                note("forgotten")
            case "/system":
                self.system = text.strip() or None
                note("noted" if self.system else "no instruction any more")
            case "/help":
                note(HELP)
            case _:
                note(f"{brief(name, 40)} is no command: /help lists them; a message may begin with a space")
        return True

    def loop(self) -> None:
        """Ask for messages until there are no more."""
        with suppress(ImportError):
            importlib.import_module("readline")  # `input` then knows arrow keys, and earlier lines
        while True:
            try:
                line = input("> ")
            except EOFError:
                typer.echo()
                return
            except KeyboardInterrupt:
                typer.echo()
                note("Ctrl-D or /exit leaves")
                continue
            except UnicodeDecodeError:
                note("that is not UTF-8")
                continue
            if line.startswith("/"):
                if not self.command(line):
                    return
            elif line.strip():
                try:
                    self.say(line.strip())
                except KeyboardInterrupt:
                    note("stopped")
                except ChatError as error:
                    typer.echo(typer.style("error: ", fg="red", bold=True) + str(error), err=True)


class _Paper:
    """Standard output, for one answer."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._last: tuple[str, str] | None = None

    def write(self, kind: str, text: str) -> None:
        """Reasoning is shown on terminals only: whoever pipes the answer somewhere wants nothing else."""
        if self._terminal:
            text = _CONTROL.sub("", text)
        elif kind == "reasoning":
            return
        if self._last is not None and self._last[0] != kind:
            self.end()
        self._last = kind, text or "\n"  # ahead of Ctrl-C
        sys.stdout.write(typer.style(text, dim=True) if kind == "reasoning" else text)
        sys.stdout.flush()

    def end(self) -> None:
        """The next thing shown begins a line."""
        if self._last is not None and not self._last[1].endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._last = None


def _explain(reason: str) -> None:
    if reason == "length":
        note("cut off: max_tokens, or what the model can take, is used up")
    elif reason not in ("stop", "eos_token", "stop_sequence"):
        note(f"ended: {brief(reason, 100)}")


def note(text: str) -> None:
    """What is not the answer."""
    typer.echo(typer.style(text, dim=True), err=True)
