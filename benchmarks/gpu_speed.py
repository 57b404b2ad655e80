"""gpu_check.py, sections `decode`, `prefill` and `tiles`: how fast attention is, beside what the device can do."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_common import Run, Skip, relative
from gpu_kernels import LLAMA, Paged, Variant, kernels, plan_of

DECODE, PREFILL, TILE = 0.85, 0.9, 0.95
"""Goals: shares of the bandwidth of a copy, of the best rival's speed, of the best tile's speed."""
COLD = 512 << 20
"""Bytes that no cache of a device holds."""
NEAR = 2e-2
"""Errors of 16 bits in long contexts, of millions of numbers the largest."""
SPLITS = (1, 2, 4, 8)
LONGEST, GRAPHS = 131072, (1, 2, 4, *range(8, 257, 8))
SMALL = (4, 2, 64)
Spans = list[tuple[int, int]]


def decodes(run: Run) -> Iterator[tuple[int, int, int]]:
    """(requests, context, tokens that tables have room for)."""
    for context in run.pick((4096, 32768, 512), (40,)):
        for batch in run.pick((1, 16, 64, 256), (1, 3)):
            yield batch, context, context
    for batch, context in run.pick(((1, 512), (1, 4096), (16, 4096), (64, 4096)), ((1, 40),)):  # as a graph has it
        yield batch, context, run.pick(LONGEST, 512)


def prefills(run: Run) -> dict[str, Spans]:
    if run.interpret:
        return {"1x24": [(0, 24)], "8 behind 24": [(24, 8)]}
    k = 1024
    return {
        "1x8k": [(0, 8 * k)], "8x2k": [(0, 2 * k)] * 8, "1x2k": [(0, 2 * k)], "2k behind 8k": [(8 * k, 2 * k)],
    }  # fmt: skip


def speed_variants(run: Run, device: Any) -> Iterator[Variant]:
    """What the sections launch, in the order in which it is needed."""
    known = [([(context - 1, 1)] * batch, room) for batch, context, room in decodes(run)]
    known += [(spans, max(start + n for start, n in spans)) for spans in prefills(run).values()]
    for spans, room in known:
        for part in plan_of(device, spans, LLAMA, "bfloat16", room):
            yield _variant(part, LLAMA)
    for batch in GRAPHS:  # of the large model
        for part in plan_of(device, [(LONGEST - 1, 1)] * batch, LLAMA, "bfloat16", LONGEST):
            yield _variant(part, LLAMA)
    for heads, ones in sweeps(run):
        for tile in tiles_of(device, heads, ones):
            yield _variant(_swept(run, device, heads, ones)[0]._replace(tile=tile), heads)
        if ones:
            part, _ = _swept(run, device, heads, ones)
            yield from (_variant(part._replace(splits=count), heads) for count in SPLITS)


def _variant(part: Any, heads: tuple[int, int, int]) -> Variant:
    return Variant(part.ones, part.mixed, part.splits, tuple(part.tile), heads, 16, "bfloat16", "bfloat16")


def _within(run: Run, what: str, error: float) -> None:
    """A row only where the result is wrong: rightness has a section of its own."""
    if not error <= NEAR:
        run.report.check(f"{what}, result", False, f"error {error:.1e}, at most {NEAR:.0e}", error=error)


# Decode


def check_decode(run: Run) -> None:
    heads, limit = run.pick(LLAMA, SMALL), run.bandwidth
    run.report.row("a copy, read and written", f"{limit / 1e9:.0f} GB/s", rate=limit)
    cases = list(decodes(run))
    for at, (batch, context, room) in enumerate(cases):
        name = f"{batch} x {context}" + (f", room for {room}" if room != context else "")
        if 2 * batch * context * heads[1] * heads[2] * 2 > min(40 << 30, run.free_memory() * 0.6):
            run.report.row(name, "left out: too large for this device")
        elif run.left() < 1:
            run.report.row(name, "left out: no time is left")
        else:
            with run.report.part(name):
                _decode(run, name, heads, (batch, context, room), run.left() / (len(cases) - at))
    run.report.raise_wrong()


def _decode(run: Run, name: str, heads: tuple[int, int, int], case: tuple[int, int, int], budget: float) -> None:
    batch, context, room = case
    cached = 2 * batch * context * heads[1] * heads[2] * 2
    copies = run.pick(max(1, min(64, -(-COLD // cached))), 1)
    paged = Paged(run, [(context - 1, 1)] * batch, heads, "bfloat16", columns=-(-room // 16), copies=copies)
    parts = paged.plan(kernels().launch.device_of(run.device))
    works: list[Callable[[], object]] = [partial(paged.attention, parts, copy) for copy in range(copies)]
    spent = run.seconds(works, min(1.0, budget))
    moved = cached + 2 * batch * heads[0] * heads[2] * 2
    share = moved / spent / run.bandwidth
    _within(run, name, paged.error(paged.attention(parts), {0, batch - 1}))
    run.report.row(
        name, f"{spent * 1e6:9.1f} us {moved / spent / 1e9:7.0f} GB/s {share:5.0%}  splits {parts[0].splits}",
        seconds=spent, bytes=moved, share=share, splits=parts[0].splits, copies=copies,
    )  # fmt: skip
    if batch >= 16 and not run.interpret:
        run.report.goal(f"decode {name}: {share:.0%} of a copy's bandwidth, at least {DECODE:.0%}", share >= DECODE)


# Prefill


def check_prefill(run: Run) -> None:
    limit, cases = run.flops, prefills(run)
    run.report.row("a product of 8192 x 8192", f"{limit / 1e12:.0f} TFLOP/s", rate=limit)
    for at, (name, spans) in enumerate(cases.items()):
        if run.left() < 1:
            run.report.row(name, "left out: no time is left")
            continue
        with run.report.part(name):
            _prefill(run, name, spans, min(0.6, run.left() / (len(cases) - at) / 5))
    run.report.raise_wrong()


def _prefill(run: Run, name: str, spans: Spans, budget: float) -> None:
    heads = run.pick(LLAMA, SMALL)
    pairs = sum(n * start + n * (n + 1) // 2 for start, n in spans)
    operations = 4 * pairs * heads[0] * heads[2]  # two products, of causal pairs only
    paged = Paged(run, spans, heads, "bfloat16")
    parts = paged.plan(kernels().launch.device_of(run.device))
    ours = run.seconds([partial(paged.attention, parts)], budget)
    _within(run, name, paged.error(paged.attention(parts), {0, len(spans) - 1}, run.pick(64, 8)))
    _rate(run, f"{name}, ours", ours, operations)
    best: tuple[float, str] | None = None
    for rival, make in RIVALS.items():
        try:
            work, found = make(run, paged)
            spent = _either(run, work, budget)
            error = paged.error(found().reshape(-1, heads[0] * heads[2]), {len(spans) - 1}, 8)
        except Skip as reason:
            run.report.row(f"{name}, {rival}", str(reason))
            continue
        except Exception as error:  # noqa: BLE001 - whatever another library raises, ours is measured
            run.report.row(f"{name}, {rival}", f"failed: {type(error).__name__}: {str(error)[:160]}")
            continue
        if not error <= NEAR:
            run.report.row(f"{name}, {rival}", f"computes something else (error {error:.1e})")
            continue
        _rate(run, f"{name}, {rival}", spent, operations)
        best = min(best or (spent, rival), (spent, rival))
    if best is not None and not run.interpret:
        speed = best[0] / ours
        text = f"prefill {name}: {speed:.2f} of the speed of {best[1]}, at least {PREFILL}"
        run.report.goal(text, speed >= PREFILL)


def _either(run: Run, work: Callable[[], object], budget: float) -> float:
    """Seconds, captured if it can be: of short work, launching it would be most."""
    try:
        return run.seconds([work], budget)
    except Exception:  # noqa: BLE001 - whatever it does not do while it is captured
        return run.seconds([work], budget, graph=False)


def _rate(run: Run, what: str, spent: float, operations: float) -> None:
    rate, limit = operations / spent, run.flops
    shown = f"{spent * 1e6:9.1f} us {rate / 1e12:7.1f} TFLOP/s {rate / limit:5.0%}"
    run.report.row(what, shown, seconds=spent, rate=rate, share=rate / limit)


def _dense(paged: Paged, expand: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """q [requests, heads, new tokens, head_dim], k and v [requests, kv heads (expand: heads), context, head_dim], and
    how many tokens are cached; of requests that are all alike."""
    (start, n), *rest = paged.spans
    if any(span != (start, n) for span in rest):
        raise Skip("not for requests of several lengths")
    count = len(paged.spans)
    q = paged.q.reshape(count, n, paged.heads[0], paged.heads[2]).transpose(1, 2).contiguous()
    sides = []
    for pages in (paged.keys, paged.values):
        some = pages[paged.tables[0].long()].transpose(1, 2).flatten(2, 3)[:, :, : start + n].contiguous()
        sides.append(some.repeat_interleave(paged.heads[0] // paged.heads[1], 1) if expand else some)
    return q, *sides, start


Rival = tuple[Callable[[], object], Callable[[], torch.Tensor]]
"""What is timed, and what gives its result as [requests, new tokens, heads, head_dim]."""


def _sdpa(run: Run, paged: Paged) -> Rival:
    """torch's, by FlashAttention or, if it is the faster, cuDNN. Heads of keys and values are expanded beforehand: not
    every path has them grouped, and reading them costs little here."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    q, k, v, start = _dense(paged, expand=True)
    mask: Any = causal_lower_right(q.shape[2], k.shape[2]) if start else None
    backends = [SDPBackend.FLASH_ATTENTION]
    if not run.cuda:
        backends.append(SDPBackend.MATH)

    def work() -> torch.Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not start)

    work()
    return work, lambda: work().transpose(1, 2)


