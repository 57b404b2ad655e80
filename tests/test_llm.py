"""The Python API, and the standing property: a request gives the same tokens alone, batched, chunked, preempted and
streamed, greedy or seeded; afterwards the pool is empty."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoints import tiny_checkpoint
from oracle import TOP, Reference, assert_drawn, assert_equal, assert_same

from framework import LLM, ConfigError, InvalidRequest, Logprobs, Plan, Rejected, SamplingParams, hookimpl
from framework.messages import EngineStats
from framework.settings import Settings
from framework.types import Mode

PROMPTS = ["Once upon a time", "def main(argv):", "Was ist das?", "A request waits", "In 1984", "漢字"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = [
    SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=24, ignore_eos=True, repetition_penalty=1.1)
    for i in range(len(PROMPTS))
]


def engine(path: Path, **flags: Any) -> LLM:
    return LLM(str(path), **{"dtype": "float32", "kv_blocks": 256, "threads": 1, **flags})


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with engine(tiny_llama) as llm:
        yield llm


def assert_idle(stats: EngineStats) -> None:
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.kv_holding, stats.kv_reserved, stats.kv_swapped, stats.kv_tokens) == (0, 0, 0, 0)


@pytest.mark.parametrize("params", [[GREEDY] * len(PROMPTS), SEEDED], ids=["greedy", "seeded"])
def test_the_standing_property(llm: LLM, tiny_llama: Path, params: list[SamplingParams]) -> None:
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    assert len({tuple(output.token_ids) for output in alone}) > 1
    assert [o.token_ids for o in llm.generate(PROMPTS, params)] == [o.token_ids for o in alone]
    for output, prompt, one in zip(alone, PROMPTS, params, strict=True):
        assert "".join(llm.stream(prompt, one)) == output.text
    assert_idle(llm.engine.stats())
    # 14 blocks of 4 tokens hold less than two whole requests: they preempt one another again and again.
    tight = {"kv_blocks": 14, "block_size": 4, "max_model_len": 56}
    small = {"max_num_batched_tokens": 3}
    swap, recompute = {"preemption": "swap", "swap_space": "1.0"}, {"preemption": "recompute"}
    alone_only = {"prefix_cache": False}
    for flags in (
        {"max_num_batched_tokens": 5, "block_size": 4},
        {"max_num_seqs": 2, "prefix_cache": False},
        {**tight, **recompute},
        {**tight, **recompute, **small, **alone_only},
        {**tight, **swap},
        {**tight, **swap, **small, **alone_only},
        {**tight, **small, "swap_space": "0"},
    ):
        with engine(tiny_llama, **flags) as other:
            for _ in range(2):  # the second time, what the first left is in the prefix cache
                outputs = other.generate(PROMPTS, params)
                assert [o.token_ids for o in outputs] == [o.token_ids for o in alone], flags
                assert [o.text for o in outputs] == [o.text for o in alone]
            stats = other.engine.stats()
            assert_idle(stats)
            other.engine.kv.check_integrity()
            swaps = flags.get("preemption") == "swap"
            assert (stats.preemptions_recompute > 0) == ("kv_blocks" in flags and not swaps)
            assert (stats.preemptions_swap > 0) == swaps
            assert stats.recomputed_tokens == 0 or not swaps
            assert stats.swaps_exhausted == 0  # without swap space, nothing is wanted of it
            assert stats.prefix_hits == 0 or flags.get("prefix_cache", True)
            assert stats.prefix_hits > 0 or "kv_blocks" in flags or "prefix_cache" in flags
            assert stats.plugin_faults == {} and other.engine.planner.forced == 0


class Watch:
    """Counts what plans do."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[str, str]] = Counter()
        self.chunks = 0

    @hookimpl
    def step_done(self, plan: Plan) -> None:
        self.copies.update((copy.src_tier, copy.dst_tier) for copy in plan.copies)
        self.chunks += sum(not part.samples for part in plan.slices)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_the_standing_property_of_a_crowd(llm: LLM, tiny_llama: Path, kind: str) -> None:
    """All that may happen to a request happens often: 24 blocks for 36 pairs of outputs, ten at a time."""
    params = [GREEDY] * len(PROMPTS) if kind == "greedy" else SEEDED
    alone = [llm.generate(prompt, one)[0].token_ids for prompt, one in zip(PROMPTS, params, strict=True)]
    both = [output.token_ids for output in llm.generate(PROMPTS, params, n=2)]
    assert both[::2] == alone
    asked = [(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True) for _ in range(6)]
    expected = [tokens for pair in zip(both[::2], both[1::2], strict=True) for _ in range(6) for tokens in pair]
    watch = Watch()
    tight = {"kv_blocks": 24, "block_size": 4, "max_model_len": 56, "preemption": "swap", "swap_space": "0.25"}
    few = {"max_num_seqs": 10, "max_num_batched_tokens": 9, "plugins": [("watch", watch)]}
    with engine(tiny_llama, **tight, **few) as crowded:
        for _ in range(4):
            outputs = crowded.generate([prompt for prompt, _ in asked], [one for _, one in asked], n=2)
            assert [output.token_ids for output in outputs] == expected
            crowded.engine.kv.check_integrity()
        stats = crowded.engine.stats()
        assert stats.plugin_faults == {} and stats.failed_steps == crowded.engine.planner.forced == 0
    assert_idle(stats)
    assert stats.preemptions_swap >= 100 and watch.copies["host", "device"] >= 100
    assert stats.preemptions_recompute >= 100 and stats.swaps_exhausted >= 20
    assert stats.prefix_hits >= 100 and watch.copies["device", "device"] >= 50 and watch.chunks >= 20


