"""Text to token ids and back, and chat messages to text. Needs no torch and runs no code of the checkpoint's."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

from .errors import InvalidRequest, one_line


class Tokenizer:
    """A `tokenizers.Tokenizer` with what a checkpoint says about it.

    `special` maps bos_token, eos_token and the like to their text: chat templates read them. `chat_templates` maps
    names to Jinja sources; "default" is the one used. Encoding, decoding and rendering are safe to call from
    several threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special = dict(special or {})
        self.chat_templates = dict(chat_templates or {})
        eos = [backend.token_to_id(self.special["eos_token"])] if "eos_token" in self.special else []
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in (*eos_token_ids, *eos) if i is not None))
        """Every token id that ends an answer, without repeats."""
        self._bytewise = any(name in _state(backend.decoder) for name in (b'"ByteLevel"', b'"ByteFallback"'))
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Those that `skip_special_tokens` leaves out."""
        self._spelling = _spelling(backend)

    # Tokens

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id; a model's embedding may have more rows."""
        return max(self.backend.get_vocab_size(), max(self._added, default=-1) + 1)

    @property
    def bos_token_id(self) -> int | None:
        return self.backend.token_to_id(self.special["bos_token"]) if "bos_token" in self.special else None

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token(self, id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that it does not have."""
        return self.backend.id_to_token(id)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that the token stands for, which need not be UTF-8 on their own. Empty for an unknown id."""
        if id in self._added:
            return self._added[id].encode()
        token = self.backend.id_to_token(id)
        return self._spelling(token) if token is not None else b""

    @property
    def longest_token(self) -> int | None:
        """Most characters of text that one token can stand for. None where nothing bounds them: an unknown token takes
        any number, and some checkpoints drop text before they split it."""
        steps = [*_steps(self.backend.normalizer), *_steps(self.backend.pre_tokenizer)]
        greedy = any(token.lstrip or token.rstrip for token in self.backend.get_added_tokens_decoder().values())
        if greedy or not self._bytewise or not all(map(_keeps_length, steps)):
            return None
        composes = any(step["type"] in ("NFC", "NFKC") for step in steps)  # up to four characters to one
        return max(map(len, self.backend.get_vocab())) * (4 if composes else 1)

    # Text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids. `add_special_tokens` adds BOS
        or EOS where the checkpoint asks for it: False for a rendered chat, which has its own."""
        # `encode` keeps the interpreter locked while it works; this lets other threads run.
        (encoding,) = self.backend.encode_batch_fast([_utf8(text)], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_spans(self, text: str, add_special_tokens: bool = False) -> list[tuple[int, int, int]]:
        """(token id, first character, one past the last) of what `encode` gives. Tokens that are parts of one character
        have the whole of it; special tokens that were added have no character."""
        (encoding,) = self.backend.encode_batch([_utf8(text)], add_special_tokens=add_special_tokens)
        return [(id, start, stop) for id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(
        self, prompt: Sequence[int] = (), skip_special_tokens: bool = True, keep: Collection[str] = ()
    ) -> TokenStream:
        """A fresh incremental decoder of what follows `prompt` (whose text it does not repeat). `keep`: special tokens
        that are not skipped."""
        kept = {id: text for text in keep if (id := self.backend.token_to_id(text)) in self.special_ids}
        if not skip_special_tokens:
            return TokenStream(self.backend, prompt, False)
        return TokenStream(self.backend, prompt, True, kept, self.special_ids)

    # Chat

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """The template that is used where there are tools."""
        return self.chat_templates.get("tool_use", self.chat_template)

    @property
    def takes_tools(self) -> bool:
        """Whether that template reads `tools`."""
        return self.tool_template is not None and _names_tools(self.tool_template)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt of a chat, to be encoded with `add_special_tokens=False`.

        `continue_final_message` ends it where the text of the last message does, for the model to go on with it;
        `add_generation_prompt` is then to be False. `kwargs` (tools, documents and whatever else the template reads)
        are its variables. Raises `InvalidRequest` for messages that the template refuses or cannot render, for those
        that cannot be continued, and where there is no template.
        """
        template = self.tool_template if kwargs.get("tools") else self.chat_template
        if template is None:
            raise InvalidRequest(
                "messages",
                "messages: this model has no chat template; start the server with --chat-template FILE, "
                "or use /v1/completions",
            )
        variables = {"tools": None, "documents": None, **self.special, **kwargs}
        # Clients send null for what is absent, which templates would print or stumble over.
        chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if "developer" not in template:  # the newer name of what nearly all of them know as system
            chat = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in chat]
        mark = ""
        if continue_final_message:
            if not chat or not isinstance(chat[-1].get("content"), str):
                raise InvalidRequest(
                    "messages", "messages: the last has no text that continue_final_message could go on"
                )
            mark = f"<{secrets.token_hex(16)}>"  # nobody's text
            chat[-1]["content"] += mark + " "  # the space tells whether the template strips texts
        try:
            text = _utf8(
                compile_template(template).render(
                    messages=chat, add_generation_prompt=add_generation_prompt, **variables
                )
            )
        except _TEMPLATE_ERRORS as exc:
            why = f"the chat template cannot render them: {one_line(exc)}"
            raise InvalidRequest("messages", f"messages: {why}") from exc
        if not mark:
            return text
        before, found, after = text.rpartition(mark)
        if not found:
            raise InvalidRequest(
                "messages", "messages: the chat template leaves out the last, which was to be continued"
            )
        return before if after.startswith(" ") else before.rstrip()


