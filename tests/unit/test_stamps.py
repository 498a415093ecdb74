"""What of a round lies outside its two forwards, from when they began and ended."""

from __future__ import annotations

import pytest

from tests.load.stamps import Stamps, outside

MS = 1_000_000


def test_only_gaps_with_a_proposal_count() -> None:
    steps = [(0, MS), (5 * MS, 6 * MS), (6 * MS, 7 * MS), (12 * MS, 13 * MS)]
    proposals = [(-MS, 0), (2 * MS, 4 * MS), (8 * MS, 9 * MS)]
    found = outside(steps, proposals)
    assert found["rounds with a proposal"] == 2
    assert found["step to proposal ms, p50"] == pytest.approx(1)
    assert found["proposal to step ms, p50"] == pytest.approx(2)
    assert found["outside ms, p50"] == pytest.approx(3)
    assert not outside(steps, []) and not outside([], proposals)


def test_the_last_begin_counts() -> None:
    stamps = Stamps()
    stamps.begin()
    stamps.begin()
    stamps.end()
    ((began, ended),) = stamps.take()
    assert began <= ended and not stamps.take()
