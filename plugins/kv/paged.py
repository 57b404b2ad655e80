"""Paged KV cache: a pool of equal blocks, handed out on demand, shared where contents are equal, swapped to the host.

    device   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |    capacity.blocks["device"] blocks of `block_size` tokens
    table of   AB  A   B   A   -   B   -   -      A: [0, 1, 3], B: [0, 2, 5]: both begin with the tokens of block 0
    state      h   h   h   r   c   h   f   f      holding, reserved (promised, still empty), cached (idle), free

    A's tokens | 0 . . . | 1 . . . | 3 . . . |    block size 4: positions 0-3, 4-7, 8-11
               <-- computed 7 -->  <reserved->

The groups of a model have their own memory but one geometry: block b of every group covers the same tokens, so one
table serves them all, and each delta and copy is repeated per group. What falls out of the window is given up only if
all groups have one, the widest. docs/memory.md tells the whole story.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from framework import CacheSpec, Capacity, ConfigError, Copy, Delta, KVCache, Request, Reservation, Usage

from .pool import Eviction, Lru, Pool
from .prefix import Prefixes
from .table import Start, Swapped, Table


class PagedCache(KVCache):
    """Every call costs O(blocks concerned); a decode inside its last block O(1), `usage` O(requests with blocks).

    chunk: the most tokens computed in one step, which bounds what a request with a sliding window needs at once.
    """

    def __init__(
        self,
        cache_spec: CacheSpec,
        capacity: Capacity,
        *,
        prefix_cache: bool = True,
        model: str = "",
        eviction: Callable[[], Eviction] = Lru,
        chunk: int | None = None,
    ) -> None:
        """Raises `ConfigError` if the pool has no block."""
        self._sizes = capacity.blocks["device"], capacity.blocks.get("host", 0)
        if self._sizes[0] < 1:
            raise ConfigError("the KV pool has no block: raise kv_memory or kv_blocks")
        self._block_size = cache_spec.block_size
        self._groups = range(len(cache_spec.groups))
        windows = [group.window for group in cache_spec.groups]
        self._window = None if None in windows else max(w for w in windows if w is not None)
        self._chunk = chunk
        self._prefixes = Prefixes(model, cache_spec.block_size) if prefix_cache else None
        self._eviction = eviction
        self.reset()

    def reset(self) -> None:
        self._pool = Pool(self._sizes[0], self._eviction())
        self._host = list(range(self._sizes[1] - 1, -1, -1))  # free host blocks, a stack
        self._tables: dict[Request, Table] = {}
        self._swapped: dict[Request, Swapped] = {}
        self._log: list[Copy] = []
        self._asked: tuple[Request | None, int, Sequence[int | None]] = None, 0, ()  # hits of whom, and pool.lost then

    @property
    def available(self) -> int:
        return self._pool.available

    def peak(self, request: Request, length: int) -> int:
        blocks = -(-length // self._block_size)
        if self._window is None or self._chunk is None:
            return blocks
        return min(blocks, -(-(self._window - 1 + self._chunk) // self._block_size) + 1)

    def prepare(self, request: Request) -> None:
        if self._prefixes is not None:
            self._prefixes.chain(request, len(request.prompt) // self._block_size)

    # What is there already

    def lookup(self, request: Request) -> int:
        return request.computed if request in self._swapped else self._start(request).tokens

    def _start(self, request: Request) -> Start:
        prefixes, size, find = self._prefixes, self._block_size, self._pool.find
        swapped = self._swapped.get(request)
        if swapped is not None:
            full = request.computed // size
            names = prefixes.chain(request, full)[swapped.first : full] if prefixes else []
            return Start(
                request.computed, swapped.first, [*map(find, names), *[None] * (len(swapped.blocks) - len(names))]
            )
        if prefixes is None or request.scoring:
            return Start(0, 0, [])
        most = (request.num_tokens - 1) // size  # something has to be left to compute
        outside = None if self._window is None else self._outside
        who, lost, known = self._asked  # who waits at the head of the queue is asked for in every step
        if outside is not None or who is not request or lost != self._pool.lost:
            known = ()
        first, blocks = prefixes.hits(request, most, find, outside, known)
        self._asked = request, self._pool.lost, blocks
        return Start((first + len(blocks)) * size, first, blocks)

    def _outside(self, computed: int) -> int:
        """Leading blocks that no token from position `computed` on sees."""
        return 0 if self._window is None else max(0, computed - self._window + 1) // self._block_size

    # Giving blocks

    def missing(self, request: Request, upto: int, keep: int = 0, without: Collection[Request] = ()) -> int:
        tables, refs = self._tables, self._pool.refs
        let_go: Counter[int] = Counter()
        for other in set(without):
            if (table := tables.get(other)) is not None:
                let_go.update(table.blocks[table.first :])
        table = tables.get(request)
        if table is not None:
            need = max(0, -(-upto // self._block_size) - len(table.blocks))
            if table.forked:
                tail = self._tail(table, request.computed)
                need += tail is not None and refs[tail] - let_go[tail] > 1
            if not need:
                return 0
        else:
            start = self._start(request)
            shared = [block for block in start.blocks if block is not None]
            need = self._upto(start, upto) - start.first - len(shared)
            need += sum(refs[block] == let_go[block] for block in shared)  # taken from those that are available
        freed = sum(refs[block] == count for block, count in let_go.items())
        return max(0, need + keep - self._pool.available - freed)

    def _upto(self, start: Start, upto: int) -> int:
        """Length of the table that a request starts with. With a window, the first chunk's."""
        if self._window is not None and self._chunk is not None:
            upto = min(upto, start.tokens + self._chunk)
        return -(-upto // self._block_size)

    def _tail(self, table: Table, computed: int) -> int | None:
        """The block that the next token goes into, if it holds some already."""
        return table.blocks[computed // self._block_size] if computed % self._block_size else None

    def reserve(self, request: Request, upto: int, keep: int = 0) -> Reservation | None:
        size, pool = self._block_size, self._pool
        table = self._tables.get(request)
        if table is None:
            return self._enter(request, upto, keep)
        computed, blocks = request.computed, table.blocks
        covered = len(blocks) * size
        if upto <= covered and not table.forked:  # the common case: a decode inside its last block
            return Reservation(computed, covered, ())
        tail = self._tail(table, computed) if table.forked else None
        copy = tail is not None and pool.refs[tail] > 1
        need = max(0, -(-upto // size) - len(blocks))
        if need + copy and need + copy + keep > pool.available:
            return None
        first = min(table.told, len(blocks))
        if copy and tail is not None:  # copy on write
            first = min(first, computed // size)
            blocks[computed // size] = pool.take(1)[0]
            self._copy(request, "device", tail, "device", blocks[computed // size])
            pool.drop((tail,))
        elif tail is not None:
            pool.unpublish(tail)  # the last sharer writes in place
        table.forked = False
        blocks += pool.take(need)
        table.told = len(blocks)
        return Reservation(computed, len(blocks) * size, self._deltas(table, first))

    def _enter(self, request: Request, upto: int, keep: int) -> Reservation | None:
        pool = self._pool
        start = self._start(request)
        count = self._upto(start, upto)
        absent = start.blocks.count(None) if request in self._swapped else 0
        need = count - start.first - len(start.blocks) + absent
        if need + keep > pool.available:
            return None
        shared = [block for block in start.blocks if block is not None]
        if need + sum(not pool.refs[block] for block in shared) + keep > pool.available:
            return None
        for block in shared:  # before any fresh one is taken, which might be one of these
            pool.found(block)
        fresh = iter(pool.take(need))
        blocks = [next(fresh) if block is None else block for block in start.blocks]
        table = self._tables[request] = Table([*[0] * start.first, *blocks, *fresh], start.first)
        swapped = self._swapped.pop(request, None)
        if swapped is None:
            table.published = start.first + len(start.blocks)
        else:
            for host, known, block in zip(swapped.blocks, start.blocks, blocks, strict=True):
                if known is None:
                    self._copy(request, "host", host, "device", block)
            self._host += reversed(swapped.blocks)
        return Reservation(start.tokens, count * self._block_size, self._deltas(table, start.first))

    def _deltas(self, table: Table, first: int) -> tuple[Delta, ...]:
        taken = tuple(table.blocks[first:])
        return tuple(Delta(group, first, taken) for group in self._groups) if taken else ()

    def _copy(self, request: Request, src_tier: str, src: int, dst_tier: str, dst: int) -> None:
        self._log += (Copy(request.id, group, src_tier, src, dst_tier, dst) for group in self._groups)

    def publish(self, request: Request) -> None:
        computed = request.computed
        full = computed // self._block_size
        table = self._tables[request]
        if full > table.published:
            if self._prefixes is not None:
                chain = self._prefixes.chain(request, full)
                for i in range(table.published, full):
                    self._pool.publish(table.blocks[i], chain[i])
            table.published = full
        if self._window is not None and (outside := self._outside(computed)) > table.first:
            self._pool.drop(table.blocks[table.first : outside])
            table.first = outside

    def fork(self, parent: Request, child: Request) -> bool:
        table = self._tables[parent]
        blocks = table.blocks[: -(-child.computed // self._block_size)]
        for block in blocks[table.first :]:
            self._pool.hold(block)
        copy = self._tables[child] = Table(blocks, table.first)
        copy.published = child.computed // self._block_size
        copy.told, copy.filled = table.first, parent.computed
        table.forked = copy.forked = True
        if self._prefixes is not None:
            self._prefixes.share(parent, child)
        return True

    # Letting go

    def swap_out(self, request: Request) -> bool:
        table = self._tables[request]
        blocks = table.blocks[table.first : -(-request.computed // self._block_size)]
        if not blocks or len(blocks) > len(self._host):
            return False
        slots = [self._host.pop() for _ in blocks]
        for block, slot in zip(blocks, slots, strict=True):
            self._copy(request, "device", block, "host", slot)
        self.release(request)
        self._swapped[request] = Swapped(table.first, slots)
        return True

    def release(self, request: Request) -> None:
        table = self._tables.pop(request, None)
        if table is not None:
            self._pool.drop(table.blocks[table.first :])
        swapped = self._swapped.pop(request, None)
        if swapped is not None:
            self._host += reversed(swapped.blocks)

    def drain(self) -> tuple[Copy, ...]:
        copies = tuple(self._log)
        self._log.clear()
        return copies

    # Accounts

    def usage(self) -> Usage:
        size, pool = self._block_size, self._pool
        reserved = 0
        room: dict[int, int] = {}  # of blocks filled in part; forks share them
        for request, table in self._tables.items():
            used = -(-request.computed // size)
            reserved += len(table.blocks) - used
            if request.computed % size:
                room[table.blocks[used - 1]] = used * size - max(request.computed, table.filled)
        holding = pool.size - pool.available - reserved
        tokens = holding * size - sum(room.values())
        swapped = self._sizes[1] - len(self._host)
        return Usage(holding, reserved, pool.idle, len(pool.free), swapped, tokens)

    def check_integrity(self) -> None:
        size = self._block_size
        held: Counter[int] = Counter()
        unwritten: list[int] = []
        for request, table in self._tables.items():
            blocks, used = table.blocks[table.first :], -(-request.computed // size)
            held.update(blocks)
            unwritten += table.blocks[used:]
            assert len(set(blocks)) == len(blocks), f"a block is twice in the table of {request}: {blocks}"
            assert used <= len(table.blocks), f"{request} has computed beyond {table.blocks}"
            assert table.first <= self._outside(request.computed), f"{request} lost blocks inside its window"
            for i in range(table.first, used):
                name = self._pool.name(table.blocks[i])
                if name is not None and self._prefixes is not None and (i + 1) * size <= request.computed:
                    own = self._prefixes.chain(request, i + 1)[i]
                    assert name == own, f"block {table.blocks[i]} of {request} is published as another's"
        self._pool.check(held, unwritten)
        slots = [*self._host, *(block for swapped in self._swapped.values() for block in swapped.blocks)]
        assert sorted(slots) == list(range(self._sizes[1])), f"host blocks lost or owned twice: {sorted(slots)}"
        for request, swapped in self._swapped.items():
            assert request not in self._tables, f"{request} has blocks on both tiers"
            count = swapped.first + len(swapped.blocks)
            assert count == -(-request.computed // size), f"{request} has {count} blocks on the host"
