"""Words of steps of a fixed shape: found one by one or all at once, they are the same."""

from __future__ import annotations

import random

import pytest
import torch

from engine import block_words
from engine.api import Item, Sampling
from engine.attention.mode import LayerMode
from engine.attention.triton_attn import TritonAttention
from engine.batch import slots_of
from engine.block_words import Blocks, BlockWords
from engine.draw_rows import DrawRows
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.pool import PagePool, PageTable

PAGE, PAGES, SCRATCH = 16, 200, 199 * 16
SAMPLED = Sampling(temperature=0.7, seed=2**63 + 5, top_k=9, choice=1)
KINDS = (Sampling(temperature=0.0), SAMPLED, Sampling(temperature=1.3, min_p=0.1, top_p=0.8))


def words(batch: int, width: int) -> BlockWords:
    cache = KVCache(KVGeometry(1, 1, 16, PAGE, torch.bfloat16), PAGES, "cpu")
    backend = TritonAttention(cache, 1, [LayerMode()], torch.bfloat16)
    return BlockWords(backend, Blocks(batch, width), 8, SCRATCH)


def tables(rng: random.Random, count: int) -> list[PageTable]:
    pool = PagePool(PAGES - 1, PAGE)
    rng.shuffle(pool._free)
    return [pool.allocate(8 * PAGE) for _ in range(count)]


def items(rng: random.Random, held: list[PageTable], width: int) -> list[Item]:
    made = []
    for table in held:
        count, kind = rng.randint(1, width), rng.choice(KINDS)
        ids, start = [rng.randrange(1000) for _ in range(count)], rng.randint(0, 7 * PAGE)
        made.append(Item(table, ids, start, count, kind))
    return made


@pytest.mark.parametrize("width", [1, 8, 16])
def test_all_at_once_is_what_one_by_one_gives(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(width)
    held, many, few = tables(rng, 12), words(16, width), words(16, width)
    for count in (12, 5, 12, 7):  # what a larger step left behind must not show
        step = items(rng, held[:count], width)
        many.fill(step)
        with monkeypatch.context() as patch:
            patch.setattr(block_words, "_MANY", 1000)
            few.fill(step)
        many.send()
        few.send()
        for name in ("ids", "positions", "slots"):
            assert many.device(name).equal(few.device(name)), name
        for at, item in enumerate(step):
            rows = slice(at * width, at * width + len(item.ids))
            assert many.device("ids")[rows].tolist() == item.ids
            own = slots_of(item.table.pages, PAGE, item.start, len(item.ids))
            assert own == [item.table.slot(item.start + i) for i in range(len(item.ids))]
            assert many.device("slots")[rows].tolist() == own
        assert set(many.device("slots")[count * width :].tolist()) <= {SCRATCH}


def test_rows_draw_as_their_items_say_step_after_step() -> None:
    rng, width = random.Random(3), 4
    held, own = tables(rng, 6), words(8, width)
    for kinds in ([SAMPLED] * 6, [SAMPLED] * 6, list(KINDS) * 2, [KINDS[0]] * 6, [SAMPLED] * 2):
        step = [
            item._replace(sampling=kind)
            for item, kind in zip(items(rng, held, width), kinds, strict=False)
        ]
        own.fill(step)
        own.send()
        how = own.draws(filtered=True)
        assert how.min_p is not None and how.top_k is not None and how.top_p is not None
        for at, item in enumerate(step):
            for row in range(len(item.ids)):
                r, s = at * width + row, item.sampling
                assert float(how.temperature[r]) == pytest.approx(s.temperature)
                if s.temperature > 0:
                    assert int(how.index[r]) == item.start + row + 1
                    assert int(how.seed[r]) % 2**64 == s.seed and int(how.choice[r]) == s.choice
                    assert int(how.top_k[r]) == s.top_k
                    assert float(how.min_p[r]) == pytest.approx(s.min_p)
                    assert float(how.top_p[r]) == pytest.approx(s.top_p)
        assert not how.temperature[len(step) * width :].any()
    assert isinstance(how, DrawRows)
