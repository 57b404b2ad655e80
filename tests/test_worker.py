"""The torch executor, driven by plans made by hand, against transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from framework import (
    ConfigError,
    Copy,
    Delta,
    ModelError,
    Plan,
    PluginError,
    RequestData,
    SampleBatch,
    SamplingParams,
    Slice,
    StepResult,
    hookimpl,
)
from framework.checkpoint import open_checkpoint
from framework.plan import Preempted
from framework.registry import load_plugins
from framework.settings import Settings
from framework.types import Mode
from framework.worker import TorchExecutor, log_probabilities, resolve_device, resolve_dtype

BLOCK = 4
BLOCKS = 96
NEAR = 2e-4
GREEDY = SamplingParams(temperature=0)


class Spy:
    """A logits processor that remembers its batches and does to the logits what a test says."""

    def __init__(self) -> None:
        self.change: Callable[[torch.Tensor, SampleBatch], None] = lambda logits, batch: None
        self.added: list[tuple[str, ...]] = []
        self.removed: list[tuple[str, ...]] = []
        self.seen: list[dict[str, tuple[list[int], list[int], int]]] = []

    @hookimpl
    def process_logits(self, logits: torch.Tensor, batch: SampleBatch) -> None:
        assert logits.dtype == torch.float32 and len(logits) == len(batch.owner)
        self.added.append(tuple(batch.added))
        self.removed.append(tuple(batch.removed))
        self.seen.append(
            {
                id: (batch.prompt_tokens(id).tolist(), batch.output_tokens(id).tolist(), length)
                for id, length in zip(batch.ids, batch.output_len, strict=True)
            }
        )
        self.change(logits, batch)


def build(model: Path, spy: Spy | None = None, **options: Any) -> TorchExecutor:
    settings = Settings(
        **{
            "model": str(model),
            "device": "cpu",
            "dtype": "float32",
            "threads": 1,
            "block_size": BLOCK,
            "kv_blocks": BLOCKS,
            "max_num_seqs": 8,
            **options,
        }
    )
    plugins = load_plugins(settings, [("spy", spy)] if spy else [])
    plugins.activate(settings, engine=True)
    return TorchExecutor(settings, plugins, open_checkpoint(settings, plugins))


class Driver:
    """Makes plans by hand. Blocks come from a shuffled pool, so that no table is contiguous."""

    def __init__(self, executor: TorchExecutor, seed: int = 0) -> None:
        self.executor = executor
        self.free = list(range(BLOCKS))
        random.Random(seed).shuffle(self.free)
        self.tokens: dict[str, list[int]] = {}
        self.prompt_len: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.data: dict[str, tuple[SamplingParams, int]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.new: list[str] = []
        self.gone: list[str] = []
        self.preempted: list[str] = []
        self.steps = 0

    def add(self, id: str, prompt: Sequence[int], params: SamplingParams = GREEDY, seed: int = 0) -> None:
        self.tokens[id], self.prompt_len[id] = list(prompt), len(prompt)
        self.data[id], self.logprobs[id] = (params, seed), []
        self.resume(id)

    def resume(self, id: str) -> None:
        self.computed[id], self.blocks[id] = 0, []
        self.new.append(id)

    def release(self, id: str, preempt: bool = False) -> None:
        self.free += self.blocks.pop(id)
        (self.preempted if preempt else self.gone).append(id)

    def plan(self, wants: dict[str, int], copies: Sequence[Copy] = ()) -> Plan:
        slices = []
        for id, most in wants.items():
            start, known, table = self.computed[id], len(self.tokens[id]), self.blocks[id]
            count = min(most, known - start)
            first = len(table)
            table += [self.free.pop() for _ in range(-(-(start + count) // BLOCK) - first)]
            deltas = (Delta(0, first, tuple(table[first:])),) if len(table) > first else ()
            slices.append(Slice(id, start, count, deltas, start + count == known))
        plan = Plan(
            self.steps,
            new=tuple(RequestData(id, list(self.tokens[id]), self.prompt_len[id], *self.data[id]) for id in self.new),
            slices=tuple(slices),
            copies=tuple(copies),
            preempted=tuple(Preempted(id, Mode.RECOMPUTE) for id in self.preempted),
            finished=tuple(self.gone),
        )
        self.steps += 1
        self.new, self.gone, self.preempted = [], [], []
        return plan

    def commit(self, plan: Plan, result: StepResult) -> None:
        for s in plan.slices:
            self.computed[s.request_id] += s.tokens
            assert (s.request_id in result.tokens or s.request_id in result.errors) == s.samples
            self.tokens[s.request_id] += result.tokens.get(s.request_id, ())
            self.logprobs[s.request_id] += result.logprobs.get(s.request_id, ())

    def step(self, wants: dict[str, int], copies: Sequence[Copy] = ()) -> StepResult:
        plan = self.plan(wants, copies)
        result = self.executor.submit(plan).result()
        assert result.step == plan.step
        self.commit(plan, result)
        return result

    def output(self, id: str) -> list[int]:
        return self.tokens[id][self.prompt_len[id] :]

    def run(self, id: str, count: int, chunk: int = 10**6) -> list[int]:
        while len(self.output(id)) < count:
            self.step({id: chunk})
        return self.output(id)


@pytest.fixture(scope="module")
def spy() -> Spy:
    return Spy()


@pytest.fixture(scope="module")
def executor(tiny_llama: Path, spy: Spy) -> Iterator[TorchExecutor]:
    executor = build(tiny_llama, spy)
    executor.start()
    yield executor
    executor.stop()


@pytest.fixture
def driver(executor: TorchExecutor, spy: Spy) -> Iterator[Driver]:
    driver = Driver(executor)
    yield driver
    Spy.__init__(spy)
    executor.submit(Plan(-1, finished=tuple(driver.tokens))).result()
    executor._rows.settle()  # the next test's sampler is a new one, as it were


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Callable[[list[int], int], torch.Tensor]:
    """Logits of transformers for the last `count` tokens, and for what follows the last: float32 [count + 1, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(tokens: list[int], count: int) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0, -count - 1 :]
        return found

    return logits


