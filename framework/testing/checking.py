"""An executor that computes nothing and checks everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ..executor import Clock, Done, Executor, MonotonicClock, Pending
from ..kv import CacheGroup, CacheSpec, Capacity
from ..model import ModelSpec
from ..plan import Delta, Logprobs, Plan, RequestData, Slice, StepResult
from .clock import VirtualClock
from .memory import Memory, PlanFault, Written

When = Literal["before", "after"]


class StepFailed(RuntimeError):
    """What a step raises that `fail` chose."""


class RequestFailed(Exception):
    """Raised by `next_token` to fail one request and no other."""


class _Unasked(Done):
    """A plan that counts as in flight until its result is asked for."""

    def __init__(self, result: StepResult | BaseException) -> None:
        super().__init__(result)
        self.failed, self.asked = isinstance(result, BaseException), False

    def result(self) -> StepResult:
        self.asked = True
        return super().result()


class _Sequence:
    """A request as a worker knows it: its tokens, its block tables, and how much of it is in the cache."""

    def __init__(self, data: RequestData, groups: int) -> None:
        self.data = data
        self.tokens = list(data.tokens)
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        self.first = [0] * groups  # blocks below it fell out of the window: the table's entries mean nothing
        self.computed: int | None = None  # None: not known before the first slice (prefix hits, swap-in)
        self.scored = data.prompt_len if data.params.prompt_logprobs is None else data.scored
        self.prefixes: list[int] = []

    def prefix(self, position: int) -> int:
        """Hash of the adapter and of tokens[: position + 1]."""
        known = self.prefixes
        for token in self.tokens[len(known) : position + 1]:
            known.append(hash((known[-1] if known else self.data.adapter, token)))
        return known[position]


class CheckingExecutor(Executor):
    """Obeys plans as a worker would and raises `PlanFault` for the first that breaks its contract.

    It checks that

    - step numbers rise; a request is planned at most once per step, and not in the step that preempts it;
    - a request's data comes with it when it joins or returns, with the prompt, seed, parameters and output it had;
    - a slice starts where the last one ended, ends within the known tokens, and samples if and only if it reaches
      their end;
    - prompt tokens whose log-probabilities are asked for are computed by the request itself, each told once;
    - deltas name blocks of the pool, leave no gap in a table (but for what is out of the window), hold no block twice,
      and cover the slice;
    - no block is written that is also in another request's table; copies (run in order) never land in one either;
    - every context position a slice reads, within the group's window, holds the keys and values of this request's own
      token prefix, in every group;
    - `token_budget` and `seats`, where given, are kept;
    - at most `max_in_flight` plans are submitted whose results were not asked for, and none behind another preempts.

    An engine treats an exception of its executor as a failed step, so a fault sticks: it is raised again by every later
    step and by `check`, which a test should call at its end.

    Output tokens are `next_token(data, tokens)`, a function of the request's seed and tokens alone; whatever the
    schedule, each request's output must be the same. So must log-probabilities, which `score` makes up for prompts.

    With `max_in_flight` 2 an engine has to plan a step before it knows what came of the last one. A plan that was
    submitted behind one that failed fails, too.

    blocks, host_blocks: size of the two tiers. windows: one group of layers per entry, and the tokens
    that its queries see.
    vocab_size: output tokens are below it. max_model_len: the longest request the pretended model takes.
    ends: request id -> output index at which its EOS token comes (`params.eos_token_ids[0]`).
    fail(plan): "before" or "after" the plan's writes, the step raises `StepFailed`; None: it does not.
    cost(plan): seconds the step takes; a `VirtualClock` is advanced by it, with any other clock the step sleeps.
    """

    def __init__(
        self,
        blocks: int = 64,
        block_size: int = 16,
        *,
        host_blocks: int = 0,
        windows: Sequence[int | None] = (None,),
        vocab_size: int = 256,
        max_model_len: int = 2**20,
        token_budget: int | None = None,
        seats: int | None = None,
        ends: Mapping[str, int] | None = None,
        fail: Callable[[Plan], When | None] = lambda plan: None,
        cost: Callable[[Plan], float] = lambda plan: 0.0,
        clock: Clock | None = None,
        max_in_flight: int = 1,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.clock = clock or MonotonicClock()
        self.cache_spec = CacheSpec(block_size, "float32", tuple(CacheGroup(1, 1, 1, w) for w in windows))
        self.capacity = Capacity({"device": blocks, "host": host_blocks}, device="none (checking executor)")
        self.vocab_size = vocab_size
        self.spec = ModelSpec(
            "none", vocab_size, max_model_len, len(windows), 1, 1, 1, 1, "float32", tuple(windows), config={}
        )
        self.dtype_name, self.backend_name = "float32", "none"
        self._token_budget, self._seats = token_budget, seats
        self._ends = ends or {}
        self._fail, self._cost = fail, cost
        self._memory = Memory(self.capacity.blocks, len(windows), block_size)
        self._step = -1
        self._fault: PlanFault | None = None
        self._flying: list[_Unasked] = []
        self._live: dict[str, _Sequence] = {}
        self._owners: list[dict[int, set[str]]] = [{} for _ in windows]  # per group: block -> requests
        self._past: dict[str, tuple[RequestData, list[int]]] = {}  # data and all tokens, by id, until it ends
        self._told: dict[str, int] = {}  # prompt tokens whose log-probabilities were told, by id, until it ends
        self._lost: set[str] = set()  # running when a step failed: their state is gone here, too

    def next_token(self, data: RequestData, tokens: Sequence[int]) -> int:
        """The token that follows `tokens` (prompt and output). Must be a pure function of its arguments.

        May raise `RequestFailed(message)`: the step goes on and reports it in `StepResult.errors`.
        """
        return hash((data.seed, tuple(tokens))) % self.vocab_size

    def score(self, data: RequestData, position: int) -> Logprobs:
        """Of the prompt token at `position`: made up from the tokens up to it."""
        tokens, count = data.tokens[: position + 1], data.params.prompt_logprobs or 0
        value = -1.0 - hash(tuple(tokens)) % 1000 / 100
        return Logprobs(tokens[-1], value, 2, tuple((i, -0.5 - i) for i in range(count)))

    def start(self, progress: Callable[[str, float], None] = lambda stage, share: None) -> Capacity:
        progress("checking", 1.0)
        return self.capacity

    def submit(self, plan: Plan) -> Pending:
        before = [pending for pending in self._flying if not pending.asked]
        result: StepResult | BaseException
        try:
            if self._fault is not None:
                raise self._fault
            _need(len(before) < self.max_in_flight, f"step {plan.step} is submitted behind {len(before)} others")
            _need(not (before and plan.preempted), f"step {plan.step} preempts while another is in flight")
            if any(pending.failed for pending in before):
                raise StepFailed(f"step {plan.step} built on one that failed")
            result = self._run(plan)
        except PlanFault as fault:
            result = self._fault = fault
        except StepFailed as error:
            result = error
        pending = _Unasked(result)
        self._flying = [*before, pending]
        return pending

    @property
    def known(self) -> frozenset[str]:
        """Requests it holds state for. One that ended stays until a plan names it in `finished`."""
        return frozenset(self._live)

    def check(self) -> None:
        """Raise the first `PlanFault`, if there was one."""
        if self._fault is not None:
            raise self._fault

    def stop(self) -> None:
        self._live.clear()

    def _run(self, plan: Plan) -> StepResult:
        begin = built = self.clock.ns()
        _need(plan.step > self._step, f"step {plan.step} comes after step {self._step}")
        self._step = plan.step
        failure = self._fail(plan)
        if failure != "before":
            self._join_and_leave(plan)
            self._set_tables(plan)
            built = self.clock.ns()
            self._compute(plan)
        cost = self._cost(plan)
        if isinstance(self.clock, VirtualClock):
            self.clock.advance(cost)
        elif cost:
            time.sleep(cost)
        if failure is not None:
            for id in [*self._live, *(data.id for data in plan.new)]:
                self._drop(id)  # the engine computes all that ran again, and sends its data first
                self._lost.add(id)
            raise StepFailed(f"step {plan.step} was made to fail {failure} its writes")
        computed = self.clock.ns()
        return self._sample(plan, (("batch_build", begin, built), ("forward", built, computed)))

    def _join_and_leave(self, plan: Plan) -> None:
        for id in plan.finished:
            if id not in self._lost:  # else it may be on its way back
                self._past.pop(id, None)
                self._told.pop(id, None)
            self._drop(id)
        for gone in plan.preempted:
            known = gone.request_id in self._live or gone.request_id in self._lost
            _need(known, f"{gone.request_id}: preempted, but it is not running")
            self._drop(gone.request_id)
        for data in plan.new:
            _need(data.id not in self._live, f"{data.id}: its data came again while it is running")
            _need(0 < data.prompt_len <= len(data.tokens), f"{data.id}: prompt_len {data.prompt_len} is out of range")
            past, tokens = self._past.setdefault(data.id, (data, list(data.tokens)))
            same = (past.prompt_len, past.seed, past.params, past.adapter, past.extra)
            _need(
                same == (data.prompt_len, data.seed, data.params, data.adapter, data.extra),
                f"{data.id}: returned with another prompt length, seed, parameters, adapter or extra",
            )
            _need(data.tokens == tokens, f"{data.id}: returned with tokens {data.tokens}, it had {tokens}")
            told = self._told.setdefault(data.id, data.scored)
            _need(data.scored == told, f"{data.id}: {told} prompt tokens have log-probabilities, not {data.scored}")
            self._live[data.id] = _Sequence(data, len(self._owners))
            self._lost.discard(data.id)
        if self._seats is not None:
            _need(len(self._live) <= self._seats, f"{len(self._live)} requests run on {self._seats} seats")

    def _set_tables(self, plan: Plan) -> None:
        fallen = {p.request_id for p in plan.preempted}
        seen: set[str] = set()
        for part in plan.slices:
            id = part.request_id
            _need(id not in seen, f"{id}: planned twice in one step")
            _need(id not in fallen, f"{id}: planned in the step that preempts it")
            _need(id in self._live, f"{id}: planned, but it ended or its data never came")
            seen.add(id)
            self._check_slice(part, self._live[id])
            self._pass_window(part.start, id)
            for delta in part.deltas:
                self._apply(delta, id)
        if self._token_budget is not None:
            _need(
                plan.tokens <= self._token_budget, f"{plan.tokens} tokens planned, the budget is {self._token_budget}"
            )

    def _check_slice(self, part: Slice, sequence: _Sequence) -> None:
        id, end, known = part.request_id, part.start + part.tokens, len(sequence.tokens)
        _need(part.drafts == 0, f"{id}: has draft tokens, which this executor does not know")
        _need(part.start >= 0 and part.tokens > 0, f"{id}: an empty slice, {part.tokens} tokens at {part.start}")
        resumes = sequence.computed in (None, part.start)
        _need(resumes, f"{id}: starts at {part.start}, but {sequence.computed} tokens are computed")
        _need(end <= known, f"{id}: computes up to {end} of {known} known tokens")
        _need(part.samples == (end == known), f"{id}: samples={part.samples} at {end} of {known} known tokens")
        gap = part.start > sequence.scored - 1 and sequence.scored < sequence.data.prompt_len
        _need(not gap, f"{id}: starts at {part.start}, {sequence.scored} prompt tokens have log-probabilities")

    def _apply(self, delta: Delta, id: str) -> None:
        _need(0 <= delta.group < len(self._owners), f"{id}: a delta for group {delta.group}, which does not exist")
        sequence, owners = self._live[id], self._owners[delta.group]
        table, outside = sequence.tables[delta.group], sequence.first[delta.group]
        if len(table) < delta.first <= outside:
            table += [-1] * (delta.first - len(table))
        _need(0 <= delta.first <= len(table), f"{id}: a delta at {delta.first} leaves a gap after {len(table)} blocks")
        for block in table[max(delta.first, outside) :]:
            owners[block].discard(id)
        table[delta.first :] = delta.blocks
        inside = table[outside:]
        _need(len(set(inside)) == len(inside), f"{id}: a block is twice in its table {table}")
        for at, block in enumerate(delta.blocks, delta.first):
            self._memory.block("device", delta.group, block)
            if at >= outside:
                owners.setdefault(block, set()).add(id)

    def _pass_window(self, start: int, id: str) -> None:
        """Nobody who goes on from `start` sees what lies before its window: those blocks may be given to others."""
        sequence = self._live[id]
        for group, spec in enumerate(self.cache_spec.groups):
            if spec.window is not None:
                table, first = sequence.tables[group], max(0, start - spec.window + 1) // self._memory.block_size
                for block in table[sequence.first[group] : first]:
                    self._owners[group][block].discard(id)
                sequence.first[group] = max(first, sequence.first[group])

    def _compute(self, plan: Plan) -> None:
        for copy in plan.copies:
            if copy.dst_tier == "device" and 0 <= copy.group < len(self._owners):
                others = self._owners[copy.group].get(copy.dst, set()) - {copy.request_id}
                _need(not others, f"{copy.request_id}: copies into block {copy.dst}, which belongs to {others}")
            self._memory.copy(copy)
        for part in plan.slices:
            for group in range(len(self._owners)):
                self._write(part, group)
        # A layer stores the keys and values of the whole batch before anyone's attention reads them.
        for part in plan.slices:
            for group in range(len(self._owners)):
                self._read(part, group)
            self._live[part.request_id].computed = part.start + part.tokens
            self._pass_window(part.start + part.tokens, part.request_id)

    def _write(self, part: Slice, group: int) -> None:
        id, size = part.request_id, self._memory.block_size
        sequence = self._live[id]
        table = sequence.tables[group]
        end = part.start + part.tokens
        _need(end <= len(table) * size, f"{id}: computes up to {end}, its table covers {len(table) * size}")
        for position in range(part.start, end):
            block = table[position // size]
            others = self._owners[group][block] - {id}
            _need(not others, f"{id}: writes block {block}, which {others} hold too")
            entry = Written(id, position, sequence.tokens[position], sequence.prefix(position))
            self._memory.block("device", group, block)[position % size] = entry

    def _read(self, part: Slice, group: int) -> None:
        id, size = part.request_id, self._memory.block_size
        sequence = self._live[id]
        window = self.cache_spec.groups[group].window
        first = 0 if window is None else max(0, part.start - window + 1)
        for position in range(first, part.start + part.tokens):
            block = sequence.tables[group][position // size]
            found = self._memory.block("device", group, block)[position % size]
            if found is None or found.prefix != sequence.prefix(position):
                raise PlanFault(
                    f"{id}: reads token {sequence.tokens[position]} at position {position} from block {block} "
                    f"of group {group}, which holds {found or 'nothing'}"
                )

    def _sample(self, plan: Plan, stages: tuple[tuple[str, int, int], ...]) -> StepResult:
        begin = self.clock.ns()
        tokens: dict[str, tuple[int, ...]] = {}
        logprobs: dict[str, tuple[Logprobs, ...]] = {}
        errors: dict[str, str] = {}
        scores: dict[str, tuple[Logprobs, ...]] = {}
        for part in plan.slices:
            id = part.request_id
            sequence = self._live[id]
            params = sequence.data.params
            scored = min(part.start + part.tokens + 1, sequence.data.prompt_len)
            if scored > sequence.scored:
                scores[id] = tuple(self.score(sequence.data, at) for at in range(sequence.scored, scored))
                sequence.scored = self._told[id] = scored
            if not part.samples:
                continue
            try:
                if self._ends.get(id) == len(sequence.tokens) - sequence.data.prompt_len:
                    token = params.eos_token_ids[0]
                else:
                    token = self.next_token(sequence.data, sequence.tokens)
            except RequestFailed as error:
                errors[id] = str(error)
                if self.max_in_flight > 1:  # it may have been planned on
                    sequence.tokens.append(0)
                continue
            sequence.tokens.append(token)
            self._past[id][1].append(token)
            tokens[id] = (token,)
            if params.logprobs is not None:
                top = tuple((token + i, -0.5 - i) for i in range(params.logprobs))
                logprobs[id] = (Logprobs(token, -0.5, 1, top),)
        copied = tuple(copy.ticket for copy in plan.copies if copy.ticket)
        stages = (*stages, ("sampling", begin, self.clock.ns()))
        return StepResult(plan.step, tokens, logprobs, {}, copied, errors, stages, scores)

    def _drop(self, id: str) -> None:
        self._lost.discard(id)
        sequence = self._live.pop(id, None)
        if sequence is not None:
            for table, first, owners in zip(sequence.tables, sequence.first, self._owners, strict=True):
                for block in table[first:]:
                    owners[block].discard(id)


def _need(ok: bool, fault: str) -> None:
    if not ok:
        raise PlanFault(fault)
