"""/docs: every route and field as a page that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
h2 {{ font-size: 1.1em; margin-top: 2em }} td {{ padding: 0 1.5em 0 0; vertical-align: top }}
</style><h1>{title} {version}</h1><p>For machines: <a href="openapi.json">openapi.json</a>.</p>
"""


def install(app: FastAPI) -> None:
    """Add /docs to `app`."""

    async def docs() -> HTMLResponse:
        return HTMLResponse("".join(_page(app.openapi())))

    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)


def _page(api: Mapping[str, Any]) -> Iterator[str]:
    yield _HEAD.format(title=escape(api["info"]["title"]), version=escape(api["info"]["version"]))
    schemas = api.get("components", {}).get("schemas", {})
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>\n"
            yield f"<p>{escape(' '.join((operation['summary'], operation.get('description', ''))))}</p>\n"
            content = operation.get("requestBody", {}).get("content", {})
            for kind in content.values():
                schema = kind.get("schema", {})
                yield from _fields(schemas.get(_name(schema), schema))


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    """Those that have to be there first; without those that are known only to be refused, whose values are listed."""
    required = schema.get("required", ())
    yield "<table>\n"
    for name, field in sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required):
        if None in field.get("enum", ()):
            continue
        need = "required" if name in required else ""
        yield f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(field))}<td>{need}\n"
    yield "</table>\n"


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _kind(schema: Mapping[str, Any]) -> str:
    """The type in words; null is left out, for every field may be left out so."""
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return _name(schema) or str(schema.get("type", "any"))