Reference = Callable[[list[int], int], torch.Tensor]


def assert_greedy(driver: Driver, id: str, reference: Reference) -> None:
    """Every token of the output is the reference's best after what came before it (two may be best)."""
    output = driver.output(id)
    logits = reference(driver.tokens[id], len(output))[:-1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (chosen >= logits.amax(-1) - NEAR).all()


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100, 250), k=length)


# Forward


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 1000])
def test_chunked_prefill_and_decode(driver: Driver, reference: Reference, chunk: int) -> None:
    driver.add("a", prompt(37))
    driver.run("a", 20, chunk)
    assert_greedy(driver, "a", reference)
    assert len(set(driver.output("a"))) > 3


def test_ragged_batch_whose_members_join_and_leave(driver: Driver, reference: Reference) -> None:
    """Random chunks, random members, requests that sit a step out, a row that is reused by a later request."""
    rng = random.Random(1)
    waiting = [f"r{i}" for i in range(12)]
    running: list[str] = []
    while waiting or running:
        if waiting and len(running) < 6 and rng.random() < 0.5:
            running.append(waiting.pop())
            driver.add(running[-1], prompt(rng.randint(1, 30), seed=len(waiting)))
        chosen = [id for id in running if rng.random() < 0.8]
        rng.shuffle(chosen)
        if chosen:
            driver.step({id: rng.choice([1, 2, 5, 100]) for id in chosen})
        for id in [id for id in running if len(driver.output(id)) >= 8]:
            running.remove(id)
            driver.release(id)
    for id in driver.tokens:
        assert_greedy(driver, id, reference)