def _cudnn(run: Run, paged: Paged) -> Rival:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, start = _dense(paged, expand=True)
    if start or not run.cuda:
        raise Skip("not behind a cached prefix, nor on a CPU")

    def work() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    work()
    return work, lambda: work().transpose(1, 2)


def _flash_attn(run: Run, paged: Paged) -> Rival:
    if importlib.util.find_spec("flash_attn") is None:
        raise Skip("not installed")
    from flash_attn import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    q, k, v, _ = _dense(paged, expand=False)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def work() -> torch.Tensor:
        found: torch.Tensor = flash_attn_func(q, k, v, causal=True)
        return found

    work()
    return work, work


def _flashinfer(run: Run, paged: Paged) -> Rival:
    if importlib.util.find_spec("flashinfer") is None:
        raise Skip("not installed")
    import flashinfer  # type: ignore[import-not-found,unused-ignore]

    q, k, v, _ = _dense(paged, expand=False)
    if len(q) > 1:
        raise Skip("compared on one request only")
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))

    def work() -> torch.Tensor:
        found: torch.Tensor = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
        return found

    work()
    return work, lambda: work()[None]


RIVALS: dict[str, Callable[[Run, Paged], Rival]] = {
    "torch's flash": _sdpa,
    "torch's cuDNN": _cudnn,
    "flash-attn": _flash_attn,
    "flashinfer": _flashinfer,
}


