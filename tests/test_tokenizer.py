"""Tokenizers against transformers and sentencepiece; incremental decoding; chat templates."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from checkpoints import LLAMA_CHAT, sentencepiece_model
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import InvalidRequest, ModelError, Tokenizer
from framework.checkpoint import open_checkpoint
from framework.registry import load_plugins
from framework.settings import Settings

TEXTS = [
    "Hello world",
    "  two leading spaces, and trailing  ",
    "def f(x):\n    return x ** 2  # comment\n\n\n\tx\r\n",
    "1984 costs $3,141.59 or 10%; v1.2.3 12345678",
    "I'm sure they'll say we've done it; HE'D KNOW'S",
    "漢字とかなと한국어 и кириллица, عربى",
    "🙂👩‍👩‍👧‍👦🇩🇪 e\u0301 café \u00a0nbsp \u200b zero",
    "a\tb\x00c\x7f �",
    "\n",
    " ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "text<s>in</s>between <unk> [INST] <0x41> ▁ word",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 4,
]


def load(path: Path, **overrides: Any) -> Tokenizer:
    options = Settings(model=str(path), **overrides)
    return open_checkpoint(options, load_plugins()).tokenizer()


def single_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The tokens of single bytes that spell `data`."""
    byte = {tokenizer.token_bytes(i): i for i in range(3, 259)}
    return [byte[bytes([b])] for b in data]


@pytest.fixture(scope="module")
def bytelevel(tiny_llama: Path) -> Tokenizer:
    return load(tiny_llama)


@pytest.fixture(scope="module")
def spm(tiny_llama_spm: Path) -> Tokenizer:
    return load(tiny_llama_spm)


@pytest.mark.parametrize(
    "text",
    ["a" * 500, "word " * 100, " " * 300, "e\u0301" * 200, "漢字" * 100, "\ufb2c" * 50],
    ids=["letter", "words", "spaces", "composed", "ideographs", "ligature"],
)
def test_no_token_is_longer_than_the_longest(bytelevel: Tokenizer, spm: Tokenizer, text: str) -> None:
    for tokenizer in (bytelevel, spm):
        assert tokenizer.longest_token is not None
        assert len(text) <= len(tokenizer.encode(text, add_special_tokens=False)) * tokenizer.longest_token


def test_where_text_may_vanish_no_token_is_the_longest() -> None:
    """Such checkpoints cannot say that a text is too long before they have tokenised it."""
    vocab = {"<unk>": 0, "a": 1}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    assert Tokenizer(words).longest_token is None
    for normalizer, longest in (
        (None, 5),
        (tokenizers.normalizers.NFC(), 20),
        (tokenizers.normalizers.Strip(), None),
        (tokenizers.normalizers.Replace("ab", "c"), None),
        (tokenizers.normalizers.Replace(" ", "▁"), 5),
        (tokenizers.normalizers.Replace(tokenizers.Regex(" +"), " "), None),
        (tokenizers.normalizers.Sequence([tokenizers.normalizers.NFD(), tokenizers.normalizers.Lowercase()]), None),
    ):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
        backend.decoder = tokenizers.decoders.ByteLevel()
        if normalizer is not None:
            backend.normalizer = normalizer
        assert Tokenizer(backend).longest_token == longest
    backend.normalizer = tokenizers.normalizers.NFD()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
    assert Tokenizer(backend).longest_token is None
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "isolated")
    assert Tokenizer(backend).longest_token == 5
    backend.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    assert Tokenizer(backend).longest_token is None


def test_others_run_while_a_long_text_is_tokenised(bytelevel: Tokenizer) -> None:
    text, turns = "the quick brown fox " * 50_000, 0
    work = threading.Thread(target=bytelevel.encode, args=(text,))
    work.start()
    while work.is_alive():
        time.sleep(0.001)  # to give the interpreter away, and to need it back
        turns += 1
    assert turns > 20


@pytest.fixture(params=["tiny_llama", "tiny_llama_spm"])
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, Any]:
    """(our tokenizer, transformers' tokenizer) of one directory."""
    path = request.getfixturevalue(request.param)
    return load(path), transformers.AutoTokenizer.from_pretrained(path)


