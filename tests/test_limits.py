"""Allowed tokens and bad words: they hold, and a request that has them gets the same tokens in any company."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from echo_engine import info
from framework.plugins.samplers import default, limits
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from framework import LLM, InvalidRequest, Rejected, SamplingParams
from framework.checkpoint import open_checkpoint
from framework.inputs import InputProcessor
from framework.messages import Add, EngineInfo
from framework.registry import load_plugins
from framework.settings import Settings
from framework.testing.sampling import Sampling, random_logits

TOKENS = 24
COMMON: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2}
FEW = tuple(range(40, 52))
KINDS: dict[str, dict[str, Any]] = {
    "free": {"temperature": 0},
    "allowed": {"temperature": 0, "allowed_token_ids": FEW},
    "drawn of allowed": {
        "seed": 4,
        "temperature": 1.5,
        "top_p": 0.9,
        "allowed_token_ids": FEW,
        "logit_bias": {41: 3},
    },
    "bad pairs": {
        "seed": 5,
        "allowed_token_ids": FEW,
        "bad_token_ids": tuple((a, b) for a in FEW for b in FEW if (a + b) % 3 == 0),
    },
    "bad triples": {
        "temperature": 0,
        "allowed_token_ids": FEW[:4],
        "bad_token_ids": tuple((a, b, c) for a in FEW[:4] for b in FEW[:4] for c in FEW[:4] if (a + b + c) % 2),
        "repetition_penalty": 1.3,
    },
    "bad tokens": {"seed": 6, "top_k": 30, "bad_token_ids": tuple((token,) for token in range(0, 500, 3))},
}
CASES: dict[str, dict[str, Any]] = {
    "together": {"kv_blocks": 512},
    "overlap": {"kv_blocks": 512, "overlap": "on", "max_num_batched_tokens": 11},
    **{
        f"{mode}, overlap {overlap}": {
            "kv_blocks": 9,
            "swap_space": "1.0",
            "preemption": mode,
            "scheduler": "priority",
            "overlap": overlap,
        }
        for mode in ("swap", "recompute")
        for overlap in ("off", "on")
    },
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("limits") / "model")


Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def make(path: Path) -> Iterator[Make]:
    def start(**flags: Any) -> LLM:
        return LLM(str(path), **{"dtype": "float32", "threads": 1, "kv_blocks": 64, "max_num_seqs": 8, **flags})

    yield start


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(40, 300), k=5 + 7 * (number % 5))


@pytest.fixture(scope="module")
def alone(make: Make) -> dict[str, list[int]]:
    with make() as llm:
        return {
            name: llm.generate([prompt(i)], SamplingParams(**COMMON, **given))[0].token_ids
            for i, (name, given) in enumerate(KINDS.items())
        }


def test_they_hold(alone: dict[str, list[int]]) -> None:
    """Of each kind: what is allowed and no sequence that is banned, with which the free one is full."""
    assert not set(alone["free"]) <= set(FEW)
    for name, output in alone.items():
        params = SamplingParams(**KINDS[name])
        assert len(output) == TOKENS and set(output) <= set(params.allowed_token_ids or output)
        runs = {tuple(output[i - n : i]) for n in (1, 2, 3) for i in range(n, TOKENS + 1)}
        assert not runs & set(params.bad_token_ids)
    assert len(set(alone["bad pairs"])) > 3 and len(set(alone["bad triples"])) > 1


@pytest.mark.parametrize("case", CASES)
def test_company_changes_nothing(case: str, make: Make, alone: dict[str, list[int]]) -> None:
    """Nor does preemption, after which what a request may not generate is found in its output again."""
    rng, got = random.Random(3), dict[str, list[int]]()
    with make(**CASES[case]) as llm:
        waiting = [(name, i, n) for n in range(3) for i, name in enumerate(KINDS)]
        while waiting or llm.engine.has_work:
            while waiting and (rng.random() < 0.5 or not llm.engine.has_work):
                name, i, n = waiting.pop(0)
                params = SamplingParams(**COMMON, **KINDS[name])
                urgency = -len(got) if "priority" in llm.info.uses else 0
                assert not llm.engine.add(Add(f"{name}, {n}", prompt(i), params, 0, urgency))
                got[f"{name}, {n}"] = []
            for output in llm.engine.step():
                assert output.error is None
                got[output.id] += output.tokens
        stats = llm.engine.stats()
    assert got == {f"{name}, {n}": alone[name] for n in range(3) for name in KINDS}
    assert "scheduler" not in CASES[case] or stats.preemptions_swap + stats.preemptions_recompute >= 3


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_who_may_generate_nothing_fails_alone(overlap: str, make: Make, alone: dict[str, list[int]]) -> None:
    """At once, or when the output has come to where all that is allowed is banned."""
    kinds = {
        "at once": SamplingParams(allowed_token_ids=(41, 42), bad_token_ids=((41,), (42,))),
        "later": SamplingParams(allowed_token_ids=(41,), bad_token_ids=((41, 41, 41),)),
        "free": SamplingParams(**COMMON, **KINDS["free"]),
    }
    tokens, errors = dict[str, list[int]](), dict[str, str | None]()
    with make(overlap=overlap) as llm:
        for id, params in kinds.items():
            assert not llm.engine.add(Add(id, prompt(0), params, 0))
        while llm.engine.has_work:
            for output in llm.engine.step():
                tokens.setdefault(output.id, []).extend(output.tokens)
                errors[output.id] = output.error
                assert output.error is None or output.status == 400
        assert tokens == {"at once": [], "later": [41, 41], "free": alone["free"]}
        assert errors.pop("free") is None
        assert all(error and error.startswith("no token is left to choose from") for error in errors.values())
        with pytest.raises(Rejected, match="no token is left to choose from: allowed_token_ids, bad_words"):
            llm.generate([prompt(0)], kinds["later"])
        while llm.engine.has_work:
            llm.engine.step()
        usage = llm.engine.kv.usage()
        assert (usage.holding, usage.reserved) == (0, 0)


def test_limits_are_worked_out_once_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the batch changes; again for an id that came back."""
    built = list[SamplingParams]()

    class Counted(limits.Limit):
        def __init__(self, params: SamplingParams, device: torch.device, vocab: int) -> None:
            built.append(params)
            super().__init__(params, device, vocab)

    monkeypatch.setattr(default, "Limit", Counted)
    sampling = Sampling(default.DefaultSampler())
    first, second = (SamplingParams(temperature=0, allowed_token_ids=(token,)) for token in (7, 8))
    sampling.add("a", first)
    sampling.add("free", SamplingParams(temperature=0))
    sampling.add("b", second)
    logits = random_logits(3)
    for ids in (("a", "free", "b"), ("b", "a"), ("free", "a"), ("a", "free", "b")):
        found = dict(zip(ids, sampling.sample(logits[: len(ids)], *ids), strict=True))
        assert found["a"] == 7 and found.get("b", 8) == 8
    assert built == [first, second]
    sampling.remove("a")
    sampling.add("a", second)
    assert sampling.sample(logits[:2], "a", "b") == [8, 8] and built == [first, second, second]