# Tiles


def sweeps(run: Run) -> list[tuple[tuple[int, int, int], bool]]:
    """(heads, whether of decodes): what is worth the most comes first."""
    if run.interpret:
        return [(SMALL, True)]
    return [(LLAMA, True), (LLAMA, False), ((32, 8, 64), False), ((32, 8, 64), True)]


def tiles_of(device: Any, heads: tuple[int, int, int], ones: bool) -> list[Any]:
    """The table's tile, and others, those that are most like it first."""
    tiles = kernels().tiles
    table = tiles.attend_tiles(device.capability, 2, heads[2], heads[0] // heads[1])[0 if ones else 1]
    rows, warps, stages = ((16,), (2, 4, 8), (1, 2, 3, 4)) if ones else ((64, 128), (4, 8), (2, 3, 4))
    others = [
        tiles.Tile(*one) for one in itertools.product(rows, (32, 64, 128), warps, stages)
    ]  # fmt: skip
    # Of 128 rows by 4 warps, sums do not fit the registers.
    others = [tile for tile in others if tile != table and not (tile.rows == 128 and tile.warps == 4)]
    return [table, *sorted(others, key=lambda tile: sum(a != b for a, b in zip(tile, table, strict=True)))]


def _swept(run: Run, device: Any, heads: tuple[int, int, int], ones: bool) -> tuple[Any, Spans]:
    spans = run.pick([(4095, 1)] * 64, [(20, 1)]) if ones else [(0, 2048)] * 4
    (part,) = plan_of(device, spans, heads, "bfloat16", max(start + n for start, n in spans))
    return part, spans


def check_tiles(run: Run) -> None:
    groups = sweeps(run)
    for at, (heads, ones) in enumerate(groups):
        name = f"{'decode 64 x 4096' if ones else 'prefill 4 x 2048'} D{heads[2]}"
        if run.left() < 1:
            run.report.row(name, "left out: no time is left")
            continue
        with run.report.part(name):
            _sweep(run, name, heads, ones, run.left() / (len(groups) - at))
    run.report.raise_wrong()


def _sweep(run: Run, name: str, heads: tuple[int, int, int], ones: bool, budget: float) -> None:
    """budget: seconds. The table's tile comes first, and others have to give what it gives."""
    device = kernels().launch.device_of(run.device)
    part, spans = _swept(run, device, heads, ones)
    paged, some = Paged(run, spans, heads, "bfloat16"), tiles_of(device, heads, ones)
    tokens, requests, group = sum(n for _, n in spans), len(spans), heads[0] // heads[1]
    found: list[tuple[float, Any]] = []
    expected: torch.Tensor | None = None
    end, tried, refused = run.left() - budget, 0, 0
    for tile in some[: run.pick(len(some), 2)]:
        if run.left() < max(end, 0.5):
            break
        tried += 1
        count = requests * -(-group // tile.rows) if ones else tokens * group // tile.rows + requests
        parts = [part._replace(tile=tile, tiles=count)]
        try:
            result = paged.attention(parts)
            run.synchronize()
        except Exception as error:  # too much shared memory, or what a compiler cannot do
            refused += 1
            run.report.row(f"{name} {_shown(tile)}", f"does not run: {type(error).__name__}: {str(error)[:90]}")
            if expected is None:
                raise
            continue
        if expected is None:
            expected = result
            _within(run, f"{name} {_shown(tile)}", paged.error(result, {0}, 16))
        elif not (far := relative(result, expected)) <= 1.5 * NEAR:
            run.report.check(f"{name} {_shown(tile)}, result", False, f"differs by {far:.1e} from the table's tile")
            continue
        found.append((run.seconds([partial(paged.attention, parts)], budget / len(some) / 2), tile))
    entry = next(((spent, tile) for spent, tile in found if tile == some[0]), None)
    _ranking(run, name, found, entry, tried, len(some), refused)
    if ones:
        _splits(run, name, paged, part._replace(tile=some[0]))


def _ranking(
    run: Run, name: str, found: list[tuple[float, Any]], entry: tuple[float, Any] | None, tried: int, known: int,
    refused: int,
) -> None:  # fmt: skip
    found.sort(key=lambda one: one[0])
    every = [{"tile": _shown(tile), "seconds": spent} for spent, tile in found]
    run.report.row(name, f"{tried} of {known} tiles tried, {refused} of them do not run", every=every)
    for spent, tile in found[:3]:
        run.report.row(f"  {_shown(tile)}", f"{spent * 1e6:9.1f} us")
    if entry is not None:
        speed = found[0][0] / entry[0]
        run.report.row(
            f"  {_shown(entry[1])}, the table's", f"{entry[0] * 1e6:9.1f} us, {speed:.2f} of the best's speed"
        )
        if not run.interpret:
            text = f"tile of {name}: {speed:.2f} of the speed of {_shown(found[0][1])}, at least {TILE}"
            run.report.goal(text, speed >= TILE)


def _splits(run: Run, name: str, paged: Paged, part: Any) -> None:
    """How many parts contexts are cut into, beside what the table says."""
    for count in run.pick(SPLITS, (1,)):
        if run.left() < 1:
            break
        parts = [part._replace(splits=count)]
        spent = run.seconds([partial(paged.attention, parts)], 0.1)
        mark = ", the table's" if count == part.splits else ""
        run.report.row(f"  {name} in {count} parts{mark}", f"{spent * 1e6:9.1f} us", seconds=spent)


def _shown(tile: Any) -> str:
    return f"{tile.rows}x{tile.columns}, {tile.warps} warps, {tile.stages} stages"
