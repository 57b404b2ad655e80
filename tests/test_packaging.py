"""What a stranger gets: the wheel, and a plugin of their own, outside this checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_docs import code_blocks

from framework.testing import SchedulerConformance

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def call(*command: object, cwd: Path) -> str:
    """Standard output of a command that must succeed, run with none of this checkout on its path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FRAMEWORK_", "PYTHON"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy so that nothing is written into the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    call(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
        "--wheel-dir", folder, folder / "source", cwd=folder,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and, from a package of its own, the scheduler of docs/scheduler.md. All other
    packages are those of the environment that runs this test, except the checkout itself."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv/bin/python"
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    # As plain paths: a .pth file's own .pth files are not read, so the editable checkout stays out of sight.
    (site / "dependencies.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    plugin = folder / "plugin"
    plugin.mkdir()
    (plugin / "shortest_first.py").write_text(code_blocks(ROOT / "docs/scheduler.md", "python")[0])
    (plugin / "pyproject.toml").write_text(code_blocks(ROOT / "docs/scheduler.md", "toml")[0])
    install = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    call(*install, "--ignore-installed", wheel, cwd=folder)
    call(*install, plugin, cwd=folder)
    return python


def test_the_wheel_puts_one_name_at_the_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"framework"}
    for shipped in ("framework/py.typed", "framework/plugins/kv/paged.py", "framework/server/main.py"):
        assert shipped in names
    for folder, package in (("framework", ""), ("plugins", "plugins/"), ("server", "server/")):
        for path in (file for kind in ("*.py", "*.cpp", "*.h") for file in (ROOT / folder).rglob(kind)):
            assert f"framework/{package}{path.relative_to(ROOT / folder)}" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_checkout_is_not_what_runs(python: Path, tmp_path: Path) -> None:
    code = "import framework, framework.server, framework.plugins.kv as kv; print(framework.__file__, kv.__file__)"
    for file in call(python, "-c", code, cwd=tmp_path).split():
        assert Path(file).is_relative_to(python.parents[1])


def test_the_plugin_is_listed(python: Path, tmp_path: Path) -> None:
    listed = call(python.with_name("framework"), "plugins", cwd=tmp_path)
    assert re.search(r"^scheduler +shortest +shortest-first 0\.1\.0 +least left to compute first$", listed, re.M)


def test_the_kit_checks_the_plugin(python: Path, tmp_path: Path) -> None:
    (tmp_path / "test_shortest.py").write_text(code_blocks(ROOT / "docs/testing.md", "python")[0])
    checks = sum(name.startswith("test_") for name in vars(SchedulerConformance))
    assert f"{checks} passed" in call(python, "-m", "pytest", "-p", "no:cacheprovider", cwd=tmp_path)


@pytest.fixture
def server(python: Path, tiny_llama: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """(URL, what start-up printed) of a server that runs with the plugin."""
    command = [
        str(python.with_name("framework")), "serve", "--scheduler", "shortest", "--strict-plugins",
        "--model", str(tiny_llama), "--dtype", "float32", "--port", "0", "--kv-blocks", "64",
    ]  # fmt: skip
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"URL +(http://\S+)/v1", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found[1], log.read_text()
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_it_serves_with_the_plugin(server: tuple[str, str]) -> None:
    url, printed = server
    assert "scheduler shortest" in printed
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"
