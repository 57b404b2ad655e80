"""Prompts, defaults and limits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from echo_engine import info

from framework import ConfigError, InvalidRequest, SamplingParams
from framework.checkpoint import open_checkpoint
from framework.inputs import Cut, InputProcessor
from framework.registry import load_plugins
from framework.settings import Settings


def processor(path: Path, **settings: Any) -> InputProcessor:
    checkpoint = open_checkpoint(Settings(model=str(path), **settings), load_plugins())
    return InputProcessor(checkpoint, checkpoint.tokenizer(), info("x"))


@pytest.fixture
def with_config(tiny_llama: Path, tmp_path: Path) -> Any:
    def make(settings: dict[str, Any] | None = None, **config: Any) -> InputProcessor:
        copy = shutil.copytree(tiny_llama, tmp_path / "copy", dirs_exist_ok=True)
        (copy / "generation_config.json").write_text(json.dumps(config))
        return processor(copy, **settings or {})

    return make


def test_bos_is_there_once(tiny_llama_spm: Path) -> None:
    inputs = processor(tiny_llama_spm)
    bos = inputs.tokenizer.bos_token_id
    for ids in (
        inputs.encode("hello"),
        inputs.encode("<s>hello"),
        inputs.render([{"role": "user", "content": "hello"}]),
    ):
        assert ids[0] == bos and ids.count(bos) == 1
    assert bos not in inputs.encode("hello", add_special_tokens=False)
    assert inputs.encode("") == [bos]
    assert inputs.encode([bos, bos, 5]) == [bos, bos, 5]


def test_cut(tiny_llama_spm: Path) -> None:
    """A text keeps its BOS; of token ids and at the right nothing is special."""
    inputs = processor(tiny_llama_spm)
    text = "the quick brown fox " * 100
    bos, *rest = inputs.tokenize(text)
    assert len(rest) > 256
    assert inputs.encode(text, True, Cut(9)) == [bos, *rest[-8:]]
    assert inputs.encode(text, False, Cut(9)) == rest[-9:]
    assert inputs.encode(text, True, Cut(9, "right")) == [bos, *rest[:8]]
    assert inputs.encode(text, True, Cut(1)) == [bos]
    assert inputs.encode([bos, *rest], True, Cut(9)) == rest[-9:]
    assert inputs.encode([bos, *rest], True, Cut(9, "right")) == [bos, *rest[:8]]
    short = inputs.encode("the fox")
    assert inputs.encode("the fox", True, Cut(len(short))) == inputs.encode("the fox", True, Cut(200)) == short
    chat = [{"role": "user", "content": text}]
    assert inputs.render(chat, Cut(9)) == [bos, *inputs.tokenize(inputs.tokenizer.render(chat), False)[-8:]]
    for long in (text, [bos, *rest]):
        with pytest.raises(InvalidRequest, match="leave no room"):
            inputs.encode(long, True, Cut(256))
    with pytest.raises(InvalidRequest, match=r"^prompt: .* characters cannot fit"):
        inputs.encode("word " * 2**20, True, Cut(9))


def test_cut_to_what_fits(tiny_llama: Path) -> None:
    inputs = processor(tiny_llama)
    assert inputs.cut(Cut(5, "right"), 200) == (5, "right")
    assert inputs.cut(Cut(-1)).tokens == 255 and inputs.cut(Cut(-1), 200).tokens == 56
    assert inputs.cut(Cut(-1), 999).tokens == 1  # whose prompt is not at fault
    for wrong in (-2, 0, 257):
        with pytest.raises(InvalidRequest, match=f"^truncate must be between 1 and .* 256 .* got {wrong}$") as caught:
            inputs.cut(Cut(wrong))
        assert caught.value.field == "truncate"


def test_empty_prompts(tiny_llama: Path) -> None:
    inputs = processor(tiny_llama)
    for prompt in ("", []):
        with pytest.raises(InvalidRequest, match="empty") as caught:
            inputs.encode(prompt)
        assert caught.value.field == "prompt"


def test_a_template_that_refuses_says_why(tiny_llama_spm: Path) -> None:
    with pytest.raises(InvalidRequest, match="Only user and assistant roles") as caught:
        processor(tiny_llama_spm).render([{"role": "system", "content": "hello"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("ids", [[-1], [5, 512], [2**63]])
def test_ids_outside_the_vocabulary(tiny_llama: Path, ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=rf"{ids[-1]}.*0\.\.511"):
        processor(tiny_llama).encode(ids)


def test_limits_name_both_numbers(tiny_llama: Path) -> None:
    inputs = processor(tiny_llama)
    with pytest.raises(InvalidRequest, match=r"256 tokens.*limit of 256"):
        inputs.encode([5] * 256)
    prompt = inputs.encode([5] * 255)
    assert inputs.complete(SamplingParams(max_tokens=1), prompt).max_tokens == 1
    assert inputs.complete(SamplingParams(), prompt).max_tokens is None
    with pytest.raises(
        InvalidRequest,
        match=r"^max_tokens: too large, or the prompt is too long: 255 prompt tokens \+ 2 .*256.*at most 1",
    ) as caught:
        inputs.complete(SamplingParams(max_tokens=2), prompt)
    assert caught.value.field == "max_tokens"
    with pytest.raises(InvalidRequest, match="min_tokens must be between 0 and 1, the most tokens to generate, got 2"):
        inputs.complete(SamplingParams(min_tokens=2), prompt)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        inputs.complete(SamplingParams(max_tokens=0), prompt)


def test_defaults_come_from_the_checkpoint(with_config: Any) -> None:
    inputs = with_config(temperature=0.6, top_p=0.9, top_k=40, repetition_penalty=1.1, do_sample=False, max_length=20)
    assert inputs.defaults == SamplingParams(temperature=0.6, top_p=0.9, top_k=40, repetition_penalty=1.1)
    assert inputs.params({"temperature": None, "top_p": 0.5}).top_p == 0.5
    assert inputs.params({"temperature": None, "top_p": 0.5}).temperature == 0.6
    assert inputs.params({"temperature": 0.0}).temperature == 0.0
    assert with_config({"generation_config": "none"}, temperature=0.6).defaults == SamplingParams()


@pytest.mark.parametrize("config", [{"temperature": "hot"}, {"top_p": 7}])
def test_bad_defaults_stop_start_up(with_config: Any, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config.json.*{next(iter(config))}.*none"):
        with_config(**config)


def test_ends(with_config: Any) -> None:
    (eos,) = with_config().tokenizer.eos_token_ids
    complete = with_config(eos_token_id=[7, 9, 5000]).complete(SamplingParams(), [1])
    assert set(complete.eos_token_ids) == {7, 9, eos}  # an id outside the vocabulary never comes
    assert with_config(eos_token_id=7).complete(SamplingParams(), [1]).ends == {7, eos}
    assert not with_config().complete(SamplingParams(ignore_eos=True), [1]).ends


def test_prompts_are_checked_together_by_the_longest(tiny_llama: Path) -> None:
    inputs = processor(tiny_llama)
    prompts = [[5] * 10, [5] * 200, [5] * 30]
    assert inputs.complete(SamplingParams(max_tokens=56), *prompts).max_tokens == 56
    with pytest.raises(InvalidRequest, match=r"200 prompt tokens \+ 57 exceed.*at most 56"):
        inputs.complete(SamplingParams(max_tokens=57), *prompts)
    with pytest.raises(InvalidRequest, match="min_tokens"):
        inputs.complete(SamplingParams(min_tokens=57), *prompts)


def test_what_cannot_fit_is_not_tokenised(
    tiny_llama: Path, tiny_llama_spm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tiny_llama, tiny_llama_spm):
        inputs = processor(path)
        longest = inputs.tokenizer.longest_token
        assert longest
        monkeypatch.setattr(inputs.tokenizer, "encode", lambda text, add_special_tokens: [1])
        fits = "a" * (256 * longest)
        assert inputs.encode(fits) == [1]
        with pytest.raises(InvalidRequest, match="cannot fit into the limit of 256 tokens") as caught:
            inputs.encode(fits + "a")
        assert caught.value.field == "prompt"
        with pytest.raises(InvalidRequest, match="cannot fit") as caught:
            inputs.render([{"role": "user", "content": fits}])
        assert caught.value.field == "messages"


def test_biases_are_cut_to_what_has_an_effect(tiny_llama: Path) -> None:
    given = {1: 1e300, 2: -100.5, 3: 99.5, 4: -100.0}
    complete = processor(tiny_llama).complete
    assert complete(SamplingParams(logit_bias=given), [1]).logit_bias == {1: 100, 2: -100, 3: 99.5, 4: -100}
    for wrong in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(InvalidRequest, match="logit_bias of token 5"):
            complete(SamplingParams(logit_bias={5: wrong}), [1])


def test_a_cache_salt_may_be_longer_than_a_name(tiny_llama: Path) -> None:
    routing = processor(tiny_llama).routing
    assert routing(tenant="t" * 256, cache_salt="s" * 1024).cache_salt == b"s" * 1024
    for wrong, most in (({"cache_salt": "s" * 1025}, 1024), ({"tenant": "t" * 257}, 256)):
        with pytest.raises(InvalidRequest, match=f"at most {most} characters"):
            routing(**wrong)


def test_top_k_is_cut_to_the_vocabulary(tiny_llama: Path) -> None:
    assert processor(tiny_llama).complete(SamplingParams(top_k=10**30), [1]).top_k == 512
    assert processor(tiny_llama).complete(SamplingParams(top_k=-1), [1]).top_k == -1
