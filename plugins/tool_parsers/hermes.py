"""Hermes, Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>; SmolLM2: an array of such objects there."""

from __future__ import annotations

from framework import Parsing, ToolParser


class Hermes(ToolParser):
    markers = ("<tool_call>", "</tool_call>")
    separator = "\n"

    @classmethod
    def fits(cls, template: str) -> bool:
        """Others put XML between these tags."""
        xml = any(tag in template for tag in ("<function=", "<arg_key>", "<parameter"))
        return super().fits(template) and not xml

    @classmethod
    def spelling(cls, name: str) -> tuple[str, str]:
        return f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"

    def parse(self) -> Parsing[None]:
        while (yield from self.until("<tool_call>")):
            several = yield from self.skip("[")
            while (yield from self.call()) and several and (yield from self.skip(",")):
                pass
            if several:
                yield from self.skip("]")
            yield from self.skip("</tool_call>")