def test_only_finished_chunks_yield_tokens(driver: Driver) -> None:
    driver.add("a", prompt(10))
    driver.add("b", prompt(3))
    result = driver.step({"a": 4, "b": 10})
    assert list(result.tokens) == ["b"] and len(result.tokens["b"]) == 1
    assert driver.step({"a": 5}).tokens == {}
    assert list(driver.step({"a": 1, "b": 1}).tokens) == ["a", "b"]


def test_stages_are_stamped_in_order(driver: Driver) -> None:
    driver.add("a", prompt(10))
    before = driver.executor.clock.ns()
    stages = driver.step({"a": 10}).stages
    assert [name for name, _, _ in stages] == ["batch_build", "forward", "sampling"]
    times = [before, *(t for _, *pair in stages for t in pair), driver.executor.clock.ns()]
    assert times == sorted(times)


def test_plan_that_does_not_fit_what_is_known_is_refused(driver: Driver) -> None:
    driver.add("a", prompt(5))
    plan = driver.plan({"a": 5})
    wrong = Plan(plan.step, plan.new, (Slice("a", 0, 6, plan.slices[0].deltas, True),))
    with pytest.raises(RuntimeError, match="5 tokens known"):
        driver.executor.submit(wrong).result()


# Preemption, failure, copies


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2)])
def test_preempted_and_resumed(driver: Driver, params: SamplingParams) -> None:
    driver.add("whole", prompt(11), params, seed=9)
    expected = driver.run("whole", 25)
    driver.add("cut", prompt(11), params, seed=9)
    driver.add("other", prompt(6, seed=3))
    for at in (3, 4, 17):
        driver.run("cut", at)
        driver.step({"other": 100})
        driver.release("cut", preempt=True)
        driver.step({"other": 1})
        driver.resume("cut")
    assert driver.run("cut", 25) == expected


def test_failed_step_is_repeated(driver: Driver, spy: Spy, reference: Reference) -> None:
    """A plugin that raises: the error names it; what ran is sent again; neighbours and later steps are right."""
    driver.add("a", prompt(9))
    driver.add("b", prompt(14, seed=2))
    driver.step({"a": 100})

    def fail(logits: torch.Tensor, batch: SampleBatch) -> None:
        raise ValueError("no such grammar")

    spy.change = fail
    with pytest.raises(PluginError, match=r"plugin 'spy': process_logits: ValueError: no such grammar") as caught:
        driver.executor.submit(driver.plan({"a": 1, "b": 100})).result()
    assert caught.value.plugin == "spy"
    spy.change = lambda logits, batch: None
    for id in ("a", "b"):
        driver.free += driver.blocks[id]
        driver.resume(id)
    driver.step({"b": 5})
    driver.step({"b": 100, "a": 100})
    for id in ("a", "b"):
        driver.run(id, 8)
        assert_greedy(driver, id, reference)


