"""What an output must be: one spelling of `StructuredOutputs`, and grammars compiled for a vocabulary by xgrammar.

xgrammar is imported when something is compiled for the first time: it takes a second and 50 MB beside torch, which who
asks for no structure shall not pay.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from .errors import InvalidRequest, brief
from .json_schema import followed
from .types import StructuredOutputs

if TYPE_CHECKING:
    import torch
    import xgrammar

    from .tokenizer import Tokenizer

FIELD = "structured_outputs"
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_REASON = 300
"""Characters of what the library says against a grammar: it may quote all of it."""
PATIENCE = 0.25
"""Seconds of a CPU that following one output, and saying what may come next, may take, beside `PER_TOKEN` for each
token: every other request waits meanwhile. Usual grammars take 20 to 60 microseconds a token; ambiguous ones take more
and more. Nothing can be interrupted, so it is seen behind the call that took too long."""
PER_TOKEN = 0.001
TOO_SLOW = "its grammar takes too long to follow; make it less ambiguous"
WALKS = 6
"""Outputs that a grammar is tried out with: every second one repeats its tokens while it can."""
REHEARSED = 256
"""Tokens of each of them."""


class Vocabulary(msgspec.Struct, array_like=True):
    """What a grammar is matched against. `tokens`: the bytes of each token id, none for those that stand for no text;
    `size`: ids that the model has, which may be more; `ends`: the checkpoint's EOS ids."""

    tokens: list[bytes]
    size: int
    ends: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> Vocabulary:
        known = range(min(tokenizer.vocab_size, size))
        silent = tokenizer.special_ids
        tokens = [b"" if id in silent else tokenizer.token_bytes(id) for id in known]
        return cls(tokens, size, [id for id in tokenizer.eos_token_ids if 0 <= id < size])

    def silent(self, id: int) -> bool:
        """Whether the token stands for no text."""
        return id >= len(self.tokens) or not self.tokens[id]


