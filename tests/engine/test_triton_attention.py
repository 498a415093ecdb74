"""TRITON_ATTN under the interpreter, and how its work is shared out, in numpy."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from engine.attention.base import Span
from engine.attention.kernels.schedule import HEADER, RECORD, Schedule, Tiles, tiles_for
from engine.kv.pool import PagePool
from tests.engine import interpreted

SMALL = Tiles(16, 16, 8, 4, 2)
CHECKS = [
    "check_all_modes_match_fp64",
    "check_dtypes_and_head_sizes",
    "check_rows_stand_alone",
    "check_few_rows_are_tried",
    "check_words_are_refilled",
    "check_lse_over_shards",
    "check_strided_queries",
    "check_windows_beyond_the_block",
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return interpreted.run("tests.engine.attention_checks")


@pytest.mark.timeout(300)
def test_every_check_is_listed(outcomes: dict[str, str]) -> None:
    assert list(outcomes) == CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_kernels(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]


def random_spans(rng: random.Random, count: int, width: int, longest: int) -> list[Span]:
    spans, first = [], 0
    for _ in range(count):
        rows = width * (rng.random() > 0.2) if width else rng.choice([0, 1, 1, 5, 40, 300])
        end = rng.randint(rows, longest)
        table = PagePool(longest, 16).allocate(end)
        rng.shuffle(table.pages)
        spans.append(Span(table, end - rows, first, rows))
        first += rows
    return spans


@pytest.mark.parametrize("seed", range(40))
def test_every_key_is_shared_out_once(seed: int) -> None:
    """Items cover each tile's keys once; partial results, records and flags stay within what was
    promised for the capacities, and the table holds the pages."""
    rng = random.Random(seed)
    group = rng.choice([1, 3, 4, 8])
    tiles = rng.choice([SMALL, tiles_for(group, 64, True)])
    schedule = Schedule(tiles, group, rng.choice([4, 40, 1000]), rng.choice([3, 50, 5000]))
    width, capacity = rng.choice([0, 1, 8]), rng.randint(1, 12)
    longest = rng.choice([100, 1000, 5000])
    spans = random_spans(rng, rng.randint(0, capacity), width, max(longest, 300))
    pages = max((len(s.table.pages) for s in spans), default=1) + rng.randint(0, 3)
    rows = width * capacity if width else sum(s.row_count for s in spans)
    words = np.full(schedule.words(capacity, rows, pages * 16, pages), -7, dtype=np.int32)
    schedule.fill(words, spans, capacity, pages, 16)

    records = schedule.records(len(words), capacity, pages)
    at, (count, combined) = HEADER + capacity * pages, words[:2].tolist()
    assert 0 <= count + combined <= records and records
    items = words[at : at + count * RECORD].reshape(-1, RECORD).tolist()
    ended = words[len(words) - combined * RECORD :].reshape(-1, RECORD)[::-1].tolist()
    covered: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for index, tile, first, last, slot, start, row_count, first_row in items:
        span = spans[index]
        assert (start, row_count, first_row) == (span.start, span.row_count, span.first_row)
        covered.setdefault((index, tile), []).append((first, last, slot))
    wanted = {(i, t) for i, s in enumerate(spans) for t in range(schedule.tiles_of(s.row_count))}
    assert set(covered) == wanted
    chunk = tiles.keys * tiles.chunk
    by_base = {(record[0], record[1]): record for record in ended}
    slots: list[int] = []
    for (index, tile), parts in covered.items():
        span, parts = spans[index], sorted(parts)
        end = span.start + span.row_count
        assert parts[0][0] == 0 and parts[-1][1] >= end > parts[-1][0]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        if len(parts) == 1:
            assert parts[0][2] == -1
            whole = schedule.whole(capacity, width, pages * 16, records)
            assert whole or end <= chunk, "more than one chunk without the flag"
            continue
        base = parts[0][2]
        assert [slot for _, _, slot in parts] == list(range(base, base + len(parts)))
        record = by_base.pop((base, tile))
        assert record[2:6] == [chunk // parts[0][1], span.start, span.row_count, span.first_row]
        assert parts[0][1] in (tiles.keys, tiles.keys * tiles.bundle, chunk)
        slots += [slot for _, _, slot in parts]
    assert not by_base and sorted(slots) == list(range(len(slots)))
    assert len(slots) <= min(records, schedule.slots)
    for index, span in enumerate(spans):
        held = -(-(span.start + span.row_count) // 16)
        row = words[HEADER + index * pages :][:held].tolist()
        assert row == span.table.pages[:held]


@pytest.mark.parametrize("seed", range(40))
def test_one_span_is_shared_out_as_among_many(seed: int) -> None:
    """The short way of a single span gives the words of the general one."""
    rng = random.Random(seed)
    schedule = Schedule(
        rng.choice([SMALL, tiles_for(3, 64, True)]),
        rng.choice([1, 3, 8]),
        rng.choice([4, 40, 1000]),
        rng.choice([3, 50, 5000]),
    )
    rows = rng.choice([1, 1, 2, 8, 100, 900])
    end = rng.choice([0, *[rng.randint(rows, rng.choice([1000, 20000])) for _ in range(6)]])
    span = Span(PagePool(end + 1, 16).allocate(end), end - rows, rng.randint(0, 9), rows)
    pages, capacity = len(span.table.pages) + rng.randint(1, 2), rng.randint(1, 3)
    count = schedule.words(capacity, rows, pages * 16, pages)
    one, many = np.zeros(count, np.int32), np.zeros(count, np.int32)
    schedule.fill_one(one, span, capacity, pages, 16)
    schedule.fill_many(many, [span], capacity, pages, 16)
    assert one.tolist() == many.tolist()