def test_sampler_that_breaks_its_contract_is_named(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from framework.plugins.samplers.default import DefaultSampler

    driver.add("a", prompt(9))
    for answer, complaint in (
        (torch.zeros(2, dtype=torch.int64), "not Sampled"),
        (torch.zeros(1), "not Sampled"),
        (torch.tensor([10**6]), "outside"),
        (torch.tensor([-1]), "outside"),
    ):
        [sampler] = driver.executor.plugins.active(DefaultSampler)
        monkeypatch.setattr("framework.plugins.samplers.default.argmax", lambda logits, answer=answer: answer)
        assert sampler
        with pytest.raises(PluginError, match=f"plugin 'default': sample: .*{complaint}"):
            driver.executor.submit(driver.plan({"a": 100})).result()
        driver.free += driver.blocks["a"]
        driver.resume("a")
    monkeypatch.undo()
    driver.step({"a": 100})
    assert len(driver.output("a")) == 1


def test_blocks_are_copied_in_order_before_the_forward_pass(driver: Driver, reference: Reference) -> None:
    """A chain of copies through shared blocks: x to y, then z to x; the table then names the copies."""
    driver.add("a", prompt(2 * BLOCK))
    driver.run("a", 2)
    x, z, _ = driver.blocks["a"]
    y, w = driver.free.pop(), driver.free.pop()
    copies = [
        Copy("a", 0, "device", x, "device", y),
        Copy("a", 0, "device", z, "device", w),
        Copy("a", 0, "device", w, "device", x, 7),
        Copy("a", 0, "device", w, "device", z),
    ]
    plan = driver.plan({"a": 1}, copies)
    [only] = plan.slices
    moved = Slice("a", only.start, only.tokens, (*only.deltas, Delta(0, 0, (y, x))), only.samples)
    plan = Plan(plan.step, slices=(moved,), copies=plan.copies)
    result = driver.executor.submit(plan).result()
    driver.commit(plan, result)
    assert result.copied == (7,)
    driver.run("a", 10)
    assert_greedy(driver, "a", reference)


def test_copies_without_slices(driver: Driver) -> None:
    assert driver.step({}, [Copy("a", 0, "device", 1, "device", 2, 5)]).copied == (5,)


def test_blocks_come_back_from_the_host(driver: Driver, reference: Reference) -> None:
    """Out, overwritten by somebody else, and back into other blocks."""
    driver.add("a", prompt(2 * BLOCK + 1))
    driver.run("a", 2)
    old = list(driver.blocks["a"])
    out = [Copy("a", 0, "device", block, "host", slot) for slot, block in enumerate(old, 3)]
    driver.add("b", prompt(3 * BLOCK, seed=1))
    driver.blocks["b"], driver.free = [], [*driver.free, *old]
    driver.step({"b": 100}, out)
    assert set(driver.blocks["b"]) == set(old)
    new = [driver.free.pop() for _ in old]
    back = [Copy("a", 0, "host", slot, "device", block) for slot, block in enumerate(new, 3)]
    plan = driver.plan({"a": 1}, back)
    [only] = plan.slices
    moved = Slice("a", only.start, only.tokens, (Delta(0, 0, tuple(new)),), only.samples)
    plan = Plan(plan.step, slices=(moved,), copies=plan.copies)
    driver.commit(plan, driver.executor.submit(plan).result())
    driver.blocks["a"] = new
    driver.run("a", 10)
    assert_greedy(driver, "a", reference)


def test_an_unknown_tier_is_refused(driver: Driver) -> None:
    driver.add("a", prompt(4))
    with pytest.raises(RuntimeError, match="from device to disk: there is no such pool"):
        driver.step({"a": 4}, [Copy("a", 0, "device", 1, "disk", 2)])


# Sampling


def test_samplers_see_the_batch(driver: Driver, spy: Spy) -> None:
    a, b = prompt(6), prompt(9, seed=1)
    driver.add("a", a)
    driver.add("b", b)
    driver.step({"a": 100, "b": 4})
    assert spy.seen[-1] == {"a": (a, [], 0)}
    assert (spy.added[-1], spy.removed[-1]) == (("a", "b"), ())
    driver.step({"b": 2})
    assert len(spy.seen) == 1
    driver.step({"b": 100, "a": 1})
    assert spy.seen[-1] == {"b": (b, [], 0), "a": (a, driver.output("a")[:1], 1)}
    assert (spy.added[-1], spy.removed[-1]) == ((), ())
    driver.release("a", preempt=True)
    driver.add("c", a)
    driver.step({"c": 2})  # nobody is sampled: kept for the next call
    driver.release("c")
    driver.resume("a")
    driver.step({"a": 100, "b": 1})
    assert spy.seen[-1]["a"] == (a, driver.output("a")[:-1], 2)
    assert (spy.added[-1], set(spy.removed[-1])) == (("a",), {"a", "c"})
    driver.step({"a": 1})
    assert (spy.added[-1], spy.removed[-1]) == ((), ())


def test_membership_is_told_again_after_a_failure(driver: Driver, spy: Spy) -> None:
    def fail(logits: torch.Tensor, batch: SampleBatch) -> None:
        raise ValueError

    driver.add("a", prompt(6))
    spy.change = fail
    with pytest.raises(PluginError):
        driver.step({"a": 100})
    spy.change = lambda logits, batch: None
    driver.resume("a")
    driver.step({"a": 100})
    assert spy.added == [("a",), ("a",)]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, logprobs=2)])
