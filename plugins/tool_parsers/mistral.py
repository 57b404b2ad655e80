"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} for each call."""

from __future__ import annotations

import secrets
import string

from framework import Parsing, ToolParser


class Mistral(ToolParser):
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    @staticmethod
    def call_id() -> str:
        """Its chat templates refuse others than these."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def parse(self) -> Parsing[None]:
        while (yield from self.until("[TOOL_CALLS]")):
            if (yield from self.skip("[")):
                while (yield from self.call()) and (yield from self.skip(",")):
                    pass
                yield from self.skip("]")
                continue
            name = yield from self.word()
            if (yield from self.skip("[CALL_ID]")):
                yield from self.word()
            if ((yield from self.skip("[ARGS]")) or (yield from self.peek()) == "{") and self.begin(name):
                yield from self.arguments()
