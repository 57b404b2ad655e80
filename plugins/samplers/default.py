"""The default sampler, vectorised over the batch.

In order: penalties, logit bias, what is allowed and what is banned, `min_tokens`; then greedy rows take the likeliest
token (the first of equals), the others temperature, min-p, top-k, top-p and one draw. A filter is a threshold on
probability and keeps all that equal it, so what it keeps does not depend on how anything was sorted. High temperatures
make tokens so nearly equal that it takes float64 to tell them apart. The draw inverts the cumulative distribution, in
order of token id, at one uniform number that is a function of (seed, output index).
Every number of a row is computed from that row alone: company changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from framework import ReferenceBackend, SampleBatch, Sampled, SamplingParams, hookimpl, send

from .limits import Limit, Limits

Array = np.ndarray[Any, Any]
Largest = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
TINY = torch.finfo(torch.float32).tiny
HUGE = 1e30  # divided by the lowest temperature still a float32
HOT = 16  # above this temperature, probabilities are filtered in float64
HOTTEST = 1e8  # higher ones count as this: all is about as likely, and float64 still tells what is likelier
SPAN = 256  # tokens summed at once when a whole row is searched: one pass and two short searches
HEAD = 256  # likeliest tokens that are looked at first for the nucleus
_GAMMA = 0x9E3779B97F4A7C15


class DefaultSampler:
    """The batch's parameters as tensors are kept while the batch stays the same; token counts and limits by request."""

    def __init__(self) -> None:
        self._setup: _Setup | None = None
        self._histories: dict[str, _History] = {}
        self._limits: dict[str, Limit] = {}

    @hookimpl
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        for id in (*batch.removed, *batch.added):
            self._histories.pop(id, None)
            self._limits.pop(id, None)
        setup = self._setup
        if setup is None or batch.added or setup.ids != batch.ids or setup.owner != batch.owner:
            for id, params in zip(batch.ids, batch.params, strict=True):
                if Limit.of(params) and id not in self._limits:
                    self._limits[id] = Limit(params, logits.device, logits.shape[-1])
            setup = self._setup = _Setup(batch, logits.device, logits.shape[-1], self._limits)
        if setup.penalties is not None:
            self._penalise(logits, batch, setup.penalties)
        if setup.bias is not None:
            rows, tokens, values = setup.bias
            logits[rows, tokens] += values
        empty = setup.limits.apply(logits, batch) if setup.limits is not None else None
        for minimum in setup.minimum:
            if batch.output_len[batch.owner[minimum.row]] < minimum.tokens:
                _ban(logits[minimum.row], minimum.ends)
        likeliest = None if setup.changes else batch.likeliest
        if setup.random is None:
            return Sampled(argmax(logits) if likeliest is None else likeliest, empty)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if setup.greedy is not None:
            tokens[setup.greedy] = argmax(logits[setup.greedy]) if likeliest is None else likeliest[setup.greedy]
            logits = logits[setup.random]
        lens = np.array(batch.output_len, np.uint64)[setup.random_owner]
        [uniform] = send([uniforms(setup.seeds, lens)], logits.device)
        largest = batch.largest or ReferenceBackend().largest
        tokens[setup.random] = _draw(logits, setup, uniform, largest)
        return Sampled(tokens, empty)

    def _penalise(self, logits: torch.Tensor, batch: SampleBatch, penalties: _Penalties) -> None:
        histories = []
        for row in penalties.rows:
            id, length = batch.ids[batch.owner[row]], batch.output_len[batch.owner[row]]
            history = self._histories.get(id)
            if history is None or history.known > length:
                history = self._histories[id] = _History(batch.prompt_tokens(id))
            history.extend(batch.output_tokens(id)[history.known : length])
            histories.append(history)
        sizes = [history.size for history in histories]
        arrays = [
            np.repeat(np.array(penalties.rows), sizes),
            np.concatenate([h.tokens[: h.size] for h in histories]),
            np.concatenate([h.counts[: h.size] for h in histories]),
            *(np.repeat(values, sizes) for values in penalties.values),
        ]
        rows, tokens, counts, repetition, presence, frequency = send(arrays, logits.device)
        given = logits[rows, tokens]
        # A tiny penalty overflows; what a temperature divides later must be finite. Masked tokens stay masked.
        values = torch.where(given > 0, given / repetition, given * repetition).clamp_(-HUGE, HUGE)
        values = values - frequency * counts - presence * (counts > 0)
        logits[rows, tokens] = torch.where(given.isfinite(), values, given)


