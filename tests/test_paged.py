"""PagedCache driven at random, its contents checked by the executor that remembers who wrote which slot."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
from framework.plugins.kv.paged import PagedCache
from framework.plugins.kv.pool import Lfu, Lru
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paging import cache, computed, request

from framework import ConfigError, Mode, Plan, Request, RequestData, SamplingParams, Slice
from framework.plan import Preempted
from framework.testing import CheckingExecutor

CHUNK = 12


class PagedMachine(RuleBasedStateMachine):
    """Any sequence of calls that the core may make. Requests of one family begin alike."""

    @initialize(
        blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 3, 4]),
        host=st.sampled_from([0, 3, 20]),
        windows=st.sampled_from([(None,), (None, None), (5,), (None, 4)]),
        prefix_cache=st.booleans(),
        eviction=st.sampled_from([Lru, Lfu]),
    )
    def build(self, blocks, block_size, host, windows, prefix_cache, eviction) -> None:
        self.executor = CheckingExecutor(blocks, block_size, host_blocks=host, windows=windows)
        self.kv = PagedCache(
            self.executor.cache_spec,
            self.executor.start(),
            prefix_cache=prefix_cache,
            eviction=eviction,
            chunk=CHUNK,
        )
        self.blocks, self.size, self.host, self.windows = blocks, block_size, host, windows
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.sent: set[Request] = set()
        self.step = self.arrived = 0

    def submit(self, new=(), slices=(), preempted=(), finished=()) -> dict[str, tuple[int, ...]]:
        self.step += 1
        plan = Plan(self.step, tuple(new), tuple(slices), self.kv.drain(), tuple(preempted), tuple(finished))
        return self.executor.submit(plan).result().tokens

    @rule(family=st.integers(1, 2), tokens=st.integers(1, 30), salt=st.sampled_from([b"", b"x"]))
    def arrive(self, family, tokens, salt) -> None:
        self.arrived += 1
        prompt = [(i * i + family) % 50 for i in range(min(tokens, self.blocks * self.size))]
        r = Request(f"r{self.arrived}", prompt, SamplingParams(), cache_salt=salt, adapter=salt.decode() or None)
        self.kv.prepare(r)
        self.waiting.append(r)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), keep=st.integers(0, 2))
    def start(self, data, keep) -> None:
        r = data.draw(st.sampled_from(self.waiting))
        short, cached = self.kv.missing(r, r.num_tokens, keep), self.kv.lookup(r)
        before = r.computed
        reservation = self.kv.reserve(r, r.num_tokens, keep)
        assert (reservation is None) == (short > 0)
        if reservation is not None:
            assert reservation.start == cached and reservation.start < r.num_tokens
            assert before in (0, reservation.start)
            r.computed = reservation.start
            self.waiting.remove(r)
            self.running.append(r)
            self.compute(r, reservation, data.draw(st.integers(1, CHUNK)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, CHUNK))
    def go_on(self, data, tokens) -> None:
        r = data.draw(st.sampled_from(self.running))
        upto = r.computed + min(tokens, r.remaining)
        short = self.kv.missing(r, upto)
        reservation = self.kv.reserve(r, upto)
        assert (reservation is None) == (short > 0)
        if reservation is not None:
            self.compute(r, reservation, tokens)

    def compute(self, r, reservation, tokens) -> None:
        assert reservation.start == r.computed
        tokens = min(tokens, r.num_tokens - r.computed, reservation.length - r.computed)
        assert tokens > 0
        new = [] if r in self.sent else [RequestData.of(r)]
        self.sent.add(r)
        end = r.computed + tokens
        done = self.submit(new, [Slice(r.id, r.computed, tokens, reservation.deltas, end == r.num_tokens)])
        r.computed = end
        self.kv.publish(r)
        for token in done.get(r.id, ()):
            r.append(token)

    @precondition(lambda self: any(r.computed == r.num_tokens - 1 > 0 for r in self.sent))
    @rule(data=st.data(), whole=st.booleans())
    def fork(self, data, whole) -> None:
        parent = data.draw(
            st.sampled_from([r for r in self.running if r in self.sent and r.computed == r.num_tokens - 1 > 0])
        )
        self.arrived += 1
        tokens = [*parent.prompt, *parent.output][: parent.computed + whole]
        child = Request(
            f"r{self.arrived}", tokens, SamplingParams(), cache_salt=parent.cache_salt, adapter=parent.adapter
        )
        child.computed = child.num_tokens - 1
        if self.windows[0] is not None and self.kv._outside(child.computed) < self.kv._tables[parent].first:
            return  # given up at the last publish
        if child.computed:
            assert self.kv.fork(parent, child)
            self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), swap=st.booleans())
    def preempt(self, data, swap) -> None:
        r = data.draw(st.sampled_from(self.running))
        swapped = swap and r.computed > 0 and self.kv.swap_out(r)
        if not swapped:
            self.kv.release(r)
            r.computed = 0
        self.leave(r, Mode.SWAP if swapped else Mode.RECOMPUTE)
        self.waiting.append(r)

    def leave(self, r, mode=None) -> None:
        self.running.remove(r)
        if r in self.sent:
            self.sent.remove(r)
            self.submit(preempted=[Preempted(r.id, mode)] if mode else (), finished=() if mode else [r.id])
        else:
            self.submit()

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def end(self, data) -> None:
        r = data.draw(st.sampled_from([*self.running, *self.waiting]))
        self.kv.release(r)
        self.kv.release(r)
        if r in self.running:
            self.leave(r)
        else:
            self.waiting.remove(r)

    @precondition(lambda self: self.running and self.waiting)
    @rule(data=st.data(), upto=st.integers(1, 60), keep=st.integers(0, 2), swap=st.booleans())
    def ask_without(self, data, upto, keep, swap) -> None:
        """What `missing` says of a world without some others is true once they let go."""
        r = data.draw(st.sampled_from([*self.running, *self.waiting]))
        upto = max(upto, r.num_tokens if r in self.waiting else r.computed + 1)
        others = data.draw(st.sets(st.sampled_from(self.running))) - {r}
        short = self.kv.missing(r, upto, keep, others)
        kv, r, others = copy.deepcopy((self.kv, r, others))
        for other in others:
            if not (swap and other.computed and kv.swap_out(other)):
                kv.release(other)
                other.computed = 0
        assert kv.missing(r, upto, keep) == short
        assert (kv.reserve(r, upto, keep) is None) == (short > 0)

    @rule()
    def reset(self) -> None:
        self.submit(finished=[r.id for r in self.sent])
        self.kv.reset()
        self.running.clear()
        self.waiting.clear()
        self.sent.clear()

    @invariant()
    def accounts(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.executor.check()
        self.kv.check_integrity()
        usage, size = self.kv.usage(), self.size
        assert usage.total == self.blocks
        assert self.kv.available == usage.free + usage.cached == self.blocks - usage.holding - usage.reserved
        tables = {r: self.kv._tables[r] for r in self.running}
        slots, holding, reserved = set(), set(), 0
        for r, table in tables.items():
            for at in range(table.first * size, max(r.computed, table.filled if r.computed % size else 0)):
                slots.add((table.blocks[at // size], at % size))
            used = -(-r.computed // size)
            holding |= set(table.blocks[table.first : used])
            reserved += len(table.blocks) - used
        assert (usage.holding, usage.reserved, usage.tokens) == (len(holding), reserved, len(slots))
        on_host = sum(-(-r.computed // size) for r in self.waiting)
        assert usage.swapped == on_host if None in self.windows else usage.swapped <= on_host
        if None not in self.windows:
            most = self.kv.peak(self.running[0], 10**6) if self.running else 0
            assert all(len(t.blocks) - t.first <= most for t in tables.values())


TestPagedMachine = PagedMachine.TestCase
TestPagedMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_peak_is_what_a_request_needs_alone() -> None:
    kv = cache(blocks=8, block_size=4)
    assert [kv.peak(request(), length) for length in (1, 4, 5, 32)] == [1, 1, 2, 8]
    kv = cache(blocks=8, block_size=4, window=6, chunk=3)
    assert [kv.peak(request(), length) for length in (1, 4, 5, 32)] == [1, 1, 2, 3]


def test_released_blocks_come_back_head_first() -> None:
    kv = cache(blocks=4, block_size=1)
    r = request()
    before = kv.reserve(r, 3)
    assert before is not None
    kv.release(r)
    again = kv.reserve(r, 2)
    assert again is not None
    assert again.deltas[0].blocks == before.deltas[0].blocks[:2]


# Forks


def test_a_fork_copies_the_block_it_writes_and_the_last_sharer_writes_in_place() -> None:
    kv = cache(blocks=8, block_size=4)
    parent, child = request("p", 6), request("c", 6)
    blocks = list(computed(kv, parent, 6))
    child.computed = 5
    assert kv.fork(parent, child)
    assert kv.usage().holding == 2 and kv.usage().tokens == 6
    assert (kv.missing(child, 6), kv.available) == (0, 6)
    reservation = kv.reserve(child, 6)
    assert reservation is not None and reservation.start == 5
    assert [(c.src, c.dst) for c in kv.drain()] == [(blocks[1], reservation.deltas[0].blocks[1])]
    assert reservation.deltas[0].first == 0 and reservation.deltas[0].blocks[0] == blocks[0]
    assert kv.reserve(parent, 7) is not None
    assert kv.drain() == () and kv._tables[parent].blocks == blocks


def test_copy_on_write_needs_a_block_unless_the_sharers_let_go() -> None:
    kv = cache(blocks=2, block_size=4)
    parent, child = request("p", 6), request("c", 6)
    computed(kv, parent, 6)
    child.computed = 5
    kv.fork(parent, child)
    assert kv.missing(child, 6) == 1 and kv.reserve(child, 6) is None
    assert kv.missing(child, 6, without=[parent]) == 0
    kv.release(parent)
    assert kv.reserve(child, 6) is not None and kv.drain() == ()


def test_the_last_sharer_of_a_published_block_takes_it_back() -> None:
    kv = cache(blocks=2, block_size=4)
    parent, child = request("p", 8), request("c", 8)
    kv.reserve(parent, 8)
    parent.computed, child.computed = 8, 7
    kv.fork(parent, child)
    kv.publish(parent)
    kv.release(parent)
    assert kv.lookup(request("x", 9)) == 8
    assert kv.reserve(child, 8) is not None and kv.drain() == ()
    assert kv.lookup(request("x", 9)) == 4  # nobody may find a block that is being written
    child.computed = 8
    kv.publish(child)
    assert kv.lookup(request("x", 9)) == 8


# Swap


def test_swap_out_takes_shared_blocks_along_and_swap_in_shares_again() -> None:
    kv = cache(blocks=4, block_size=4, host=4)
    first, second = request("a", 10), request("b", 10)
    computed(kv, first, 10)
    computed(kv, second, 10)
    assert kv.available == 0 and kv.usage().holding == 4
    assert kv.swap_out(second)
    assert [(c.src_tier, c.dst_tier) for c in kv.drain()] == [("device", "host")] * 3
    assert kv.usage().swapped == 3 and kv.available == 1 and kv.lookup(second) == 10
    assert kv.missing(second, 10) == 0
    reservation = kv.reserve(second, 11)
    assert reservation is not None and reservation.start == 10
    assert [(c.src_tier, c.dst_tier) for c in kv.drain()] == [("host", "device")]
    assert kv.usage().swapped == 0


def test_swap_out_copies_nothing_beyond_what_is_computed() -> None:
    kv = cache(blocks=4, block_size=4, host=4)
    r = request("a", 16)
    kv.reserve(r, 16)
    r.computed = 5
    assert kv.swap_out(r)
    assert kv.usage().swapped == 2 and kv.available == 4


def test_a_full_host_pool_changes_nothing() -> None:
    kv = cache(blocks=4, block_size=4, host=1)
    r = request("a", 8)
    computed(kv, r, 8)
    assert not kv.swap_out(r)
    assert kv.drain() == () and kv.usage().holding == 2 and kv.usage().swapped == 0


# Windows


def test_blocks_behind_the_window_are_given_up() -> None:
    kv = cache(blocks=8, block_size=4, window=6, chunk=4)
    r = request("a", 20)
    for end, held in ((4, 1), (8, 2), (12, 2), (16, 2), (17, 2), (20, 2)):
        reservation = kv.reserve(r, end)
        assert reservation is not None
        r.computed = end
        kv.publish(r)
        assert kv.usage().holding == held
    assert kv.swap_out(r) is False
    kv.release(r)
    assert kv.available == 8


def test_a_follow_up_holds_hits_inside_the_window_only() -> None:
    kv = cache(blocks=8, block_size=4, window=6, chunk=100)
    first = request("a", 32)
    computed(kv, first, 32)
    kv.release(first)
    assert kv.usage().cached == 8
    second = request("b", 36)
    assert kv.lookup(second) == 32
    reservation = kv.reserve(second, 36)
    assert reservation is not None and reservation.start == 32
    assert (reservation.deltas[0].first, len(reservation.deltas[0].blocks)) == (6, 3)
    assert kv.usage().cached == 5


def test_with_a_window_what_lies_before_it_need_not_be_cached() -> None:
    kv = cache(blocks=8, block_size=4, window=6, chunk=100)
    first = request("a", 32)
    computed(kv, first, 32)
    kv.release(first)
    other = request("x", 20)
    other.prompt = [90 + token for token in other.prompt]
    computed(kv, other, 20)
    found = [kv._pool.find(name) is not None for name in kv._prefixes.chain(first, 8)]
    assert found.count(True) < 8
    best = max((i for i in range(1, 9) if all(found[max(0, i * 4 - 5) // 4 : i])), default=0)
    assert kv.lookup(request("b", 36)) == best * 4


# Damage


def test_a_pool_without_blocks_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="kv_memory"):
        cache(blocks=0, block_size=16)


def damage(change: Callable[[PagedCache, Request], object], message: str):
    return pytest.param(change, message, id=message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        damage(lambda kv, r: kv._pool.free.pop(), "neither free nor owned"),
        damage(lambda kv, r: kv._pool.free.append(kv._pool.free[0]), "twice on the free list"),
        damage(lambda kv, r: kv._pool.free.append(kv._tables[r].blocks[0]), "free and owned"),
        damage(lambda kv, r: kv._tables[r].blocks.append(kv._tables[r].blocks[0]), "twice in the table"),
        damage(lambda kv, r: kv._pool.refs.__setitem__(kv._tables[r].blocks[0], 2), "counts 2"),
        damage(lambda kv, r: setattr(r, "computed", 100), "computed beyond"),
        damage(lambda kv, r: setattr(r, "computed", 1), "still empty and published"),
        damage(lambda kv, r: setattr(kv._pool, "idle", 1), "idle but 1 were counted"),
        damage(lambda kv, r: r.state["paged"].__setitem__(0, b"x"), "published as another's"),
        damage(lambda kv, r: kv._host.pop(), "host blocks lost"),
        damage(lambda kv, r: setattr(kv._tables[r], "first", 1), "inside its window"),
    ],
)
def test_check_integrity_sees_damage(change, message) -> None:
    kv = cache(blocks=4, block_size=4, host=2)
    r = request(tokens=9)
    computed(kv, r, 9)
    kv.check_integrity()
    assert Counter(kv._tables[r].blocks).total() == 3
    change(kv, r)
    with pytest.raises(AssertionError, match=message):
        kv.check_integrity()
