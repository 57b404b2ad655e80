"""Structured output of models with random weights: whatever they would say, it parses and validates, and is the same
in company, preempted, in chunks, and after steps that failed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import LLM, FrameworkError, InvalidRequest, Rejected, SamplingParams, StructuredOutputs, hookimpl
from framework import grammars as library
from framework.grammars import Compiler, Matcher, Vocabulary, normalised

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b", None, 3]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}]}
    },
    "$ref": "#/$defs/node",
}
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"}
PALINDROME = 'root ::= "a" root "a" | "b" root "b" | "c"\n'


def is_json_of(schema: dict[str, Any]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return check


def is_palindrome(text: str) -> bool:
    return text == text[::-1] and set(text) <= set("abc") and text[len(text) // 2] == "c" and text.count("c") == 1


def _regex(pattern: str) -> tuple[StructuredOutputs, Callable[[str], bool]]:
    return StructuredOutputs(regex=pattern), lambda text: re.fullmatch(pattern, text) is not None


CHOICES = ("yes", "no", 'é🙂 "quoted"\n\\', "yesterday")
KINDS: dict[str, tuple[StructuredOutputs, Callable[[str], bool]]] = {
    "schema": (StructuredOutputs(json=PERSON, disable_any_whitespace=True), is_json_of(PERSON)),
    "schema as text": (StructuredOutputs(json=json.dumps(PERSON), disable_any_whitespace=True), is_json_of(PERSON)),
    "recursive": (StructuredOutputs(json=TREE, disable_any_whitespace=True), is_json_of(TREE)),
    "date": _regex(r"(19|20)\d{2}-(0[1-9]|1[0-2])-\d\d"),
    "dots": _regex(r".{3}[.]\.[^\]a]\\."),
    "umlauts": _regex(r"[äöü]{2,5}ß?"),
    "choice": (StructuredOutputs(choice=CHOICES), lambda text: text in CHOICES),
    "grammar": (StructuredOutputs(grammar=PALINDROME), is_palindrome),
    "tag": (
        StructuredOutputs(structural_tag={"format": TAG}),
        lambda text: is_json_of(PERSON)(text.removeprefix("<f>").removesuffix("</f>")),
    ),
}
FREE = SamplingParams(max_tokens=12, temperature=0)
PROMPT = "In 1984 there were"


def params(name: str, **fields: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=KINDS[name][0], **{"max_tokens": 300, "seed": 1} | fields)


def check(name: str, text: str) -> None:
    assert KINDS[name][1](text), f"{name}: {text!r}"


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_llama_spm", "tiny_llama_gguf"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(request.getfixturevalue(request.param)), dtype="float32", kv_blocks=1200) as llm:
        yield llm


def test_outputs_follow(llm: LLM) -> None:
    for name in KINDS:
        some = [params(name, seed=seed) for seed in range(12)] + [params(name, temperature=0)]
        found = llm.generate([PROMPT] * len(some), some)
        whole = [output.text for output in found if output.finish_reason == "stop"]
        for text in whole:
            check(name, text)
        assert len(whole) > 6, f"{name}: {[output.text for output in found]}"
        assert len(set(whole)) > 1 or name == "recursive"
    assert llm.engine.stats().kv_holding == 0


def test_json_objects_are_objects(llm: LLM) -> None:
    for seed in range(8):
        wanted = StructuredOutputs(json_object=True, disable_any_whitespace=True)
        [output] = llm.generate(PROMPT, SamplingParams(structured_outputs=wanted, seed=seed, max_tokens=400))
        assert output.text.startswith("{")
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)


def test_streamed_and_several_at_once(llm: LLM) -> None:
    for name in KINDS:
        texts = [output.text for output in llm.generate(PROMPT, params(name, seed=7), n=4)]
        for text in texts:
            check(name, text)
        assert "".join(llm.stream(PROMPT, params(name, seed=7))) == texts[0]


def test_company_changes_nothing(llm: LLM) -> None:
    alone = {name: llm.generate(PROMPT, params(name))[0].token_ids for name in KINDS}
    free = llm.generate(PROMPT, FREE)[0].token_ids
    mixed = [one for name in KINDS for one in (params(name), FREE)]
    found = [output.token_ids for output in llm.generate([PROMPT] * len(mixed), mixed)]
    assert found[::2] == list(alone.values())
    assert found[1::2] == [free] * len(alone)


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_and_in_chunks(tiny_llama: Path, preemption: str, overlap: str) -> None:
    names = ["schema", "date", "grammar", "tag"] * 2
    some = [params(name, seed=seed) for seed, name in enumerate(names)]
    with LLM(str(tiny_llama), dtype="float32", kv_blocks=1200) as llm:
        alone = [llm.generate(PROMPT, one)[0].token_ids for one in some]
    with LLM(
        str(tiny_llama), dtype="float32", kv_blocks=12, block_size=8, swap_space="1", preemption=preemption,
        overlap=overlap, max_num_batched_tokens=7, max_model_len=90, prefix_cache=False,
    ) as llm:  # fmt: skip
        found = [output.token_ids for output in llm.generate([PROMPT] * len(some), [_cut(one) for one in some])]
        stats = llm.engine.stats()
    assert found == [tokens[:60] for tokens in alone]
    assert (stats.preemptions_swap if preemption == "swap" else stats.preemptions_recompute) > 0
    assert stats.kv_holding == stats.kv_swapped == stats.running == stats.waiting == 0


def _cut(given: SamplingParams) -> SamplingParams:
    return SamplingParams(structured_outputs=given.structured_outputs, seed=given.seed, max_tokens=60)


class Breaker:
    """Fails every third step, behind the masks."""

    def __init__(self) -> None:
        self.steps = 0

    @hookimpl(trylast=True)
    def process_logits(self, logits: torch.Tensor) -> None:
        self.steps += 1
        if self.steps % 3 == 0:
            raise RuntimeError("a step that fails")


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_steps_that_fail_are_computed_again(tiny_llama: Path, overlap: str) -> None:
    some = [params(name) for name in ("schema", "date", "grammar")]
    with LLM(str(tiny_llama), dtype="float32", kv_blocks=200) as llm:
        alone = [llm.generate(PROMPT, one)[0].token_ids for one in some]
    flags: dict[str, Any] = {"dtype": "float32", "kv_blocks": 200, "overlap": overlap}
    with LLM(str(tiny_llama), plugins=[("breaker", Breaker())], **flags) as llm:
        for one, tokens in zip(some, alone, strict=True):
            assert llm.generate(PROMPT, one)[0].token_ids == tokens
        assert llm.engine.stats().failed_steps > 10


def test_the_end_comes_where_the_grammar_may_end(llm: LLM) -> None:
    ends = llm.tokenizer.eos_token_ids
    wanted = StructuredOutputs(regex="(ab){2,}")
    biased = {ends[0]: 100.0}
    [output] = llm.generate("x", SamplingParams(structured_outputs=wanted, logit_bias=biased, temperature=0))
    assert output.text == "abab" and output.finish_reason == "stop"
    [output] = llm.generate(
        "x", SamplingParams(structured_outputs=wanted, logit_bias=biased, temperature=0, min_tokens=9)
    )
    assert re.fullmatch("(ab){3,}", output.text) and len(output.token_ids) > 9
    one = StructuredOutputs(choice=("ab",))
    for fields in ({"min_tokens": 12}, {"ignore_eos": True}):
        [output] = llm.generate("x", SamplingParams(structured_outputs=one, max_tokens=12, **fields))
        assert output.text == "ab" and len(output.token_ids) == 12
        assert set(output.token_ids[-3:]) <= set(ends)


def test_a_stop_token_that_is_text_stays_text(llm: LLM) -> None:
    b = llm.tokenizer.token_to_id("b")
    assert b is not None
    for stop in ({"stop_token_ids": (b,)}, {"stop": ("b",), "include_stop_str_in_output": True}):
        wanted = StructuredOutputs(regex="a+b+a+")
        given = SamplingParams(structured_outputs=wanted, logit_bias={b: 100.0}, temperature=0, **stop)
        [output] = llm.generate("x", given)
        assert output.text in ("ab", "a") and output.stop_reason in (b, "b")


def test_ambiguous_grammars_end_alone(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody tried out before: the Python API takes what compiles."""
    monkeypatch.setattr(library, "PATIENCE", 0.02)
    monkeypatch.setattr(library, "PER_TOKEN", 0.0)
    with LLM(str(tiny_llama), dtype="float32", kv_blocks=200) as llm:
        slow = SamplingParams(
            structured_outputs=StructuredOutputs(regex="((a{1,1000}){1,1000}){1,1000}b"),
            max_tokens=400,
            logit_bias={llm.tokenizer.token_to_id("a") or 0: 100.0},
            temperature=0,
        )
        free = llm.generate(PROMPT, FREE)[0].text
        stream = llm.stream(PROMPT, slow)
        with pytest.raises(FrameworkError, match="too long to follow"):
            for _ in stream:
                assert llm.generate(PROMPT, FREE)[0].text == free
        assert llm.engine.stats().kv_holding == 0 and llm.engine.stats().failed_steps == 0


@pytest.mark.parametrize("company", [0, 4])
def test_masks_that_take_long_end_alone(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, company: int) -> None:
    """What following takes does not count here, but to say which tokens may come takes longer from step to step; among
    many rows, whose masks are made at once, it has to be found first."""
    from framework.plugins.samplers import grammar

    def follow(self: Matcher, tokens: list[int], do: Any = Matcher.follow) -> None:
        spent = self._spent
        do(self, tokens)
        self._spent, self.failed = spent, None  # only masks count

    monkeypatch.setattr(Matcher, "follow", follow)
    monkeypatch.setattr(library, "PATIENCE", 0.02)
    monkeypatch.setattr(library, "PER_TOKEN", 0.0005)
    monkeypatch.setattr(grammar, "SLOW_ROW", 0.0005)
    monkeypatch.setattr(grammar, "ALONE", 1)
    ambiguous = StructuredOutputs(grammar=f'root ::= ({" x" * 30})* "b"\nx ::= "a"* [a-f]* "a"*\n')
    digits = SamplingParams(structured_outputs=StructuredOutputs(regex="[0-9]{40}"), max_tokens=60, temperature=0)
    with LLM(str(tiny_llama), dtype="float32", kv_blocks=400) as llm:
        bias = {llm.tokenizer.token_to_id("a") or 0: 100.0}
        slow = SamplingParams(structured_outputs=ambiguous, max_tokens=150, logit_bias=bias, temperature=0)
        alone = llm.generate(PROMPT, digits)[0].text
        stream = llm.stream(PROMPT, slow)
        next(stream)
        texts = [output.text for output in llm.generate([PROMPT] * company, digits)] if company else []
        assert not company or llm.engine.stats().running == 0, "it was not found among the others"
        with pytest.raises(Rejected, match="too long to follow") as refused:
            list(stream)
        assert refused.value.status == 400
        assert len(alone) == 40 and texts == [alone] * company
        assert llm.engine.stats().kv_holding == 0 and llm.engine.stats().failed_steps == 0


def test_bad_ones_in_python(llm: LLM) -> None:
    with pytest.raises(Rejected, match="regex: Regex parsing error at position 5: Two consecutive") as refused:
        llm.generate("x", {"structured_outputs": StructuredOutputs(regex="foo**")}, n=3)
    assert refused.value.status == 400
    for bad in (StructuredOutputs(), StructuredOutputs(regex="a", json_object=True), StructuredOutputs(choice=())):
        with pytest.raises(InvalidRequest, match="structured_outputs: "):
            llm.generate("x", SamplingParams(structured_outputs=bad))
    assert llm.engine.stats().waiting == 0
    check("date", llm.generate(PROMPT, params("date"))[0].text)


def test_grammars_are_kept_up_to_a_size(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from framework.plugins.samplers import grammar

    with LLM(str(tiny_llama), dtype="float32", kv_blocks=200) as llm:
        compiled: list[StructuredOutputs] = []
        monkeypatch.setattr(
            Compiler, "compile", lambda self, one, do=Compiler.compile: compiled.append(one) or do(self, one)
        )
        for _ in range(3):
            for pattern in ("a{3}", "b{3}"):
                wanted = StructuredOutputs(regex=pattern)
                assert llm.generate("x", SamplingParams(structured_outputs=wanted))[0].text == pattern[0] * 3
        assert len(compiled) == 2
        monkeypatch.setattr(grammar, "KEPT_BYTES", 1)
        for pattern in ("c{3}", "d{3}", "a{3}"):
            llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs(regex=pattern)))
        assert len(compiled) == 5
        compiled.clear()
        some = [SamplingParams(structured_outputs=StructuredOutputs(regex=f"{char}{{40}}")) for char in "efgh"]
        for k, output in enumerate(llm.generate([PROMPT] * 12, some * 3, n=2)):
            assert output.text == "efgh"[k // 2 % 4] * 40
        assert len(compiled) == 4, "what requests have is kept whatever its size"
        [held] = llm.engine.plugins.active(grammar.StructuredOutput)
        assert not held._used and not held._matchers and not held._idle and held._idle_bytes == 0


def test_the_interpreter_ends_while_something_compiles(tiny_llama: Path) -> None:
    """Nobody tried it out before: it takes for ever."""
    program = f"""
import _thread, threading, time
from framework import LLM, SamplingParams, StructuredOutputs
from framework.grammars import Compiler
bomb = "|".join("[a-z]{{%d}}" % i for i in range(1, 3000))
compiling, compile = threading.Event(), Compiler.compile
def begun(self, wanted):
    compiling.set()
    return compile(self, wanted)
Compiler.compile = begun
def interrupt():
    compiling.wait()
    time.sleep(0.5)
    _thread.interrupt_main()
with LLM({str(tiny_llama)!r}, dtype="float32", kv_blocks=100) as llm:
    ask = SamplingParams(structured_outputs=StructuredOutputs(regex=bomb))
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        llm.generate("x", ask)
    except KeyboardInterrupt:
        print("interrupted")
print("over")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["interrupted", "over"] and done.returncode == 0, done.stderr[-2000:]


# The library


@pytest.fixture(scope="module")
def compiler(tiny_llama: Path) -> Compiler:
    from framework.checkpoint import Settings, open_checkpoint
    from framework.registry import load_plugins

    tokenizer = open_checkpoint(Settings(model=str(tiny_llama)), load_plugins()).tokenizer()
    return Compiler(Vocabulary.of(tokenizer, tokenizer.vocab_size + 70))


def accepts(compiler: Compiler, wanted: StructuredOutputs, text: bytes) -> bool:
    """Byte by byte: each has a token."""
    vocabulary = compiler.vocabulary
    of = {data: id for id, data in enumerate(vocabulary.tokens)}
    matcher = Matcher(compiler.compile(normalised(wanted)), vocabulary.ends)
    matcher.follow([*(of[bytes([byte])] for byte in text), vocabulary.ends[0]])
    return matcher.failed is None


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "minItems": 1}, ["[1]", '["a", {}]'], ["[]", "{}"]),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        ({"type": "object"}, ["{}", '{"a": [1, null]}'], ["[]", "3"]),
        ({"properties": {"not": {"type": "integer"}}}, ['{"not": 1}'], ['{"not": "a"}']),
        ({"const": {"uniqueItems": True}}, ['{"uniqueItems": true}'], ["{}"]),
        (True, ["{}", "3", "null"], ["nul"]),
    ],
)
def test_schemas(compiler: Compiler, schema: Any, good: list[str], bad: list[str]) -> None:
    wanted = StructuredOutputs(json=json.dumps(schema))
    for text in good:
        jsonschema.validate(json.loads(text), schema)
        assert accepts(compiler, wanted, text.encode()) or accepts(compiler, wanted, text.replace(" ", "").encode())
    for text in bad:
        assert not accepts(compiler, wanted, text.encode())


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"items": {"type": "array", "uniqueItems": True}},
        {"anyOf": [{"properties": {"x": {"contains": {}}}}]},
        {"$defs": {"a": {"if": {}, "then": {}}}, "$ref": "#/$defs/a"},
        {"allOf": [{"type": "object"}, {"type": "null"}]},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/nothing"},
        {"type": "objekt"},
        {"type": "integer", "minimum": 3, "maximum": 1},
    ],
)
def test_what_would_not_be_enforced_is_refused(compiler: Compiler, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs: json: \S") as refused:
        compiler.compile(normalised(StructuredOutputs(json=schema)))
    assert ".cc" not in str(refused.value) and len(str(refused.value)) < 400
    inside = {"format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(InvalidRequest, match=r"structured_outputs: structural_tag: \S"):
        compiler.compile(normalised(StructuredOutputs(structural_tag=inside)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6), min_size=1, max_size=4
    ),
    st.text(max_size=6),
)
def test_choices_are_taken_literally(compiler: Compiler, texts: list[str], other: str) -> None:
    wanted = StructuredOutputs(choice=tuple(texts))
    assert all(accepts(compiler, wanted, text.encode()) for text in texts)
    assert accepts(compiler, wanted, other.encode()) == (other in texts)


def test_control_characters_beside_digits(compiler: Compiler) -> None:
    wanted = StructuredOutputs(grammar=r'root ::= "\x1f" "0\\x1f" "é1" [^a]')
    assert accepts(compiler, wanted, "\x1f0\\x1fé1b".encode())


def test_older_structural_tags(compiler: Compiler) -> None:
    tag = {"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}
    wanted = StructuredOutputs(structural_tag={"type": "structural_tag", "structures": [tag], "triggers": ["<f"]})
    assert accepts(compiler, wanted, b"free <f>true</f> text")
    assert not accepts(compiler, wanted, b"free <f>3</f> text")


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutputs(regex='"[^a]"'),
        StructuredOutputs(regex='".*"'),
        StructuredOutputs(grammar='root ::= "\\"" [^a] "\\""'),
        StructuredOutputs(json={"type": "string"}),
        StructuredOutputs(json={"type": "string", "maxLength": 3}),
        StructuredOutputs(structural_tag={"format": {"type": "json_schema", "json_schema": {"type": "string"}}}),
    ],
)
def test_what_is_no_text_is_not_allowed(compiler: Compiler, wanted: StructuredOutputs) -> None:
    for good in ("b", "é", "漢", "🙂", "\x7f", "\ud7ff", "\ue000", "\U0010ffff"):
        assert accepts(compiler, wanted, f'"{good}"'.encode())
    for bad in (b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\xff"):
        assert not accepts(compiler, wanted, b'"' + bad + b'"')
    if wanted.regex is None and wanted.grammar is None:
        for byte in range(0x20):
            assert not accepts(compiler, wanted, b'"%c"' % byte)


def test_one_spelling() -> None:
    spelt = [
        normalised(StructuredOutputs(json=one)) for one in (PERSON, json.dumps(PERSON), json.dumps(PERSON, indent=2))
    ]
    assert len(set(spelt)) == 1 and json.loads(str(spelt[0].json)) == PERSON
    assert normalised(spelt[0]) == spelt[0]
