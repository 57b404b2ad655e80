"""The package where it is not installed, for gpu_check.py. Imports the standard library only, so that packages can be
added before any other is imported."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = {
    "msgspec": "msgspec", "pluggy": "pluggy", "pydantic": "pydantic", "pydantic_settings": "pydantic-settings",
    "structlog": "structlog", "psutil": "psutil", "jinja2": "jinja2", "yaml": "pyyaml", "tokenizers": "tokenizers",
    "prometheus_client": "prometheus-client",
}  # fmt: skip
"""Modules that the engine imports, and the packages they come from."""


@contextmanager
def package(wheels: Path | None) -> Iterator[list[str]]:
    """Make this checkout importable as `framework`, and install what it needs from `wheels`, both in a folder that is
    gone afterwards. Yields the packages that the engine needs and that are not there."""
    with tempfile.TemporaryDirectory(prefix="gpu_check") as folder:
        tree, more = Path(folder) / "tree", Path(folder) / "packages"
        added = []
        if not _is_this("framework"):
            _link(tree)
            sys.path.insert(0, str(tree))
            added.append(str(tree))
        if wheels is not None:
            files = sorted(wheels.glob("*.whl"))
            if not files:
                sys.exit(f"--wheels {wheels}: it holds no .whl file")
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
            done = subprocess.run([*command, "--target", more, *files], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"--wheels {wheels}: pip failed:\n{done.stdout}{done.stderr}")
            sys.path.insert(0, str(more))
            added.append(str(more))
        importlib.invalidate_caches()
        try:
            yield [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
        finally:
            sys.path[:] = [path for path in sys.path if path not in added]


def _is_this(name: str) -> bool:
    """Whether `import name` finds the checkout that this file is in, with its plugins."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != ROOT / name:
        return False
    return importlib.util.find_spec(f"{name}.plugins") is not None


def _link(tree: Path) -> None:
    """The package as an installation would lay it out, with the entry points by which plugins are found."""
    inside = tree / "framework"
    inside.mkdir(parents=True)
    for path in [*(ROOT / "framework").iterdir(), ROOT / "plugins", ROOT / "server"]:
        if path.name != "__pycache__":
            (inside / path.name).symlink_to(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    info = tree / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