def normalised(wanted: StructuredOutputs) -> StructuredOutputs:
    """The same in one spelling: schemas as text, so that it can be compared, hashed and sent. Raises `InvalidRequest`
    unless it is exactly one constraint and well-formed."""
    given = [kind for kind in KINDS if getattr(wanted, kind) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequest(
            FIELD, f"{FIELD}: exactly one of {', '.join(KINDS)} is possible, got {' and '.join(given) or 'none'}"
        )
    (kind,) = given
    value = getattr(wanted, kind)
    match kind:
        case "json" | "structural_tag":
            value = _json_text(kind, value)
        case "choice":
            value = tuple(dict.fromkeys(value))
            if not value or "" in value:
                raise _refusal(kind, "must be one or more strings, none of them empty")
        case "regex" | "grammar" if not value:
            raise _refusal(kind, "must not be empty")
    try:
        for text in value if kind == "choice" else [str(value)]:
            text.encode()
            if "\0" in text:
                raise _refusal(kind, "must not contain null characters")
    except UnicodeEncodeError:
        raise _refusal(kind, "must be valid Unicode, without lone surrogates") from None
    return replace(wanted, **{kind: value})


def _json_text(kind: str, value: object) -> str:
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if kind == "structural_tag":
            value = _tag(value)
        elif not isinstance(value, dict | bool):
            raise ValueError("must be a JSON schema: an object, or true")
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise _refusal(kind, "is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise _refusal(kind, _reason(error)) from None


def _tag(value: object) -> object:
    """The older form of structural tags, {structures: [{begin, schema, end}], triggers}, as the newer one."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if "format" in value or "structures" not in value:
        return {"type": "structural_tag"} | value
    structures = value["structures"]
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        raise ValueError("structures must be a list of objects")
    tags = [
        {
            "type": "tag",
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one.get("end"),
        }
        for one in structures
    ]
    form = {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": form}


def _refusal(kind: str, reason: str) -> InvalidRequest:
    return InvalidRequest(FIELD, f"{FIELD}: {kind}: {reason}")


def refusal(wanted: StructuredOutputs, reason: str) -> InvalidRequest:
    """What is said of a constraint that is not to be followed."""
    return _refusal(_kind(wanted), reason)


def _reason(error: BaseException) -> str:
    """What the library says, without its own files and without the text that it quotes at the end."""
    said = re.sub(r"^\[[\d:]+\] \S+:\d+: |Check failed: \(.*?\) is false: ", "", str(error))
    said = said.partition("The JSON string is:")[0]
    return brief(" ".join(said.split()).rstrip("."), MAX_REASON) or type(error).__name__


class Compiler:
    """Compiles for one vocabulary. Safe to call from several threads, which others may overtake: what is compiled runs
    outside the interpreter's lock. With one thread, in a trial as in the engine: so it takes about as long in both.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            vocabulary.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=vocabulary.ends,
        )
        self.vocabulary = vocabulary
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, wanted: StructuredOutputs) -> xgrammar.CompiledGrammar:
        """`wanted` must be `normalised`. Raises `InvalidRequest` with the library's reason."""
        with _refusing(wanted):
            return self._compile(wanted)

    def rehearse(self, wanted: StructuredOutputs) -> None:
        """Compile it, and follow some outputs of it: random ones, and ones that repeat themselves, which makes
        ambiguous grammars slow. Raises `InvalidRequest`, also for what takes too long to follow in one of them: others
        may take longer yet, which only `Matcher` sees."""
        with _refusing(wanted):
            _rehearse(self._compile(wanted), self.vocabulary)

    def _compile(self, wanted: StructuredOutputs) -> xgrammar.CompiledGrammar:
        from xgrammar import Grammar

        match _kind(wanted):
            case "json":
                grammar = _of_schema(str(wanted.json), wanted.disable_any_whitespace)
            case "json_object":
                grammar = _of_schema('{"type":"object"}', wanted.disable_any_whitespace)
            case "regex":
                grammar = Grammar.from_regex(_one_line_dots(str(wanted.regex)))
            case "choice":
                grammar = Grammar.from_ebnf("root ::= " + " | ".join(map(_literal, wanted.choice or ())))
            case "grammar":
                grammar = Grammar.from_ebnf(str(wanted.grammar))
            case _:
                tag = _with_forms(json.loads(str(wanted.structural_tag)))
                grammar = Grammar.from_structural_tag(json.dumps(tag, ensure_ascii=False))
        json_inside = wanted.json is not None or wanted.json_object or wanted.structural_tag is not None
        return self._compiler.compile_grammar(_mended(grammar, json_inside))


def _of_schema(text: str, compact: bool) -> xgrammar.Grammar:
    from xgrammar import Grammar

    text = json.dumps(followed(json.loads(text)), ensure_ascii=False)
    options: dict[str, Any] = {"any_whitespace": not compact}
    if compact:
        options["separators"] = (",", ":")
    try:  # without properties that the schema does not name: models would make some up
        grammar = Grammar.from_json_schema(text, **options)
    except RuntimeError:  # some schemas can be followed with such ones only
        grammar = Grammar.from_json_schema(text, strict_mode=False, **options)
    return grammar


_CLASS = re.compile(r'"(?:\\.|[^"\\])*"|\[\^((?:\\.|[^\]\\])*)\]|\[(?:\\.|[^\]\\])*\]', re.DOTALL)
"""In the library's own spelling of a grammar: a string, the inside of a negated class, another class."""


