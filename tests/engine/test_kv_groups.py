"""KV groups beside the target's: which positions of a table, and which cached pages, hold them."""

from __future__ import annotations

import random

import pytest
import torch

from engine.errors import OutOfPages
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.groups import PagedGroups
from engine.kv.pool import PagePool, PageTable, TableView
from engine.kv.prefix import chain_root

ROOT = chain_root("model")
DRAFT = frozenset({"draft"})
NONE: frozenset[str] = frozenset()


def write(table: PageTable, end: int, groups: frozenset[str] = DRAFT) -> None:
    table.reserve(end)
    table.extend(end, groups)


def test_a_group_is_covered_from_where_it_was_written_without_a_break() -> None:
    table = PagePool(8, 4).allocate(0)
    write(table, 5)
    assert table.covered == {"draft": 0}
    write(table, 6, NONE)  # a step that did not write it
    assert table.covered == {}
    write(table, 11)
    assert table.covered == {"draft": 6}
    table.truncate(9)
    assert table.covered == {"draft": 6}
    table.truncate(6)
    assert table.covered == {}
    write(table, 8)
    assert table.covered == {"draft": 6}


def test_a_pages_entry_lists_its_groups_and_a_missing_one_shortens_the_coverage_only() -> None:
    pool, ids = PagePool(12, 4), list(range(40))
    first = pool.allocate(0)
    write(first, 8)
    write(first, 10, NONE)
    write(first, 20)  # its group is whole again from page 3 on
    first.publish(ROOT, ids, 20)
    second = pool.allocate(0)
    found = second.find(ROOT, ids, 40)
    assert found.groups == (NONE, NONE, NONE, DRAFT, DRAFT)
    # What the first table has now is from 10 on; pages 0 and 1 are published as they are now.
    second.adopt(found, 20)
    assert (second.length, second.covered) == (20, {"draft": 12})
    third = pool.allocate(0)
    third.adopt(second.find(ROOT, ids, 12), 12)
    assert (third.length, third.covered) == (12, {})
    for table in (first, second, third):
        table.free()
    pool.check_integrity()


def test_pages_that_are_published_as_they_fill_keep_their_groups() -> None:
    pool, ids = PagePool(12, 4), list(range(40))
    first = pool.allocate(0)
    for end, groups in ((8, DRAFT), (12, NONE), (20, DRAFT)):
        write(first, end, groups)
        first.publish(ROOT, ids, end)
    second = pool.allocate(0)
    found = second.find(ROOT, ids, 40)
    assert found.groups == (DRAFT, DRAFT, NONE, DRAFT, DRAFT)
    second.adopt(found, 20)
    assert second.covered == {"draft": 12}
    second.truncate(11)
    assert second.covered == {}
    third = pool.allocate(0)
    third.adopt(third.find(ROOT, ids, 8), 8)
    assert third.covered == {"draft": 0}
    pool.check_integrity()


def test_a_fork_has_its_parents_coverage() -> None:
    pool = PagePool(8, 4)
    parent = pool.allocate(0)
    write(parent, 3, NONE)
    write(parent, 14)
    child = pool.allocate(0)
    child.adopt(parent.shared(), 11)
    assert child.covered == {"draft": 4}  # whole pages only: page 0 has a gap
    child.reserve(13)
    assert [c[0] for c in pool.take_copies()] == [parent.pages[2]]
    child.extend(13, DRAFT)
    assert child.covered == {"draft": 4} and parent.covered == {"draft": 3}


def test_a_view_counts_from_its_page_on() -> None:
    pool = PagePool(8, 4)
    table = pool.allocate(0)
    write(table, 11)
    view = TableView(table, 2, 4)
    assert (view.length, view.pages) == (3, table.pages[2:])
    view.reserve(9)
    assert len(table.pages) == 5 and view.pages == table.pages[2:]
    assert [view.slot(i) for i in range(9)] == [table.slot(8 + i) for i in range(9)]
    with pytest.raises(OutOfPages):
        view.reserve(40)


