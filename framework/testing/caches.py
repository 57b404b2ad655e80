"""What every KV cache must do, as tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, ClassVar

import pytest

from ..hookspecs import hookimpl
from ..kv import CacheGroup, CacheSpec, Capacity, KVCache, Reservation
from ..types import Mode, Request, SamplingParams, Victim, View, Want
from .simulation import Client, Simulation, failures, make_cache, random_clients


class _Pressure:
    """Ranks running and waiting together by a level drawn at random, and preempts whoever ranks last, by either mode:
    it has blocks taken and given back all the time."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    @hookimpl
    def arrived(self, request: Request) -> None:
        request.level = self._rng.random()

    @hookimpl
    def admit(self, view: View) -> Iterator[Want]:
        return (Want(r) for r in view.ranked(key=lambda r: r.level))

    @hookimpl
    def preempt(self, candidates: Sequence[Request]) -> Victim:
        return Victim(candidates[-1], self._rng.choice((None, *Mode)))


class KVConformance:
    """Subclass it in a test module, and pytest runs the tests below on your cache::

        from framework.testing import KVConformance

        class TestMine(KVConformance):
            provider = "mine"

    For one that is not installed, override `cache`. What a cache does not do (prefix hits, swap, fork) is not asked of
    it: those tests are skipped, or find nothing to check.
    """

    provider: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    block_sizes: ClassVar[Sequence[int]] = (1, 4, 16)
    windows: ClassVar[Sequence[tuple[int | None, ...]]] = ((None,), (None, None), (6,))
    """Models that it is tried with: the sliding window of each group of layers."""

    def cache(self, cache_spec: CacheSpec, capacity: Capacity) -> KVCache:
        """A new one."""
        return make_cache(self.provider, dict(self.options))(cache_spec, capacity)

    def _empty(self, blocks: int, block_size: int, host: int = 0) -> KVCache:
        spec = CacheSpec(block_size, "float32", (CacheGroup(1, 1, 1),))
        return self.cache(spec, Capacity({"device": blocks, "host": host}))

    # In an engine

    def test_contents(self) -> None:
        """Whatever happens to it, steps that fail included, a request reads the keys and values of its own tokens,
        nobody writes where another reads, and each gets the tokens that it gets alone. The books balance after every
        step, and at the end all blocks are back."""
        for seed, simulation, clients in self._runs():
            try:
                simulation.play(clients)
            except AssertionError as fault:
                raise AssertionError(f"seed {seed}: {fault}") from fault
            assert not simulation.faults, f"seed {seed}: {simulation.fault}"

    def _runs(self) -> Iterable[tuple[int, Simulation, list[Client]]]:
        """Half of them without aborts, which hide requests that would wait for ever."""
        for seed in range(24):
            rng = Random(seed)
            block_size = rng.choice(self.block_sizes)
            blocks, host = rng.randint(8, 24), rng.choice((0, 2, 16))
            clients = random_clients(rng, rng.randint(4, 20), blocks * block_size, aborts=bool(seed % 2))
            simulation = Simulation(
                _Pressure(seed),
                self.cache,
                blocks=blocks,
                block_size=block_size,
                host_blocks=host,
                windows=rng.choice(self.windows),
                tokens=rng.choice((7, 64, 300)),
                seats=rng.randint(2, 8),
                watermark=rng.choice((0, 2)),
                fail=failures(rng) if seed % 3 == 0 else lambda plan: None,
            )
            yield seed, simulation, clients

    # By itself

    def test_missing_and_reserve_agree(self) -> None:
        """`reserve` succeeds if and only if `missing` says 0, and a failed one changes nothing; `missing`, `lookup` and
        `peak` never do. A new request starts with what `lookup` said."""
        for user in self._users():
            request, keep = user.choice(), user.rng.choice((0, 0, 2))
            upto = request.num_tokens  # an admission asks for all that is known
            if request in user.tables:
                upto = request.computed + user.rng.randint(1, max(1, request.remaining))
            before = user.state()
            short = user.kv.missing(request, upto, keep)
            known, new = user.kv.lookup(request), request not in user.tables
            user.kv.peak(request, request.num_tokens)
            assert user.state() == before, "missing, lookup or peak changed something"
            reservation = user.reserve(request, upto, keep)
            if short:
                assert reservation is None, f"{short} blocks were missing, and reserve found them"
                assert user.state() == before, "a reserve that failed changed something"
            else:
                assert reservation is not None, "nothing was missing, and reserve failed"
                assert not new or reservation.start == known, f"lookup said {known}, and {reservation} was reserved"

    def test_missing_as_if_others_were_gone(self) -> None:
        """`missing(..., without)` is what `missing` says once those requests are released."""
        for user in self._users():
            request, victims, keep = user.choice(), user.some(), user.rng.choice((0, 0, 2))
            victims = [r for r in victims if r is not request]
            upto = request.num_tokens if request not in user.tables else request.computed + 1
            predicted = user.kv.missing(request, upto, keep, victims)
            for victim in victims:
                user.release(victim)
            found = user.kv.missing(request, upto, keep)
            assert predicted == found, f"{predicted} blocks missing without {victims}, and {found} once they were gone"
            user.reserve(request, upto, 0)

    def test_nobody_owns_what_another_writes(self) -> None:
        """A block that a request is going to write is in no other table."""
        for user in self._users():
            request = user.choice()
            user.reserve(request, request.num_tokens, 0)
            user.check_owners()

    def test_everything_comes_back(self) -> None:
        """Blocks are conserved; `release` is idempotent and frees all; after `reset` nothing is left, nor known."""
        for block_size in self.block_sizes:
            user = _User(self._empty(16, block_size), block_size, Random(block_size))
            for _ in range(60):
                request = user.choice()
                user.reserve(request, request.num_tokens, 0)
                if user.rng.random() < 0.3:
                    for gone in user.some():
                        user.release(gone)
                        user.kv.release(gone)
                user.kv.check_integrity()
                usage = user.kv.usage()
                assert usage.total == 16, f"{usage} does not add up to 16 blocks"
                assert usage.free + usage.cached == user.kv.available, f"{user.kv.available} available, but {usage}"
            for request in list(user.tables):
                user.release(request)
            assert user.kv.available == 16, f"{user.kv.available} of 16 blocks came back"
            user.kv.reset()
            usage = user.kv.usage()
            assert (usage.free, usage.cached, usage.tokens) == (16, 0, 0), f"after reset: {usage}"
            known = user.kv.lookup(_request("again", 4 * block_size, 1))
            assert not known, f"after reset, {known} tokens are still known"

    def test_peak_is_enough_and_no_more(self) -> None:
        """Alone in a pool of `peak` blocks a request can grow to its end, and it never takes more."""
        for block_size in self.block_sizes:
            for prompt, output in ((1, 1), (1, 17), (16, 1), (33, 20)):
                request = _request("r", prompt, output)
                peak = self._empty(64, block_size).peak(request, prompt + output - 1)
                kv = self._empty(peak, block_size)
                user = _User(kv, block_size, Random(0))
                while request.num_tokens < prompt + output:
                    found = user.reserve(request, request.num_tokens, 0)
                    assert found is not None, f"{request} does not fit into {peak} blocks of {block_size} tokens"
                    request.output.append(7)
                    request.num_tokens += 1

    def test_salts_and_adapters_part(self) -> None:
        """Requests that differ in `cache_salt` or `adapter` share nothing, though they begin alike."""
        for block_size in self.block_sizes:
            user = _User(self._empty(32, block_size), block_size, Random(0))
            for salt, adapter in ((b"", None), (b"one", None), (b"two", None), (b"", "one"), (b"", "two")):
                request = _request(f"{salt!r} {adapter}", 3 * block_size + 1, 1)
                request.cache_salt, request.adapter = salt, adapter
                user.kv.prepare(request)
                known = user.kv.lookup(request)
                found = user.reserve(request, request.num_tokens, 0)
                assert (known, found and found.start) == (0, 0), f"{request} was given {known} tokens of another's"

    def test_usage_tells_what_is_held_and_what_is_only_reserved(self) -> None:
        for block_size in self.block_sizes:
            kv = self._empty(16, block_size)
            user = _User(kv, block_size, Random(0))
            request = _request("r", 2 * block_size + 1, 2)
            reservation = kv.reserve(request, request.num_tokens)
            assert reservation is not None
            usage = kv.usage()
            assert usage.holding == 0 and usage.reserved >= 3, f"nothing is computed yet: {usage}"
            user.computed(request, request.num_tokens)
            usage = kv.usage()
            assert usage.holding == 3 and usage.tokens == request.computed, f"{request}: {usage}"
            assert usage.holding + usage.reserved + usage.free + usage.cached == 16

    def test_swap(self) -> None:
        """A swapped request owns no device block; on its return it has as many tokens as it left with, and the copies
        bring back what they took."""
        for block_size in self.block_sizes:
            kv = self._empty(8, block_size, host=8)
            if not kv.swaps:
                pytest.skip("this cache does not swap")
            user = _User(kv, block_size, Random(1))
            request = _request("r", 3 * block_size, 3)
            user.reserve(request, request.num_tokens, 0)
            computed = request.computed
            request.output.append(7)
            request.num_tokens += 1
            assert kv.swap_out(request), "there is room for it on the host"
            out = kv.drain()
            kv.check_integrity()
            assert kv.available == 8, "a swapped request holds blocks on the device"
            assert kv.usage().swapped == len(out) == 3, f"three blocks were computed: {out}"
            found = kv.reserve(request, request.num_tokens)
            assert found is not None and found.start == computed, f"{computed} tokens left, and {found} came back"
            copied = {copy.src for copy in kv.drain()}
            assert copied <= {copy.dst for copy in out}, "it returned from other host blocks than it went to"
            user.computed(request, request.num_tokens)
            swapped_again = kv.swap_out(request)
            kv.drain()
            kv.release(request)  # its client left while it was swapped, if it was
            kv.check_integrity()
            left = f"released {'while swapped' if swapped_again else ''}, and the cache says {kv.usage()}"
            assert (kv.available, kv.usage().swapped) == (8, 0), left

    def test_fork(self) -> None:
        """A fork takes no blocks; the block that both would write is copied; either may go first."""
        forked = 0
        for block_size in self.block_sizes:
            for first in (0, 1):
                kv = self._empty(16, block_size)
                user = _User(kv, block_size, Random(2))
                prompt = 2 * block_size + block_size // 2 + 1  # it ends inside a block, if blocks have an inside
                parent, child = _request("parent", prompt, 9), _request("child", prompt, 9)
                user.reserve(parent, parent.num_tokens, 0)
                user.written.clear()
                available, child.computed = kv.available, child.num_tokens - 1
                if not kv.fork(parent, child):
                    continue
                forked += 1
                assert kv.available == available, "a fork took blocks"
                for request in (child, parent):
                    request.output.append(7)
                    request.num_tokens += 1
                    user.reserve(request, request.num_tokens, 0)
                    user.check_owners()
                kv.check_integrity()
                for request in (parent, child) if first else (child, parent):
                    user.release(request)
                assert kv.available == 16
        if not forked:
            pytest.skip("this cache does not fork")

    def _users(self) -> Iterator[_User]:
        """The same cache again and again, each time as somebody left it."""
        for block_size in self.block_sizes:
            for seed in range(6):
                user = _User(self._empty(12, block_size, host=4), block_size, Random(seed))
                for _ in range(30):
                    yield user
                    user.kv.check_integrity()
                    for request in user.some() if user.rng.random() < 0.3 else ():
                        user.release(request)


