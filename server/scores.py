"""How the OpenAI dialect spells tokens and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from framework import Logprobs, Tokenizer

FLOOR = -9999.0
"""JSON has no infinity: the least log-probability that is told."""


class Echo(NamedTuple):
    """A prompt as it is returned. `offsets`: where the text of each of its tokens begins."""

    text: str = ""
    offsets: Sequence[int] = ()

    @classmethod
    def of_text(cls, tokenizer: Tokenizer, text: str, ids: Sequence[int], add_special_tokens: bool) -> Echo:
        """`ids` are those of `text`."""
        offsets, end = [], 0
        # A BOS that is in the text already was left out at the front; some tokenizers' spans leave out spaces.
        for _, start, stop in tokenizer.encode_spans(text, add_special_tokens)[-len(ids) :]:
            offsets.append(min(start, end) if start < stop else end)
            end = max(end, stop)
        return cls(text, offsets)

    @classmethod
    def of_tokens(cls, tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> Echo:
        stream = tokenizer.stream((), skip_special_tokens)
        text, offsets = "", []
        for id in ids:
            offsets.append(len(text))
            text += stream.step(id) or ""
        return cls(text + stream.finish(), offsets)


class Scores:
    """Of one response. `as_ids`: tokens are spelt "token_id:N", which tells all of them apart."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def token(self, id: int) -> str:
        """The token as text; where its bytes are no UTF-8 by themselves, as bytes:\\x.."""
        if self._as_ids:
            return f"token_id:{id}"
        data = self._tokenizer.token_bytes(id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def completion(
        self, tokens: Sequence[int], entries: Sequence[Logprobs | None], offsets: Sequence[int], count: int
    ) -> dict[str, Any]:
        """Four lists, as long as `tokens`. count: of the likeliest tokens, beside which the token itself is told."""
        return {
            "tokens": [self.token(id) for id in tokens],
            "token_logprobs": [None if entry is None else max(entry.logprob, FLOOR) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry, count) for entry in entries],
            "text_offset": list(offsets),
        }

    def _top(self, entry: Logprobs, count: int) -> dict[str, float]:
        top: dict[str, float] = {}
        for id, value in (*entry.top[:count], (entry.token, entry.logprob)):
            top.setdefault(self.token(id), max(value, FLOOR))
        return top

    def chat(self, entries: Sequence[Logprobs]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._chat_token(entry.token, entry.logprob),
                    "top_logprobs": [self._chat_token(id, value) for id, value in entry.top],
                }
                for entry in entries
            ]
        }

    def _chat_token(self, id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(id)
        return {"token": self.token(id), "logprob": max(logprob, FLOOR), "bytes": list(data)}

    def prompt(self, entries: Sequence[Logprobs | None] | None, count: int) -> list[dict[str, Any] | None] | None:
        """Of each prompt token: by token id the token itself, and `count` of the likeliest."""
        if entries is None:
            return None
        return [None if entry is None else self._ranked(entry, count) for entry in entries]

    def _ranked(self, entry: Logprobs, count: int) -> dict[str, Any]:
        every = {entry.token: (entry.logprob, entry.rank)}
        for rank, (id, value) in enumerate(islice(entry.top, count), 1):
            every.setdefault(id, (value, rank))
        return {
            str(id): {"logprob": max(value, FLOOR), "rank": rank, "decoded_token": self.token(id)}
            for id, (value, rank) in every.items()
        }
