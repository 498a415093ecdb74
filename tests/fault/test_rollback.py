"""A rollback of rows that a draft has taken in, and not worked on yet.

Family: repair after a fault. What waits in the background goes with the text that it belonged to,
and holds up nobody else.
"""

from __future__ import annotations

import pytest

from draft_svc.methods.base import Request, RowBlock
from engine.api import Sampling
from engine.models.draft_loading import LoadedDraft
from tests.service.test_draft_dflash import loaded, make_method, random_rows

__all__ = ["loaded"]  # a fixture
pytestmark = pytest.mark.model

GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("keep", [1, 2, 40])
def test_waiting_rows_are_rolled_back(loaded: LoadedDraft, keep: int) -> None:
    method = make_method(loaded)
    ids = [7 * i % 1000 for i in range(60)]
    rows = random_rows(59)
    behind, beside = method.open(ids, GREEDY), method.open(ids[:30], GREEDY)
    method.update(behind, 60, (), [RowBlock(0, rows)])
    method.update(beside, 30, (), [RowBlock(0, rows[:29])])
    method.update(behind, keep, ids[keep:50], ())
    while method.work():
        pass
    # The other one's rows are written, and this one takes new rows as if nothing had been.
    assert [beside.end, behind.end] == [29, keep - 1 if keep > 1 else 0]
    assert not (beside.pending or behind.pending)
    method.update(behind, 50, (), [RowBlock(keep - 1, rows[keep - 1 : 49])])
    cold = method.open(ids[:50], GREEDY)
    method.update(cold, 50, (), [RowBlock(0, rows[:49])])
    drafts = method.propose([Request(context, 3) for context in (behind, cold)])
    assert drafts[0].ids == drafts[1].ids and len(drafts[0].ids) == 3
    for context in (behind, beside, cold):
        method.close(context)
    loaded.model.pool.check_integrity()
    assert loaded.model.pool.stats().tables == 0


def test_rows_that_the_cache_had_come_again(loaded: LoadedDraft) -> None:
    """An Advance that overtakes the answer to its Open brings all rows of the text once more."""
    method = make_method(loaded)
    ids, rows = [11 * i % 1000 for i in range(50)], random_rows(49, seed=1)
    first = method.open(ids, GREEDY)
    assert method.restore(first, "a target") == (0, 0)
    method.update(first, 50, (), [RowBlock(0, rows)])
    drafts = method.propose([Request(first, 3)])
    again, beside = method.open(ids, GREEDY), method.open(ids[:9], GREEDY)
    assert method.restore(again, "a target")[1] >= 16
    method.update(again, 50, (), [RowBlock(0, rows[:10])])
    assert not again.pending and not method.work()
    method.update(beside, 9, (), [RowBlock(0, rows[:8])])
    assert len(method.propose([Request(beside, 3)])[0].ids) == 3
    method.update(again, 50, (), [RowBlock(10, rows[10:])])
    assert method.propose([Request(again, 3)])[0].ids == drafts[0].ids
    for context in (first, again, beside):
        method.close(context)
    loaded.model.pool.check_integrity()
