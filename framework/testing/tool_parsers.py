"""What every tool parser must do, as tests: whatever the pieces in which text comes, and whatever the model writes."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

from ..registry import load_plugins
from ..settings import Settings
from ..tool_parser import ToolParser

NAMES = ("add", "get_weather", "a-b.c_9")
ARGUMENTS = (
    "{}",
    '{"a": 1, "b": [1, 2.5e3, null, true], "c": {"d": {}}}',
    '{"text": "a } { ] [ b", "more": "\\"}\\\\", "path": "C:\\\\\\\\"}',
    '{"text": "é 漢字 🙂 \\u00e9", "<|x|>": "</tool_call> ; [ARGS] <tool_call>"}',
    '{ "a" :\n\t[ [ "x" ] , [ ] ]\n}',
)
PROSE = (
    "",
    " ",
    "The sum is 3.\n",
    'As JSON: {"name": "Bob", "age": 7} and [1, 2]; done',
    '{"name": "Bob", "arguments": {"a": 1}}',
    '{"answer": [{"name": "add"}]}',
    "[TOOL_ <tool_ <| <|python_ [ARGS] < [ {",
    "a < b, c[0] and {d}; \\ \" ' 🙂\n\n  ",
)


@functools.cache
def _made(provider: str) -> type[ToolParser]:
    made: type[ToolParser] = load_plugins().create("tool_parser", provider, settings=Settings())
    return made


class Answer(NamedTuple):
    """What a parser made of a text. `calls`: (name, arguments) of each."""

    content: str
    calls: list[tuple[str, str]]


class ToolParserConformance:
    """Subclass it in a test module, and pytest runs the tests below on your tool parser::

        from framework.testing import ToolParserConformance

        class TestMine(ToolParserConformance):
            provider = "mine"

            def spell(self, calls):
                return "".join(f'<call>{{"name": "{name}", "arguments": {args}}}</call>' for name, args in calls)

    For one that is not installed, override `parser`.
    """

    provider: ClassVar[str] = ""
    around: ClassVar[Sequence[tuple[str, str]]] = (("", ""), ("I will look.", ""), ("\n", "\n"), ("One.\n\n", "Two."))
    """Texts that may stand before and behind calls. Spaces beside calls are left out of the first and of spaces alone.
    """
    splits: ClassVar[int] = 30
    """Random ways to cut each text, beside at each character and at all."""

    def spell(self, calls: Sequence[tuple[str, str]]) -> str:
        """How a model writes these calls, (name, arguments as JSON) each, one or several."""
        raise NotImplementedError

    def parser(self, names: Sequence[str]) -> ToolParser:
        """A new one."""
        return _made(self.provider)(names)

    def parse(self, pieces: Iterable[str]) -> Answer:
        """What comes of a text, cut into `pieces`; checks what holds for any."""
        parser = self.parser(NAMES)
        found = [delta for piece in pieces for delta in parser.push(piece)]
        found += parser.finish()
        content = ""
        calls: list[tuple[str, str]] = []
        for delta in found:
            if delta.call is None:
                assert delta.name is None and delta.text, f"content that is none: {delta}"
                content += delta.text
                continue
            if delta.name is not None:
                assert delta.call == len(calls), f"call {delta.call} begins after {len(calls)} others"
                assert delta.name in NAMES, f"there is no tool {delta.name!r}"
                calls.append((delta.name, ""))
            assert delta.call == len(calls) - 1, f"{delta} is no part of the last call"
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
        return Answer(content, calls)

    def samples(self) -> Iterator[tuple[str, Answer]]:
        """Texts with calls, and what they say."""
        calls = [(NAMES[i % len(NAMES)], arguments) for i, arguments in enumerate(ARGUMENTS)]
        for some in (*([call] for call in calls), calls[:2], calls):
            for before, behind in self.around:
                yield before + self.spell(some) + behind, Answer((before + behind).strip(), some)

    def _cuts(self, text: str) -> Iterator[list[str]]:
        chance = random.Random(len(text))
        yield list(text)
        for at in range(len(text) + 1):
            yield [text[:at], text[at:]]
        for _ in range(self.splits):
            ends = sorted(chance.choices(range(len(text) + 1), k=chance.randint(2, 9)))
            yield [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]

    def _agrees(self, text: str) -> Answer:
        """What comes of a text, and of it in pieces."""
        whole = self.parse([text])
        for pieces in self._cuts(text):
            assert self.parse(pieces) == whole, f"cut into {pieces}"
        return whole

    # What is found

    def test_calls(self) -> None:
        """All are found, with the content around them, however the text is cut."""
        for text, expected in self.samples():
            found = self._agrees(text)
            assert found.calls == expected.calls, text
            assert "".join(found.content.split()) == "".join(expected.content.split()), text
            assert expected.content or not found.content, f"{text!r}: spaces are no content"

    def test_arguments_are_json(self) -> None:
        for text, expected in self.samples():
            for (_, found), (_, given) in zip(self.parse([text]).calls, expected.calls, strict=True):
                assert json.loads(found) == json.loads(given)

    def test_calls_come_early(self) -> None:
        """The name is told before the arguments end, and the arguments as they come."""
        text = self.spell([(NAMES[0], '{"long": "' + "x" * 200 + '"}')])
        parser, at = self.parser(NAMES), text.index("x" * 200)
        assert any(delta.name for delta in parser.push(text[:at])), "no call is told before its arguments"
        for char in text[at : at + 200]:
            assert "".join(delta.text for delta in parser.push(char)) == char

    # What is none

    def test_text_is_left_alone(self) -> None:
        for text in PROSE:
            assert self._agrees(text) == Answer(text, [])

    def test_unknown_tools_are_content(self) -> None:
        for arguments in ARGUMENTS:
            text = self.spell([("unknown", arguments)])
            assert self._agrees(text) == Answer(text, [])

    def test_cut_off(self) -> None:
        """An answer that ends anywhere: what was found before stays as it is, and the rest is lost nowhere."""
        for text, expected in self.samples():
            for end in range(len(text)):
                found = self.parse([text[:end]])
                assert len(found.calls) <= len(expected.calls)
                for (name, arguments), (true, whole) in zip(found.calls, expected.calls, strict=False):
                    assert name == true and whole.startswith(arguments), f"{text[:end]!r}: {arguments!r}"
                if not found.calls:
                    assert found.content == text[:end]

    def test_any_text(self) -> None:
        """Damaged calls are no error, and say the same however they are cut."""
        chance = random.Random(0)
        texts = [text for text, _ in self.samples()]
        for _ in range(200):
            text = chance.choice(texts)
            for _ in range(chance.randint(1, 4)):
                at, end = sorted(chance.choices(range(len(text) + 1), k=2))
                end = min(end, at + chance.randint(0, 12))
                text = text[:at] + chance.choice(["", text[at:end] * 2, chance.choice('{}[]",:<;\\x \n')]) + text[end:]
            whole = self.parse([text])
            assert self.parse(text) == whole, text
            assert self.parse([text[:at], text[at:]]) == whole, text