class _Penalties(NamedTuple):
    rows: list[int]
    values: Array
    """float32 [3, rows]: repetition, presence, frequency."""


class _Minimum(NamedTuple):
    row: int
    tokens: int
    ends: torch.Tensor


class _Filters:
    """The filters (top-k, top-p, min-p) of some of the random rows as tensors; None where no row needs the thing.

    rows: int64 [filtered], which they are; from here on they are numbered from 0 again. dtype: of their probabilities.
    counts: int64 [filtered], how many of the likeliest tokens to look at first; 0: all. nuclear: those with a top-p;
    top_p: float64 [nuclear, 1], whole: bool [nuclear, 1], whether there is no other filter.
    """

    def __init__(self, rows: Sequence[int], drawn: Sequence[SamplingParams], vocab: int, device: torch.device) -> None:
        picked = [drawn[at] for at in rows]
        self.rows = _index(rows, device)
        self.dtype = torch.float64 if picked[0].temperature > HOT else torch.float32
        self.min_p = _column([p.min_p for p in picked], device)[:, 0] if any(p.min_p > 0 for p in picked) else None
        nuclear = [at for at, p in enumerate(picked) if p.top_p < 1]
        self.nuclear = _index(nuclear, device) if nuclear else None
        self.top_p = _column([max(picked[at].top_p, TINY) for at in nuclear], device).double()
        cut = [0 < p.top_k < vocab for p in picked]
        whole = [p.top_p < 1 and not p.min_p > 0 and not limited for p, limited in zip(picked, cut, strict=True)]
        self.whole = torch.tensor([whole[at] for at in nuclear], dtype=torch.bool, device=device)[:, None]
        counts = [p.top_k if limited else HEAD * all_ for p, limited, all_ in zip(picked, cut, whole, strict=True)]
        self.counts = torch.tensor(counts, dtype=torch.int64, device=device)


def _index(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    return send([np.array(rows, np.int64)], device)[0]


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return send([np.array(values, np.float32)], device)[0][:, None]


class _Setup:
    """The parameters of one batch as tensors; None where no row needs the thing. `n` rows are random."""

    def __init__(self, batch: SampleBatch, device: torch.device, vocab: int, limits: Mapping[str, Limit]) -> None:
        self.ids, self.owner = batch.ids, batch.owner
        params = [batch.params[o] for o in batch.owner]

        def index(rows: Sequence[int]) -> torch.Tensor | None:
            return _index(rows, device) if rows else None

        self.random_rows = [row for row, p in enumerate(params) if not p.greedy]
        self.random_owner = np.array([batch.owner[row] for row in self.random_rows], np.int64)
        self.seeds = batch.seeds[self.random_owner]
        self.random = index(self.random_rows)
        self.greedy = index([row for row, p in enumerate(params) if p.greedy])
        drawn = [params[row] for row in self.random_rows]
        heat = [min(p.temperature, HOTTEST) for p in drawn]
        self.temperature = _column(heat, device) if any(degree != 1 for degree in heat) else None

        filtered = [at for at, p in enumerate(drawn) if p.top_p < 1 or p.min_p > 0 or 0 < p.top_k < vocab]
        self.plain = index(sorted(set(range(len(drawn))) - set(filtered)))
        groups = [at for at in filtered if heat[at] <= HOT], [at for at in filtered if heat[at] > HOT]
        self.filters = [_Filters(some, drawn, vocab, device) for some in groups if some]

        rows = [
            row
            for row, p in enumerate(params)
            if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
        ]
        of = [params[row] for row in rows]
        values = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in of]
        self.penalties = _Penalties(rows, np.array(values).clip(-HUGE, HUGE).astype(np.float32).T) if rows else None
        entries = [(row, *entry) for row, p in enumerate(params) for entry in p.logit_bias.items()]
        self.bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if entries:
            at, tokens, amounts = zip(*entries, strict=True)
            arrays = np.array(at, np.int64), np.array(tokens, np.int64), np.array(amounts, np.float32)
            on_rows, of_tokens, by = send(arrays, device)
            self.bias = on_rows, of_tokens, by
        self.minimum = [
            _Minimum(row, p.min_tokens, send([np.array(_within(p, vocab), np.int64)], device)[0])
            for row, p in enumerate(params)
            if p.min_tokens and p.ends
        ]
        self.limits = Limits(batch, limits, device) if any(id in limits for id in batch.ids) else None
        self.changes = bool(rows or entries or self.minimum or self.limits)  # logits, before anything is chosen


