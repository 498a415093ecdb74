"""Parts of attention: which size a step takes, and that bits do not depend on it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.attention.base import Span
from engine.attention.kernels.schedule import HEADER, Schedule, Tiles, tiles_for
from engine.kv.pool import PagePool
from tests.engine import interpreted

CHECKS = ["check_tiles_of_few_rows", "check_parts_of_every_size"]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return interpreted.run("tests.engine.attention_part_checks")


@pytest.mark.timeout(300)
def test_every_check_is_listed(outcomes: dict[str, str]) -> None:
    assert list(outcomes) == CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_kernels(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]


@pytest.mark.parametrize("width", [1, 8])
def test_size_of_parts_on_an_h200(width: int) -> None:
    """Keys of a part of a model of 32 query heads over 8 KV heads of 128, by context, for 1, 8 and
    32 sessions: small ones where there would be too few programs, large ones where enough."""
    wanted = {
        1024: [64, 256, 1024],
        4096: [256, 1024, 1024],
        8192: [256, 1024, 1024],
        32768: [1024, 1024, 1024],
    }
    tiles = tiles_for(4, 128, half=True)
    schedule = Schedule(tiles, 4, tiles.programs * 132 // 8, 2000)
    found = {context: [keys_of_parts(schedule, context, width, n) for n in (1, 8, 32)]
             for context in wanted}  # fmt: skip
    assert found == wanted


def test_interpreted_runs_see_every_size() -> None:
    tiles = Tiles(16, 16, 8, 4, 2)
    schedule = Schedule(tiles, 3, tiles.programs * 3, 5000)
    assert [keys_of_parts(schedule, end, 1, 1) for end in (80, 200, 1600)] == [16, 32, 128]


def keys_of_parts(schedule: Schedule, context: int, width: int, batch: int) -> int:
    pages = -(-context // 16)
    spans = [
        Span(PagePool(pages, 16).allocate(context), context - width, n * width, width)
        for n in range(batch)
    ]
    words = np.zeros(schedule.words(batch, batch * width, context, pages), np.int32)
    schedule.fill(words, spans, batch, pages, 16)
    return int(words[HEADER + batch * pages + 3])
