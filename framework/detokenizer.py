"""From tokens to text, one token at a time: what may be sent now, and where a stop string ends the output.

Used by the server and by the Python API alike, so that both produce the same text.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .messages import TokenOutput
from .plan import Logprobs
from .types import SamplingParams

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class StopMatcher:
    """Finds the stop string that ends first, over pieces of text; holds back only what may still become one.

    `keep`: the text goes on to the end of the stop string, so that nothing is held back.

    One Knuth-Morris-Pratt automaton per stop string, shared by all who have the same: the cost per character does not
    depend on their lengths, and only on how many of them it may begin or go on.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        self._keep = keep
        self._automata = _automata(tuple(stops))
        self._states: dict[int, int] = {}  # by number of the stop string: characters of it that the text ends with
        self._held = ""

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """(text that is certain to be part of the output, the stop string that was completed or None).

        `may_end`: a stop string may end within `text`. Of several that end at one character the longest is found.
        After a match, nothing may be pushed any more.
        """
        (stops, begun), states = self._automata, self._states
        if not stops:
            return text, None
        held = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            found = ""
            for i in {*states, *begun.get(char, ())}:
                (stop, failure), state = stops[i], states.pop(i, 0)
                while state and stop[state] != char:
                    state = failure[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    found = max(found, stop, key=len)
                    state = failure[-1]
                if state:
                    states[i] = state
            if found and may_end:
                self._held = ""
                return held[: end if self._keep else end - len(found)], found
        split = len(held) - (0 if self._keep else max(states.values(), default=0))
        self._held = held[split:]
        return held[:split], None

    def flush(self) -> str:
        """What was held back: call it when no more text comes."""
        text, self._held = self._held, ""
        return text


class _Automata(NamedTuple):
    """Of some stop strings: each with its table, and which of them begin with a character."""

    stops: Sequence[tuple[str, Sequence[int]]]
    begun: Mapping[str, Sequence[int]]


@functools.lru_cache(maxsize=16)  # all sequences of a request have the same stop strings
def _automata(stops: tuple[str, ...]) -> _Automata:
    begun: dict[str, list[int]] = {}
    for i, stop in enumerate(stops):
        begun.setdefault(stop[0], []).append(i)
    return _Automata([(stop, _failure(stop)) for stop in stops], begun)


def _failure(stop: str) -> Sequence[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is a prefix of `stop` too."""
    table, k = [0] * len(stop), 0
    for i in range(1, len(stop)):
        while k and stop[i] != stop[k]:
            k = table[k - 1]
        k += stop[i] == stop[k]
        table[i] = k
    return table


class Piece(NamedTuple):
    """What `Detokenizer.push` gives. `tokens`: how many of those pushed belong to the output, fewer than all only
    where a stop string was completed. `offsets`: for each of them, the characters of text before it."""

    text: str
    stop: str | None
    tokens: int
    offsets: list[int]


class Detokenizer:
    """Text of one sequence. `prompt`: the token ids before it. `keep`: special tokens that are not left out.

    The token of an end (EOS or a stop id) gives no text unless `include_stop_str_in_output`.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = (), keep: Collection[str] = ()
    ) -> None:
        self._text = tokenizer.stream(prompt, params.skip_special_tokens, keep)
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._params = params
        self._ends = params.ends
        self._length = 0
        self._count = 0

    def push(self, tokens: Sequence[int], finished: bool) -> Piece:
        """`finished`: no more tokens come. After a stop string was found, nothing may be pushed any more."""
        params = self._params
        given: list[str] = []
        offsets: list[int] = []
        for i, token in enumerate(tokens):
            self._count += 1
            offsets.append(self._length)
            last = finished and i == len(tokens) - 1
            silent = last and token in self._ends and not params.include_stop_str_in_output
            text = "" if silent else self._text.step(token) or ""
            if last:
                text += self._text.finish()
            self._length += len(text)
            out, stop = self._stops.push(text, self._count >= params.min_tokens)
            given.append(out)
            if stop is not None:
                return Piece("".join(given), stop, i + 1, offsets)
        if finished:
            if not tokens:
                given.append(self._stops.push(self._text.finish(), may_end=False)[0])
            given.append(self._stops.flush())
        return Piece("".join(given), None, len(tokens), offsets)


class Delta(NamedTuple):
    """What one `TokenOutput` adds to a sequence. `offsets` and, where there are any, `logprobs` cover the tokens whose
    text was given (all of them at the end); an offset is the position in the sequence's text where the token's text
    begins."""

    text: str
    tokens: Sequence[int]
    logprobs: list[Logprobs]
    offsets: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


class Assembler:
    """Turns the `TokenOutput`s of one sequence into text, log-probabilities and the reason why it ended.

    A stop string found here ends the sequence before the engine knows: if a `Delta` has a finish reason and the output
    that it came from has none, abort the request with reason "stop".
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = (), keep: Collection[str] = ()
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, params, prompt, keep)
        self._offsets: list[int] = []  # of tokens whose text has not been given
        self._logprobs: list[Logprobs] = []
        self._length = 0
        self.num_tokens = 0

    def push(self, output: TokenOutput) -> Delta:
        piece = self._detokenizer.push(output.tokens, output.finish_reason is not None)
        self.num_tokens += piece.tokens
        self._length += len(piece.text)
        finish = output.finish_reason
        reason: int | str | None = output.stop_reason
        if piece.stop is not None:
            finish, reason = "stop", piece.stop
        self._offsets += piece.offsets
        self._logprobs += (output.logprobs or ())[: piece.tokens]
        ready = len(self._offsets)
        if finish is None:
            ready = next((i for i, offset in enumerate(self._offsets) if offset >= self._length), ready)
        offsets, self._offsets = self._offsets[:ready], self._offsets[ready:]
        logprobs, self._logprobs = self._logprobs[:ready], self._logprobs[ready:]
        return Delta(
            piece.text,
            output.tokens[: piece.tokens],
            logprobs,
            [min(offset, self._length) for offset in offsets],
            finish,
            reason,
        )
