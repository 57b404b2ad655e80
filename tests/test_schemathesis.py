"""Requests that schemathesis makes of the API's own document: what comes back is as documented, and never our fault."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from framework.server.keys import Keys
from serving import Running, eventually, running

from framework.settings import Settings

pytestmark = pytest.mark.slow
KEY = "sk-somebody"
KEYS = Keys([("somebody", KEY)])
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Running]:
    settings = Settings(model=str(tiny_llama), served_model_name="tiny", executor="scripted", max_queued_requests=64)
    with running(settings, request.param) as found:
        yield found


def generated(server: Running, folder: Path, *options: str) -> int:
    """How many requests there were; each was answered as the document says. The same ones every time."""
    document = folder / "openapi.json"
    document.write_bytes(server.http.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).content)
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", document.name]
    command += ["--url", server.url, "--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--workers", "2"]
    command += ["--generation-deterministic", "--no-color", "--continue-on-failure", "--request-timeout", "30"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    print(done.stdout[-10_000:])
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None and found[1] == found[2]
    return int(found[1])


@pytest.mark.parametrize(
    ("server", "options"),
    [(None, ["--max-examples", "20"]), (KEYS, ["--max-examples", "10", "--header", f"Authorization: Bearer {KEY}"])],
    ids=["open", "keys"],
    indirect=["server"],
)
def test_every_route(server: Running, tmp_path: Path, options: list[str]) -> None:
    assert generated(server, tmp_path, *options) > 1500
    eventually(lambda: server.engine.load == 0)
    # They got as far as the engine on every route that generates, and to errors of each kind, as well.
    seen = Counter((record.operation, record.status) for record in server.recorder.records)
    for operation in ("text_completion", "chat"):
        assert seen[operation, 200] > 10 and seen[operation, 400] > 10
    assert seen["text_completion", 422] > 10
    assert not [status for _, status in seen if status >= 500]


@pytest.mark.parametrize("server", [KEYS], ids=["keys"], indirect=True)
def test_strangers(server: Running, tmp_path: Path) -> None:
    before = len(server.recorder.records)
    assert generated(server, tmp_path, "--max-examples", "1") > 1000
    assert len(server.recorder.records) == before