def _mended(grammar: xgrammar.Grammar, json: bool) -> xgrammar.Grammar:
    """Negated classes without surrogates, which are no characters of UTF-8; and those that stand for strings of limited
    length in JSON without control characters, which no parser would take there."""
    from xgrammar import Grammar

    def mend(match: re.Match[str]) -> str:
        if match[0].startswith('"'):  # the library reads more hexadecimal digits there than it writes
            return re.sub(r"\\x(\w\w)|\\.", lambda m: rf"\U000000{m[1]}" if m[1] else m[0], match[0])
        if match[1] is None:
            return match[0]
        control = r"\0-\x1f" if json and match[1] == r"\"\\\r\n" else ""
        return rf"[^{control}\ud800-\udfff{match[1]}]"

    text = str(grammar)
    mended = _CLASS.sub(mend, text)
    return grammar if mended == text else Grammar.from_ebnf(mended)


def _kind(wanted: StructuredOutputs) -> str:
    return next(kind for kind in KINDS if getattr(wanted, kind) not in (None, False))


@contextmanager
def _refusing(wanted: StructuredOutputs) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise refusal(wanted, "needs too much memory; make it smaller") from None
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        reason = _reason(error)
        if "bad_alloc" in reason:
            reason = "needs too much memory; make it smaller"
        raise refusal(wanted, reason) from None


def _with_forms(tag: Any) -> Any:
    """A structural tag whose JSON schemas are in the form that is followed."""
    if isinstance(tag, list):
        return [_with_forms(one) for one in tag]
    if isinstance(tag, dict):
        return {key: followed(value) if key == "json_schema" else _with_forms(value) for key, value in tag.items()}
    return tag


def _literal(text: str) -> str:
    plain = (char if char.isascii() and char.isalnum() else f"\\U{ord(char):08x}" for char in text)
    return f'"{"".join(plain)}"'


def _one_line_dots(regex: str) -> str:
    """A dot matches anything but the end of a line, as everywhere else; the library's matches that, too."""
    parts = re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|.", regex, re.DOTALL)
    return "".join(r"[^\n]" if part == "." else part for part in parts)


class Matcher:
    """Where one output stands in its grammar. `stops`: the tokens that may come where the grammar may end, and nothing
    but them behind it.

    `known` output tokens were followed. `failed` says why no further one can be: then nothing may follow. `follow` and
    `fill` are bounded in time together: see `PATIENCE`.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, stops: Sequence[int]) -> None:
        import xgrammar

        self.state = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stops))
        self.known = 0
        self.failed: str | None = None
        self.stops = frozenset(stops)
        self._spent = 0.0

    @property
    def ended(self) -> bool:
        """It has had a stop token: any number of them may follow, as for requests that are to go on."""
        return self.state.is_terminated()

    def follow(self, tokens: Sequence[int]) -> None:
        """These output tokens came next."""
        for token in tokens:
            if self.failed is not None:
                return
            with self._timed():
                taken = token in self.stops if self.ended else self.state.accept_token(token)
                self.known += 1
            if not taken:
                self.failed = f"token {token} of the output is none that its grammar allows"

    def fill(self, mask: torch.Tensor, row: int = 0) -> None:
        """Write the tokens that may come next into this row of int32 `mask`: none if it has `failed`."""
        if self.failed is None:
            with self._timed():
                self.state.fill_next_token_bitmask(mask, row)
        if self.failed is not None:
            mask[row] = 0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self._spent += time.thread_time() - begin
        if self._spent > PATIENCE + self.known * PER_TOKEN:
            self.failed = TOO_SLOW


def _rehearse(compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
    import numpy as np  # it starts threads, which the server has no need for
    import xgrammar

    mask = xgrammar.allocate_token_bitmask(1, vocabulary.size)
    for walk in range(WALKS):
        random, matcher, token, again = Random(walk), Matcher(compiled, vocabulary.ends), -1, walk % 2 == 0
        for _ in range(REHEARSED):
            matcher.fill(mask)
            if matcher.failed is not None:
                raise ValueError(matcher.failed)
            allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: vocabulary.size])
            if not len(allowed):
                break
            if not (again and token in allowed):
                token = int(allowed[random.randrange(len(allowed))])
            matcher.follow([token])
            if matcher.failed is not None:
                raise ValueError(matcher.failed)
            if matcher.ended:
                break
