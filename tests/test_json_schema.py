"""Whatever comes out of the grammar of a schema is valid, as `jsonschema_rs` has it, whose regular expressions are
those of ECMAScript; what cannot be so is refused."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import xgrammar
from hypothesis import given, note, settings
from hypothesis import strategies as st

from framework import InvalidRequest, StructuredOutputs
from framework.grammars import Compiler, Matcher, Vocabulary, normalised
from framework.json_schema import followed

END = 256
VOCABULARY = Vocabulary([bytes([byte]) for byte in range(END)], END + 1, [END])
CLOSERS = [*b'"]},']


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(VOCABULARY)


def outputs(compiler: Compiler, schema: Any, count: int, longest: int = 150) -> list[bytes]:
    """Random ones; those that go on for long are left out. Raises `InvalidRequest`."""
    compiled = compiler.compile(normalised(StructuredOutputs(json=schema, disable_any_whitespace=True)))
    mask, found = xgrammar.allocate_token_bitmask(1, END + 1), []
    for walk in range(count):
        random, matcher, output = Random(walk), Matcher(compiled, [END]), bytearray()
        while not matcher.ended and len(output) < longest:
            matcher.fill(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: END + 1]
            allowed = np.flatnonzero(bits).tolist()
            assert allowed, f"nothing may follow {bytes(output)!r}"
            ends = [token for token in allowed if token in CLOSERS or token == END]
            token = random.choice(ends if ends and random.random() < 0.4 else allowed)
            matcher.follow([token])
            output += bytes([token] if token != END else [])
        if matcher.ended:
            found.append(bytes(output))
    return found


class _Twice(Exception):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise _Twice
    return dict(pairs)


def _finite(text: str) -> float:
    return max(-1e308, min(float(text), 1e308))


def check(schema: Any, found: list[bytes]) -> None:
    validator = jsonschema_rs.Draft202012Validator(schema)
    for output in found:
        try:
            value = json.loads(output.decode(), object_pairs_hook=_once, parse_float=_finite)
        except _Twice:
            continue  # no grammar can forbid it
        validator.validate(value)


def an(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


ITEM = {"type": "object", "title": "Item", "properties": {"n": {"type": "string"}}, "required": ["n"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
        {"type": "object", "required": ["b"]},
        {"required": ["b"]},
        {"type": "object", "required": ["b"], "additionalProperties": {"type": "null"}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "anyOf": [{"required": ["a"]}]},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "allOf": [{"type": "object"}]},
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        {"$defs": {"i": {"type": "integer"}}, **an(a={"$ref": "#/$defs/i", "minimum": 7, "maximum": 8})},
        {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 1},
        an(a={"type": "integer", "maximum": 9, "anyOf": [{"minimum": 5}, {"minimum": 6}]}),
        an(a={"allOf": [{"type": "integer"}], "maximum": 9}),
        {"allOf": [{"type": "object"}, {"required": ["a"]}, {"properties": {"a": {"type": "null"}}}]},
        an(a={"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}),
        an(a={"type": "string", "pattern": r"^\d{3,}$", "minLength": 2, "maxLength": 4}),
        an(a={"type": "string", "pattern": "^[A-Z][a-z]{2}x*$", "maxLength": 4}),
        an(a={"type": "string", "pattern": r"^[A-Z]{2}\d{3}$", "minLength": 1, "maxLength": 5}),
        an(a={"type": "string", "format": "no such format", "maxLength": 3}),
        an(a={"type": "integer", "enum": ["x", 3]}),
        an(a={"type": ["string", "null"], "const": "x"}),
        an(a={"type": "integer", "multipleOf": 5}),
        an(a={"type": "integer", "exclusiveMinimum": 1.5, "maximum": 3.5}),
        {"minimum": 3},
        {"minLength": 2},
        {"type": ["integer", "string"], "minimum": 3, "maxLength": 2},
        {"type": "object", "properties": {"a": False, "b": {"type": "null"}}},
        {"anyOf": [False, {"type": "null"}]},
        {"$defs": {"any": True}, "$ref": "#/$defs/any"},
        {"type": "string", "pattern": '^"x"$'},
        {"type": "string", "pattern": r"^a\\b+$"},
        {"type": "string", "pattern": "^\n\\n\\t{2}$"},
        {"type": "string", "pattern": r'^["\\a-c\n]{2}$'},
        {"type": "string", "pattern": r"^[\x22]+\x22\u005c$"},
        {"type": "string", "pattern": r'^[\s"]$'},
        {"type": "object", "patternProperties": {'^"a$': {"type": "null"}}, "additionalProperties": False},
        {"$defs": {"I": ITEM}, **an(i={"allOf": [{"$ref": "#/$defs/I"}], "description": "of pydantic"})},
        {"$defs": {"C": CAT, "D": DOG}, "type": "object", "oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}]},
        {"$defs": {"I": ITEM}, "allOf": [{"$ref": "#/$defs/I"}, {"properties": {"m": {"type": "null"}}}]},
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node", "properties": {"v": {"maximum": 3}}},
        an(c={"type": "array", "items": {"$ref": "#/properties/d"}, "maxItems": 1}, d={"type": "boolean"}),
        an(a={"type": "array", "prefixItems": [{"type": "null"}], "items": False}),
    ],
    ids=str,
)
def test_what_comes_is_valid(compiler: Compiler, schema: Any) -> None:
    found = outputs(compiler, schema, 40)
    assert len(found) > 20
    check(schema, found)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (an(a={"type": "integer"}) | {"required": ["b"]}, "'b' is required"),
        ({"type": "string", "const": 5}, "no value of enum or const"),
        ({"enum": [1, 2, 3], "minimum": 2}, "minimum beside enum"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "string", "format": "date", "maxLength": 3}, "format beside maxLength"),
        ({"type": "string", "pattern": "^(a|b)+$", "maxLength": 3}, "one repetition"),
        ({"type": "string", "pattern": "^a+b+$", "maxLength": 3}, "one repetition"),
        ({"type": "string", "pattern": "^$", "maxLength": 3}, "one repetition"),
        ({"type": "string", "pattern": "^ab?c$", "minLength": 4}, "no length is left"),
        ({"type": "integer", "multipleOf": 10**400, "minimum": 1}, "multipleOf beside limits"),
        ({"type": "string", "pattern": "^a{3}$", "maxLength": 2}, "no length is left"),
        ({"type": "string", "pattern": "^(?!b)[ab]$"}, "lookaround"),
        ({"$defs": {"a": {"$anchor": "x", "type": "integer"}}, "$ref": "#x"}, "only pointers"),
        ({"$ref": "#"}, "nothing but itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/a", "minimum": 1}}, "$ref": "#/$defs/a"}, "refers to itself"),
        ({"allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]}, "pattern in two schemas"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no type is left"),
        ({"allOf": [an(a={}), {"properties": {"b": {}}}]}, "additionalProperties beside properties"),
        ({"anyOf": [{"anyOf": [{"minimum": 1}]}], "allOf": [{"anyOf": [{"maximum": 3}]}]}, "anyOf in two schemas"),
        ({"items": [{"type": "null"}]}, "use prefixItems"),
        ({"minimum": "3"}, "minimum must be a number"),
        ({"properties": {"ab": {}}, "patternProperties": {"^a": {"type": "null"}}}, "matches patternProperties"),
        ({"propertyNames": {"maxLength": 1}, "properties": {"ab": {}}}, "propertyNames"),
        ({"anyOf": {}}, "anyOf must be a list"),
        ({"properties": {"a": 3}}, "a schema must be an object"),
    ],
)
def test_what_is_not_followed_is_refused(compiler: Compiler, schema: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=f"json: .*{why}"):
        outputs(compiler, schema, 0)


def test_deep_and_large_ones_end() -> None:
    deep: Any = {"type": "null"}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        followed(deep)
    every = {
        f"d{i}": {"properties": {n: {"$ref": f"#/$defs/d{i + 1}", "minProperties": 1} for n in "abcd"}}
        for i in range(40)
    }
    assert len(json.dumps(followed({"$defs": every | {"d40": {}}, "$ref": "#/$defs/d0"}))) < 50_000  # each merged once
    wide = {"anyOf": [{"required": [str(i)]} for i in range(400)], "properties": {str(i): {} for i in range(400)}}
    with pytest.raises(ValueError, match="over 100000 schemas"):
        followed(wide)


NAMES = st.sampled_from(["a", "b", 'c"'])
CONSTANTS = st.sampled_from([None, True, 0, 1, 2.5, "", "a", 'q"\\', [1], {"a": None}])
PATTERNS = st.sampled_from(
    ["^a+$", "b", r'^["\\]{1,2}$', r"^\w\.[^\d]$", "^(ab|\t)?$", r"^[a-c\-]*$", "^x{2,}$", r"^\d[A-C]{1,2}\\$"]
)
SMALL = st.integers(0, 3)


def _some(**keywords: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    types = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
    limits = {"minimum": st.integers(-20, 20), "exclusiveMaximum": st.integers(-20, 20) | st.just(2.5)}
    string = _some(minLength=SMALL, maxLength=SMALL, pattern=PATTERNS, format=st.sampled_from(["date", "x"]))
    array = _some(items=inner, prefixItems=st.lists(inner, min_size=1, max_size=2), minItems=SMALL, maxItems=SMALL)
    thing = _some(
        properties=st.dictionaries(NAMES, inner, max_size=3),
        required=st.lists(NAMES, max_size=2, unique=True),
        additionalProperties=inner,
        patternProperties=st.dictionaries(PATTERNS, inner, max_size=1),
        minProperties=SMALL,
        maxProperties=SMALL,
    )
    several = st.lists(inner, min_size=1, max_size=3)
    parts = st.one_of(
        _some(**limits, multipleOf=st.sampled_from([2, 0.5])),
        string,
        array,
        thing,
        st.builds(dict, anyOf=several),
        st.builds(dict, allOf=several),
        st.builds(dict, enum=st.lists(CONSTANTS, min_size=1, max_size=3)),
        st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, st.sampled_from("xy")),
    )
    typed = st.builds(dict, type=types | st.lists(types, min_size=1, max_size=2, unique=True))
    return st.lists(st.one_of(parts, typed), min_size=1, max_size=3).map(
        lambda all: {k: v for p in all for k, v in p.items()}
    )


SCHEMA = st.recursive(
    st.booleans() | st.builds(dict, type=st.sampled_from(["integer", "null", "string"])), _schemas, max_leaves=6
)
TRIED = {"accepted": 0, "refused": 0}


@settings(max_examples=300, deadline=None)
@given(SCHEMA, SCHEMA, SCHEMA)
def _whatever(compiler: Compiler, schema: Any, x: Any, y: Any) -> None:
    if not isinstance(schema, dict):
        return
    schema = {**schema, "$defs": {"x": x, "y": y}}
    try:
        found = outputs(compiler, schema, 8)
    except InvalidRequest:
        TRIED["refused"] += 1
        return
    TRIED["accepted"] += 1
    note(f"{json.dumps(schema)} became {json.dumps(followed(schema))}")
    check(schema, found)


def test_whatever_is_accepted_is_followed(compiler: Compiler) -> None:
    TRIED.update(accepted=0, refused=0)
    _whatever(compiler)
    assert TRIED["accepted"] > 0.3 * sum(TRIED.values())
