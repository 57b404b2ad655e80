"""Signatures of functions of libraries that need a GPU, as their published sources define them.

    python tests/signatures.py flash_attn-2.8.3.post2.tar.gz flashinfer_python-0.7.4-py3-none-any.whl

reads them from the archives as they were published, without running anything in there, and writes signatures.json;
`python tests/signatures.py --check ARCHIVE...` only compares. A parameter list is text such as "(q, k=None, *, x=1)".
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).with_name("signatures.json")
WANTED = {
    "flash_attn/flash_attn_interface.py": ["flash_attn_varlen_func"],
    "hopper/flash_attn_interface.py": ["flash_attn_with_kvcache"],
    "flashinfer/decode.py": [
        f"BatchDecodeWithPagedKVCacheWrapper.{name}" for name in ("__init__", "plan", "_plan_impl", "run")
    ],
    "flashinfer/prefill.py": [f"BatchPrefillWithPagedKVCacheWrapper.{name}" for name in ("__init__", "plan", "run")],
}
Known = dict[str, dict[str, str]]
"""Parameter lists, by archive and by "file: function"."""


def signature(key: str) -> inspect.Signature:
    """Of "file: function"; defaults are what they evaluate to, or their source text."""
    for functions in json.loads(FILE.read_text("utf-8")).values():
        if key in functions:
            return parse(functions[key])
    raise KeyError(key)


def parse(text: str) -> inspect.Signature:
    function = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    args, kinds = function.args, inspect.Parameter

    def default(node: ast.expr | None) -> object:
        return inspect.Parameter.empty if node is None else ast.literal_eval(node)

    ordered = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(ordered) - len(args.defaults)) + list(args.defaults)
    found = [
        kinds(
            a.arg, kinds.POSITIONAL_ONLY if a in args.posonlyargs else kinds.POSITIONAL_OR_KEYWORD, default=default(d)
        )
        for a, d in zip(ordered, defaults, strict=True)
    ]
    found += [kinds(args.vararg.arg, kinds.VAR_POSITIONAL)] if args.vararg else []
    found += [
        kinds(a.arg, kinds.KEYWORD_ONLY, default=default(d))
        for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    found += [kinds(args.kwarg.arg, kinds.VAR_KEYWORD)] if args.kwarg else []
    return inspect.Signature(found)


def read(archive: Path) -> dict[str, str]:
    found = {}
    for path, source in _sources(archive):
        for name, node in _functions(ast.parse(source)):
            if name in WANTED[path]:  # the last of them: overloads come before
                for arg in ast.walk(node.args):
                    if isinstance(arg, ast.arg):
                        arg.annotation = None
                found[f"{path}: {name}"] = f"({ast.unparse(node.args)})"
    return found


def _sources(archive: Path) -> Iterator[tuple[str, str]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for path in WANTED.keys() & set(wheel.namelist()):
                yield path, wheel.read(path).decode()
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist:
                path = member.name.partition("/")[2]
                if path in WANTED and (file := sdist.extractfile(member)):
                    yield path, file.read().decode()


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{one.name}", one) for one in node.body if isinstance(one, ast.FunctionDef))


if __name__ == "__main__":
    archives = [Path(name) for name in sys.argv[1:] if name != "--check"]
    known: Known = {archive.name: dict(sorted(read(archive).items())) for archive in archives}
    text = json.dumps(known, indent=2) + "\n"
    if "--check" not in sys.argv:
        FILE.write_text(text, "utf-8")
    elif FILE.read_text("utf-8") != text:
        sys.exit(f"{FILE} differs from {', '.join(map(str, archives))}")
