"""Any split of the tokens gives the text that one piece gives, cut at the right stop string."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoints import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from framework import Logprobs, SamplingParams, Tokenizer, detokenizer
from framework.detokenizer import Assembler, Detokenizer, StopMatcher
from framework.messages import TokenOutput


def make(kind: str, eos: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), kind)
        backend = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    return Tokenizer(backend, special={"eos_token": eos})


BYTES = make("bytelevel", "<|im_end|>")
PIECES = make("sentencepiece", "</s>")
ALPHABET = "ab \n🙂漢é"


def split(data: st.DataObject, whole: list[int] | str) -> list[list[int] | str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[i:j] for i, j in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def cut(text: str, stops: list[str], after: int = 0) -> tuple[str, str | None]:
    """By definition: the stop that ends first, beyond `after` characters; of those the longest; text before it."""
    found = [(end, -len(s), s) for s in stops for end in range(after + 1, len(text) + 1) if text[:end].endswith(s)]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def run(tokenizer: Tokenizer, params: SamplingParams, pieces: list[list[int]]) -> tuple[str, str | None, int]:
    detokenizer, text, count = Detokenizer(tokenizer, params), "", 0
    for i, piece in enumerate(pieces):
        out = detokenizer.push(piece, finished=i == len(pieces) - 1)
        text, count = text + out.text, count + out.tokens
        if out.stop is not None:
            return text, out.stop, count
    return text, None, count


@given(st.data())
def test_stop_strings_are_found_however_the_text_is_split(data: st.DataObject) -> None:
    text = data.draw(st.text("ab", max_size=30))
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
    matcher, sent, seen = StopMatcher(stops), "", ""
    for piece in split(data, text):
        assert isinstance(piece, str)
        out, stop = matcher.push(piece)
        sent, seen = sent + out, seen + piece
        if stop is not None:
            break
        # Held is the longest end of the text that a stop string begins with, and nothing more.
        held = seen.removeprefix(sent)
        begins = [n for n in range(len(seen) + 1) for s in stops if n < len(s) and seen.endswith(s[:n])]
        assert sent + held == seen and len(held) == max(begins)
    else:
        sent, stop = sent + matcher.flush(), None
    assert (sent, stop) == cut(text, stops)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@given(data=st.data())
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(ALPHABET, max_size=25))
    stops = data.draw(st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3))
    include = data.draw(st.booleans())
    ids = tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    whole = run(tokenizer, params, [ids])
    assert run(tokenizer, params, split(data, ids)) == whole  # type: ignore[arg-type]
    expected, stop = cut(tokenizer.decode(ids), stops)
    assert whole[:2] == (expected + (stop if include and stop else ""), stop)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@given(data=st.data())
def test_any_tokens_stream_alike(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Also those that are no UTF-8: most random ones."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    stops = data.draw(st.lists(st.sampled_from(["a", "th", "\ufffd ", " of"]), max_size=2))
    params = SamplingParams(stop=tuple(stops), min_tokens=data.draw(st.integers(0, 10)))
    assert run(tokenizer, params, split(data, ids)) == run(tokenizer, params, [ids])  # type: ignore[arg-type]


def steps(tokenizer: Tokenizer, text: str, **params: object) -> list[str]:
    """Text sent after each token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))  # type: ignore[arg-type]
    return [detokenizer.push([id], i == len(ids) - 1).text for i, id in enumerate(ids)]


