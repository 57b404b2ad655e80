"""The prefix cache of PagedCache: what is shared, and what is given up first."""

from __future__ import annotations

from typing import Any

import pytest
from framework.plugins.kv.pool import Lfu, Lru, Pool
from paging import cache, computed, request

from framework import CacheGroup, CacheSpec, Capacity, ConfigError, PluginError, Provider, hookimpl
from framework.registry import load_plugins
from framework.settings import Settings


def test_what_is_published_is_shared_up_to_the_last_token_but_one() -> None:
    kv = cache(blocks=8, block_size=4)
    first, same, longer, other = (request(id, tokens) for id, tokens in (("a", 8), ("b", 8), ("c", 13), ("d", 9)))
    other.prompt = [99, *other.prompt[1:]]
    kv.reserve(first, 8)
    assert kv.lookup(same) == 0  # nothing is computed yet
    blocks = computed(kv, first, 8)
    assert [kv.lookup(r) for r in (same, longer, other)] == [4, 8, 0]
    reservation = kv.reserve(longer, 13)
    assert reservation is not None and reservation.start == 8
    assert reservation.deltas[0].blocks[:2] == tuple(blocks)
    longer.computed = 8
    assert kv.usage().holding == 2


@pytest.mark.parametrize("fields", [{"cache_salt": b"x"}, {"adapter": "x"}])
def test_only_equal_salts_and_adapters_share(fields) -> None:
    kv = cache(blocks=8, block_size=4)
    computed(kv, request("a", 8, **fields), 8)
    assert kv.lookup(request("b", 8)) == 0
    assert kv.lookup(request("c", 8, **fields)) == 4


def test_models_do_not_share_names() -> None:
    names = [cache(2, 4, model=model)._prefixes.chain(request("a", 4), 1) for model in ("one", "other")]
    assert names[0] != names[1]


def test_nothing_is_shared_without_a_prefix_cache() -> None:
    kv = cache(blocks=8, block_size=4, prefix_cache=False)
    r = request(tokens=9)
    computed(kv, r, 8)
    assert kv.lookup(request("same", tokens=9)) == 0
    kv.release(r)
    assert kv.usage().free == 8


def test_a_duplicate_stays_private() -> None:
    kv = cache(blocks=4, block_size=4)
    first, second = request("a", 5), request("b", 5)
    kv.reserve(first, 5)
    kv.reserve(second, 5)
    original = computed(kv, first, 5)[0]
    computed(kv, second, 5)
    kv.release(first)
    kv.release(second)
    assert (kv.usage().cached, kv.usage().free) == (1, 3)
    reservation = kv.reserve(request("c", 5), 5)
    assert reservation is not None and reservation.deltas[0].blocks[0] == original


def test_cached_blocks_go_only_when_no_block_is_free_and_tails_go_first() -> None:
    kv = cache(blocks=4, block_size=4)
    first = request("a", 9)
    computed(kv, first, 9)
    kv.release(first)
    assert (kv.usage().cached, kv.usage().free, kv.available) == (2, 2, 4)
    other = request("b", 8)
    other.prompt = [50, *other.prompt[1:]]
    kv.reserve(other, 8)
    assert kv.lookup(first) == 8
    kv.reserve(other, 9)
    assert kv.lookup(first) == 4  # its head is still there


def test_a_hit_uses_up_a_block_that_was_available() -> None:
    kv = cache(blocks=3, block_size=4)
    first = request("a", 9)
    computed(kv, first, 9)
    kv.release(first)
    assert kv.missing(request("b", 13), 13) == 1 and kv.reserve(request("b", 13), 13) is None
    assert kv.reserve(request("c", 12), 12) is not None


def test_each_token_is_hashed_once(monkeypatch) -> None:
    hashed: list[int] = []
    from framework.plugins.kv import prefix

    original = prefix.blake2b
    monkeypatch.setattr(
        prefix, "blake2b", lambda data, **options: hashed.append(len(data)) or original(data, **options)
    )
    kv = cache(blocks=8, block_size=4)
    r = request("a", 17)
    kv.prepare(r)
    count = len(hashed)
    for _ in range(5):
        kv.lookup(r)
        kv.missing(r, 17)
        kv.reserve(r, 17)
        r.computed = 17
        kv.publish(r)
        kv.release(r)
        r.computed = 0
    assert len(hashed) == count == 5  # the salt, and four blocks


def test_lru_and_lfu_choose_differently() -> None:
    for eviction, gone in ((Lru, 0), (Lfu, 1)):
        pool = Pool(2, eviction())
        for block in pool.take(2):
            pool.publish(block, bytes([block]))
        pool.found(0)
        pool.drop([0])
        pool.drop([0])
        pool.drop([1])
        pool.take(1)
        assert pool.find(bytes([gone])) is None and pool.find(bytes([1 - gone])) is not None


def test_lfu_forgets_what_came_back() -> None:
    lfu = Lfu()
    for _ in range(1000):
        for block in range(4):
            lfu.add(block, block)
        for block in range(4):
            lfu.remove(block)
    assert len(lfu._heap) < 200
    for block in (2, 0, 3):
        lfu.add(block, 1)
    assert [lfu.pop() for _ in range(3)] == [2, 0, 3]


def test_the_eviction_policy_is_chosen_by_name() -> None:
    """Bundled ones, and whatever a plugin provides."""

    class Mine(Lru):
        pass

    class Plugin:
        @hookimpl
        def providers(self):
            return [Provider("eviction", "mine", Mine)]

    plugins = load_plugins([("mine", Plugin())])
    spec, capacity = CacheSpec(4, "float32", (CacheGroup(1, 1, 1),)), Capacity({"device": 4, "host": 0})

    def made(**options):
        context = {"settings": Settings(prefix_cache=True), "plugins": plugins}
        return plugins.create("kv", "paged", options, cache_spec=spec, capacity=capacity, **context)

    assert [type(made(eviction=name)._pool._eviction) for name in ("lru", "lfu", "mine")] == [Lru, Lfu, Mine]
    assert type(made()._pool._eviction) is Lru
    with pytest.raises(ConfigError, match="available: lfu, lru, mine"):
        made(eviction="other")


class _Gives(Lru):
    """Whatever it is told to."""

    answer: Any = None

    def pop(self) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", [0, 3, 99, -1, None, "block"])
def test_an_eviction_policy_cannot_give_what_is_not_idle(answer: Any) -> None:
    """It would be in two tables at once, and one request would read what another wrote."""
    pool = Pool(4, _Gives())
    blocks = pool.take(3)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.drop(blocks[1:])
    pool.take(1)  # 3 is free no longer; 0 is held, and has a name
    _Gives.answer = answer
    with pytest.raises(PluginError, match=f"eviction '_Gives': pop answered {answer!r}, which is no idle block"):
        pool.take(1)
    _Gives.answer = 1
    assert pool.take(1) == [1]
    with pytest.raises(PluginError, match="pop answered 1"):
        pool.take(1)


def test_an_eviction_policy_that_raises_is_named() -> None:
    class Forgets(Lru):
        def add(self, block: int, uses: int) -> None:
            pass

    pool = Pool(1, Forgets())
    pool.publish(*pool.take(1), b"name")
    pool.drop([0])
    with pytest.raises(PluginError, match="eviction 'Forgets': remove: KeyError: 0"):
        pool.hold(0)
