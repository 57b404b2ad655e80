"""An executor whose output the prompt dictates."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import RequestData
from .checking import CheckingExecutor


class ScriptedExecutor(CheckingExecutor):
    """Repeats the prompt in a cycle: output token i is prompt token i modulo the prompt's length.

    Checks plans as its base class does. Override `next_token` for another script.
    """

    def next_token(self, data: RequestData, tokens: Sequence[int]) -> int:
        return tokens[(len(tokens) - data.prompt_len) % data.prompt_len]
