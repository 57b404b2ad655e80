"""HTTPS with certificates that openssl made, and files that are none."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from echo_engine import EchoProcess
from framework.server.main import _url
from framework.server.tls import check_tls
from serving import Running, running

from framework import ConfigError
from framework.settings import Settings


def made(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate)]
    command += ["-keyout", str(key), *(options or ("-nodes",))]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("own", "other"):
        made(folder, name)
    made(folder, "locked", "-passout", "pass:secret")
    (folder / "both.pem").write_bytes((folder / "own.pem").read_bytes() + (folder / "own.key").read_bytes())
    (folder / "text").write_text("no certificate")
    return folder


@pytest.fixture(scope="module")
def server(files: Path, tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(
        model=str(tiny_llama),
        served_model_name="echo",
        ssl_certfile=files / "own.pem",
        ssl_keyfile=files / "own.key",
    )
    with running(settings, spawn=EchoProcess) as found:
        yield found


def url(server: Running) -> str:
    return server.url.replace("http:", "https:")


def test_clients_that_know_the_certificate_are_served(server: Running, files: Path) -> None:
    context = ssl.create_default_context(cafile=str(files / "own.pem"))
    with httpx.Client(verify=context, timeout=30) as http:
        client = openai.OpenAI(base_url=f"{url(server)}/v1", api_key="none", http_client=http, max_retries=0)
        answer = client.completions.create(model="echo", prompt=server.ids("fine"), max_tokens=20)
        assert answer.choices[0].text == "fine"
        chunks = client.completions.create(model="echo", prompt=server.ids("fine"), max_tokens=20, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "fine"


def test_nobody_else_is(server: Running, files: Path) -> None:
    for context in (ssl.create_default_context(), ssl.create_default_context(cafile=str(files / "other.pem"))):
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url(server)}/health", verify=context)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{server.url}/health")  # without TLS


@pytest.mark.parametrize(
    ("certificate", "key", "why"),
    [
        (None, "own.key", r"^--ssl-keyfile: needs --ssl-certfile"),
        ("none.pem", "own.key", r"^--ssl-certfile: cannot read \S+none.pem: No such file"),
        ("own.pem", "none.key", r"^--ssl-keyfile: cannot read \S+none.key: No such file"),
        (".", "own.key", r"^--ssl-certfile: cannot read"),
        ("text", "own.key", r"text must hold a certificate and \S+own.key its key, both in PEM"),
        ("own.pem", "text", r"own.pem must hold a certificate and \S+text its key, both in PEM"),
        ("own.pem", "other.key", r"the key is not that of the certificate"),
        ("own.pem", None, r"^--ssl-certfile: \S+own.pem must hold a certificate and its key"),
        ("locked.pem", "locked.key", r"protected by a password"),
    ],
)
def test_bad_files(files: Path, certificate: str | None, key: str | None, why: str) -> None:
    settings = Settings(ssl_certfile=certificate and files / certificate, ssl_keyfile=key and files / key)
    with pytest.raises(ConfigError, match=why):
        check_tls(settings)


def test_good_files(files: Path) -> None:
    check_tls(Settings())
    check_tls(Settings(ssl_certfile=files / "own.pem", ssl_keyfile=files / "own.key"))
    check_tls(Settings(ssl_certfile=files / "both.pem"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::1"])
def test_the_banner_says_https(files: Path, host: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        name = "[::1]" if ":" in host else "127.0.0.1"
        assert _url(Settings(host=host), listener) == f"http://{name}:{port}"
        assert _url(Settings(host=host, ssl_certfile=files / "both.pem"), listener) == f"https://{name}:{port}"


def test_a_real_server_with_a_key_and_a_certificate(files: Path, tiny_llama: Path) -> None:
    """The command as users run it: what the banner says can be used, and the key is seen by nobody."""
    command = [
        sys.executable,
        "-m",
        "framework",
        "serve",
        "--model",
        str(tiny_llama),
        "--port",
        "0",
        "--log-level=debug",
    ]
    command += ["--ssl-certfile", str(files / "both.pem"), "--kv-blocks", "64", "--dtype", "float32"]
    environment = {**os.environ, "FRAMEWORK_API_KEY": "sk-hidden"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            shown = []
            for line in process.stdout:
                shown.append(line)
                if line.startswith("  curl "):
                    break
            else:
                pytest.fail("".join(shown))
            assert f"curl --cacert {files / 'both.pem'} https://127.0.0.1:" in line and "$FRAMEWORK_API_KEY" in line
            base = next(line.split()[1] for line in shown if line.startswith("  URL "))
            assert base.startswith("https://127.0.0.1:")
            context = ssl.create_default_context(cafile=str(files / "own.pem"))
            with httpx.Client(base_url=base, verify=context, timeout=60) as http:
                body = {"prompt": "a", "max_tokens": 2}
                assert http.post("/completions", json=body).status_code == 401
                headers = {"Authorization": "Bearer sk-hidden"}
                assert http.post("/completions", json=body, headers=headers).status_code == 200
            for child in psutil.Process(process.pid).children(recursive=True):
                assert "sk-hidden" not in json.dumps([child.environ(), child.cmdline()])
        finally:
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=30)
    assert "sk-hidden" not in "".join(shown) + rest
