"""The contiguous KV cache: one region per request, as large as it may become."""

from __future__ import annotations

from random import Random

import pytest
from framework.plugins.kv.contiguous import ContiguousCache
from harness import Harness, ids

from framework import ConfigError, Delta, Request, Reservation, SamplingParams
from framework.kv import CacheGroup, CacheSpec, Capacity


def cache(blocks: int = 8, groups: int = 1, block_size: int = 4) -> ContiguousCache:
    spec = CacheSpec(block_size, "float32", (CacheGroup(1, 1, 1),) * groups)
    return ContiguousCache(spec, Capacity({"device": blocks}))


def request(id: str, prompt: int, max_tokens: int | None) -> Request:
    limit = prompt + max_tokens if max_tokens else 1000
    return Request(id, list(range(prompt)), SamplingParams(max_tokens=max_tokens), limit=limit)


def test_a_region_holds_all_that_a_request_may_become() -> None:
    kv = cache(groups=2)
    r = request("a", 3, 8)  # eleven tokens, of which the last needs no place
    reservation = kv.reserve(r, 3)
    assert reservation is not None
    assert (reservation.start, reservation.length) == (0, 12)
    assert reservation.deltas == (Delta(0, 0, (0, 1, 2)), Delta(1, 0, (0, 1, 2)))
    r.computed = 3
    assert kv.reserve(r, 12) == Reservation(3, 12, ())
    assert kv.reserve(r, 13) is None and kv.missing(r, 13) == 1


def test_what_is_reserved_and_empty_is_told() -> None:
    kv = cache()
    r = request("a", 3, 20)
    kv.reserve(r, 3)
    r.computed = 5
    usage = kv.usage()
    assert (usage.holding, usage.reserved, usage.cached, usage.free, usage.tokens) == (2, 4, 0, 2, 5)
    assert usage.total == 8


def test_without_max_tokens_it_takes_the_longest_context_or_the_whole_pool() -> None:
    kv = cache()
    kv.reserve(Request("a", [1], SamplingParams(), limit=17), 1)
    assert kv.available == 4
    kv.reset()
    kv.reserve(request("a", 1, None), 1)
    assert kv.available == 0


def test_gaps_are_lost_to_whoever_does_not_fit_into_one() -> None:
    kv = cache()
    requests = [request(f"r{i}", 4, 5) for i in range(4)]  # two blocks each
    for r in requests:
        assert kv.reserve(r, 4)
    kv.release(requests[0])
    kv.release(requests[2])
    big = request("big", 9, 4)
    assert kv.available == 4 and kv.missing(big, 9) == 1
    assert kv.reserve(big, 9) is None
    assert kv.missing(big, 9, without=[requests[1]]) == 0
    small = request("small", 4, 5)
    found = kv.reserve(small, 4)
    assert found is not None and found.deltas == (Delta(0, 0, (0, 1)),)
    kv.release(small)
    kv.release(requests[1])
    found = kv.reserve(big, 9)
    assert found is not None and found.deltas == (Delta(0, 0, (0, 1, 2)),)
    kv.check_integrity()


def test_blocks_to_keep_are_kept() -> None:
    kv = cache()
    r = request("a", 4, 21)
    assert kv.missing(r, 4, keep=3) == 1 and kv.reserve(r, 4, keep=3) is None
    assert kv.reserve(r, 4, keep=2) is not None


def test_random_use_keeps_the_books() -> None:
    rng = Random(7)
    kv = cache(blocks=16)
    live: list[Request] = []
    for i in range(2000):
        if live and rng.random() < 0.45:
            kv.release(live.pop(rng.randrange(len(live))))
        else:
            r = request(f"r{i}", rng.randint(1, 20), rng.choice((None, rng.randint(1, 30))))
            keep = rng.choice((0, 0, 2))
            victims = [r for r in live if rng.random() < 0.3]
            short, after = kv.missing(r, len(r.prompt), keep), kv.missing(r, len(r.prompt), keep, victims)
            assert after <= short
            assert (kv.reserve(r, len(r.prompt), keep) is not None) == (short == 0)
            if short == 0:
                live.append(r)
            elif not after:
                for victim in victims:
                    kv.release(victim)
                    live.remove(victim)
                assert kv.reserve(r, len(r.prompt), keep) is not None
                live.append(r)
        kv.check_integrity()
    for r in [*live, *live]:
        kv.release(r)
    assert kv.available == 16
    kv.check_integrity()


def test_requests_wait_for_room_for_all_they_may_become() -> None:
    h = Harness(blocks=8, kv=ContiguousCache)
    for id in "abc":
        h.add(id, 4, 12)  # four blocks each
    assert ids(h.step()) == ["a", "b"]
    assert h.kv.usage().reserved == 6
    h.run()
    assert h.outputs == {id: h.alone(id) for id in "abc"}
    assert h.engine.stats().preemptions_recompute == 0


def test_it_is_no_smaller_than_one_block() -> None:
    with pytest.raises(ConfigError, match="kv_blocks"):
        cache(blocks=0)
    kv = cache()
    assert kv.reserve(Request("a", [1], SamplingParams(max_tokens=1), limit=2), 1) is not None
    assert kv.available == 7
