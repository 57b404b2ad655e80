"""Llama 3: {"name": ..., "parameters": {...}}, at the beginning or behind <|python_tag|>; several apart by ";"."""

from __future__ import annotations

import re

from framework import Parsing, ToolParser


class Llama3Json(ToolParser):
    """An object further on in the text, say in an explanation, is no call."""

    markers = ("<|python_tag|>",)
    separator = "; "

    @classmethod
    def fits(cls, template: str) -> bool:
        """Templates of Llama 3.2 do without the tag, but ask for this form."""
        asks = re.search(r'parameters\\?":', template)
        return super().fits(template) or ("<|start_header_id|>" in template and asks is not None)

    @classmethod
    def spelling(cls, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "parameters": ', "}"

    def parse(self) -> Parsing[None]:
        while True:
            while (yield from self.call()):
                yield from self.skip(";")
            if not (yield from self.until("<|python_tag|>")):
                return
