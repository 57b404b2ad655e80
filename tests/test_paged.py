"""PagedCache against a model that keeps a set of blocks per request and nothing else."""

from __future__ import annotations

import pytest
from framework.plugins.kv.paged import PagedCache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from framework import CacheGroup, CacheSpec, Capacity, ConfigError, Request, SamplingParams


def cache(blocks: int, block_size: int, groups: int = 1) -> PagedCache:
    group = CacheGroup(layers=1, kv_heads=1, head_dim=1)
    return PagedCache(CacheSpec(block_size, "float32", (group,) * groups), Capacity({"device": blocks}))


def request(id: str = "r", tokens: int = 1) -> Request:
    return Request(id, list(range(tokens)), SamplingParams())


class PagedMachine(RuleBasedStateMachine):
    """Any sequence of calls that the core may make."""

    @initialize(blocks=st.integers(1, 12), block_size=st.sampled_from([1, 3, 16]), groups=st.integers(1, 2))
    def build(self, blocks: int, block_size: int, groups: int) -> None:
        self.kv = cache(blocks, block_size, groups)
        self.blocks, self.block_size, self.groups = blocks, block_size, groups
        self.tables: dict[Request, list[int]] = {}
        self.known: list[Request] = []

    @rule()
    def arrive(self) -> None:
        self.known.append(request(f"r{len(self.known)}"))

    def owned(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        r = data.draw(st.sampled_from(self.known))
        upto = data.draw(st.integers(r.computed + 1, r.computed + 3 * self.block_size))
        keep = data.draw(st.integers(0, 2))
        table = self.tables.get(r, [])
        needed = max(0, -(-upto // self.block_size) - len(table))
        free = self.blocks - len(self.owned())
        short = max(0, needed + keep - free) if needed else 0

        assert self.kv.missing(r, upto, keep) == short
        reservation = self.kv.reserve(r, upto, keep)

        if short:
            assert reservation is None
            return
        assert reservation is not None
        assert reservation.start == r.computed
        assert reservation.length == (len(table) + needed) * self.block_size >= upto
        if not needed:
            assert reservation.deltas == ()
            return
        assert [d.group for d in reservation.deltas] == list(range(self.groups))
        assert len({(d.first, d.blocks) for d in reservation.deltas}) == 1
        first, blocks = reservation.deltas[0].first, reservation.deltas[0].blocks
        assert first == len(table) and len(blocks) == needed
        assert self.owned().isdisjoint(blocks) and len(set(blocks)) == needed
        assert all(0 <= block < self.blocks for block in blocks)
        self.tables[r] = [*table, *blocks]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        r = data.draw(st.sampled_from(list(self.tables)))
        r.computed = data.draw(st.integers(r.computed, len(self.tables[r]) * self.block_size))
        self.kv.publish(r)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        r = data.draw(st.sampled_from(self.known))
        self.kv.release(r)
        self.tables.pop(r, None)
        r.computed = 0

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def ask_without(self, data: st.DataObject) -> None:
        """`missing` as if others held nothing equals `missing` once they do hold nothing."""
        r = data.draw(st.sampled_from(self.known))
        others = data.draw(st.sets(st.sampled_from(self.known))) - {r}
        upto = data.draw(st.integers(1, 4 * self.blocks * self.block_size))
        without = self.kv.missing(r, upto, 1, others)
        needed = -(-upto // self.block_size) - len(self.tables.get(r, ()))
        free = self.blocks - len(self.owned()) + sum(len(self.tables.get(o, ())) for o in others)
        assert without == (max(0, needed + 1 - free) if needed > 0 else 0)

    @rule()
    def reset(self) -> None:
        self.kv.reset()
        self.tables.clear()
        for r in self.known:
            r.computed = 0

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        assert self.kv.available == self.blocks - len(self.owned())
        usage = self.kv.usage()
        holding = sum(-(-r.computed // self.block_size) for r in self.tables)
        assert usage.holding == holding
        assert usage.reserved == len(self.owned()) - holding
        assert (usage.cached, usage.swapped) == (0, 0)
        assert usage.total == self.blocks
        assert usage.tokens == sum(r.computed for r in self.tables)
        assert self.kv.drain() == ()


TestPagedMachine = PagedMachine.TestCase
TestPagedMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_peak_is_what_a_request_needs_alone() -> None:
    kv = cache(blocks=8, block_size=4)
    assert [kv.peak(request(), length) for length in (1, 4, 5, 32)] == [1, 1, 2, 8]


def test_nothing_is_reusable_without_a_prefix_cache() -> None:
    kv = cache(blocks=8, block_size=4)
    r = request(tokens=9)
    assert kv.reserve(r, 9) is not None
    r.computed = 8
    kv.publish(r)
    assert kv.lookup(request("same", tokens=9)) == 0


def test_released_blocks_come_back_head_first() -> None:
    kv = cache(blocks=4, block_size=1)
    r = request()
    before = kv.reserve(r, 3)
    assert before is not None
    kv.release(r)
    again = kv.reserve(r, 2)
    assert again is not None
    assert again.deltas[0].blocks == before.deltas[0].blocks[:2]


def test_a_pool_without_blocks_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="kv_memory"):
        cache(blocks=0, block_size=16)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda kv, r: kv._free.pop(), "neither free nor owned"),
        (lambda kv, r: kv._free.append(kv._free[0]), "twice on the free list"),
        (lambda kv, r: kv._free.append(kv._tables[r][0]), "free and owned"),
        (lambda kv, r: kv._tables[r].append(kv._tables[r][0]), "counts 1"),
        (lambda kv, r: setattr(r, "computed", 100), "computed beyond"),
    ],
)
def test_check_integrity_sees_damage(damage, message) -> None:
    kv = cache(blocks=4, block_size=4)
    r = request()
    kv.reserve(r, 8)
    kv.check_integrity()
    damage(kv, r)
    with pytest.raises(AssertionError, match=message):
        kv.check_integrity()
