"""An executor's rows against a model that keeps everything in dictionaries."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Delta, Plan, RequestData, SamplingParams, Slice
from framework.batch import RowBatch, Rows
from framework.plan import Preempted
from framework.types import Mode

BLOCK = 3


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
        seen = RowBatch(rows, ids, sampled)
        assert list(seen.output_len) == [len(tokens[id]) - prompt_len[id] for id in ids]
        for id in ids:
            assert seen.prompt_tokens(id).tolist() == tokens[id][: prompt_len[id]]
            assert seen.output_tokens(id).tolist() == tokens[id][prompt_len[id] :]
        rows.append(sampled, np.arange(len(ids)))
        for s in slices:
            start[s.request_id] += s.tokens
        for token, id in enumerate(ids):
            tokens[id].append(token)


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
