"""A tokenizer from a GGUF file's vocabulary: byte-level BPE ("gpt2") or sentencepiece BPE ("llama")."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from framework import ModelError, Tokenizer

_log = logging.getLogger(__name__)

# Values of tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# How text is cut before merging, by tokenizer.ggml.pre. A split's regex is the model's own; see its tokenizer.json.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = ""  # what ByteLevel does on its own
_DIGITS = "digits"  # the same, with each digit apart
_SPLITS = {
    **dict.fromkeys(("gpt-2", "gpt2", "default", "olmo", "mpt", "phi-2", "trillion"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), _QWEN2),
    "tekken": _TEKKEN,
}


def build_tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    """Raises KeyError for a missing key and `ModelError` for a vocabulary of another kind."""
    kind = meta["tokenizer.ggml.model"]
    if kind == "gpt2":
        backend, add_bos = _byte_level(meta)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(meta), True
    else:
        raise ModelError(f"tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [
        AddedToken(token, normalized=False, special=type == _CONTROL)
        for token, type in zip(tokens, types, strict=True)
        if type in (_CONTROL, _USER_DEFINED) and token
    ]
    backend.add_tokens(added)
    names = ("bos", "eos", "unknown", "padding")
    ids = {name: meta.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    special = {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special.values()])
    add_eos = meta.get("tokenizer.ggml.add_eos_token", False)
    add_bos = meta.get("tokenizer.ggml.add_bos_token", add_bos)
    around = [special[n] for n, on in (("bos", add_bos), ("eos", add_eos)) if on and n in special]
    if around:
        single = [special["bos"]] if add_bos and "bos" in special else []
        single += ["$A", *([special["eos"]] if add_eos and "eos" in special else [])]
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=None, special_tokens=[(t, backend.token_to_id(t)) for t in around]
        )
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Tokenizer(
        backend,
        special={roles[name]: token for name, token in special.items()},
        chat_templates=_templates(meta),
        eos_token_ids=[
            meta[key] for key in (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")) if key in meta
        ],
    )


def _templates(meta: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(f"{prefix}."): meta[key] for key in meta if key.startswith(f"{prefix}.")}
    return named | ({"default": meta[prefix]} if prefix in meta else {})


def _byte_level(meta: Mapping[str, Any]) -> tuple[Backend, bool]:
    """(tokenizer, whether it adds BOS unless the file says otherwise)"""
    pre = meta.get("tokenizer.ggml.pre", "default")
    split = _SPLITS.get(pre)
    if split is None:
        _log.warning("tokenizer.ggml.pre %r is unknown: text is cut as for gpt-2, which may differ", pre)
        split = _GPT2
    # These vocabularies take a whole word that they know as it is, without going through its merges.
    whole = split in (_LLAMA3, _TEKKEN)
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", False))
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split in (_GPT2, _DIGITS))
    if split == _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    elif split != _GPT2:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), behavior="isolated"), level]
        )
    else:
        backend.pre_tokenizer = level
    if split == _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, whole


def _sentencepiece(meta: Mapping[str, Any]) -> Backend:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    unknown = meta.get("tokenizer.ggml.unknown_token_id")
    return sentencepiece_backend(
        tokens,
        meta["tokenizer.ggml.scores"],
        types,
        unknown=tokens[unknown] if unknown is not None else None,
        prefix=bool(meta.get("tokenizer.ggml.add_space_prefix", True)),
    )


def sentencepiece_backend(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], unknown: str | None, prefix: bool
) -> Backend:
    """A sentencepiece BPE vocabulary. `prefix`: a space is put before each stretch of text, as it was in training."""
    vocab = {token: i for i, token in enumerate(tokens)}
    # Sentencepiece joins the pair whose union scores best: each way to cut a piece in two is a merge of its rank.
    merges = []
    for token, score, type in zip(tokens, scores, types, strict=True):
        if type in (_CONTROL, _UNKNOWN, _BYTE):
            continue
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort()
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=[merge[3:] for merge in merges],
            unk_token=unknown or next((t for t, k in zip(tokens, types, strict=True) if k == _UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    space = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