@pytest.mark.parametrize("encode", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_characters_are_never_split(encode: Tokenizer) -> None:
    pieces = steps(encode, "a🙂 漢字")
    assert "".join(pieces) == "a🙂 漢字"
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces  # some token ended within a character


def test_an_unfinished_character_comes_at_the_end() -> None:
    ids = BYTES.encode("a🙂", add_special_tokens=False)[:-1]
    assert run(BYTES, SamplingParams(), [[id] for id in ids])[0] == "a\ufffd"


def test_text_is_held_only_while_it_can_become_a_stop_string() -> None:
    tokens = BYTES.encode("a b", add_special_tokens=False)
    assert steps(BYTES, "xy", stop=("yz",)) == ["x", "y"]  # the end flushes
    detokenizer = Detokenizer(BYTES, SamplingParams(stop=(" b c",)))
    sent = [detokenizer.push([t], False).text for t in tokens]
    assert sent[0] == "a" and "".join(sent) == "a"
    assert detokenizer.push(BYTES.encode("!", add_special_tokens=False), False).text == " b!"


def test_nothing_is_held_where_the_stop_string_is_kept() -> None:
    kept = {"stop": ("y!", "b c"), "include_stop_str_in_output": True}
    assert steps(BYTES, "xy", **kept) == ["x", "y"]
    ids = BYTES.encode("a b cd", add_special_tokens=False)
    assert run(BYTES, SamplingParams(**kept), [[id] for id in ids])[:2] == ("a b c", "b c")  # type: ignore[arg-type]


def test_min_tokens_counts_for_stop_strings() -> None:
    ids = BYTES.encode("a\na\na\n", add_special_tokens=False)
    assert len(ids) == 6
    for least, expected in ((0, "a"), (2, "a"), (3, "a\na"), (5, "a\na\na"), (7, "a\na\na\n")):
        params = SamplingParams(stop=("\n",), min_tokens=least)
        assert run(BYTES, params, [ids])[0] == run(BYTES, params, [[i] for i in ids])[0] == expected


def test_the_token_that_ends_the_output_is_silent() -> None:
    ids = BYTES.encode("ab", add_special_tokens=False)
    (eos,) = BYTES.eos_token_ids
    last = ids[-1]
    assert run(BYTES, SamplingParams(eos_token_ids=(eos,), skip_special_tokens=False), [[*ids, eos]])[0] == "ab"
    assert run(BYTES, SamplingParams(stop_token_ids=(last,)), [ids])[0] == BYTES.decode(ids[:-1])
    params = SamplingParams(stop_token_ids=(last,), include_stop_str_in_output=True)
    assert run(BYTES, params, [ids])[0] == "ab"
    kept = SamplingParams(eos_token_ids=(eos,), ignore_eos=True, skip_special_tokens=False)
    assert run(BYTES, kept, [[*ids, eos]])[0] == "ab<|im_end|>"


def test_the_prompt_decides_about_the_first_space() -> None:
    prompt = PIECES.encode("The five", add_special_tokens=False)
    ids = PIECES.encode("boxing", add_special_tokens=False)
    assert Detokenizer(PIECES, SamplingParams(), prompt).push(ids, True).text == " boxing"
    assert Detokenizer(PIECES, SamplingParams()).push(ids, True).text == "boxing"


@given(st.data())
def test_log_probabilities_come_with_their_text(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(3, BYTES.vocab_size - 1), min_size=1, max_size=30))
    params = SamplingParams(stop=("th", "e\n"), logprobs=0)
    results = []
    for pieces in ([ids], split(data, ids)):
        assembler, text, offsets, tokens = Assembler(BYTES, params), "", [], 0
        for i, piece in enumerate(pieces):
            entries = [Logprobs(id, -1.0, 1) for id in piece]
            finish = "length" if i == len(pieces) - 1 else None
            delta = assembler.push(TokenOutput("x", 0, list(piece), entries, finish))  # type: ignore[arg-type]
            text += delta.text
            assert len(delta.logprobs) == len(delta.offsets)
            assert all(offset <= len(text) for offset in delta.offsets)
            offsets += delta.offsets
            tokens += len(delta.tokens)
            if delta.finish_reason is not None:
                break
        assert len(offsets) == tokens == assembler.num_tokens
        assert offsets == sorted(offsets)
        results.append((text, offsets, delta.finish_reason, delta.stop_reason))
    assert results[0] == results[1]


def test_sequences_share_what_is_made_of_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def spy(stop: str, make: Any = detokenizer._failure) -> Any:
        made.append(stop)
        return make(stop)

    monkeypatch.setattr(detokenizer, "_failure", spy)
    stops = tuple(f"never seen before {i}" for i in range(8))
    every = [Detokenizer(BYTES, SamplingParams(stop=stops)) for _ in range(50)]
    assert made == list(stops)
    ids = BYTES.encode("a never seen before 3", add_special_tokens=False)
    assert {one.push(ids, True).stop for one in every} == {"never seen before 3"}


def test_hostile_stop_strings_cost_little() -> None:
    """Linear in the text, whatever the stop strings: this would take hours if each position were compared anew."""
    matcher = StopMatcher(["a" * 100_000 + "b"])
    assert matcher.push("a" * 300_000)[0] == "a" * 200_000
    assert matcher.push("c")[0] == "a" * 100_000 + "c"