DEMO = [
    "The sun rose over the hills and",
    "The sun rose over the hills, but nobody",
    "The sun rose over the sea",
    "def main(argv):\n    ",
    "Was ist das? Das ist",
    "In 1984 a request waited for the others, and then",
]
DEMO_PARAMS = {"max_tokens": 12, "ignore_eos": True, "logprobs": TOP}
DRAWN = [SamplingParams(temperature=0.9, top_k=TOP, seed=seed, **DEMO_PARAMS) for seed in range(len(DEMO))]


@pytest.mark.slow
def test_the_standing_property_of_a_real_model(demo_model: Path) -> None:
    """The demo weights in float32, whose best logits are often close. Each prompt twice, greedy and seeded, each for
    two outputs that share it."""
    count = len(DEMO)
    prompts, params = DEMO * 2, [SamplingParams(temperature=0, **DEMO_PARAMS)] * count + DRAWN
    tight = {"block_size": 4, "kv_blocks": 32, "max_num_seqs": 12}
    chosen: list[list[Logprobs]] = []  # greedy outputs, one after the other
    drawn: list[list[Logprobs]] = []
    forked: list[list[list[int]]] = []  # second outputs of those with a seed: a seed of their own

    def together(flags: dict[str, Any]) -> tuple[EngineStats, Watch]:
        """All at once."""
        watch = Watch()
        with engine(demo_model, plugins=[("watch", watch)], **flags) as llm:
            outputs = llm.generate(prompts, params, n=2)
            chosen.extend(output.logprobs for output in outputs[: 2 * count])
            drawn.extend(output.logprobs for output in outputs[2 * count :: 2])
            forked.append([output.token_ids for output in outputs[2 * count + 1 :: 2]])
            stats = llm.engine.stats()
            assert_idle(stats)
            llm.engine.kv.check_integrity()
            assert stats.plugin_faults == {} and stats.failed_steps == llm.engine.planner.forced == 0
        assert watch.copies["device", "device"] > 0  # forks write on
        return stats, watch

    stats, watch = together({"block_size": 4})
    assert stats.preemptions_swap == stats.preemptions_recompute == watch.chunks == stats.prefix_hits == 0
    swap = {"preemption": "swap", "swap_space": "1.0", "prefix_cache": False, "max_num_batched_tokens": 13}
    stats, watch = together({**tight, **swap})
    assert stats.preemptions_swap >= 5 and watch.copies["host", "device"] >= 20 and watch.chunks > 0
    assert stats.preemptions_recompute == stats.recomputed_tokens == stats.prefix_hits == 0
    stats, watch = together({**tight, "preemption": "recompute"})
    assert stats.preemptions_recompute >= 5 and stats.recomputed_tokens > 0 and stats.prefix_hits >= 5

    with engine(demo_model, prefix_cache=False, kernel="cpu", kernel_opt={"gguf": "widened"}) as llm:
        alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
        for at in (0, count):
            assert "".join(llm.stream(prompts[at], params[at])) == alone[at].text

        def again(prompt: list[int], rest: int) -> list[Logprobs]:
            return llm.generate(prompt, msgspec.structs.replace(params[0], max_tokens=rest))[0].logprobs

        references = [
            Reference(output.prompt_token_ids, output.token_ids, [dict(entry.top) for entry in output.logprobs])
            for output in alone[:count]
        ]
        assert_equal([ref for _ in range(3) for ref in references for _ in range(2)], chosen, again)
    expected = [output.logprobs for output in alone[count:]]
    assert_drawn([*expected, *drawn], [*range(count)] * 4, 0.9)
    assert_same(expected * 3, drawn)
    assert forked[0] == forked[1] == forked[2]


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_n_is_as_many_requests_that_share_their_prompt(tiny_llama: Path, kind: str) -> None:
    prompt = "A request waits for the others"
    greedy = kind == "greedy"
    params = GREEDY if greedy else SEEDED[3]
    with engine(tiny_llama, block_size=4) as llm:
        outputs = llm.generate(prompt, params, n=4)
        length = len(outputs[0].prompt_token_ids)
        assert llm.engine.stats().prompt_tokens == length + 3  # each of the others its last token again
        tokens = [o.token_ids for o in outputs]
        assert tokens[0] == llm.generate(prompt, params)[0].token_ids
        assert len({tuple(t) for t in tokens}) == (1 if greedy else 4)
        assert_idle(llm.engine.stats())
    tight = {"kv_blocks": 26, "block_size": 4, "max_model_len": 80, "swap_space": "1.0"}
    for flags in ({"max_num_seqs": 2}, {**tight, "preemption": "swap"}, {**tight, "preemption": "recompute"}):
        with engine(tiny_llama, **flags) as llm:
            several = llm.generate([prompt, "Another"], params, n=4)
            assert [o.token_ids for o in several[:4]] == tokens, flags
            assert [o.text for o in several[:4]] == [o.text for o in outputs]
            assert_idle(llm.engine.stats())


