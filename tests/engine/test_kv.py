"""The page pool: nothing leaks, a refusal changes nothing, and the cache writes where it says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import OutOfPages
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.pool import PagePool, PageTable, PoolStats


def test_allocate_reserve_free() -> None:
    pool = PagePool(10, 4)
    table = pool.allocate(9)
    assert (len(table.pages), table.capacity, table.length) == (3, 12, 0)
    table.reserve(12)
    assert len(table.pages) == 3
    table.reserve(13)
    assert len(table.pages) == 4
    assert pool.stats() == PoolStats(free=6, total=10, tables=1)
    table.free()
    table.free()
    assert pool.stats() == PoolStats(free=10, total=10, tables=0)
    pool.check_integrity()


def test_truncate_keeps_pages() -> None:
    table = PagePool(4, 4).allocate(10)
    table.length = 10
    table.truncate(3)
    assert (table.length, len(table.pages)) == (3, 3)
    with pytest.raises(AssertionError, match="cannot truncate 3 to 4"):
        table.truncate(4)


def test_out_of_pages_changes_nothing() -> None:
    pool = PagePool(4, 4)
    table = pool.allocate(8)
    before = list(table.pages)
    with pytest.raises(OutOfPages, match="3 KV pages needed, 2 of 4 free") as caught:
        table.reserve(20)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (3, 2, 4)
    with pytest.raises(OutOfPages):
        pool.allocate(9)
    assert table.pages == before
    assert pool.stats() == PoolStats(free=2, total=4, tables=1)
    pool.check_integrity()


def test_integrity_finds_a_shared_page() -> None:
    pool = PagePool(4, 4)
    first, second = pool.allocate(4), pool.allocate(4)
    second.pages[0] = first.pages[0]
    with pytest.raises(AssertionError, match="leaked or is held twice"):
        pool.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("arft"), st.integers(0, 40)), max_size=40))
def test_any_sequence_keeps_the_pool_whole(steps: list[tuple[str, int]]) -> None:
    pool = PagePool(12, 3)
    tables: list[PageTable] = []
    for action, number in steps:
        before = pool.stats()
        try:
            if action == "a":
                tables.append(pool.allocate(number))
            elif tables:
                table = tables[number % len(tables)]
                if action == "r":
                    table.reserve(number)
                    table.length = max(table.length, number)
                elif action == "t":
                    table.truncate(min(number, table.length))
                else:
                    tables.remove(table)
                    table.free()
        except OutOfPages:
            assert pool.stats() == before
        pool.check_integrity()
        assert pool.stats().tables == len(tables)
    for table in tables:
        table.free()
    assert pool.stats().free == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_writes_at_slots(dtype: torch.dtype) -> None:
    geometry = KVGeometry(layers=2, kv_heads=3, head_dim=8, page_tokens=4, dtype=dtype)
    assert geometry.bytes_per_token == 2 * 2 * 3 * 8 * dtype.itemsize
    cache, pool = KVCache(geometry, 6), PagePool(6, 4)
    pool.allocate(5)
    table = pool.allocate(7)
    k, v = torch.randn(2, 7, 3, 8)
    slots = torch.tensor([table.slot(position) for position in range(7)])
    cache.write(1, k, v, slots)
    page, offset = table.pages[1], 2
    assert torch.equal(cache.k[1][page, offset], k[6].to(dtype))
    assert torch.equal(cache.v[1][page, offset], v[6].to(dtype))
    assert not cache.k[0].any()