def test_logits_that_are_not_finite_fail_one_request(
    driver: Driver, spy: Spy, params: SamplingParams, value: float
) -> None:
    for id, seed in (("a", 1), ("bad", 2), ("c", 3)):
        driver.add(id, prompt(8, seed), params, seed)

    def spoil(logits: torch.Tensor, batch: SampleBatch) -> None:
        for row, owner in enumerate(batch.owner):
            if batch.ids[owner] == "bad" and batch.output_len[owner] == 2:
                logits[row, slice(None) if value == float("-inf") else 3] = value

    spy.change = spoil
    failed = [driver.step({"a": 100, "bad": 100, "c": 100}) for _ in range(3)][-1]
    assert list(failed.errors) == ["bad"] and "finite" in failed.errors["bad"]
    assert list(failed.tokens) == ["a", "c"] and "bad" not in failed.logprobs
    driver.release("bad")
    for _ in range(3):
        assert driver.step({"a": 1, "c": 1}).errors == {}
    spy.change = lambda logits, batch: None
    for id, seed in (("a", 1), ("c", 3)):
        driver.add("alone", prompt(8, seed), params, seed)
        assert driver.run("alone", 6) == driver.output(id)
        driver.release("alone")


def test_logits_processors_change_what_is_sampled_and_not_the_logprobs(
    driver: Driver, spy: Spy, reference: Reference
) -> None:
    driver.add("a", prompt(8), SamplingParams(temperature=0, logprobs=1))
    best = int(reference(prompt(8), 0)[0].argmax())

    def ban(logits: torch.Tensor, batch: SampleBatch) -> None:
        logits[:, best] = float("-inf")

    spy.change = ban
    driver.step({"a": 100})
    [entry] = driver.logprobs["a"]
    assert entry.token == driver.output("a")[0] != best
    assert entry.rank == 2 and entry.top[0][0] == best


def test_logprobs(driver: Driver, reference: Reference) -> None:
    """Of the unmodified logits, whatever the penalties and filters; None for who asked for none."""
    hot = {"temperature": 1.7, "top_k": 30, "presence_penalty": 1.0}
    for i, count in enumerate((None, 0, 1, 5, 20)):
        driver.add(f"r{i}", prompt(6 + i, i), SamplingParams(**hot, logprobs=count), seed=i)
    for _ in range(12):
        driver.step({f"r{i}": 7 for i in range(5)})
    assert driver.logprobs["r0"] == []
    for i, count in enumerate((0, 1, 5, 20), 1):
        output = driver.output(f"r{i}")
        logits = reference(driver.tokens[f"r{i}"], len(output))[:-1]
        expected = logits.double().log_softmax(-1)
        entries = driver.logprobs[f"r{i}"]
        assert [entry.token for entry in entries] == output
        for entry, row in zip(entries, expected, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            assert abs(entry.rank - 1 - int((row > row[entry.token]).sum())) <= 1
            assert len(entry.top) == count
            for (token, value), best in zip(entry.top, row.topk(count).values.tolist(), strict=True):
                assert value == pytest.approx(float(row[token]), abs=1e-4)
                assert value == pytest.approx(best, abs=1e-4)
    assert any(entry.rank > 1 for entry in driver.logprobs["r1"])


def test_equal_log_probabilities_are_listed_by_token() -> None:
    """More ties than places, cut alike whatever the neighbours ask for."""
    row = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, -1.0])
    logprobs = torch.stack([row, row, row, row])
    top = [entry.top for entry in log_probabilities(logprobs, torch.tensor([1, 4, 0, 5]), [3, 1, 0, 6])]
    assert [[token for token, _ in entries] for entries in top] == [[1, 2, 3], [1], [], [1, 2, 3, 4, 0, 5]]
    ranks = [entry.rank for entry in log_probabilities(logprobs, torch.tensor([1, 4, 0, 5]), [0, 0, 0, 0])]
    assert ranks == [1, 2, 5, 6]