def _request(id: str, prompt: int, output: int, start: int = 0) -> Request:
    params = SamplingParams(max_tokens=output)
    return Request(id, [(start + i) % 97 for i in range(prompt)], params, limit=prompt + output)


class _User:
    """Uses a cache as the core does, and keeps tables of its own from the deltas."""

    def __init__(self, kv: KVCache, block_size: int, rng: Random) -> None:
        self.kv = kv
        self.rng = rng
        self.tables: dict[Request, list[int]] = {}
        self.written: dict[Request, int] = {}  # from which token on its last reservation is going to be written
        self._block_size = block_size
        self._count = 0

    def choice(self) -> Request:
        """A new request, or one that goes on."""
        if self.tables and self.rng.random() < 0.6:
            request = self.rng.choice(list(self.tables))
            if request.computed == request.num_tokens < request.limit - 1:
                request.output.append(7)
                request.num_tokens += 1
            if request.computed < request.num_tokens:
                return request
            self.release(request)  # it has all its tokens
        self._count += 1
        prompt = self.rng.randint(1, 4 * self._block_size)
        output, start = self.rng.randint(1, 2 * self._block_size), self.rng.choice((0, 5))
        request = _request(f"r{self._count}", prompt, output, start)
        self.kv.prepare(request)
        return request

    def some(self) -> list[Request]:
        return [request for request in self.tables if self.rng.random() < 0.4]

    def reserve(self, request: Request, upto: int, keep: int) -> Reservation | None:
        """And compute and publish what was reserved, if anything was."""
        found = self.kv.reserve(request, upto, keep)
        if found is not None:
            self.kv.drain()
            table = self.tables.setdefault(request, [])
            for delta in found.deltas:
                assert delta.first <= len(table), f"{request}: a delta at {delta.first} leaves a gap after {len(table)}"
                table[delta.first :] = delta.blocks
            assert len(set(table)) == len(table), f"{request}: a block is twice in its table {table}"
            covered = len(table) * self._block_size
            assert covered >= upto, f"{request}: {len(table)} blocks do not cover {upto} tokens"
            assert found.start < request.num_tokens, f"{request}: {found.start} are computed, so that nothing is left"
            self.written[request] = found.start
            self.computed(request, max(upto, request.computed))
        return found

    def computed(self, request: Request, upto: int) -> None:
        request.computed = upto
        self.kv.publish(request)

    def release(self, request: Request) -> None:
        self.kv.release(request)
        request.computed = 0
        self.tables.pop(request, None)
        self.written.pop(request, None)

    def check_owners(self) -> None:
        for request, start in self.written.items():
            for block in self.tables[request][start // self._block_size :]:
                others = [r for r, table in self.tables.items() if r is not request and block in table]
                assert not others, f"{request} writes block {block}, which {others} hold too"
        self.written.clear()

    def state(self) -> Any:
        held: Collection[Any] = [(request, request.computed, tuple(table)) for request, table in self.tables.items()]
        return self.kv.available, self.kv.usage(), held