class TestEncoding:
    @pytest.mark.parametrize("special", [True, False])
    def test_equals_transformers(self, pair: tuple[Tokenizer, Any], special: bool) -> None:
        ours, theirs = pair
        for text in TEXTS:
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text

    def test_spm_equals_sentencepiece(self, spm: Tokenizer) -> None:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
        for text in TEXTS:
            if "<s>" not in text and "\x00" not in text:  # control tokens are not text to sentencepiece
                assert spm.encode(text, add_special_tokens=False) == model.encode(text), text

    @pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
    @pytest.mark.parametrize("processor", [True, False])
    def test_who_adds_bos(self, tiny_llama_spm: Path, tmp_path: Path, flags: dict[str, bool], processor: bool) -> None:
        path = shutil.copytree(tiny_llama_spm, tmp_path / "m")
        config = json.loads((path / "tokenizer_config.json").read_text())
        config = {k: v for k, v in config.items() if k not in ("add_bos_token", "add_eos_token")} | flags
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        if not processor:
            data = json.loads((path / "tokenizer.json").read_text())
            (path / "tokenizer.json").write_text(json.dumps(data | {"post_processor": None}))
        ids = load(path).encode("Hello")
        assert ids == transformers.AutoTokenizer.from_pretrained(path).encode("Hello")
        assert ids.count(1) == processor

    def test_lone_surrogates_become_replacement_characters(self, bytelevel: Tokenizer) -> None:
        assert bytelevel.decode(bytelevel.encode("a\ud800b🙂")) == "a�b🙂"

    def test_tokens_of_tokenizer_config_alone(self, tiny_llama: Path, tmp_path: Path) -> None:
        path = shutil.copytree(tiny_llama, tmp_path / "m")
        size = load(path).vocab_size
        file = path / "tokenizer_config.json"
        config = json.loads(file.read_text())
        entry = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        config["added_tokens_decoder"] = {
            str(size): {"content": "<think>", "special": False, **entry},
            str(size + 1): {"content": "<tool>", "special": True, **entry},
        }
        config["pad_token"] = "[NOWHERE]"  # no id of its own: adding it would exceed the embedding
        file.write_text(json.dumps(config))
        tokenizer = load(path)
        assert tokenizer.encode("<think><tool>[NOWHERE]")[:2] == [size, size + 1]
        assert tokenizer.vocab_size == size + 2
        assert tokenizer.decode([size, size + 1]) == "<think>"
        assert tokenizer.token_to_id("[NOWHERE]") is None

    def test_truncation_in_tokenizer_json_is_ignored(self, tiny_llama: Path, tmp_path: Path) -> None:
        path = shutil.copytree(tiny_llama, tmp_path / "m")
        data = json.loads((path / "tokenizer.json").read_text())
        data["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
        (path / "tokenizer.json").write_text(json.dumps(data))
        assert load(path).decode(load(path).encode("Hello long world")) == "Hello long world"


class TestTokens:
    def test_ids(self, bytelevel: Tokenizer, spm: Tokenizer) -> None:
        assert (bytelevel.bos_token_id, bytelevel.eos_token_ids) == (1, (2,))
        assert (spm.bos_token_id, spm.eos_token_ids) == (1, (2,))
        assert bytelevel.vocab_size == 512
        assert bytelevel.id_to_token(2) == "<|im_end|>"
        assert bytelevel.id_to_token(9999) is None
        assert bytelevel.token_to_id("<|im_end|>") == 2

    def test_token_bytes_make_up_the_text(self, bytelevel: Tokenizer, spm: Tokenizer) -> None:
        for text in TEXTS:
            assert b"".join(map(bytelevel.token_bytes, bytelevel.encode(text))) == text.encode()
            if "<s>" not in text:  # sentencepiece puts a space before each stretch of text, and ▁ is its space
                spelled = b"".join(map(spm.token_bytes, spm.encode(text, add_special_tokens=False)))
                assert spelled == f" {text}".replace("▁", " ").encode()

    def test_token_bytes_of_single_tokens(self, bytelevel: Tokenizer, spm: Tokenizer) -> None:
        assert bytelevel.token_bytes(2) == b"<|im_end|>"
        assert bytelevel.token_bytes(9999) == b""
        assert {bytelevel.token_bytes(i) for i in range(3, 259)} == {bytes([b]) for b in range(256)}
        assert [spm.token_bytes(i) for i in range(3, 259)] == [bytes([b]) for b in range(256)]


class TestStream:
    def test_equals_decoding_at_once(self, pair: tuple[Tokenizer, Any]) -> None:
        ours, _ = pair
        for text in TEXTS:
            prompt = ours.encode("Some prompt:")
            ids = ours.encode(text, add_special_tokens=False)
            for skip in (True, False):
                stream = ours.stream(skip_special_tokens=skip)
                pieces = [stream.step(i) for i in ids]
                assert "".join(p or "" for p in pieces) + stream.finish() == ours.decode(ids, skip), text
                assert all(p is None or "�" not in p for p in pieces) or "�" in text
                stream = ours.stream(prompt, skip)
                after = "".join(stream.step(i) or "" for i in ids) + stream.finish()
                assert ours.decode(prompt, skip) + after == ours.decode(prompt + ids, skip), text

    def test_characters_come_whole_and_at_once(self, bytelevel: Tokenizer, spm: Tokenizer) -> None:
        for tokenizer in (bytelevel, spm):
            stream = tokenizer.stream(tokenizer.encode("x"))
            assert [stream.step(i) for i in single_bytes(tokenizer, "👾".encode())] == [None, None, None, "👾"]
            assert stream.finish() == ""

    def test_the_space_after_the_prompt_is_kept(self, spm: Tokenizer) -> None:
        ids = spm.encode("The dog", add_special_tokens=False)
        head = next(n for n in range(len(ids)) if spm.decode(ids[:n]) == "The")
        stream = spm.stream(ids[:head])
        assert "".join(stream.step(i) or "" for i in ids[head:]) + stream.finish() == " dog"

    def test_an_unfinished_character_comes_at_the_end(self, bytelevel: Tokenizer, spm: Tokenizer) -> None:
        for tokenizer in (bytelevel, spm):
            stream = tokenizer.stream()
            assert [stream.step(i) for i in single_bytes(tokenizer, "👾".encode()[:3])] == [None] * 3
            assert set(stream.finish()) == {"�"}
            assert stream.finish() == ""

    def test_a_prompt_that_ends_within_a_character_is_not_repeated(self, bytelevel: Tokenizer) -> None:
        ids = bytelevel.encode("x👾", add_special_tokens=False)
        stream = bytelevel.stream(ids[:-1])
        text = (stream.step(ids[-1]) or "") + (stream.step(bytelevel.encode("y")[0]) or "") + stream.finish()
        assert "x" not in text and text.endswith("y")

    @pytest.mark.parametrize("kind", ["bytelevel", "spm"])
    def test_invalid_bytes_do_not_stall(self, kind: str, request: pytest.FixtureRequest) -> None:
        tokenizer = request.getfixturevalue(kind)
        stream = tokenizer.stream()
        pieces = [stream.step(i) for i in single_bytes(tokenizer, b"\xff" * 40)]
        assert sum(p is not None for p in pieces) >= 4
        assert "".join(p or "" for p in pieces) + stream.finish() == "�" * 40
        stream = tokenizer.stream()
        text = [stream.step(i) or "" for i in single_bytes(tokenizer, "é".encode() + b"\xffok")]
        assert ("".join(text) + stream.finish()).startswith("é�")

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_special_tokens_that_are_kept(self, data: st.DataObject) -> None:
        """Where they stand, and nothing else changes; ones that are no special tokens are no matter."""
        tokenizer = data.draw(st.sampled_from(_CACHE))
        special = tokenizer.special["eos_token"]
        (eos,), bos = tokenizer.eos_token_ids, tokenizer.bos_token_id
        texts = st.text(max_size=12).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
        parts = data.draw(st.lists(texts | st.sampled_from([[eos], [bos]]), max_size=8))
        ids, prompt = [id for part in parts for id in part], data.draw(texts)
        plain, kept = tokenizer.stream(prompt), tokenizer.stream(prompt, keep=[special, "e", "no token"])
        expected = [(plain.step(id) or "") + (special if id == eos else "") for id in ids]
        assert "".join(kept.step(id) or "" for id in ids) + kept.finish() == "".join(expected) + plain.finish()
        shown, all = tokenizer.stream([], False), tokenizer.stream([], False, keep=[special])
        assert [shown.step(id) for id in ids] == [all.step(id) for id in ids]

    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def test_any_text_and_any_tokens(self, data: st.DataObject) -> None:
        tokenizer = data.draw(st.sampled_from(_CACHE))
        ids = tokenizer.encode(data.draw(st.text(max_size=40)))
        cut = data.draw(st.integers(0, len(ids)))
        stream = tokenizer.stream(ids[:cut])
        text = "".join(stream.step(i) or "" for i in ids[cut:]) + stream.finish()
        if "�" not in tokenizer.decode(ids[:cut]):
            assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)
        noise = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
        stream = tokenizer.stream(ids)
        held = 0
        for token in noise:
            held = held + 1 if stream.step(token) is None and tokenizer.token_bytes(token) else 0
            assert held < 40  # special tokens give no text, everything else soon does
        stream.finish()


