"""JSON schemas in a form that the grammar library follows whole.

The library looks at one keyword of a schema, such as `anyOf`, and passes over those beside it; it has no place for
others at all. What comes out of here says the same as what goes in, or allows less, with nothing that is passed over.
What cannot be said so is refused: half a schema is worse than none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from .errors import brief
from .json_patterns import NoLength, escaped, matches, of_length

Schema = Mapping[str, Any]

DEPTH = 48
"""Definitions that are merged into one another, one inside the other, before one is taken to contain itself."""
SIZE = 100_000
"""Schemas within one, after merging."""
_ABSENT = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependencies"),
    *("dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef", "additionalItems"),
}
"""Keywords that there is no form for."""
_KINDS = {
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("unevaluatedProperties", "minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""What concerns values of one type only."""
_ANY = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const", "type")
_KEYWORDS = {*_ANY, *(keyword for keywords in _KINDS.values() for keyword in keywords)}
_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_CLOSING = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
"""What they say depends on which other properties there are."""


class _Impossible(ValueError):
    """No value is valid."""


def followed(schema: object) -> Any:
    """The schema in that form. Raises `ValueError` if there is none, and if nothing at all would be valid."""
    try:
        return _Rewriter(schema).whole()
    except RecursionError:
        raise ValueError("is nested too deeply") from None