def test_trim_keeps_the_pages_it_is_told_to() -> None:
    pool = PagePool(8, 4)
    table = pool.allocate(12)
    table.extend(5, NONE)
    table.reserve(24)
    table.trim(3)
    assert len(table.pages) == 3
    table.trim(1)
    assert len(table.pages) == 2  # never what is in use
    pool.check_integrity()


def test_a_copied_page_is_copied_in_every_group() -> None:
    pool = PagePool(6, 4)
    shapes = {"target": KVGeometry(2, 2, 4, 4, torch.float32)}
    shapes["draft"] = KVGeometry(1, 1, 6, 4, torch.bfloat16)
    caches = {name: KVCache(shape, 7) for name, shape in shapes.items()}
    memory = PagedGroups(pool, caches)
    parent = pool.allocate(0)
    write(parent, 6)
    for cache in caches.values():
        for tensor in (*cache.k, *cache.v):
            tensor.copy_(torch.randn(tensor.shape))
    child = pool.allocate(0)
    child.adopt(parent.shared(), 6)
    child.reserve(7)
    memory.copy_pages()
    old, new = parent.pages[1], child.pages[1]
    assert old != new
    for cache in caches.values():
        for tensor in (*cache.k, *cache.v):
            assert torch.equal(tensor[old], tensor[new])
    with pytest.raises(TypeError):
        memory.caches["other"] = caches["draft"]  # type: ignore[index]


def test_coverage_is_what_was_written_whatever_sessions_do() -> None:
    """Against a memory that keeps, slot by slot, whether the group's value is that of the text."""
    chance, pool = random.Random(3), PagePool(14, 3)
    draft: list[int | None] = [None] * (14 * 3)
    tables: list[tuple[PageTable, list[int]]] = []

    def copy() -> None:
        for source, to in pool.take_copies():
            draft[to * 3 : to * 3 + 3] = draft[source * 3 : source * 3 + 3]

    checked = 0
    for _ in range(4000):
        act = chance.random()
        if act < 0.2 and len(tables) < 5:
            ids = [chance.randrange(2) for _ in range(15)]
            table = pool.allocate(0)
            found = table.find(ROOT, ids, 15)
            table.adopt(found, min(15, len(found.pages) * 3))
            tables.append((table, ids[: table.length]))
        elif act < 0.3 and tables and len(tables) < 5:
            parent, ids = chance.choice(tables)
            length = chance.randint(0, parent.length)
            table = pool.allocate(0)
            table.adopt(parent.shared(), length)
            tables.append((table, ids[:length]))
        elif act < 0.4 and tables:
            table, _ = tables.pop(chance.randrange(len(tables)))
            table.free()
        elif act < 0.5 and tables:
            table, ids = chance.choice(tables)
            table.truncate(chance.randint(0, table.length))
            del ids[table.length :]
        elif tables:
            table, ids = chance.choice(tables)
            more = [chance.randrange(2) for _ in range(chance.randint(1, 4))]
            start, written = len(ids), chance.random() < 0.7
            try:
                table.reserve(start + len(more))
            except OutOfPages:
                table.free()
                tables = [pair for pair in tables if pair[0] is not table]
                continue
            copy()
            ids += more
            for position in range(start, len(ids)):
                # The value of a position tells everything before it.
                draft[table.slot(position)] = hash(tuple(ids[: position + 1])) if written else None
            table.extend(len(ids), DRAFT if written else NONE)
            if chance.random() < 0.5:
                table.publish(ROOT, ids, len(ids))
        copy()
        for table, ids in tables:
            for position in range(table.covered.get("draft", table.length), table.length):
                assert draft[table.slot(position)] == hash(tuple(ids[: position + 1]))
                checked += 1
        pool.check_integrity()
    assert checked > 1000