# Start


def test_start_reports_what_it_found(tiny_llama: Path) -> None:
    stages: list[tuple[str, float]] = []
    executor = build(tiny_llama)
    capacity = executor.start(lambda stage, share: stages.append((stage, share)))
    assert capacity.blocks == {"device": BLOCKS, "host": BLOCKS // 4}
    assert executor.compute_rate > 0 and executor.copy_rate > 0
    group = executor.cache_spec.groups[0]
    assert capacity.block_bytes == 2 * group.layers * group.kv_heads * group.head_dim * BLOCK * 4
    assert (executor.dtype_name, executor.backend_name, executor.threads) == ("float32", "torch", 1)
    assert executor.cache_spec.block_size == BLOCK and executor.device_name
    loading = [share for stage, share in stages if stage == "load weights"]
    assert loading == sorted(loading) and (loading[0], loading[-1]) == (0, 1)
    executor.stop()
    executor.stop()
    assert executor.model is None


def test_pool_size(tiny_llama: Path) -> None:
    def blocks(**options: Any) -> int:
        executor = build(tiny_llama, **options)
        capacity = executor.start()
        executor.stop()
        return capacity.blocks["device"]

    group = {"kv_blocks": None, "max_num_seqs": 64}
    size = build(tiny_llama).start().block_bytes
    assert blocks(kv_blocks=5, kv_memory="0.9") == 5
    assert blocks(**group, kv_memory=f"{10 * size + size // 2}B") == 10
    # Never more than all seats at full length could fill.
    assert blocks(kv_blocks=None, max_num_seqs=2, kv_memory="0.5") == 2 * 512 // BLOCK
    assert blocks(kv_blocks=None, max_num_seqs=2, kv_memory="0.5", max_model_len=30) == 2 * 8
    with pytest.raises(ConfigError, match=rf"--kv-memory {size - 1}B: .* do not hold one KV block.*{size} bytes"):
        blocks(**group, kv_memory=f"{size - 1}B")
    with pytest.raises(ConfigError, match=r"--kv-blocks 1000000000: .* is more than the .* free"):
        blocks(kv_blocks=10**9)


def test_fraction_is_of_the_free_memory(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = build(tiny_llama).start().block_bytes
    monkeypatch.setattr("framework.machine.free_memory", lambda: 40 * size)
    executor = build(tiny_llama, kv_blocks=None, kv_memory="0.25")
    assert executor.start().blocks["device"] == 10


def test_threads(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--threads, then OMP_NUM_THREADS, then the CPUs of this process."""
    monkeypatch.setattr("framework.machine.cpus", lambda: 3)
    before = torch.get_num_threads()
    for told, option, expected in (("", None, 3), ("2", None, 2), ("2", 1, 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        executor = build(tiny_llama, threads=option)
        executor.start()
        assert executor.threads == torch.get_num_threads() == expected
    torch.set_num_threads(before)


def test_devices() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("gpu", "cuda:x", "meta", "cpu:0:1"):
        with pytest.raises(ConfigError, match=f"--device {name}: expected auto, cpu, cuda or cuda:N"):
            resolve_device(name)
    with pytest.raises(ConfigError, match="--device cuda:99"):
        resolve_device("cuda:99")


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype("float16", cpu) is torch.float16
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("framework.worker._has_bfloat16", lambda device, native=native: native)
        assert resolve_dtype("auto", cpu) is expected
    monkeypatch.undo()
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    native = "avx512_bf16" in flags or "amx_bf16" in flags
    assert resolve_dtype("auto", cpu) is (torch.bfloat16 if native else torch.float32)


def test_checkpoint_without_architecture(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = build(tiny_llama)
    monkeypatch.setitem(executor.checkpoint.config, "architectures", [])
    with pytest.raises(ModelError, match="architectures"):
        executor.start()