def _within(params: SamplingParams, vocab: int) -> list[int]:
    """Ends that the model can produce: checkpoints name EOS ids beyond their vocabulary."""
    return sorted(token for token in params.ends if token < vocab)


class _History:
    """Distinct tokens of one request and how often its output holds each; `known` output tokens are counted."""

    def __init__(self, prompt: Array) -> None:
        distinct = np.unique(prompt).astype(np.int64)
        self.known = 0
        self.size = len(distinct)
        self.tokens: Array = distinct
        self.counts: Array = np.zeros(self.size, np.float32)
        self._slot: dict[int, int] = {token: at for at, token in enumerate(distinct.tolist())}

    def extend(self, output: Array) -> None:
        for token in output.tolist():
            at = self._slot.get(token)
            if at is None:
                at = self._slot[token] = self.size
                if at == len(self.tokens):
                    room = max(64, at)
                    self.tokens = np.concatenate([self.tokens, np.zeros(room, np.int64)])
                    self.counts = np.concatenate([self.counts, np.zeros(room, np.float32)])
                self.tokens[at] = token
                self.size += 1
            self.counts[at] += 1
        self.known += len(output)


def _ban(row: torch.Tensor, tokens: torch.Tensor) -> None:
    """Forbid tokens, unless nothing else is left: then whoever masked the rest (a grammar, say) has the last word."""
    before, nothing = row[tokens], float("-inf")
    row[tokens] = nothing
    row[tokens] = torch.where(row.amax() == nothing, before, nothing)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """int64 [rows], the first of equals."""
    return ReferenceBackend().argmax(logits)[0]


def _draw(logits: torch.Tensor, setup: _Setup, uniform: torch.Tensor, largest: Largest) -> torch.Tensor:
    """int64 [n] from the logits [n, vocab] of the random rows, which may be changed; uniform: float64 [n]."""
    if setup.temperature is not None:
        logits.div_(setup.temperature)
    if not setup.filters:
        return _search(torch.softmax(logits, -1), uniform)
    if setup.plain is None and len(setup.filters) == 1:
        return _search_filtered(logits, setup.filters[0], uniform, largest)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if setup.plain is not None:
        tokens[setup.plain] = _search(torch.softmax(logits[setup.plain], -1), uniform[setup.plain])
    for filters in setup.filters:
        rows = filters.rows
        tokens[rows] = _search_filtered(logits[rows], filters, uniform[rows], largest)
    return tokens


