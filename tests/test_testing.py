"""The executors for tests. Each check of the checking executor has to fire on a plan with just that fault."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from framework import ConfigError, Copy, Delta, Mode, Plan, RequestData, SamplingParams, Slice, StepResult
from framework.messages import Add
from framework.plan import Preempted
from framework.registry import load_plugins
from framework.settings import Settings
from framework.startup import build_engine
from framework.testing import (
    CheckingExecutor,
    PlanFault,
    RequestFailed,
    ScriptedExecutor,
    StepFailed,
    VirtualClock,
)

GREEDY = SamplingParams(temperature=0.0)


def executor(**options: Any) -> CheckingExecutor:
    return CheckingExecutor(blocks=8, block_size=4, host_blocks=2, **options)


def data(id: str, tokens: Sequence[int], prompt_len: int | None = None, **fields: Any) -> RequestData:
    fields = {"params": GREEDY, "seed": 7, **fields}
    return RequestData(id, list(tokens), len(tokens) if prompt_len is None else prompt_len, **fields)


def part(id: str, start: int, tokens: int, *blocks: int, first: int = 0, samples: bool = True, group: int = 0) -> Slice:
    deltas = (Delta(group, first, blocks),) if blocks else ()
    return Slice(id, start, tokens, deltas, samples)


def run(ex: CheckingExecutor, *plans: Plan) -> StepResult:
    for plan in plans:
        result = ex.submit(plan).result()
    return result


A, B = data("a", range(5)), data("b", range(10, 16))
JOIN = Plan(1, (A, B), (part("a", 0, 5, 0, 1), part("b", 0, 6, 2, 3)))


def test_a_correct_run_passes() -> None:
    ex = executor(token_budget=11, seats=2)
    first = run(ex, JOIN)
    outputs = {"a": [*first.tokens["a"]], "b": [*first.tokens["b"]]}
    second = run(ex, Plan(2, (), (part("a", 5, 1), part("b", 6, 1))))
    for id, tokens in second.tokens.items():
        outputs[id] += tokens
    # b falls, its blocks go to a third request; then b returns with its tokens and is computed again in chunks
    run(ex, Plan(3, (data("c", [1]),), (part("c", 0, 1, 2),), preempted=(Preempted("b", Mode.RECOMPUTE),)))
    back = data("b", [*B.tokens, *outputs["b"]], 6)
    run(ex, Plan(4, (back,), (part("b", 0, 5, 3, 5, samples=False),), finished=("c",)))
    third = run(ex, Plan(5, (), (part("b", 5, 3), part("a", 6, 1))))
    ex.check()
    # and all that came out is what each request gives when it is alone
    for id, more in third.tokens.items():
        outputs[id] += more
    for request in (A, B):
        tokens = list(request.tokens)
        for token in outputs[request.id]:
            assert ex.next_token(request, tokens) == token
            tokens.append(token)


def test_swapped_blocks_and_shared_prefixes_pass() -> None:
    ex = executor()
    run(ex, Plan(1, (data("a", range(8)),), (part("a", 0, 8, 0, 1),)))
    out = Copy("a", 0, "device", 0, "host", 1)
    overwrite = Plan(
        2, (data("b", range(9)),), (part("b", 0, 9, 0, 1, 2),), (out,), (Preempted("a", Mode.SWAP),), finished=()
    )
    run(ex, overwrite)
    # "a" returns: its first block from the host, its second shared with "b", which has the same eight tokens
    again = data("a", [*range(8), ex.next_token(data("a", range(8)), list(range(8)))], 8)
    back = Copy("a", 0, "host", 1, "device", 5, ticket=3)
    result = run(ex, Plan(3, (again,), (part("a", 8, 1, 5, 1, 6),), (back,)))
    assert result.copied == (3,)


def test_a_window_reads_no_further_back() -> None:
    gone = [Delta(0, 0, (3,)), Delta(0, 1, (1, 2))]  # block 3 was never written
    plan = Plan(2, (), (Slice("a", 8, 1, (gone[0], gone[1]), True),))
    for window, passes in ((5, True), (6, False)):
        ex = executor(windows=[window])
        run(ex, Plan(1, (data("a", range(8)),), (part("a", 0, 8, 0, 1),)))
        if passes:
            run(ex, plan)
        else:
            with pytest.raises(PlanFault, match="position 3 from block 3"):
                run(ex, plan)


NEXT = 2
FAULTS: dict[str, tuple[Plan, str]] = {
    "a step twice": (Plan(1), "step 1 comes after step 1"),
    "planned twice": (Plan(NEXT, (), (part("a", 5, 1), part("a", 6, 1))), "planned twice"),
    "planned and preempted": (
        Plan(NEXT, (), (part("a", 5, 1),), preempted=(Preempted("a", Mode.RECOMPUTE),)),
        "planned in the step that preempts it",
    ),
    "planned and ended": (Plan(NEXT, (), (part("a", 5, 1),), finished=("a",)), "it ended or its data never came"),
    "unknown": (Plan(NEXT, (), (part("x", 0, 1, 4),)), "its data never came"),
    "preempted, not running": (Plan(NEXT, preempted=(Preempted("x", Mode.RECOMPUTE),)), "it is not running"),
    "data twice": (Plan(NEXT, (A,), (part("a", 0, 5, 4, 5),)), "came again while it is running"),
    "no prompt": (Plan(NEXT, (data("c", [], 0),), ()), "prompt_len 0 is out of range"),
    "empty slice": (Plan(NEXT, (), (part("a", 5, 0),)), "empty slice"),
    "computed twice": (Plan(NEXT, (), (part("a", 4, 2),)), "starts at 4, but 5 tokens are computed"),
    "skipped": (Plan(NEXT, (), (part("a", 6, 1),)), "starts at 6, but 5 tokens are computed"),
    "beyond the known": (Plan(NEXT, (), (part("a", 5, 2),)), "up to 7 of 6 known"),
    "samples too early": (Plan(NEXT, (data("c", [1, 2]),), (part("c", 0, 1, 4),)), "samples=True at 1 of 2"),
    "does not sample": (Plan(NEXT, (), (part("a", 5, 1, samples=False),)), "samples=False at 6 of 6"),
    "drafts": (Plan(NEXT, (), (Slice("a", 5, 1, (), True, drafts=1),)), "draft tokens"),
    "no such group": (Plan(NEXT, (), (part("a", 5, 1, 4, first=2, group=1),)), "group 1, which does not exist"),
    "outside the pool": (Plan(NEXT, (), (part("a", 5, 1, 8, first=2),)), "no block 8"),
    "a gap in the table": (Plan(NEXT, (), (part("a", 5, 1, 4, first=3),)), "leaves a gap after 2"),
    "a block twice": (Plan(NEXT, (), (part("a", 5, 1, 0, first=2),)), "twice in its table"),
    "table too short": (
        Plan(NEXT, (data("c", range(5)),), (part("c", 0, 5, 4),)),
        "computes up to 5, its table covers 4",
    ),
    "writes another's block": (Plan(NEXT, (), (part("a", 5, 1, 3, first=1),)), "writes block 3, which {'b'} hold"),
    "replaced without a copy": (Plan(NEXT, (), (part("a", 5, 1, 4, first=1),)), "position 4 from block 4"),
    "reads what nobody wrote": (
        Plan(NEXT, (data("c", range(5)),), (part("c", 4, 1, 4, 5),)),
        "position 0 from block 4 of group 0, which holds nothing",
    ),
    "reads another's tokens": (
        Plan(NEXT, (data("c", range(9)),), (part("c", 4, 5, 2, 4, 5),)),
        "token 0 at position 0 from block 2 of group 0, which holds token 10 of b at position 0",
    ),
    "copies nothing": (
        Plan(NEXT, (), (part("a", 5, 1),), (Copy("a", 0, "device", 6, "host", 0),)),
        "block 6, which was never written",
    ),
    "copies over another's": (
        Plan(NEXT, (), (part("a", 5, 1),), (Copy("a", 0, "device", 0, "device", 2),)),
        r"copies into block 2, which belongs to \{'b'\}",
    ),
    "copies to no tier": (
        Plan(NEXT, (), (part("a", 5, 1),), (Copy("a", 0, "device", 0, "disk", 0),)),
        "no block 0 in tier 'disk'",
    ),
    "over budget": (Plan(NEXT, (data("c", range(12)),), (part("c", 0, 12, 4, 5, 6),)), "12 tokens planned, the budget"),
    "over seats": (Plan(NEXT, (data("c", [1]), data("d", [1])), ()), "4 requests run on 3 seats"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_check_fires(name: str) -> None:
    ex = executor(token_budget=11, seats=3)
    run(ex, JOIN)
    plan, message = FAULTS[name]
    with pytest.raises(PlanFault, match=message):
        run(ex, plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "another prompt length, seed"),
        ({"params": SamplingParams(temperature=0.5)}, "another prompt length, seed"),
        ({"adapter": "x"}, "another prompt length, seed"),
        ({"prompt_len": 4}, "another prompt length, seed"),
        ({"tokens": list(range(5))}, "returned with tokens"),
    ],
)
def test_a_request_returns_as_it_left(change: dict[str, Any], message: str) -> None:
    ex = executor()
    output = run(ex, JOIN).tokens["a"]
    run(ex, Plan(2, (), (part("b", 6, 1),), preempted=(Preempted("a", Mode.RECOMPUTE),)))
    fields = {"tokens": [*A.tokens, *output], "prompt_len": 5, **change}
    with pytest.raises(PlanFault, match=message):
        run(ex, Plan(3, (data("a", **fields),), ()))


def test_copies_run_in_their_order() -> None:
    """A block leaves for the host and is filled from another host block in one step; the other order loses it."""
    out, back = Copy("a", 0, "device", 0, "host", 0), Copy("b", 0, "host", 1, "device", 0)
    for copies, fine in (((out, back), True), ((back, out), False)):
        ex = executor()
        run(ex, Plan(1, (data("a", range(4)), data("b", range(10, 14))), (part("a", 0, 4, 0), part("b", 0, 4, 1))))
        swap_b = Copy("b", 0, "device", 1, "host", 1)
        run(ex, Plan(2, (), (part("a", 4, 1, 2, first=1),), (swap_b,), (Preempted("b", Mode.SWAP),)))
        next_b = ex.next_token(data("b", range(10, 14)), list(range(10, 14)))
        b = data("b", [*range(10, 14), next_b], 4)
        swap = Plan(3, (b,), (part("b", 4, 1, 0, 1),), copies, (Preempted("a", Mode.SWAP),))
        run(ex, swap)
        a_tokens = list(range(4))
        for _ in range(2):
            a_tokens.append(ex.next_token(data("a", range(4)), a_tokens))
        resume = Plan(
            4, (data("a", a_tokens, 4),), (part("a", 4, 2, 4, 5),), (Copy("a", 0, "host", 0, "device", 4),), ()
        )
        if fine:
            run(ex, resume)
        else:
            with pytest.raises(PlanFault, match="position 0 from block 4 of group 0, which holds token 10 of b"):
                run(ex, resume)


def test_every_group_is_checked() -> None:
    ex = executor(windows=[None, None])
    deltas = (Delta(0, 0, (0, 1)), Delta(1, 0, (0,)))
    with pytest.raises(PlanFault, match="its table covers 4"):
        run(ex, Plan(1, (A,), (Slice("a", 0, 5, deltas, True),)))


def test_a_fault_sticks() -> None:
    """The engine would take it for a failed step and go on."""
    ex = executor()
    run(ex, JOIN)
    ex.check()
    assert ex.submit(Plan(1)).done()
    with pytest.raises(PlanFault, match="step 1 comes after"):
        run(ex, Plan(2, (), (part("a", 5, 1),)))
    with pytest.raises(PlanFault, match="step 1 comes after"):
        ex.check()


@pytest.mark.parametrize("when", ["before", "after"])
def test_steps_fail_on_demand_and_lose_what_ran(when: Any) -> None:
    ex = executor(fail=lambda plan: when if plan.step == 2 else None)
    output = run(ex, JOIN).tokens["a"]
    with pytest.raises(StepFailed, match=f"step 2 was made to fail {when}"):
        run(ex, Plan(2, (), (part("a", 5, 1), part("b", 6, 1))))
    ex.check()
    # The same step again, as if nothing had happened, is a fault: everybody has to be computed again.
    back = Plan(3, (data("a", [*A.tokens, *output], 5),), (part("a", 0, 6, 0, 1),), finished=("a", "b"))
    run(ex, back)
    with pytest.raises(PlanFault, match="its data never came"):
        run(ex, Plan(4, (), (part("b", 6, 1),)))


def test_requests_fail_alone_on_demand() -> None:
    class FailsB(CheckingExecutor):
        def next_token(self, data: RequestData, tokens: Sequence[int]) -> int:
            if data.id == "b":
                raise RequestFailed("no such luck")
            return super().next_token(data, tokens)

    result = run(FailsB(8, 4), JOIN)
    assert result.errors == {"b": "no such luck"}
    assert list(result.tokens) == ["a"]


def test_output_depends_on_seed_and_tokens_alone() -> None:
    alone = run(executor(), Plan(9, (A,), (part("a", 0, 5, 6, 3),))).tokens["a"]
    assert alone == run(executor(), JOIN).tokens["a"]
    outputs = {CheckingExecutor().next_token(data("a", range(5), seed=s), range(5)) for s in range(20)}
    assert len(outputs) > 10


def test_eos_comes_where_the_script_says() -> None:
    params = SamplingParams(eos_token_ids=(999,))
    ex = executor(ends={"a": 1})
    run(ex, Plan(1, (data("a", range(5), params=params),), (part("a", 0, 5, 0, 1),)))
    assert run(ex, Plan(2, (), (part("a", 5, 1),))).tokens["a"] == (999,)


def test_scripted_output_repeats_the_prompt() -> None:
    ex = ScriptedExecutor(8, 4)
    tokens = [*run(ex, Plan(1, (data("a", [5, 6, 7]),), (part("a", 0, 3, 0, 1),))).tokens["a"]]
    for step in range(2, 6):
        tokens += run(ex, Plan(step, (), (part("a", step + 1, 1),))).tokens["a"]
    assert tokens == [5, 6, 7, 5, 6]


def test_logprobs_come_if_asked_for() -> None:
    ex = executor()
    result = run(ex, Plan(1, (data("a", [1], params=SamplingParams(logprobs=2)),), (part("a", 0, 1, 0),)))
    [logprobs] = result.logprobs["a"]
    assert (logprobs.token,) == result.tokens["a"]
    assert len(logprobs.top) == 2 and logprobs.top[0] == (logprobs.token, logprobs.logprob)
    assert run(executor(), JOIN).logprobs == {}


def test_a_virtual_clock_moves_by_the_cost_of_steps_alone() -> None:
    clock = VirtualClock()
    ex = executor(clock=clock, cost=lambda plan: plan.tokens / 1000)
    result = run(ex, JOIN)
    assert clock.ns() == 11_000_000
    assert {name: end - start for name, start, end in result.stages} == {
        "batch_build": 0,
        "forward": 11_000_000,
        "sampling": 0,
    }
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)


def test_it_can_be_selected_by_name_and_imports_no_torch() -> None:
    code = (
        "import sys, framework.testing as t, framework.testing.plugin as p;"
        "assert [(x.kind, x.name) for x in p.providers()] == [('executor', 'checking'), ('executor', 'scripted')];"
        "torch = {'KernelConformance', 'SamplerConformance'};"
        "assert all(getattr(t, name) for name in set(t.__all__) - torch);"
        "assert 'torch' not in sys.modules;"
        "assert all(getattr(t, name) for name in torch & set(t.__all__))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["checking", "scripted"])
def test_an_engine_starts_with_it_in_place_of_a_model(name: str, tiny_llama: Path) -> None:
    options = Settings(model=str(tiny_llama), executor=name, kv_blocks=8)
    plugins = load_plugins()
    plugins.activate(options, engine=True)
    engine, info = build_engine(options, plugins)
    assert info.kv_blocks == 8
    engine.add(Add("a", [5, 6, 7], SamplingParams(max_tokens=5), arrival=1))
    output: list[int] = []
    while engine.has_work:
        for part in engine.step():
            output += part.tokens
    assert len(output) == 5 and all(0 <= token < info.vocab_size for token in output)
    if name == "scripted":
        assert output == [5, 6, 7, 5, 6]
    engine.executor.check()
    engine.close()


@pytest.mark.parametrize(("field", "value"), [("kv_blocks", 10**9), ("swap_space", "9TiB")])
def test_a_pool_without_memory_is_bounded_all_the_same(field: str, value: Any, tiny_llama: Path) -> None:
    """Books are kept of every block: those of a few terabytes would fill the memory of the machine."""
    options = Settings(model=str(tiny_llama), executor="checking", **{field: value})
    plugins = load_plugins()
    plugins.activate(options, engine=True)
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}: [0-9]+ blocks are more than the 4194304"):
        build_engine(options, plugins)