class TokenStream:
    """Incremental decoding of one sequence by `tokenizers.decoders.DecodeStream`.

    Text comes as soon as it is valid UTF-8. What `step` returned, with `finish` at the end, makes up the output; it is
    what `Tokenizer.decode` says of the whole wherever the tokens form valid UTF-8.
    """

    # A character has at most four bytes, hence tokens: one that is still open after this many will never close.
    _PATIENCE = 8
    # The text of a token may depend on the ones before it (a sentencepiece space), never on ones further back.
    _CONTEXT = 6

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        kept: Mapping[int, str] = MappingProxyType({}),
        silent: Container[int] = (),
    ) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._kept = kept
        self._silent = silent  # tokens that are skipped, but for the kept ones
        self._context = list(prompt[-self._CONTEXT :])  # known tokens whose text has been given out
        self._held: list[int] = []  # tokens whose text has not
        self._stream = self._fresh()

    def _fresh(self) -> DecodeStream:
        if self._backend.decode(self._context, skip_special_tokens=self._skip).endswith("\ufffd"):
            self._context = []  # DecodeStream would give out an unfinished context once more
        return DecodeStream(ids=self._context, skip_special_tokens=self._skip)

    def step(self, token_id: int) -> str | None:
        """Text that `token_id` completes; None if there is none yet."""
        if token_id in self._kept:
            return (self.finish() if self._unfinished() else "") + self._kept[token_id]
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._backend, token_id)
        except Exception as exc:  # tokenizers raises nothing narrower; anything else goes on up
            if "Invalid prefix" not in str(exc):
                raise
            return self._restart()  # invalid bytes changed how earlier ones decode: carry on behind them
        if text is None:
            return self._restart() if self._unfinished() >= self._PATIENCE else None
        self._forget()
        return text

    def finish(self) -> str:
        """The text still held back: an unfinished character comes as U+FFFD. Ends the stream."""
        return self._restart() or ""

    def _unfinished(self) -> int:
        """Tokens that a character may be made of."""
        return sum(id not in self._silent for id in self._held)

    def _forget(self) -> None:
        self._context = [*self._context, *self._held][-self._CONTEXT :]
        self._held = []

    def _restart(self) -> str | None:
        """Give out the held tokens as they stand and begin again behind them."""
        before = self._backend.decode(self._context, skip_special_tokens=self._skip)
        after = self._backend.decode([*self._context, *self._held], skip_special_tokens=self._skip)
        text = after[len(before) :] if after.startswith(before) else self._decode_held()
        self._forget()
        self._stream = self._fresh()
        return text or None

    def _decode_held(self) -> str:
        return self._backend.decode(self._held, skip_special_tokens=self._skip)


def _utf8(text: str) -> str:
    """`text` with U+FFFD for lone surrogates, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def byte_alphabet() -> dict[int, str]:
    """How byte-level vocabularies spell each byte: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


def _state(component: Any) -> bytes:
    return b"null" if component is None else component.__getstate__()


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """The parts of a normaliser or pre-tokeniser, without their nesting."""
    parts = [json.loads(_state(component))]
    while parts:
        part = parts.pop()
        if part is not None and part["type"] == "Sequence":
            parts += part.get("normalizers") or part.get("pretokenizers") or []
        elif part is not None:
            yield part


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Whether this part of a tokeniser leaves no character out, but for composing some."""
    match step:
        case {"type": "Replace", "pattern": {"String": before}, "content": after}:
            return len(after) >= len(before)
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Prepend")


def _spelling(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How to read bytes from this vocabulary's spelling of a token."""
    decoder = _state(backend.decoder)
    if b'"ByteLevel"' in decoder:
        byte = {c: b for b, c in byte_alphabet().items()}
        return lambda token: bytes(byte[c] for c in token) if all(c in byte for c in token) else token.encode()
    space, fallback = "▁".encode() in decoder, b'"ByteFallback"' in decoder

    def read(token: str) -> bytes:
        if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return (token.replace("▁", " ") if space else token).encode()

    return read


_TEMPLATE_ERRORS = (
    # what template code can raise on data that it did not expect
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template as transformers does: sandboxed, blocks trimmed. Raises `jinja2.TemplateError`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)


@functools.lru_cache(maxsize=32)
def _names_tools(source: str) -> bool:
    names = compile_template(source).environment.parse(source).find_all(jinja2.nodes.Name)
    return any(name.name == "tools" for name in names)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant said, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