def _search(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Where the cumulative sum over token ids passes the uniform number: first the span, then the token in it."""
    rows, vocab = probs.shape
    if vocab % SPAN:
        probs = torch.nn.functional.pad(probs, (0, SPAN - vocab % SPAN))
    spans = probs.view(rows, -1, SPAN)
    cumulative = spans.sum(-1).double().cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    span = _passes(cumulative, target)
    before = torch.nn.functional.pad(cumulative, (1, 0)).gather(1, span)
    inside = spans[torch.arange(rows, device=probs.device), span[:, 0]].double().cumsum(-1)
    return (span * SPAN + _passes(inside, target - before))[:, 0]


def _search_filtered(logits: torch.Tensor, filters: _Filters, uniform: torch.Tensor, largest: Largest) -> torch.Tensor:
    """The same over the few tokens that the filters leave, packed to the left: logits [filtered, vocab]."""
    rows, vocab = logits.shape
    probs = torch.softmax(logits, -1, dtype=filters.dtype)
    if filters.dtype is torch.float64:
        largest = ReferenceBackend().largest  # backends' own are for float32
    least = torch.full((rows,), TINY, dtype=filters.dtype, device=probs.device)
    if filters.min_p is not None:
        least = torch.maximum(least, filters.min_p * probs.amax(-1))
    token, first, kept = _packed(largest(probs, filters.counts, least))
    if filters.nuclear is not None:
        ordered, sums, mass = _nucleus(kept, filters.nuclear, filters)
        short = filters.whole & (sums[:, -1:] < mass)
        if short.any():
            # The likeliest tokens do not add up to it. Those under (1 - top_p) / vocab add up to less than 1 - top_p,
            # so none of them belongs to the nucleus.
            again = filters.nuclear[short[:, 0]]
            counts = filters.counts.index_fill(0, again, 0)
            bound = (1 - filters.top_p[short[:, 0], 0]).to(filters.dtype) / vocab
            token, first, kept = _packed(largest(probs, counts, least.index_copy(0, again, bound.clamp(min=TINY))))
            ordered, sums, mass = _nucleus(kept, filters.nuclear, filters)
        inside = (sums - ordered < mass).sum(-1, keepdim=True)
        some = kept[filters.nuclear]
        kept[filters.nuclear] = some.masked_fill(some < ordered.gather(1, inside - 1), 0.0)
    cumulative = kept.cumsum(-1, dtype=torch.float64)
    chosen = _passes(cumulative, uniform[:, None] * cumulative[:, -1:])[:, 0]
    return token[first + chosen]


def _packed(found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens of all rows, where each row's begin, float32 [rows, most tokens of a row]: probabilities, then 0)."""
    token, value, lengths = found
    first = lengths.cumsum(0) - lengths
    row = torch.arange(len(lengths), device=token.device).repeat_interleave(lengths)
    kept = value.new_zeros(len(lengths), int(lengths.max()))
    kept[row, torch.arange(len(token), device=token.device) - first[row]] = value
    return token, first, kept


def _nucleus(
    kept: torch.Tensor, rows: torch.Tensor, filters: _Filters
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the rows with a top-p, all float64: probabilities, the likeliest first, their cumulative sums, and what those
    of the nucleus add up to."""
    ordered = _descending(kept if len(rows) == len(kept) else kept[rows]).double()
    sums = ordered.cumsum(-1)
    # Top-p is a share of what min-p and top-k left; of everything, that is, where there was neither.
    return ordered, sums, filters.top_p * torch.where(filters.whole, 1.0, sums[:, -1:])


def _descending(x: torch.Tensor) -> torch.Tensor:
    """Each row sorted; numpy's is several times as fast as torch's."""
    if x.device.type != "cpu":
        return x.sort(-1, descending=True).values
    return torch.from_numpy(-np.sort(-x.numpy(), -1))


def _passes(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """int64 [n, 1]: the first entry above the target, never one without a share of its own, whatever was rounded."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def uniforms(seeds: Array, index: Array) -> Array:
    """float64 in [0, 1), one for each (seed, output index), both uint64.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): number `index` of
    the generator whose state is the mixed seed. The top 53 bits make the fraction.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64)) + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
        fraction: Array = (_mix(state) >> np.uint64(11)) * 2.0**-53
    return fraction


def _mix(z: Array) -> Array:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed
