"""Rules of the code base that no single module can show: who imports what, how large files are, what is packaged."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import framework

ROOT = Path(__file__).parents[1]
CODE = [path for folder in ("framework", "plugins", "server") for path in sorted((ROOT / folder).rglob("*.py"))]
AROUND = [path for folder in ("tests", "benchmarks", "docs") for path in sorted((ROOT / folder).rglob("*.py"))]
NATIVE = [
    path for folder in ("plugins", "tests") for kind in ("*.cpp", "*.h") for path in sorted((ROOT / folder).rglob(kind))
]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


FAMILY = {"plugins": "framework.plugins", "server": "framework.server", "framework": "framework"}


def module(path: Path) -> str:
    """Import name of a source file."""
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FAMILY[top], *(part for part in rest if part != "__init__")])


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name) for every import of a file, wherever it stands; name is None for `import module`."""
    package = module(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((target, alias.name) for alias in node.names)


def inside(name: str, *families: str) -> bool:
    return any(name == family or name.startswith(family + ".") for family in families)


def public_modules() -> set[str]:
    return set(re.findall(r"`(framework(?:\.\w+)?)`[,:]", (ROOT / "docs/api.md").read_text("utf-8")))


def loaded(code: str, *names: str) -> list[str]:
    """Which of `names` are in sys.modules after `code` ran in a process of its own."""
    code = f"{code}\nimport sys\nprint(*sorted(set({names!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("path", CODE, ids=name)
def test_who_imports_whom(path: Path) -> None:
    own = module(path)
    for target, name in imports(path):
        whole = f"{target}.{name}" if name else target
        where = f"{path.relative_to(ROOT)}: {whole}"
        if not inside(own, "framework.plugins", "framework.server"):
            assert not inside(whole, "framework.plugins", "framework.server"), f"{where}: the core knows no plugin"
            continue
        family = ".".join(own.split(".")[: 3 if inside(own, "framework.plugins") else 2])
        if not inside(target, "framework") or inside(target, family):
            continue
        assert target in public_modules(), f"{where}: not a public module, see docs/api.md"
        if name:
            assert not name.startswith("_") or name == "__version__", f"{where}: a private name"
        if target == "framework" and name and f"framework.{name}" not in public_modules():
            assert name in framework.__all__, f"{where}: not a public name"


@pytest.mark.parametrize("path", [path for path in CODE if "framework" not in path.relative_to(ROOT).parts], ids=name)
def test_plugins_touch_no_private_attribute_of_the_core(path: Path) -> None:
    family = ROOT.joinpath(*path.relative_to(ROOT).parts[:-1])
    mine, core = private_members(family), private_members(ROOT / "framework")
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in core - mine:
            pytest.fail(f"{name(path)}:{node.lineno}: {ast.unparse(node)} is private to the core")


def private_members(folder: Path) -> set[str]:
    """Private names of methods and attributes that the files below a folder define."""
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                found |= {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
                found |= {
                    one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
                }
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {one for one in found if re.match("_[^_]", one)}


@pytest.mark.parametrize(
    "decider",
    [
        "types",
        "plan",
        "kv",
        "planner",
        "view",
        "policy",
        "batch",
        "hookspecs",
        "settings",
        "messages",
        "testing.checking",
        "testing.simulation",
        "testing.schedulers",
        "testing.caches",
        "testing.pytest_plugin",
    ],
)
def test_decisions_import_no_torch(decider: str) -> None:
    assert loaded(f"import framework.{decider}", "torch", "transformers", "fastapi") == []


def test_scenarios_of_the_planner_import_no_torch() -> None:
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})"
    assert loaded(f"{path}; import test_scenarios", "torch", "transformers", "fastapi") == []


def test_the_server_process_imports_no_torch() -> None:
    code = (
        "import framework.server.main\n"
        "from framework.registry import load_plugins\n"
        "from framework.settings import Settings\n"
        "load_plugins().activate(Settings(), engine=False)"
    )
    assert loaded(code, "torch", "transformers", "opentelemetry.sdk") == []


def test_only_its_plugin_uses_opentelemetry() -> None:
    """Versions of FastAPI import its API, without effect: what is in sys.modules says nothing."""
    users = {name(path) for path in CODE for target, _ in imports(path) if inside(target, "opentelemetry")}
    assert users == {"plugins/telemetry/otel.py"}


def test_the_engine_imports_no_web_framework(tiny_llama: Path) -> None:
    """Everything that a running engine needs, in one process: loaded, and one token generated."""
    code = (
        "import framework.process\n"
        "from framework import LLM, SamplingParams\n"
        f"llm = LLM(model={str(tiny_llama)!r}, dtype='float32', kv_blocks=16)\n"
        "llm.generate('a', SamplingParams(max_tokens=1))"
    )
    assert loaded(code, "torch", "transformers", "fastapi", "starlette", "uvicorn", "typer") == ["torch"]


@pytest.mark.parametrize("path", [*CODE, *AROUND, *NATIVE], ids=name)
def test_no_file_has_grown_a_second_job(path: Path) -> None:
    limits = {"framework/planner.py": 300, "framework/engine.py": 300, "plugins/kv/paged.py": 300}
    limit = limits.get(name(path), 100 if name(path).startswith("plugins/schedulers/") else 500)
    if name(path).startswith("plugins/kernels/"):
        limit = 300
    assert len(path.read_text("utf-8").splitlines()) <= limit


def test_every_package_is_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    found = {module(path) for path in CODE if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_the_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["version"] == framework.__version__


def test_no_test_hides_behind_a_missing_package() -> None:
    """A dependency that is not there fails the suite instead of thinning it out."""
    word = "import" + "orskip"
    assert [file.name for file in (ROOT / "tests").glob("*.py") if word in file.read_text("utf-8")] == []