def test_eos_is_a_token_like_others(make: Make) -> None:
    """Who does not allow it goes on to the end; who allows nothing else has an empty output."""
    with make() as llm:
        eos = llm.inputs.tokenizer.eos_token_ids[0]
        [output] = llm.generate([prompt(1)], {"allowed_token_ids": [50, 51], "max_tokens": 20})
        assert (output.finish_reason, len(output.token_ids)) == ("length", 20)
        [output] = llm.generate([prompt(1)], {"allowed_token_ids": [eos], "max_tokens": 20})
        assert (output.finish_reason, output.text) == ("stop", "")
        [output] = llm.generate([prompt(1)], {"bad_token_ids": [[eos]], "logit_bias": {eos: 100}, "max_tokens": 20})
        assert output.finish_reason == "length" and eos not in output.token_ids


def test_ranges(make: Make) -> None:
    with make() as llm:
        vocab, most, [a] = llm.info.vocab_size, SamplingParams.MAX_BAD_WORDS, llm.tokenizer.encode("a", False)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"allowed_token_ids": [3, vocab]}, f"allowed_token_ids: token id {vocab} is outside the vocabulary"),
            ({"allowed_token_ids": [-1]}, "allowed_token_ids: token id -1 is outside the vocabulary"),
            ({"bad_token_ids": [[3], [4, -2]]}, "bad_token_ids: token id -2 is outside the vocabulary"),
            ({"bad_token_ids": [[3], []]}, "bad_token_ids must be made of non-empty sequences"),
            ({"bad_words": ["a", ""]}, "bad_words must be made of non-empty strings"),
            ({"bad_words": ["a"] * (most + 1)}, f"bad_words: at most {most} may be given, got {most + 1}"),
            ({"bad_token_ids": [[1]] * (4 * most + 1)}, f"bad_token_ids: at most {4 * most} may be given"),
            ({"bad_words": "abc"}, "bad_words: "),
            ({"allowed_token_ids": [7, 8], "bad_token_ids": [[8], [7]]}, "allowed_token_ids: bad_words .* ban each"),
            ({"allowed_token_ids": [a], "bad_words": ["a", "b"]}, "allowed_token_ids: bad_words .* ban each of them"),
            ({"bad_words": ["a" * 10**6]}, "bad_words: 1000000 characters cannot come within the limit of"),
        ]
        for given_, message in wrong:
            with pytest.raises(InvalidRequest, match=message) as caught:
                llm.generate("a", given_)
            assert caught.value.field == next(iter(given_))


