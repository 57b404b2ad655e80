"""From what a client asks to an `Add` message: prompt text or chat to token ids, defaults, limits.

Used by the server and by the Python API alike, so that both accept and refuse the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from .errors import ConfigError, InvalidRequest, quoted
from .grammars import FIELD, normalised
from .messages import EngineInfo
from .types import INT64, SamplingParams

if TYPE_CHECKING:
    from .model import Checkpoint
    from .tokenizer import Tokenizer

_SUGGESTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


MAX_NAME = 256
"""Characters of a tenant's name."""
MAX_SALT = 1024
"""Characters of a cache salt."""
_TOO_LONG = "the prompt is too long"
"""Clients look for these very words: they shorten the chat then, or turn to another model."""
MAX_CUT = 2**20
"""Characters of a text that is to be cut, at least: a second of a thread."""


class Cut(NamedTuple):
    """How many tokens of a longer prompt to keep, and where it is cut off: at its "left", or at its "right"."""

    tokens: int
    """-1: as many as fit beside max_tokens."""
    side: str = "left"

    def __call__(self, ids: list[int], keep: int | None = None) -> list[int]:
        """`keep`: a token that stays where it is the first, the one that begins every text."""
        if len(ids) <= self.tokens:
            return ids
        if self.side == "right":
            return ids[: self.tokens]
        head = [id for id in ids[:1] if id == keep]
        return head + ids[len(ids) - self.tokens + len(head) :]


class Routing(NamedTuple):
    """What policies and the prefix cache go by, beside the tokens."""

    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""