class _Rewriter:
    def __init__(self, root: object) -> None:
        self._root = root
        self._definitions: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # of definitions, by what they come from
        self._size = 0

    def whole(self) -> Any:
        found = self._form(self._root)
        for name in self._definitions:
            self._check_end(name)
        return {"$defs": self._definitions, **found} if self._definitions else found

    def _check_end(self, name: str) -> None:
        seen = set()
        while name not in seen:
            seen.add(name)
            form = self._definitions[name]
            if form.keys() != {"$ref"}:
                return
            name = form["$ref"].removeprefix("#/$defs/")
        raise ValueError("a $ref refers to nothing but itself")

    def _form(self, schema: object) -> Any:
        self._size += 1
        if self._size > SIZE:
            raise ValueError(f"over {SIZE} schemas within one, once what is to be merged is merged; make it simpler")
        if schema is False:
            raise _Impossible("the schema 'false' accepts no value")
        if schema is True:
            return {}
        own = _own(schema)
        if "$ref" in own:
            return {"$ref": f"#/$defs/{self._definition(own)}"}
        if "allOf" in own:
            rest = _without(own, "allOf")
            for member in _members(own, "allOf"):
                rest = self._both(rest, member)
            return self._form(rest)
        for keyword in ("anyOf", "oneOf"):
            if keyword in own:
                return self._choices(own, keyword)
        if "enum" in own or "const" in own:
            return {"enum": _values(own)}
        return self._typed(own)

    def _choices(self, own: Schema, keyword: str) -> Any:
        rest, found, last = _without(own, keyword), [], ""
        for member in _members(own, keyword):
            try:
                found.append(self._form(self._both(rest, member)))
            except _Impossible as error:
                last = str(error)
        if not found:
            raise _Impossible(last)
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _typed(self, own: Schema) -> dict[str, Any]:
        types = own.get("type")
        if types is None:
            # Values of other types would be valid, too. Who writes such keywords means those that they are for.
            types = [kind for kind, keywords in _KINDS.items() if any(keyword in own for keyword in keywords)]
        listed = [types] if isinstance(types, str) else types
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise ValueError("type must be a string or a list of strings")
        if "type" in own and not listed:
            raise _Impossible("no type is left that a value may have")
        found: dict[str, Any] = {}
        for one in listed:
            kind = "number" if one == "integer" else one
            about = {keyword: own[keyword] for keyword in _KINDS.get(kind, ()) if keyword in own}
            match kind:
                case "object":
                    about = self._object(about)
                case "array":
                    about = self._array(about)
                case "string":
                    about = _string(about)
                case "number":
                    about = _number(about, one == "integer", len(listed) > 1)
            found |= about
        if listed:
            found["type"] = listed[0] if len(listed) == 1 else listed
        return found

    def _object(self, own: Schema) -> dict[str, Any]:
        found = dict(own)
        properties, patterns = _by_name(own, "properties"), _by_name(own, "patternProperties")
        required = own.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise ValueError("required must be a list of strings")
        if "propertyNames" in own and (properties or patterns or required):
            raise ValueError("propertyNames is supported without properties, patternProperties and required only")
        if len(patterns) > 1:
            raise ValueError("more than one of patternProperties is not supported; make it one pattern")
        for pattern in patterns:
            for name in (*properties, *required):
                if matches(pattern, name):
                    raise ValueError(f"the property {brief(repr(name), 80)} matches patternProperties: not supported")
        rest = own.get("additionalProperties", own.get("unevaluatedProperties", True))
        for name in required:
            properties.setdefault(name, rest)  # the library looks at required properties only
        found["properties"] = {}
        for name, schema in properties.items():
            form = self._or_false(schema)
            if form is not False:
                found["properties"][name] = form
            elif name in required:
                raise _Impossible(f"the property {brief(repr(name), 80)} is required, and can have no value")
            elif rest is not False and ({"additionalProperties", "unevaluatedProperties"} & own.keys() or patterns):
                raise ValueError(
                    f"the property {brief(repr(name), 80)} may not be there, but others may: not supported"
                )
        if not properties:
            del found["properties"]
        if patterns:
            found["patternProperties"] = {escaped(p): self._form(s) for p, s in patterns.items()}
        for keyword in ("additionalProperties", "unevaluatedProperties", "propertyNames"):
            if keyword in own:  # a name that is not to be like the pattern cannot be said
                found[keyword] = self._or_false(False if patterns else own[keyword])
        return found

    def _array(self, own: Schema) -> dict[str, Any]:
        found = dict(own)
        if isinstance(own.get("items"), list):
            raise ValueError("a list as items is not supported; use prefixItems")
        if "prefixItems" in own:
            found["prefixItems"] = [self._form(member) for member in _members(own, "prefixItems")]
        for keyword in ("items", "unevaluatedItems"):
            if keyword in own:
                found[keyword] = self._or_false(own[keyword])
        return found

    def _or_false(self, schema: object) -> Any:
        try:
            return self._form(schema)
        except _Impossible:
            return False

    def _definition(self, own: Schema) -> str:
        """The name of what a $ref means, with what is beside it, among the definitions of the result."""
        key = _text(own)
        if key not in self._names:
            name = self._names[key] = str(len(self._names))
            try:
                self._definitions[name] = self._form(self._expanded(own))
            except _Impossible:
                del self._names[key]
                raise
        return self._names[key]

    def _target(self, pointer: object) -> Any:
        if not isinstance(pointer, str) or not re.match("#(/|$)", pointer):
            raise ValueError(f"$ref {brief(repr(pointer), 80)}: only pointers within the schema are supported, #/...")
        found = self._root
        for part in unquote(pointer[1:]).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]  # type: ignore[index]
            except (LookupError, TypeError, ValueError):
                raise ValueError(f"$ref {brief(repr(pointer), 80)}: there is no such schema") from None
        return found

    def _expanded(self, own: Schema, depth: int = 0) -> Any:
        """What a $ref means and what is beside it, as one."""
        if depth > DEPTH:
            raise ValueError(f"$ref {brief(repr(own['$ref']), 80)} refers to itself")
        target, rest = self._target(own["$ref"]), _without(own, "$ref")
        return self._both(rest, target, depth) if rest else target

    def _both(self, one: Schema, other: object, depth: int = 0) -> dict[str, Any]:
        """What both say, as one schema."""
        if other is True:
            return dict(one)
        if other is False:
            raise _Impossible("the schema 'false' accepts no value")
        two = _own(other)
        if "$ref" in two and one:
            target = self._target(two["$ref"])
            if len(two) == 1 and isinstance(target, dict) and one == {"type": target.get("type")}:
                return two
            return self._both(one, self._expanded(two, depth + 1), depth + 1)
        self._check_closed(one, two)
        found = dict(one)
        for keyword, value in two.items():
            found[keyword] = self._meet(keyword, one[keyword], value) if keyword in one else value
        return found

    def _check_closed(self, one: Schema, two: Schema) -> None:
        for a, b in ((one, two), (two, one)):
            closing = [keyword for keyword in _CLOSING if a.get(keyword, True) is not True]
            if closing and not _by_name(b, "properties").keys() <= _by_name(a, "properties").keys():
                raise ValueError(f"{closing[0]} beside properties of another schema is not supported; merge them")
            closing = [keyword for keyword in ("items", "unevaluatedItems") if a.get(keyword, True) is not True]
            if closing and "prefixItems" in b and "prefixItems" not in a:
                raise ValueError(f"{closing[0]} beside prefixItems of another schema is not supported; merge them")

    def _meet(self, keyword: str, one: Any, two: Any) -> Any:
        if _text(one) == _text(two):
            return one
        if keyword in _LOWER + _UPPER and _is_number(one) and _is_number(two):
            return max(one, two) if keyword in _LOWER else min(one, two)
        match keyword:
            case "type":
                return _common_types(one, two)
            case "required" if isinstance(one, list) and isinstance(two, list):
                return [*one, *(name for name in two if name not in one)]
            case "enum" if isinstance(one, list) and isinstance(two, list):
                there = {*map(_text, two)}
                return [value for value in one if _text(value) in there]
            case "properties" if isinstance(one, dict) and isinstance(two, dict):
                return {**one, **{n: {"allOf": [one[n], s]} if n in one else s for n, s in two.items()}}
            case "allOf" if isinstance(one, list) and isinstance(two, list):
                return [*one, *two]
            case "items" | "additionalProperties":
                return {"allOf": [one, two]}
        raise ValueError(f"{keyword} in two schemas that hold both is not supported; merge them")


