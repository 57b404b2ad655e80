"""The fields of a request that say what its output must be, whichever dialect has them, as `StructuredOutputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import WithJsonSchema

from framework import InvalidRequest, StructuredOutputs
from framework.errors import quoted

_FORMATS = ("text", "json", "json_object", "json_schema", "regex", "structural_tag")
_UNSUPPORTED: dict[str, tuple[bool, ...]] = {"whitespace_pattern": (), "disable_additional_properties": (False,)}
"""What would change the output if it were ignored, and values beside null that ask for nothing."""
COMPACT = {"disable_any_whitespace": True}
"""Of JSON that is asked for as TGI's clients do: a model could go on with blanks for ever."""
RESPONSE_FORMAT = WithJsonSchema(
    {
        "type": "object",
        "properties": {
            "type": {"enum": list(_FORMATS)},
            "value": {"type": ["object", "string"]},
            "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}, "required": ["schema"]},
            "format": {"type": "object"},
        },
        "required": ["type"],
    }
)
STRUCTURED_OUTPUTS = WithJsonSchema(
    {
        "type": "object",
        "properties": {
            "json": {"type": ["object", "string"]},
            "json_object": {"type": "boolean"},
            "regex": {"type": "string"},
            "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            "grammar": {"type": "string"},
            "structural_tag": {"type": ["object", "string"]},
            "disable_any_whitespace": {"type": "boolean"},
        },
    }
)


def structured_outputs(
    response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None
) -> StructuredOutputs | None:
    """What the two fields ask for together. Raises `InvalidRequest` naming the one at fault."""
    wanted = None if response_format is None else _of_format(response_format)
    if structured is None:
        return wanted
    if wanted is not None:
        raise InvalidRequest(
            "response_format", "response_format and structured_outputs exclude each other; leave out one"
        )
    for name, neutral in _UNSUPPORTED.items():
        if not any(structured.get(name) is one for one in (None, *neutral)):
            raise InvalidRequest("structured_outputs", f"structured_outputs: {name} is not supported")
    known = {name: structured[name] for name in StructuredOutputs.__struct_fields__ if structured.get(name) is not None}
    return _typed("structured_outputs", known)


def _of_format(form: Mapping[str, Any]) -> StructuredOutputs | None:
    field, kind = "response_format", form.get("type")
    value = form.get("value")  # as in TGI's API
    match kind:
        case "text":
            return None
        case "json" | "regex" if value is None:
            raise InvalidRequest(field, f"{field}: type {kind} needs a value")
        case "regex":
            return _typed(field, {"regex": value})
        case "json_object" if value is None:
            return _typed(field, {"json_object": True})
        case "json" | "json_object":
            return _typed(field, {"json": value, **COMPACT})
        case "json_schema":
            inner = value if form.get("json_schema") is None else form["json_schema"]
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if schema is None:
                raise InvalidRequest(field, f"{field}: type json_schema needs json_schema.schema")
            return _typed(field, {"json": schema, **(COMPACT if inner is value else {})})
        case "structural_tag":
            return _typed(field, {"structural_tag": {name: value for name, value in form.items() if name != "type"}})
    raise InvalidRequest(field, f"{field}: type must be one of {', '.join(_FORMATS)}, got {quoted(kind)}")


def _typed(field: str, values: Mapping[str, Any]) -> StructuredOutputs:
    """Raises `InvalidRequest` for wrong types."""
    try:
        return msgspec.convert(values, StructuredOutputs)
    except msgspec.ValidationError as error:
        what, _, path = str(error).replace("`", "").partition(" - at $.")
        raise InvalidRequest(field, f"{field}: {path}: {what[0].lower()}{what[1:]}") from None
