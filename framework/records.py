"""What the server tells plugins of a response: stamps and counts, no text."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .messages import RequestTimes


class ResponseRecord(msgspec.Struct, kw_only=True):
    """One generation request over HTTP (or of the Python API), from first byte to last. Times: monotonic ns.

    `trace_id`, `span_id` (hex) are minted for every request; `parent_span_id` comes from an incoming traceparent,
    whose trace id is continued. Stages: (name, start, end): http.receive, tokenize, grammar, detokenize, http.send;
    `detokenize` may repeat. Sums over many short stages are kept in `detokenize_ns`.
    """

    id: str
    operation: str
    """chat, text_completion."""
    model: str
    trace_id: str
    span_id: str
    parent_span_id: str | None = None
    sampled: bool = True
    start: int = 0
    end: int = 0
    stages: list[tuple[str, int, int]] = []
    detokenize_ns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token: int = 0
    last_token: int = 0
    finish_reasons: list[str] = []
    error: str | None = None
    status: int = 200
    stream: bool = False
    choices: int = 1
    attributes: dict[str, str | int | float | bool] = {}
    """Request parameters under their gen_ai.request.* names."""
    times: dict[int, RequestTimes] = {}
    """The engine's stamps of each sequence that got a token, by its number; final once the sequence has ended."""

    @property
    def traceparent(self) -> str:
        """W3C: what the engine's spans take as their parent."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


class Delivery(NamedTuple):
    """`tokens` arrived for a response. `gap` is seconds since the previous delivery of the same sequence, None for
    its first one; then `ttft` is seconds since the response began."""

    record: ResponseRecord
    tokens: int
    gap: float | None
    ttft: float | None