def test_with_a_window_a_request_outlasts_the_pool(tmp_path: Path) -> None:
    """200 tokens and more through 10 blocks of 4: what fell out of the window is given up, swapped or not."""
    path = tiny_checkpoint(tmp_path / "mistral", "MistralForCausalLM", sliding_window=12)
    prompts = [[(7 * i * i + k) % 200 + 3 for i in range(length)] for k, length in enumerate((4, 5, 4, 3, 6, 200))]
    with engine(path, kv_blocks=512, block_size=4, prefix_cache=False) as llm:
        expected = [o.token_ids for o in llm.generate(prompts, GREEDY)]
        assert len({tuple(tokens) for tokens in expected}) == 6
    tight = {"kv_blocks": 10, "block_size": 4, "max_num_batched_tokens": 9, "swap_space": "1.0"}
    for flags in (tight, {**tight, "preemption": "recompute"}, {**tight, "prefix_cache": False, "preemption": "swap"}):
        with engine(path, **flags) as llm:
            for _ in range(2):
                assert [o.token_ids for o in llm.generate(prompts, GREEDY)] == expected, flags
            stats = llm.engine.stats()
            assert stats.preemptions_swap + stats.preemptions_recompute > 0
            assert_idle(stats)
            llm.engine.kv.check_integrity()


def test_n_has_to_be_a_number_of_outputs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="n must be at least 1"):
        llm.generate("x", GREEDY, n=0)


def test_streams_may_be_interleaved_and_left(llm: LLM) -> None:
    whole = [output.text for output in llm.generate(PROMPTS[:2], GREEDY)]
    first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
    pieces = list(zip_longest(first, second, fillvalue=""))
    assert len(pieces) > 10
    assert ["".join(texts) for texts in zip(*pieces, strict=True)] == whole
    left = llm.stream(PROMPTS[2], GREEDY)
    next(left)
    assert llm.engine.stats().running == 1
    left.close()  # type: ignore[attr-defined]
    assert_idle(llm.engine.stats())


def test_a_stop_string_ends_a_request_in_the_engine_too(llm: LLM) -> None:
    text = llm.generate(PROMPTS[0], GREEDY)[0].text
    stop = text[5:8]
    output = llm.generate(PROMPTS[0], {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "stop": (stop,)})[0]
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.times is not None and output.times.finished >= output.times.first_token > 0
    assert_idle(llm.engine.stats())