# Words


@pytest.fixture(scope="module", params=["bytelevel", "sentencepiece"])
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    path = tiny_checkpoint(tmp_path_factory.mktemp("words") / request.param, tokenizer=request.param)
    checkpoint = open_checkpoint(Settings(model=str(path)), load_plugins())
    return InputProcessor(checkpoint, checkpoint.tokenizer(), _info(checkpoint.config["vocab_size"]))


def _info(vocab_size: int) -> EngineInfo:
    return replace(info("x"), vocab_size=vocab_size)


def spellings(inputs: InputProcessor, *words: str) -> set[tuple[int, ...]]:
    return set(inputs.complete(SamplingParams(bad_words=words), [5]).bad_token_ids)


@given(
    before=st.sampled_from(["", "x ", "\n", "the quick ", "(", "a: "]),
    word=st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=9)
    | st.sampled_from(["quick", "the", "fox", "lazy dog", ".", "漢", "é"]),
    after=st.sampled_from(["", " ", ".", "\n", " the"]),
)
def test_a_word_is_banned_wherever_it_stands(inputs: InputProcessor, before: str, word: str, after: str) -> None:
    """Tokens that cover the word and nothing else, or the space before it, are one of the sequences: in any text."""
    banned = spellings(inputs, word)
    spans = inputs.tokenizer.encode_spans(before + word + after)
    begin, end = len(before), len(before) + len(word)
    for first in {begin, begin - before.endswith(" ")}:
        covering = [(id, start, stop) for id, start, stop in spans if first < stop and start < end and start < stop]
        if covering and (covering[0][1], covering[-1][2]) == (first, end):
            assert tuple(id for id, *_ in covering) in banned


def test_only_the_word_is_banned(inputs: InputProcessor) -> None:
    for word in ("fox", " fox", "  fox", ".", "\n", " ", "lazy dog", "漢"):
        bare = word.lstrip(" ") or word
        x = inputs.tokenizer.encode("x", False)
        texts = {inputs.tokenizer.decode([*x, *ids]).removeprefix("x") for ids in spellings(inputs, word)}
        assert {text.lstrip(" ") for text in texts} == {bare.lstrip(" ")}


def test_words_and_tokens_go_together(inputs: InputProcessor) -> None:
    params = inputs.complete(SamplingParams(bad_words=("fox", "fox"), bad_token_ids=((9, 8), (7,))), [5])
    assert params.bad_token_ids[:2] == ((9, 8), (7,)) and len(set(params.bad_token_ids)) == len(params.bad_token_ids)
    assert set(params.bad_token_ids[2:]) == spellings(inputs, "fox") != set()
    assert inputs.complete(params, [5]) == params


def test_a_word_that_the_model_cannot_generate_bans_nothing(inputs: InputProcessor) -> None:
    small = InputProcessor.__new__(InputProcessor)
    small.__dict__ |= inputs.__dict__ | {"info": _info(3)}
    assert spellings(small, "fox") == set()


def test_bad_words_are_not_generated(make: Make) -> None:
    """Words that the model likes, one after the other: none of them comes again."""
    banned = list[str]()
    with make() as llm:
        for _ in range(8):
            given_ = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "bad_words": banned}
            [output] = llm.generate([prompt(2)], given_)
            spelt = llm.inputs.complete(SamplingParams(bad_words=tuple(banned)), prompt(2)).bad_token_ids
            ends = [tuple(output.token_ids[:i]) for i in range(1, TOKENS + 1)]
            assert not any(end[-len(some) :] == some for end in ends for some in spelt)
            liked = (llm.tokenizer.decode([token]).strip() for token in output.token_ids)
            banned.append(next(word for word in liked if word and word not in banned and "\ufffd" not in word))