def _own(schema: object) -> dict[str, Any]:
    """What a schema says itself: no annotations, no definitions. Raises for what there is no form for."""
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object, true or false, got {brief(repr(schema), 80)}")
    for keyword in schema:
        if keyword in _ABSENT and schema[keyword] is not False:
            raise ValueError(f"the keyword {keyword!r} is not supported")
    return {keyword: value for keyword, value in schema.items() if keyword in _KEYWORDS}


def _without(schema: Schema, keyword: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != keyword}


def _members(schema: Schema, keyword: str) -> list[Any]:
    value = schema[keyword]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{keyword} must be a list of schemas")
    return value


def _by_name(schema: Schema, keyword: str) -> dict[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise ValueError(f"{keyword} must be an object")
    return dict(value)


def _text(value: object) -> str:
    """Equal for equal values of JSON."""
    return json.dumps(value, sort_keys=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values(own: Schema) -> list[Any]:
    """Those of `enum` or `const` that are of the `type`."""
    values = own.get("enum", [own.get("const")])
    if not isinstance(values, list) or not values:
        raise ValueError("enum must be a list of values")
    if "const" in own:
        values = [value for value in values if _text(value) == _text(own["const"])]
    for keyword in own:
        if keyword not in ("enum", "const", "type"):
            raise ValueError(f"{keyword} beside enum or const is not supported; leave out the values that it forbids")
    if "type" in own:
        types = own["type"] if isinstance(own["type"], list) else [own["type"]]
        values = [value for value in values if not _types_of(value).isdisjoint(types)]
    if not values:
        raise _Impossible("no value of enum or const is valid")
    return values


def _types_of(value: object) -> set[str]:
    """The types of JSON Schema that a value of JSON has."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
    assert isinstance(value, int | float)
    return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}


def _common_types(one: Any, two: Any) -> list[str]:
    ones, twos = ([value] if isinstance(value, str) else value for value in (one, two))
    if not isinstance(ones, list) or not isinstance(twos, list):
        raise ValueError("type must be a string or a list of strings")
    common = [type for type in ones if type in twos]
    if "integer" not in common and any("integer" in a and "number" in b for a, b in ((ones, twos), (twos, ones))):
        common.append("integer")
    if not common:
        raise _Impossible("no type is left that a value may have")
    return common


_FORMATS = {
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
    *("uri-template", "json-pointer", "relative-json-pointer"),
}
"""Those that are followed; others are annotations."""


def _string(own: Schema) -> dict[str, Any]:
    found = {key: value for key, value in own.items() if key != "format" or value in _FORMATS}
    if "pattern" in found and not isinstance(found["pattern"], str):
        raise ValueError("pattern must be a string")
    if "pattern" in found and "format" not in found and len(found) > 1:
        least, most = found.pop("minLength", 0), found.pop("maxLength", math.inf)
        try:
            found["pattern"] = of_length(found["pattern"], least, most)
        except NoLength as error:
            raise _Impossible(str(error)) from None
    for what in ("pattern", "format"):
        if what in found and len(found) > 1:
            others = " and ".join(key for key in found if key != what)
            raise ValueError(f"{what} beside {others} is not supported; make it one pattern")
    if "pattern" in found:
        found["pattern"] = escaped(found["pattern"])
    return found


def _number(own: Schema, whole: bool, several: bool) -> dict[str, Any]:
    found = dict(own)
    for keyword, value in own.items():
        if not _is_number(value):
            raise ValueError(f"{keyword} must be a number")
    if "multipleOf" in own and not (whole and own["multipleOf"] == int(own["multipleOf"])):
        raise ValueError("multipleOf is supported for integers only")
    if "multipleOf" in own and len(own) > 1:
        raise ValueError("multipleOf beside limits is not supported; list the values as enum")
    if not whole:
        return found
    if several and any(value != int(value) for value in own.values()):
        raise ValueError("limits with a fraction for one of several types are not supported")
    for keyword, value in own.items():  # the library takes whole ones only
        if keyword == "exclusiveMinimum" and value != int(value):
            found["minimum"] = max(math.ceil(value), found.get("minimum", -math.inf))
            del found[keyword]
        elif keyword == "exclusiveMaximum" and value != int(value):
            found["maximum"] = min(math.floor(value), found.get("maximum", math.inf))
            del found[keyword]
    return {key: math.ceil(value) if key in _LOWER else math.floor(value) for key, value in found.items()}