def test_chat_uses_the_template_once(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    output = llm.chat(messages, GREEDY)[0]
    rendered = llm.tokenizer.render(messages)
    assert output.prompt_token_ids == llm.tokenizer.encode(rendered, add_special_tokens=False)
    assert output.text == "".join(llm.stream(messages, GREEDY))
    assert [o.text for o in llm.chat([messages, messages], GREEDY)] == [output.text] * 2


def test_logprobs_come_with_the_tokens(llm: LLM) -> None:
    output = llm.generate(PROMPTS[0], {"temperature": 0.0, "max_tokens": 5, "logprobs": 2})[0]
    assert [entry.token for entry in output.logprobs] == output.token_ids
    assert all(len(entry.top) == 2 and entry.rank == 1 for entry in output.logprobs)


def test_bad_requests_name_the_field_and_harm_nobody(llm: LLM) -> None:
    for prompt, params, field in (
        ("", None, "prompt"),
        ([10**6], None, "prompt"),
        ("x", {"temperature": -1.0}, "temperature"),
        ("x", {"temperature": math.inf}, "temperature"),
        ("x", {"max_tokens": 10**6}, "max_tokens"),
        ("x", {"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ("x", {"max_tokens": "5"}, "max_tokens"),
        ("x", {"stop": (1,)}, "stop"),
        ("x", {"max_token": 5}, "max_token"),
        ("x", SamplingParams(temperature="hot"), "temperature"),  # type: ignore[arg-type]
        ("x", [GREEDY, GREEDY], "params"),
    ):
        with pytest.raises(InvalidRequest, match=field) as caught:
            llm.generate(prompt, params)
        assert caught.value.field == field
    assert_idle(llm.engine.stats())
    assert len(llm.generate("x", GREEDY)[0].token_ids) == 24


def test_a_refusal_is_an_exception(tiny_llama: Path) -> None:
    from framework import Reject, Request, hookimpl

    class Closed:
        @hookimpl
        def accept(self, request: Request) -> Reject:
            return Reject("closed", retry_after=3.0)

    with engine(tiny_llama, plugins=[("closed", Closed())]) as closed:
        with pytest.raises(Rejected, match="closed") as caught:
            closed.generate("x", GREEDY)
        assert (caught.value.status, caught.value.retry_after) == (429, 3.0)
        assert_idle(closed.engine.stats())


def test_settings_or_flags(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="either settings or kv_blocks, model, not both"):
        LLM(str(tiny_llama), settings=Settings(), kv_blocks=5)
    with pytest.raises(ConfigError, match="cannot hold one request; raise --kv-memory or --kv-blocks"):
        engine(tiny_llama, kv_blocks=1, block_size=1)
    with pytest.raises(ConfigError, match=r"--max-model-len 200 does not fit: .*10 blocks of 16 tokens holds 160"):
        engine(tiny_llama, kv_blocks=10, max_model_len=200)
    with pytest.raises(ConfigError, match=r"--max-model-len 513 is over the model's limit of 512"):
        engine(tiny_llama, max_model_len=513)


def test_auto_goes_by_the_rates_that_were_measured(llm: LLM, tiny_llama: Path) -> None:
    limits, info = llm.engine.planner.limits, llm.info
    assert (limits.preemption, info.preemption) == (None, "auto")
    assert limits.costs == (info.copy_rate, info.compute_rate, info.block_bytes) and min(limits.costs) > 0
    with engine(tiny_llama, swap_space="0") as small:  # there is nothing to choose
        assert (small.engine.planner.limits.preemption, small.info.preemption) == (Mode.RECOMPUTE, "recompute")
    with engine(tiny_llama, kv="contiguous") as whole:  # nor for a cache that does not swap
        assert (whole.info.preemption, whole.info.host_blocks) == ("recompute", 0)
    with pytest.raises(ConfigError, match="--preemption swap: --kv contiguous does not swap; use recompute or auto"):
        engine(tiny_llama, kv="contiguous", preemption="swap")


def test_priority_tenant_and_salt_of_each_prompt(tiny_llama: Path, llm: LLM) -> None:
    alone = [output.token_ids for output in llm.generate(PROMPTS[:3], GREEDY)]
    with engine(tiny_llama, scheduler="priority", max_num_seqs=1) as ranked:
        outputs = ranked.generate(PROMPTS[:3], GREEDY, priority=[2, 0, 1], tenant="blue", cache_salt=["a", "b", "c"])
        assert [output.token_ids for output in outputs] == alone
        admitted = [output.times.admitted for output in outputs if output.times]
        assert sorted(admitted) == [admitted[1], admitted[2], admitted[0]]
        assert "".join(ranked.stream(PROMPTS[0], GREEDY, priority=-1)) == outputs[0].text
        assert ranked.chat([{"role": "user", "content": "a"}], {"max_tokens": 1}, priority=4)[0].token_ids
        for field in ("priority", "tenant", "cache_salt"):
            with pytest.raises(InvalidRequest, match=f"{field}: 2 given for 3 prompts"):
                ranked.generate(PROMPTS[:3], GREEDY, **{field: [1, 2]})
        for wrong in ({"priority": "high"}, {"priority": float("nan")}, {"tenant": 5}, {"cache_salt": b"salt"}):
            with pytest.raises(InvalidRequest, match="must be"):
                ranked.generate(PROMPTS[0], GREEDY, **wrong)
        with pytest.raises(InvalidRequest, match="64-bit"):
            ranked.generate(PROMPTS[0], GREEDY, priority=2**63)
    assert_idle(llm.engine.stats())


def test_a_priority_that_would_be_ignored_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="'fcfs', ignores it") as error:
        llm.generate(PROMPTS[0], GREEDY, priority=1)
    assert error.value.field == "priority"
    with pytest.raises(InvalidRequest, match="at most 256"):
        llm.generate(PROMPTS[0], GREEDY, tenant="a" * 257)