class InputProcessor:
    """Holds what requests to one model have in common. Safe to call from several threads.

    Sampling defaults come from the checkpoint's generation config. As in vLLM, `do_sample` is not among them: without a
    temperature, false still means temperature 1.
    """

    def __init__(self, checkpoint: Checkpoint, tokenizer: Tokenizer, info: EngineInfo) -> None:
        self.tokenizer = tokenizer
        self.info = info
        longest = tokenizer.longest_token
        self._most = math.inf if longest is None else info.max_model_len * longest
        config = checkpoint.generation_config
        suggested = {name: config[name] for name in _SUGGESTED if config.get(name) is not None}
        try:
            self.defaults = msgspec.convert(suggested, SamplingParams)
            """What a request without sampling fields gets."""
            self.defaults.check(info.vocab_size)
        except (msgspec.ValidationError, InvalidRequest) as error:
            raise ConfigError(
                f"generation_config.json of the checkpoint: {error}; --generation-config none ignores it"
            ) from None

    def encode(self, prompt: str | Sequence[int], add_special_tokens: bool = True, cut: Cut | None = None) -> list[int]:
        """Token ids of a prompt. BOS is there once at most, also where a text is `cut`; ids that are given are taken as
        they are.

        Raises `InvalidRequest` for an empty prompt, ids outside the vocabulary, and a prompt that leaves no room for
        a token.
        """
        if isinstance(prompt, str):
            self._check_size(prompt, "prompt", cut)
            return self._fitting(self.tokenize(prompt, add_special_tokens), "prompt", cut, self.tokenizer.bos_token_id)
        ids = self._fitting(list(prompt), "prompt", cut)
        self.check_ids(ids, "prompt")
        return ids

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, of a text that may be empty or too long for a request."""
        ids = self.tokenizer.encode(text, add_special_tokens)
        bos = self.tokenizer.bos_token_id
        if bos is not None and add_special_tokens and ids[:2] == [bos, bos]:
            del ids[0]  # the text begins with it already
        return ids

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise `InvalidRequest` naming `field` for an id outside the vocabulary."""
        for id in ids:
            if not 0 <= id < self.info.vocab_size:
                raise InvalidRequest(
                    field, f"{field}: token id {id} is outside the vocabulary (0..{self.info.vocab_size - 1})"
                )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        cut: Cut | None = None,
        add_special_tokens: bool = False,
        /,
        **template: Any,
    ) -> list[int]:
        """Token ids of a chat. `template`: variables of the chat template, such as add_generation_prompt. Most
        templates write BOS themselves; there is one at most.

        Raises `InvalidRequest` as `encode` does, and with the template's message where it refuses the messages.
        """
        text = self.tokenizer.render(messages, **template)
        self._check_size(text, "messages", cut)
        return self._fitting(self.tokenize(text, add_special_tokens), "messages", cut, self.tokenizer.bos_token_id)

    def cut(self, cut: Cut, max_tokens: int | None = None) -> Cut:
        """`cut` with as many tokens as it comes to. Raises `InvalidRequest` naming the field "truncate"."""
        limit = self.info.max_model_len
        if cut.tokens != -1 and not 1 <= cut.tokens <= limit:
            raise InvalidRequest(
                "truncate",
                f"truncate must be between 1 and the limit of {limit} tokens (prompt and output), or -1 (what fits), "
                f"got {cut.tokens}",
            )
        return cut if cut.tokens > 0 else cut._replace(tokens=max(1, limit - (max_tokens or 1)))

    def _check_size(self, text: str, field: str, cut: Cut | None) -> None:
        if len(text) <= (self._most if cut is None else max(self._most, MAX_CUT)):
            return
        why = f"cannot fit into the limit of {self.info.max_model_len} tokens (prompt and output)"
        if cut is not None:
            why += f", and texts to be cut have at most {MAX_CUT}"
        raise InvalidRequest(field, f"{field}: {_TOO_LONG}: {len(text)} characters {why}; shorten it")

    def _fitting(self, ids: list[int], field: str, cut: Cut | None, bos: int | None = None) -> list[int]:
        limit = self.info.max_model_len
        ids = ids if cut is None else cut(ids, bos)
        if not ids:
            raise InvalidRequest(field, f"{field}: empty; give at least one token")
        if len(ids) >= limit:
            raise InvalidRequest(
                field,
                f"{field}: {_TOO_LONG}: {len(ids)} tokens leave no room for output within the limit of {limit} tokens "
                "(prompt and output); shorten it",
            )
        return ids

    def params(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters from fields of `SamplingParams`; None or absent means the default.

        Raises `InvalidRequest` for an unknown field or a wrong type; `complete` checks ranges.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        for name in given:
            if name not in SamplingParams.__struct_fields__:
                known = ", ".join(SamplingParams.__struct_fields__)
                raise InvalidRequest(name, f"{name}: no such sampling parameter; there are: {known}")
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        return self.typed(msgspec.structs.asdict(self.defaults) | given)

    @staticmethod
    def typed(values: Mapping[str, Any]) -> SamplingParams:
        """`values` as `SamplingParams`. Raises `InvalidRequest` for a wrong type, which the class itself accepts."""
        try:
            return msgspec.convert(values, SamplingParams)
        except msgspec.ValidationError as error:
            what, _, path = str(error).partition(" - at `$")
            name = path.strip("`.").partition("[")[0].partition(".")[0]
            raise InvalidRequest(name, f"{name}: {what[0].lower()}{what[1:]}") from None

    def complete(self, params: SamplingParams, *prompts: Sequence[int]) -> SamplingParams:
        """`params` checked for these prompts and ready for the engine, with the EOS ids, and with the tokens of
        `bad_words`. An unset max_tokens stays unset: what remains of the context. Biases beyond -100 and 100 become
        these.

        Raises `InvalidRequest` naming the field at fault.
        """
        vocab, limit, longest = self.info.vocab_size, self.info.max_model_len, max(map(len, prompts))
        room = limit - longest
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequest(
                "max_tokens",
                f"max_tokens: too large, or {_TOO_LONG}: {longest} prompt tokens + {params.max_tokens} exceed the "
                f"limit of {limit} tokens (prompt and output); ask for at most {room}",
            )
        eos = params.eos_token_ids or tuple(id for id in self.tokenizer.eos_token_ids if 0 <= id < vocab)
        bias = {id: max(-100.0, min(by, 100.0)) if math.isfinite(by) else by for id, by in params.logit_bias.items()}
        params = msgspec.structs.replace(params, eos_token_ids=eos, top_k=min(params.top_k, vocab), logit_bias=bias)
        if params.structured_outputs is not None:
            if not self.info.logits:
                name = self.info.providers.get("executor")
                why = f"the executor here, {name!r}, computes no logits, so no output follows a grammar; leave it out"
                raise InvalidRequest(FIELD, f"{FIELD}: {why}")
            if not eos:
                raise InvalidRequest(FIELD, f"{FIELD}: this model has no end token, which is to follow a whole output")
            params = msgspec.structs.replace(params, structured_outputs=normalised(params.structured_outputs))
        most = room if params.max_tokens is None else params.max_tokens
        msgspec.structs.replace(params, max_tokens=most).check(vocab)
        if params.bad_words:
            bad = [*params.bad_token_ids, *(ids for word in params.bad_words for ids in self._spellings(word))]
            params = msgspec.structs.replace(params, bad_token_ids=tuple(dict.fromkeys(bad)))
            msgspec.structs.replace(params, max_tokens=most).check(vocab)
        return params

    def _spellings(self, word: str) -> Iterator[tuple[int, ...]]:
        """Token ids of a word at the start of a text, behind a space, and right behind other text: tokenizers spell a
        word that begins a text in one way or the other. Without what the model cannot generate.

        Raises `InvalidRequest` if the word has no tokens.
        """
        if len(word) > self._most:
            raise InvalidRequest(
                "bad_words",
                f"bad_words: {len(word)} characters cannot come within the limit of {self.info.max_model_len} tokens; "
                "leave them out",
            )
        bare, before = word.lstrip(" ") or word, self.tokenizer.encode("\n", False)
        behind = self.tokenizer.encode("\n" + bare, False)
        found = [self.tokenizer.encode(text, False) for text in (bare, " " + bare)]
        found += [behind[len(before) :]] if behind[: len(before)] == before else []
        if not any(found):
            raise InvalidRequest("bad_words", f"bad_words: {quoted(word)} has no tokens; leave it out")
        for ids in found:
            if ids and max(ids) < self.info.vocab_size:
                yield tuple(ids)

    def routing(self, priority: int | None = None, tenant: str | None = None, cache_salt: str | None = None) -> Routing:
        """Checked and ready for the engine. Raises `InvalidRequest` naming the field at fault: a priority other than 0
        too, where nothing goes by it, because whoever sets one relies on it."""
        if not isinstance(priority, int | None):
            raise InvalidRequest("priority", f"priority must be an integer, got {quoted(priority)}")
        if priority and "priority" not in self.info.uses:
            raise InvalidRequest(
                "priority",
                f"priority: the scheduler here, {self.info.providers.get('scheduler')!r}, ignores it; leave it out, or "
                "serve with --scheduler priority",
            )
        if not -INT64 <= (priority or 0) < INT64:
            raise InvalidRequest("priority", f"priority must be a signed 64-bit integer, got {priority}")
        salt = _name("cache_salt", cache_salt, MAX_SALT)
        _name("tenant", tenant, MAX_NAME)
        return Routing(priority or 0, tenant or "", salt)


def _name(field: str, value: str | None, most: int) -> bytes:
    if value is None:
        return b""
    if not isinstance(value, str):
        raise InvalidRequest(field, f"{field} must be a string, got {quoted(value)}")
    if len(value) > most:
        raise InvalidRequest(field, f"{field} must have at most {most} characters, got {len(value)}")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, f"{field} must be valid Unicode, without lone surrogates") from None
