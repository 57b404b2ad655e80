"""An executor's rows against a model that keeps everything in dictionaries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Delta, Plan, ReferenceBackend, RequestData, SamplingParams, Slice
from framework.batch import RowBatch, Rows, Step
from framework.plan import Preempted
from framework.types import Mode

BLOCK = 3


def commit(rows: Rows, step: Step, tokens: Sequence[int]) -> None:
    rows.learn(rows.sampled(step, None, lambda: list(tokens)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_keep_tokens_and_tables(data: st.DataObject) -> None:
    """Random arrivals, replacements, departures, deltas, chunks and sampled tokens, with rows and columns that grow."""
    rows = Rows(2, BLOCK, rows=1)
    tokens: dict[str, list[int]] = {}
    prompt_len: dict[str, int] = {}
    start: dict[str, int] = {}
    tables: dict[str, list[list[int]]] = {}
    serial = iter(range(10**6))
    for step in range(data.draw(st.integers(1, 15))):
        gone = [id for id in list(tokens) if data.draw(st.integers(0, 4)) == 0]
        new = []
        for id in gone:
            del tokens[id]
        for id in data.draw(st.lists(st.sampled_from("abcdefg"), unique=True, max_size=4)):
            known = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=data.draw(st.sampled_from([3, 600]))))
            tokens[id], start[id], tables[id] = known, 0, [[], []]
            prompt_len[id] = data.draw(st.integers(1, len(known)))
            new.append(RequestData(id, list(known), prompt_len[id], SamplingParams(), next(serial)))
        slices = []
        for id in data.draw(st.permutations(sorted(tokens))):
            left = len(tokens[id]) - start[id]
            count = data.draw(st.sampled_from(sorted({1, left, (left + 1) // 2})))
            deltas = []
            for group, table in enumerate(tables[id]):
                need = -(-(start[id] + count) // BLOCK)
                first = data.draw(st.integers(0, len(table)))
                if need > len(table) or data.draw(st.booleans()):
                    blocks = [next(serial) for _ in range(max(need, len(table)) - first)]
                    table[first:] = blocks
                    deltas.append(Delta(group, first, tuple(blocks)))
            slices.append(Slice(id, start[id], count, tuple(deltas), count == left))
        preempted = tuple(Preempted(id, Mode.SWAP) for id in gone[::2])
        plan = Plan(step, tuple(new), tuple(slices), preempted=preempted, finished=tuple(gone[1::2]))
        rows.update(plan)
        assert set(rows.index) == set(tokens)
        assert len(set(rows.index.values())) == len(tokens)
        if not slices:
            continue
        built = rows.build(plan)
        batch = built.batch
        assert built.tokens.tolist() == [t for s in slices for t in tokens[s.request_id][s.start :][: s.tokens]]
        assert built.positions.tolist() == [s.start + i for s in slices for i in range(s.tokens)]
        assert batch.starts.tolist() == [s.start for s in slices]
        assert batch.lens.tolist() == [s.tokens for s in slices]
        assert batch.samples.tolist() == [s.samples for s in slices]
        for group, table in enumerate(batch.tables):
            for s, row in zip(slices, table.tolist(), strict=True):
                need = -(-(s.start + s.tokens) // BLOCK)
                assert row[:need] == tables[s.request_id][group][:need]
        ids = [s.request_id for s in slices if s.samples]
        sampled = built.rows[batch.samples]
        seen = built.sampled or RowBatch(rows, [], sampled)
        assert seen.ids == ids
        assert list(seen.output_len) == [len(tokens[id]) - prompt_len[id] for id in ids]
        for id in ids:
            assert seen.prompt_tokens(id).tolist() == tokens[id][: prompt_len[id]]
            assert seen.output_tokens(id).tolist() == tokens[id][prompt_len[id] :]
        if ids:
            commit(rows, built, range(len(ids)))
        for s in slices:
            start[s.request_id] += s.tokens
        for token, id in enumerate(ids):
            tokens[id].append(token)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_a_decode_step_takes_over_the_arrays_of_the_one_before(seed: int) -> None:
    """Every array, and the backend's `Meta`, is what a step that is laid out anew has, whatever comes between: chunks,
    arrivals, forks, replacements, departures, changed and shared blocks, tables that grow, failed rows and steps."""
    rng = random.Random(seed)
    block = rng.choice([1, 3, 16])
    fast, plain = Rows(2, block, rows=2), Rows(2, block, rows=2)
    backend, device = ReferenceBackend(), torch.device("cpu")
    meta = None
    known: dict[str, int] = {}
    start: dict[str, int] = {}
    blocks: dict[str, list[int]] = {}
    serial = iter(range(10**6))
    advanced = 0
    for step in range(60):
        event = rng.choice(["decode"] * 60 + ["add", "drop", "preempt", "replace", "chunk", "some", "order"])
        new, finished, preempted = [], (), ()
        if event == "add" or not known:
            id, prompt = f"r{next(serial)}", rng.choice([1, 2, 17, 250])
            known[id], blocks[id] = prompt, [[], []]
            start[id] = rng.randint(0, prompt - 1)  # found in a cache, or forked off
            params = SamplingParams(logprobs=rng.choice([None, 1]))
            new.append(RequestData(id, list(range(prompt)), rng.randint(1, prompt), params, next(serial)))
        elif event in ("drop", "preempt"):
            id = rng.choice(sorted(known))
            del known[id]
            finished, preempted = ((id,), ()) if event == "drop" else ((), (Preempted(id, Mode.SWAP),))
        elif event == "replace":
            id = rng.choice(sorted(known))
            start[id], blocks[id] = 0, [[], []]
            new.append(RequestData(id, [7] * known[id], 1, SamplingParams(), next(serial)))
        ids = list(known)
        if event == "some":
            ids = rng.sample(ids, rng.randint(0, len(ids)))
        elif event == "order":
            ids = rng.sample(ids, len(ids))
        slices = []
        for id in ids:
            left = known[id] - start[id]
            count = max(1, left // 2) if event == "chunk" else left
            deltas, need = [], -(-(start[id] + count) // block)
            for group, table in enumerate(blocks[id]):
                if need > len(table) or rng.random() < 0.02:  # else sometimes one is replaced
                    first = min(len(table), rng.randint(max(0, need - 2), need))
                    ahead = rng.choice([0, 0, 0, 1, 40])
                    found = [next(serial) for _ in range(max(need, len(table)) + ahead - first)]
                    table[first:] = found
                    deltas.append(Delta(group, first, tuple(found)))
            slices.append(Slice(id, start[id], count, tuple(deltas), count == left))
        plan = Plan(step, tuple(new), tuple(slices), preempted=preempted, finished=finished)
        fast.update(plan)
        plain.update(plan)
        plain.update(Plan(step, finished=("nobody",)))  # so that it starts anew
        if not slices:
            continue
        ours, theirs = fast.build(plan), plain.build(plan)
        assert not theirs.advanced
        advanced += ours.advanced
        for name in ("rows", "tokens", "positions"):
            assert_same(getattr(ours, name), getattr(theirs, name))
        for name in ("starts", "lens", "samples"):
            assert_same(getattr(ours.batch, name), getattr(theirs.batch, name))
        width = -(-theirs.longest // block)
        for a, b in zip(ours.batch.tables, theirs.batch.tables, strict=True):
            assert_same(a[:, :width], b[:, :width])
        if ours.advanced:
            assert meta is not None
            meta = backend.advance(ours.batch, meta, device, ours.moved)
        else:
            meta = backend.prepare(ours.batch, device)
        anew = backend.prepare(theirs.batch, device)
        assert meta.batch is ours.batch and (meta.max_len, meta.max_seq) == (anew.max_len, anew.max_seq)
        pairs = [(getattr(meta, name), getattr(anew, name)) for name in ("cu_lens", "seq_lens", "logits_rows")]
        pairs += [*zip(meta.slots, anew.slots, strict=True)]
        pairs += [(a[:, :width], b[:, :width]) for a, b in zip(meta.tables, anew.tables, strict=True)]
        for x, y in pairs:
            assert_same(x.numpy(), y.numpy())
        assert (ours.sampled is None) == (theirs.sampled is None)
        if ours.sampled is not None and theirs.sampled is not None:
            for name in ("ids", "params", "extra", "owner", "output_len", "added", "removed", "likeliest", "asked"):
                assert getattr(ours.sampled, name) == getattr(theirs.sampled, name), name
            assert_same(ours.sampled.seeds, theirs.sampled.seeds)
            sampled = [s.request_id for s in slices if s.samples]
            bad = [at for at in range(len(sampled)) if rng.random() < 0.02]
            tokens = [next(serial) for _ in sampled]
            if rng.random() < 0.05:  # the step fails, and all are sent again
                again = tuple(RequestData(id, [5] * n, 1, SamplingParams(), 0) for id, n in known.items())
                for rows in (fast, plain):
                    rows.update(Plan(step, again))
                start, blocks = dict.fromkeys(known, 0), {id: [[], []] for id in known}
                continue
            for rows, built in ((fast, ours), (plain, theirs)):
                commit(rows, built, tokens)
                rows.update(Plan(step, finished=tuple(sampled[at] for at in bad)))
            for at, id in enumerate(sampled):
                if at in bad:
                    del known[id]
                else:
                    known[id] += 1
        for s in slices:
            start[s.request_id] += s.tokens
        for id in known:
            assert_same(fast.tokens[fast.index[id], : known[id]], plain.tokens[plain.index[id], : known[id]])
        assert_same(fast.length, plain.length)
    hypothesis.event("a step was taken over" if advanced else "none was")


def test_decode_steps_are_taken_over() -> None:
    """All but the first, and one whenever the tables have no more room."""
    rows = Rows(1, BLOCK)
    rows.update(Plan(0, new=tuple(RequestData(id, [1, 2], 1, SamplingParams(), 0) for id in "ab")))
    taken = []
    for step in range(200):
        deltas = (Delta(0, (1 + step) // BLOCK, (step,)),)
        built = rows.build(Plan(step, slices=tuple(Slice(id, 1 + step, 1, deltas, True) for id in "ab")))
        taken.append(built.advanced)
        commit(rows, built, [3, 4])
    assert not taken[0] and taken.count(False) < 8


def test_a_taken_over_step_is_checked() -> None:
    """Positions that the request does not have are refused, and so is a step whose tokens never came."""
    for wrong in (1, 3):
        rows = Rows(1, BLOCK)
        rows.update(Plan(0, new=(RequestData("a", [1, 2], 1, SamplingParams(), 0),)))
        commit(rows, rows.build(Plan(0, slices=(Slice("a", 1, 1, (), True),))), [3])
        with pytest.raises(RuntimeError, match="3 tokens known"):
            rows.build(Plan(1, slices=(Slice("a", wrong, 1, (), True),)))
        rows.build(Plan(2, slices=(Slice("a", 2, 1, (), True),)))
        with pytest.raises(RuntimeError, match="3 tokens known"):
            rows.build(Plan(3, slices=(Slice("a", 3, 1, (), True),)))


def assert_same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    assert a.dtype == b.dtype and a.tolist() == b.tolist()


def test_a_request_that_came_and_went_unseen_was_removed() -> None:
    rows = Rows(1, BLOCK)
    data = RequestData("a", [1], 1, SamplingParams(), 0)
    rows.update(Plan(0, new=(data,)))
    rows.update(Plan(1, finished=("a", "unknown")))
    assert (list(rows.added), list(rows.removed)) == ([], ["a"])
    rows.update(Plan(2, new=(data,)))
    assert (list(rows.added), list(rows.removed)) == (["a"], ["a"])
    rows.settle()
    assert (list(rows.added), list(rows.removed)) == ([], [])
