"""Tool parsers: the bundled ones and one of a plugin's, by the conformance kit; what each family writes beside that."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_docs import ROOT, code_blocks

from framework import Parsing, ToolDelta, ToolParser, tool_parser
from framework.registry import load_plugins
from framework.settings import Settings
from framework.testing import ToolParserConformance

Call = tuple[str, str]


class TestHermes(ToolParserConformance):
    provider = "hermes"

    def spell(self, calls: Sequence[Call]) -> str:
        return "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
        )


class TestHermesArgumentsFirst(TestHermes):
    """Told when the name is."""

    def spell(self, calls: Sequence[Call]) -> str:
        return "".join(f'<tool_call>{{"arguments":{a},"name":"{n}"}}</tool_call>' for n, a in calls)

    def test_calls_come_early(self) -> None:
        pass


class TestHermesArray(ToolParserConformance):
    """As SmolLM2 writes it."""

    provider = "hermes"

    def spell(self, calls: Sequence[Call]) -> str:
        written = ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
        return f"<tool_call>[{written}]</tool_call>"


class TestMistralArray(ToolParserConformance):
    provider = "mistral"

    def spell(self, calls: Sequence[Call]) -> str:
        return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls) + "]"


class TestMistralNames(ToolParserConformance):
    provider = "mistral"

    def spell(self, calls: Sequence[Call]) -> str:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


class TestMistralIds(ToolParserConformance):
    provider = "mistral"

    def spell(self, calls: Sequence[Call]) -> str:
        return "".join(f"[TOOL_CALLS]{name}[CALL_ID]x7Gh2kLm9[ARGS]{arguments}" for name, arguments in calls)


class TestLlama(ToolParserConformance):
    provider = "llama3_json"
    around: ClassVar[Sequence[tuple[str, str]]] = (("", ""), ("\n", "\n"), ("", " Two."))

    def spell(self, calls: Sequence[Call]) -> str:
        return "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls)


class TestLlamaTag(ToolParserConformance):
    provider = "llama3_json"

    def spell(self, calls: Sequence[Call]) -> str:
        return "".join(
            f'<|python_tag|>{{"type": "function", "name": "{name}", "parameters": {arguments}}}'
            for name, arguments in calls
        )


def documented() -> Any:
    (block,) = (block for block in code_blocks(ROOT / "docs/plugins.md", "python") if "ToolParser" in block)
    names: dict[str, Any] = {}
    exec(block, names)
    return names["providers"]()[0].factory()


class TestTagged(ToolParserConformance):
    """Of a plugin, the documentation's: what a call is need not be JSON."""

    def parser(self, names: Sequence[str]) -> ToolParser:
        parser: ToolParser = documented()(names)
        return parser

    def spell(self, calls: Sequence[Call]) -> str:
        return "\n".join(f"<function={name}>{arguments}</function>" for name, arguments in calls)


# The kit can fail

TAG = "<tool_call>"


class Patient(ToolParser):
    """Waits for the end of a call."""

    def parse(self) -> Parsing[None]:
        while (yield from self.until(TAG)):
            written = json.loads((yield from self.value()) or "{}")
            if self.begin(written.get("name", "")):
                self._argue(json.dumps(written["arguments"], ensure_ascii=False))
                yield from self.skip("</tool_call>")


class Trusting(ToolParser):
    """Takes every object for a call."""

    def parse(self) -> Parsing[None]:
        while (yield from self.until("{")):
            self._text = "{" + self._text
            if not (yield from self.call()):
                self._held.clear()


class Hasty(ToolParser):
    """Looks for markers in each piece by itself."""

    def push(self, text: str) -> list[ToolDelta]:
        before, marker, rest = text.partition(TAG)
        if not marker:
            self._give(text, None)
            return self._take()
        self._give(before, None)
        self._text += rest
        return super().push("")

    def parse(self) -> Parsing[None]:
        yield from self.call()


BROKEN = {
    Patient: ["test_calls_come_early", "test_any_text"],
    Trusting: ["test_unknown_tools_are_content", "test_text_is_left_alone"],
    Hasty: ["test_calls"],
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_parser_fails(kind: type[ToolParser]) -> None:
    class Suite(TestHermes):
        def parser(self, names: Sequence[str]) -> ToolParser:
            return kind(names)

    for check in BROKEN[kind]:
        with pytest.raises((AssertionError, ValueError)):
            getattr(Suite(), check)()


# What families write


@functools.cache
def made(provider: str) -> type[ToolParser]:
    parser: type[ToolParser] = load_plugins().create("tool_parser", provider, settings=Settings())
    return parser


def parse(provider: str, *pieces: str) -> tuple[str, list[list[str]]]:
    """(content, [name, arguments] of each call)"""
    parser = made(provider)(["f", "g"])
    content, calls = "", []
    for delta in [*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()]:
        if delta.name is not None:
            calls.append([delta.name, ""])
        if delta.call is None:
            content += delta.text
        else:
            calls[delta.call][1] += delta.text
    return content, calls


CASES: list[tuple[str, str, str, list[list[str]]]] = [
    # arguments as a string, as null, or missing
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [["f", '{"a": 1}']]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [["f", "{}"]]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [["f", "{}"]]),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": [1]}</tool_call>', "", [["f", "[1]"]]),
    # damaged: what there is of the arguments, and the next call is found
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call> x', " x", [["f", '{"a": [1}}']]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x', "x", [["f", '{"a": 1']]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}\n<tool_call>{"name": "g"}</tool_call>', "",
     [["f", "{}"], ["g", "{}"]]),
    ("hermes", '<tool_call>{"name": "f", oops}</tool_call>', " oops}</tool_call>", [["f", ""]]),
    ("hermes", '<tool_call>{oops}</tool_call> <tool_call>{"name": "g"}</tool_call>', "<tool_call>{oops}</tool_call>",
     [["g", "{}"]]),
    ("hermes", '<tool_call><tool_call>{"name": "g"}</tool_call>', "<tool_call>", [["g", "{}"]]),
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("hermes", 'Yes.\n<tool_call>{"name": "f"}</tool_call>\n', "Yes.", [["f", "{}"]]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>\nNo.\n', "\nNo.\n", [["f", "{}"]]),
    # the marker is text without it
    ("mistral", '[{"name": "f", "arguments": {}}]', '[{"name": "f", "arguments": {}}]', []),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [["f", '{"a": 1}']]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "h"}]', ' {"name": "h"}]', [["f", "{}"]]),
    # only where an answer begins
    ("llama3_json", 'Like {"name": "f", "parameters": {}}', 'Like {"name": "f", "parameters": {}}', []),
    ("llama3_json", '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', "", [["f", "{}"], ["g", "{}"]]),
    ("llama3_json", '<|python_tag|>f.call(a=1)', '<|python_tag|>f.call(a=1)', []),
]  # fmt: skip


@pytest.mark.parametrize(("provider", "text", "content", "calls"), CASES, ids=range(len(CASES)))
def test_what_families_write(provider: str, text: str, content: str, calls: list[list[str]]) -> None:
    assert parse(provider, text) == parse(provider, *text) == (content, calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
WORDS = ["tool_call", "TOOL_CALLS", "|python_tag|", "<tool_call>{", '"name":', "a", "🙂"]
TEXTS = st.lists(st.sampled_from([*'<>[]{}|"\\;,: \n', *WORDS]), max_size=12).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans(), st.data())
def test_any_arguments(arguments: dict[str, Any], ascii: bool, data: st.DataObject) -> None:
    """What json writes is what comes, cut anywhere."""
    written = json.dumps(arguments, ensure_ascii=ascii, indent=data.draw(st.sampled_from([None, 2])))
    for provider, text in (
        ("hermes", f'A<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>B'),
        ("mistral", f'A[TOOL_CALLS]f[ARGS]{written}B'),
        ("llama3_json", f'A<|python_tag|>{{"name": "f", "parameters": {written}}}B'),
    ):  # fmt: skip
        ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
        assert parse(provider, *pieces) == ("AB", [["f", written]])


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=6), st.sampled_from(["hermes", "mistral", "llama3_json"]))
def test_text_without_tools_is_content(pieces: list[str], provider: str) -> None:
    text = "".join(pieces)
    assert parse(provider, *pieces) == (text, [])


def test_time_grows_with_the_text() -> None:
    """Whatever it is: markers that begin nothing, objects that are no calls, spaces, strings without an end."""
    for provider, piece in (
        ("hermes", "<tool_call>{"), ("hermes", '<tool_call>{"a": "'), ("hermes", "<tool_"), ("hermes", " "),
        ("llama3_json", '{"a": ['), ("mistral", "[TOOL_CALLS]["),
    ):  # fmt: skip
        text = piece * (300_000 // len(piece))
        assert parse(provider, text) == (text, [])
    pieces = '[TOOL_CALLS]f{"a":' * 10_000
    assert parse("mistral", pieces)[0] == parse("mistral", *pieces)[0]


class Counting:
    """A pattern that counts the characters from where it begins to look to where it stops."""

    def __init__(self, pattern: re.Pattern[str], looks: list[int]) -> None:
        self._pattern, self._looks = pattern, looks

    def match(self, text: str, start: int = 0) -> re.Match[str] | None:
        return self._counted(self._pattern.match(text, start), text, start)

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        return self._counted(self._pattern.search(text, start), text, start)

    def _counted(self, found: re.Match[str] | None, text: str, start: int) -> re.Match[str] | None:
        self._looks.append((found.end() if found else len(text)) - start)
        return found


@pytest.mark.parametrize(
    ("provider", "before", "piece"),
    [
        ("mistral", "[TOOL_CALLS]", "name"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]", "x7Gh"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", "1234"),
        ("mistral", "[TOOL_CALLS]", "    "),
        ("hermes", "<tool_call>", " \n  "),
        ("hermes", '<tool_call>{"a": ', "1234"),
        ("hermes", '<tool_call>{"name": "f", "arguments": ', "nnnn"),
        ("hermes", '<tool_call>{"name": "f", "arguments": ', " \n  "),
        ("hermes", '<tool_call>{"name": "f", "arguments": "', '\\"ab'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [', "{1},"),
        ("llama3_json", "", "    "),
    ],
)
def test_text_is_scanned_once(provider: str, before: str, piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the pieces are that it comes in."""
    looks = list[int]()
    for where in (tool_parser, tool_parser._Brackets):
        for name, value in list(vars(where).items()):
            if isinstance(value, re.Pattern):
                monkeypatch.setattr(where, name, Counting(value, looks))
    pieces = [before, *[piece] * 2000]
    assert parse(provider, *pieces) == parse(provider, "".join(pieces))
    assert 8000 < sum(looks) < 3 * 2 * len("".join(pieces))  # twice parsed


# Which parser


TEMPLATES = [
    ('{{"<tool_call>"}} {"name": .., "arguments": ..}', "hermes"),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
    ("<|start_header_id|> <|python_tag|>", "llama3_json"),
    ('<|start_header_id|> {"name": function name, "parameters": dictionary}', "llama3_json"),
    ("<tool_call>\n<function=example>\n<parameter=a>", None),
    ("<|im_start|>", None),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_which_fits(template: str, name: str | None) -> None:
    plugins = load_plugins()
    every: Iterable[str] = (provider.name for provider in plugins.providers("tool_parser"))
    fitting = (each for each in every if plugins.create("tool_parser", each, settings=Settings()).fits(template))
    assert next(fitting, None) == name


def test_ids() -> None:
    """Mistral's templates refuse others than nine letters and digits."""
    plugins = load_plugins()
    ids = [plugins.create("tool_parser", "mistral").call_id() for _ in range(50)]
    assert len(set(ids)) == 50 and all(len(id) == 9 and id.isalnum() and id.isascii() for id in ids)
    assert plugins.create("tool_parser", "hermes").call_id().startswith("call_")
