"""Models by hub id, through huggingface_hub: a prepared cache offline, and a hub on the loopback interface.

Each runs in a process of its own, since huggingface_hub reads its environment variables when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SHA = {"main": "a" * 40, "v2": "b" * 40}
OPEN = """
import json, sys
from framework import FrameworkError
from framework.checkpoint import open_checkpoint
from framework.registry import load_plugins
from framework.settings import Settings
settings = Settings(model=sys.argv[1], revision=sys.argv[2] or None)
try:
    checkpoint = open_checkpoint(settings, load_plugins())
except FrameworkError as error:
    print(json.dumps({"error": str(error), "kind": type(error).__name__}))
else:
    print(json.dumps({"path": checkpoint.path, "tensors": checkpoint.num_tensors,
                      "ids": checkpoint.tokenizer().encode("Hello")}))
"""


def open_model(model: str, home: Path, revision: str = "", **variables: str) -> dict[str, object]:
    """Open it in a fresh process whose hub variables are these alone; (path, tensors, ids) or (error, kind)."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()}
    result = subprocess.run(
        [sys.executable, "-c", OPEN, model, revision],
        env={**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    assert "\n" not in str(answer.get("error", ""))
    return answer


class Hub(ThreadingHTTPServer):
    """The part of the hub's API that a download needs. `repos`: id -> directory; `seen`: (method, path, token)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Path] = {}
        self.gated: dict[str, str] = {}
        self.seen: list[tuple[str, str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.server.seen.append((self.command, path, token))
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        folder = self.server.repos.get(repo)
        if folder is None:
            return self._send(404, {"error": "Repository not found"}, code="RepoNotFound")
        if token != self.server.gated.get(repo, token):
            return self._send(403, {"error": "Access to model is restricted"}, code="GatedRepo")
        kind, revision = (rest[0], rest[1]) if len(rest) > 1 else ("revision", "main")
        sha = SHA.get(revision, revision if revision in SHA.values() else "")
        if not sha:
            return self._send(404, {"error": "Invalid rev id"}, code="RevisionNotFound")
        files = {str(f.relative_to(folder)): f for f in sorted(folder.rglob("*")) if f.is_file()}
        if kind == "resolve":
            file = files.get("/".join(rest[2:]))
            if file is None:
                return self._send(404, {"error": "Entry not found"}, code="EntryNotFound")
            return self._send(200, file.read_bytes(), sha)
        if kind == "tree":
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "size": f.stat().st_size,
                    "oid": hashlib.sha1(f.read_bytes()).hexdigest(),
                }
                for name, f in files.items()
            ]
            return self._send(200, entries)
        siblings = [{"rfilename": name} for name in files]
        return self._send(200, {"id": repo, "modelId": repo, "sha": sha, "private": False, "siblings": siblings})

    def _send(self, status: int, body: object, sha: str = "", code: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        if sha:
            self.send_header("X-Repo-Commit", sha)
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def cache(tiny_llama: Path, tmp_path: Path) -> Path:
    """HF_HOME with org/tiny in it."""
    repo = tmp_path / "home" / "hub" / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(SHA["main"])
    shutil.copytree(tiny_llama, repo / "snapshots" / SHA["main"])
    return tmp_path / "home"


class TestOffline:
    def test_prepared_cache(self, cache: Path) -> None:
        got = open_model("org/tiny", cache, HF_HUB_OFFLINE="1")
        assert str(got["path"]).startswith(str(cache))
        assert got["tensors"] == 29

    def test_commit_as_revision(self, cache: Path) -> None:
        assert open_model("org/tiny", cache, SHA["main"], HF_HUB_OFFLINE="1")["tensors"] == 29

    @pytest.mark.parametrize(("model", "revision"), [("org/other", ""), ("org/tiny", "v9"), ("plain-name", "")])
    def test_not_in_the_cache(self, cache: Path, model: str, revision: str) -> None:
        got = open_model(model, cache, revision, HF_HUB_OFFLINE="1")
        assert got["kind"] == "ModelError"
        assert str(got["error"]).startswith(f"--model {model}: no such file or directory, and not (or only partly)")
        assert "HF_HUB_OFFLINE" in str(got["error"])

    def test_weights_missing_from_the_cache(self, cache: Path) -> None:
        next(cache.rglob("model.safetensors")).unlink()
        got = open_model("org/tiny", cache, HF_HUB_OFFLINE="1")
        assert got["kind"] == "ModelError"
        assert "safetensors" in str(got["error"])


class TestDownload:
    def test_only_what_is_needed_and_once(self, hub: Hub, tiny_qwen2: Path, tmp_path: Path) -> None:
        repo = hub.repos["org/tiny"] = Path(shutil.copytree(tiny_qwen2, tmp_path / "repo"))
        (repo / "original").mkdir()
        for name in ("pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors", "run.py", "m.gguf"):
            (repo / name).write_bytes(b"never fetched")
        (repo / "chat_template.jinja").write_text("x")
        got = open_model("org/tiny", tmp_path, HF_ENDPOINT=hub.url)
        assert got["tensors"] == 39
        folder = Path(str(got["path"]))
        assert {f.name for f in folder.rglob("*")} == {f.name for f in tiny_qwen2.iterdir()} | {"chat_template.jinja"}
        fetched = {path for method, path, _ in hub.seen if method == "GET" and "/resolve/" in path}
        hub.seen.clear()
        again = open_model("org/tiny", tmp_path, HF_ENDPOINT=hub.url)
        assert again == got
        assert not fetched & {path for method, path, _ in hub.seen if method == "GET"}
        assert open_model("org/tiny", tmp_path, HF_HUB_OFFLINE="1", HF_ENDPOINT=hub.url) == got

    def test_revision(self, hub: Hub, tiny_llama: Path, tmp_path: Path) -> None:
        hub.repos["org/tiny"] = tiny_llama
        got = open_model("org/tiny", tmp_path, "v2", HF_ENDPOINT=hub.url)
        assert str(got["path"]).endswith(SHA["v2"])
        got = open_model("org/tiny", tmp_path, "v9", HF_ENDPOINT=hub.url)
        assert got["error"] == "--model org/tiny: the hub model has no revision 'v9'; correct --revision"

    def test_token(self, hub: Hub, tiny_llama: Path, tmp_path: Path) -> None:
        hub.repos["org/tiny"] = tiny_llama
        hub.gated["org/tiny"] = "hf_secret"
        got = open_model("org/tiny", tmp_path, HF_ENDPOINT=hub.url)
        assert "gated; accept its terms on the hub and set HF_TOKEN" in str(got["error"])
        got = open_model("org/tiny", tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong")
        assert "gated" in str(got["error"])
        assert "hf_wrong" not in str(got["error"])
        hub.seen.clear()
        got = open_model("org/tiny", tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret")
        assert got["tensors"] == 29
        assert {token for _, path, token in hub.seen if "org/tiny" in path} == {"hf_secret"}

    def test_no_such_model(self, hub: Hub, tmp_path: Path) -> None:
        got = open_model("org/none", tmp_path, HF_ENDPOINT=hub.url)
        assert got["kind"] == "ModelError"
        assert "no such file or directory, and no such model on the hub" in str(got["error"])

    def test_other_formats(self, hub: Hub, tiny_llama: Path, tmp_path: Path) -> None:
        for name, file in (("gguf", "m.Q4_0.gguf"), ("pickle", "pytorch_model.bin"), ("nothing", "README.md")):
            hub.repos[f"org/{name}"] = folder = tmp_path / name
            folder.mkdir()
            (folder / file).write_bytes(b"x")
            shutil.copy(tiny_llama / "config.json", folder)
        errors = {
            name: str(open_model(f"org/{name}", tmp_path, HF_ENDPOINT=hub.url)["error"])
            for name in ("gguf", "pickle", "nothing")
        }
        assert "only GGUF files" in errors["gguf"] and "hf download org/gguf m.Q4_0.gguf" in errors["gguf"]
        assert "only pickle weights" in errors["pickle"]
        assert "no safetensors weights" in errors["nothing"]

    def test_hub_out_of_reach(self, tmp_path: Path) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            got = open_model("org/tiny", tmp_path, HF_ENDPOINT=url)
        assert got["kind"] == "ModelError"
        assert "the hub cannot be reached" in str(got["error"])

    def test_out_of_reach_but_cached(self, cache: Path) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            assert open_model("org/tiny", cache, HF_ENDPOINT=url)["tensors"] == 29