_CACHE: list[Tokenizer] = []


@pytest.fixture(autouse=True, scope="module")
def _cache(bytelevel: Tokenizer, spm: Tokenizer) -> None:
    _CACHE[:] = [bytelevel, spm]


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>there</b> & 🙂"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  1+1?  "},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Sure?"},
    ],
]
TEMPLATES = {
    "blocks": (
        "{% for message in messages %}\n    {% if loop.first %}\n{{ bos_token }}\n    {% endif %}\n"
        "  {{- message.role }}: {{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}\n"
        "{%- if add_generation_prompt %}assistant:{% endif %}"
    ),
    "json": (
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
        "{% if tools %}{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}{% endif %}"
    ),
    "loops": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ m.content }};"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<e>"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = m.content %}{% endif %}{% endfor %}[{{ ns.system }}]"
        "{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say(messages[-1].content) }}"
        "{{ strftime_now('%Y') | length }}{{ dict(a=1) }}{{ documents is none }}{{ tools is none }}"
        "{{ enable_thinking | default('unset') }}{{ unk_token }}"
    ),
    "llama": LLAMA_CHAT.replace("{{ raise_exception('Only user and assistant roles') }}", ""),
}


class TestChat:
    @pytest.mark.parametrize("name", TEMPLATES)
    @pytest.mark.parametrize("chat", CHATS, ids=["one", "four"])
    def test_rendering_equals_transformers(
        self, tiny_llama_spm: Path, tmp_path: Path, name: str, chat: list[dict[str, Any]]
    ) -> None:
        file = tmp_path / "template.jinja"
        file.write_text(TEMPLATES[name])
        ours = load(tiny_llama_spm, chat_template=file)
        theirs = transformers.AutoTokenizer.from_pretrained(tiny_llama_spm)
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "<>"}}}]
        for extra in ({}, {"enable_thinking": False}, {"tools": tools}):
            for prompt in (True, False):
                expected = theirs.apply_chat_template(
                    chat, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=prompt, **extra
                )
                assert ours.render(chat, prompt, **extra) == expected

    def test_bos_appears_once(self, spm: Tokenizer) -> None:
        ids = spm.encode(spm.render(CHATS[0]), add_special_tokens=False)
        assert ids.count(1) == 1
        assert ids[0] == 1

    def test_own_template_of_the_checkpoint(self, tiny_llama: Path, bytelevel: Tokenizer) -> None:
        theirs = transformers.AutoTokenizer.from_pretrained(tiny_llama)
        for chat in CHATS:
            expected = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
            assert bytelevel.encode(bytelevel.render(chat), add_special_tokens=False) == expected

    def test_template_file_and_named_templates(self, tiny_llama: Path, tmp_path: Path) -> None:
        path = shutil.copytree(tiny_llama, tmp_path / "m")
        file = path / "tokenizer_config.json"
        config = json.loads(file.read_text())
        config["chat_template"] = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools"},
        ]
        file.write_text(json.dumps(config))
        tokenizer = load(path)
        assert tokenizer.render(CHATS[0]) == "plain"
        assert tokenizer.render(CHATS[0], tools=[{"type": "function"}]) == "tools"
        (path / "chat_template.jinja").write_text("from the file")
        assert load(path).chat_template == "from the file"

    def test_no_template(self, tiny_llama: Path, tmp_path: Path) -> None:
        path = shutil.copytree(tiny_llama, tmp_path / "m")
        file = path / "tokenizer_config.json"
        config = json.loads(file.read_text())
        del config["chat_template"]
        file.write_text(json.dumps(config))
        with pytest.raises(InvalidRequest, match="--chat-template") as error:
            load(path).render(CHATS[0])
        assert error.value.field == "messages"

    @pytest.mark.parametrize(
        ("template", "says"),
        [
            ("{{ raise_exception('no system role here') }}", "no system role here"),
            ("{{ messages[0].content + 1 }}", "can only concatenate"),
            ("{{ messages[7].content }}", "messages"),
            ("{% if %}", "Expected an expression"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.append(1) }}", "unsafe"),
        ],
    )
    def test_errors_of_the_template_are_the_requests(self, bytelevel: Tokenizer, template: str, says: str) -> None:
        tokenizer = Tokenizer(bytelevel.backend, chat_templates={"default": template})
        with pytest.raises(InvalidRequest, match=says) as error:
            tokenizer.render(CHATS[0])
        assert error.value.field == "messages"
        assert "\n" not in str(error.value)

    def test_null_fields_are_absent(self, bytelevel: Tokenizer) -> None:
        tokenizer = Tokenizer(
            bytelevel.backend, chat_templates={"default": "{{ 'name' in messages[0] }}{{ messages[0].content }}"}
        )
        assert tokenizer.render([{"role": "user", "content": "x", "name": None}]) == "Falsex"


def test_missing_and_broken_tokenizer_files(tiny_llama: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_llama, tmp_path / "m")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load(path)


def test_needs_no_torch() -> None:
    code = (
        "import sys, framework.tokenizer, framework.checkpoint, framework.plugins.models.gguf, "
        "framework.plugins.models.huggingface as h; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
