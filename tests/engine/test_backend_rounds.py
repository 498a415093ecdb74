"""Public bugs that show only over many rounds: stale KV, holes, growth, ranks that disagree."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.api import Item, Sampling
from engine.kv.pool import PagePool
from engine.models.dflash import Block
from tests.engine import test_dflash as draft
from tests.engine.tiny import KERNELS, VOCAB, load_tiny, random_ids, write_llama

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_llama(directory)
    return directory


@pytest.mark.parametrize("kernels", KERNELS)
def test_rejected_rows_leave_nothing_behind(target: Path, kernels: str) -> None:
    """AB-14: KV after rounds with random accept patterns equals KV after plain decoding."""
    engine, prompt, chance = load_tiny(target, kernels), random_ids(11), random.Random(3)
    plain = engine.allocate(80)
    ids = prompt + list(engine.step([Item(plain, prompt, 0, 1, GREEDY)])[0].tokens)
    while len(ids) < 64:
        item = Item(plain, ids[-1:], len(ids) - 1, 1, GREEDY)
        ids += engine.step([item])[0].tokens
    table = engine.allocate(80)
    y = prompt + list(engine.step([Item(table, prompt, 0, 1, GREEDY)])[0].tokens)
    while len(y) < 56:
        right = chance.randrange(5)
        drafts = ids[len(y) : len(y) + right]
        drafts += [(token + 1) % VOCAB for token in ids[len(y) + right : len(y) + 5]]
        item = Item(table, [y[-1], *drafts], len(y) - 1, 1 + len(drafts), GREEDY)
        result = engine.step([item])[0]
        assert result.accepted == right
        y += result.tokens
    assert y == ids[: len(y)] and table.length == len(y) - 1
    cache = engine._cache
    slots = [[t.slot(at) for at in range(table.length)] for t in (plain, table)]
    for data in (*cache.k, *cache.v):
        flat = data.flatten(0, 1)
        torch.testing.assert_close(flat[slots[1]], flat[slots[0]], atol=2e-5, rtol=1e-4)
        unused = set(range(cache.page_count - 1)) - {*plain.pages, *table.pages}
        assert not data[sorted(unused)].any()
    for one in (plain, table):
        one.free()
    engine.check_integrity()


@pytest.mark.parametrize("kernels", KERNELS)
def test_rounds_without_a_proposal_leave_no_hole(
    tmp_path: Path, target: Path, kernels: str
) -> None:
    """AB-12: after rounds with K = 0 the draft's logits are those of a run that never had one."""
    draft.write_draft(tmp_path)
    model = draft.load(tmp_path, target, kernels)
    taps, edges = draft.rows(30), [0, 9, 10, 13, 14, 15, 30]
    always, sometimes = model.pool.allocate(0), model.pool.allocate(0)
    for round_, (start, end) in enumerate(pairwise(edges)):
        for table, proposes in ((always, True), (sometimes, round_ % 3 == 0)):
            model.write_context(table, start, taps[start:end])
            if proposes:
                model.propose_logits([Block(table, 5, end)])
    ends = [model.propose_logits([Block(table, 7, 30)]) for table in (always, sometimes)]
    torch.testing.assert_close(ends[0], ends[1], atol=1e-5, rtol=1e-5)
    at_once = draft.context(model, taps)
    torch.testing.assert_close(
        model.propose_logits([Block(at_once, 7, 30)]), ends[0], atol=1e-5, rtol=1e-5
    )


def test_twenty_thousand_rounds_of_short_requests() -> None:
    """AB-13: eight requests that come and go: pages stay within bounds, and none is lost."""
    chance, pool = random.Random(1), PagePool(64, 16)
    tables = [pool.allocate(0) for _ in range(8)]
    for round_ in range(20_000):
        at = round_ % 8
        table = tables[at]
        if table.length > 90:
            table.free()
            table = tables[at] = pool.allocate(0)
        end = table.length + 8
        table.reserve(end)
        assert all(0 <= page < 64 for page in table.pages)
        assert 0 <= table.slot(end - 1) < 64 * 16
        table.truncate(table.length)
        table.length += 1 + chance.randrange(8)
        if round_ % 1000 == 0:
            pool.check_integrity()
    for table in tables:
        table.free()
    pool.check_integrity()
    assert pool.stats().free == pool.stats().total


def test_ranks_near_the_limit_clip_alike(target: Path) -> None:
    """AB-25: two engines with other lengths beside them allow the same block at the same place."""
    first, second = (load_tiny(target, max_length=64) for _ in range(2))
    first.allocate(16)
    second.step([Item(second.allocate(8), random_ids(40), 0, 1, GREEDY)])
    for start in range(50, 64):
        limits = {
            engine.block_limit(start, exact) for engine in (first, second) for exact in (0, 1)
        }
        assert max(limits) == 64 - start
        for exact in (False, True):
            assert first.block_limit(start, exact) == second.block_limit(start, exact)
