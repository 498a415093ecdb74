"""Shared pages: whatever sessions do, each reads its own tokens, and published pages never change.

The model is a memory of token ids, written as an engine writes keys and values.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import OutOfPages
from engine.kv.pool import PagePool, PageTable, PoolStats
from engine.kv.prefix import Prefix, block_name, chain_root

ROOT = chain_root("model", "numerics")


class Memory:
    """What an engine keeps in its pages."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[list[int]] = [[-1] * pool.page_tokens for _ in range(pool.page_count)]

    def append(self, table: PageTable, ids: list[int]) -> None:
        """Raises OutOfPages."""
        table.reserve(table.length + len(ids))
        for source, to in self.pool.take_copies():
            self.pages[to] = list(self.pages[source])
        for token in ids:
            page, offset = divmod(table.slot(table.length), self.pool.page_tokens)
            self.pages[page][offset] = token
            table.length += 1

    def read(self, table: PageTable) -> list[int]:
        slots = [divmod(table.slot(i), self.pool.page_tokens) for i in range(table.length)]
        return [self.pages[page][offset] for page, offset in slots]


class PoolMachine(RuleBasedStateMachine):
    """Random sessions over few ids, so that prefixes meet."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9, 3)
        self.memory = Memory(self.pool)
        self.sessions: list[tuple[PageTable, list[int]]] = []
        self.published: dict[bytes, list[int]] = {}

    def pick(self, number: int) -> tuple[PageTable, list[int]]:
        return self.sessions[number % len(self.sessions)]

    @rule(ids=st.lists(st.integers(0, 1), max_size=14), keep=st.integers(0, 14))
    def open(self, ids: list[int], keep: int) -> None:
        """A hit may be shortened to any length, also in the middle of a page."""
        table = self.pool.allocate(0)
        prefix = table.find(ROOT, ids, len(ids))
        found = len(prefix.pages) * self.pool.page_tokens
        assert found <= len(ids)
        start = min(found, keep)
        free = self.pool.stats().free
        needed = table.lacking(prefix, start, len(ids))
        table.adopt(prefix, start)
        self.sessions.append((table, ids[:start]))
        try:
            self.memory.append(table, ids[start:])
        except OutOfPages:
            assert needed > free
            return
        assert needed <= free or start % self.pool.page_tokens
        self.sessions[-1] = (table, list(ids))

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 9), ids=st.lists(st.integers(0, 1), max_size=5))
    def append(self, number: int, ids: list[int]) -> None:
        table, known = self.pick(number)
        before = self.pool.stats()
        try:
            self.memory.append(table, ids)
        except OutOfPages:
            assert self.pool.stats() == before
        else:
            known += ids

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 9))
    def publish(self, number: int) -> None:
        table, known = self.pick(number)
        table.publish(ROOT, known, len(known))

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 9), length=st.integers(0, 20))
    def truncate(self, number: int, length: int) -> None:
        table, known = self.pick(number)
        length = min(length, table.length)
        table.truncate(length)
        del known[length:]

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 9), length=st.integers(0, 20))
    def fork(self, number: int, length: int) -> None:
        parent, known = self.pick(number)
        length = min(length, len(known))
        table = self.pool.allocate(0)
        table.adopt(parent.shared(), length)
        self.sessions.append((table, known[:length]))

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 9))
    def trim(self, number: int) -> None:
        self.pick(number)[0].trim()

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 9))
    def free(self, number: int) -> None:
        table, _ = self.sessions.pop(number % len(self.sessions))
        table.free()
        table.free()

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity()
        for table, known in self.sessions:
            assert self.memory.read(table) == known
        size = self.pool.page_tokens
        for table, known in self.sessions:
            name = ROOT
            for at, named in enumerate(table.names):
                name = block_name(name, known[at * size : (at + 1) * size])
                assert name == named

    @invariant()
    def published_pages_hold_what_they_are_named_for(self) -> None:
        for page in range(self.pool.page_count):
            name = self.pool.index.name_of(page)
            if name is not None:
                content = self.memory.pages[page]
                assert self.published.setdefault(name, list(content)) == content

    def teardown(self) -> None:
        for table, _ in self.sessions:
            table.free()
        self.pool.check_integrity()
        stats = self.pool.stats()
        assert (stats.free, stats.tables, stats.cached) == (9, 0, len(self.pool.index))


@pytest.mark.parametrize("seed", range(20))
def test_a_long_walk(seed: int) -> None:
    """The same machine, many steps deep: what needs a published page, a fork and a full pool."""
    dice, machine = random.Random(seed), PoolMachine()
    for _ in range(300):
        action = dice.choice(["open", "append", "append", "publish", "truncate", "fork", "trim"])
        number, ids = dice.randrange(10), [dice.randrange(2) for _ in range(dice.randrange(8))]
        if action == "open":
            machine.open(ids + ids, dice.randrange(15))
        elif action == "append" and machine.sessions:
            machine.append(number, ids[:5])
        elif action in ("publish", "trim") and machine.sessions:
            getattr(machine, action)(number)
        elif machine.sessions:
            getattr(machine, action)(number, dice.randrange(20))
        if len(machine.sessions) > 5:
            machine.free(number)
        machine.whole()
        machine.published_pages_hold_what_they_are_named_for()
    machine.teardown()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def filled(pool: PagePool, memory: Memory, ids: list[int]) -> PageTable:
    table = pool.allocate(0)
    memory.append(table, ids)
    table.publish(ROOT, ids, len(ids))
    return table


def test_a_hit_is_whole_blocks_of_the_same_beginning() -> None:
    pool = PagePool(20, 4)
    memory = Memory(pool)
    ids = list(range(18))
    filled(pool, memory, ids).free()
    assert pool.stats() == PoolStats(free=20, total=20, tables=0, cached=4)
    table = pool.allocate(0)
    assert len(table.find(ROOT, ids, 18).pages) == 4
    assert len(table.find(ROOT, ids, 15).pages) == 3
    assert len(table.find(ROOT, [*ids[:9], 99, *ids[10:]], 18).pages) == 2
    assert table.find(ROOT, [99, *ids[1:]], 18) == Prefix()
    # The same block behind another one is another block.
    assert table.find(ROOT, ids[4:], 14) == Prefix()
    assert table.find(chain_root("model", "other numerics"), ids, 18) == Prefix()


def test_truncating_into_a_published_page_copies_it() -> None:
    pool = PagePool(8, 4)
    memory = Memory(pool)
    table = filled(pool, memory, list(range(8)))
    page = table.pages[0]
    table.truncate(2)
    memory.append(table, [50, 51])
    assert table.pages[0] != page and memory.read(table) == [0, 1, 50, 51]
    assert memory.pages[page] == [0, 1, 2, 3]
    other = pool.allocate(0)
    other.adopt(other.find(ROOT, list(range(8)), 8), 8)
    assert memory.read(other) == list(range(8))


def test_a_table_alone_in_a_full_pool_can_still_write() -> None:
    """Nothing is left to copy into: its own page leaves the cache instead."""
    pool = PagePool(2, 4)
    memory = Memory(pool)
    table = filled(pool, memory, list(range(8)))
    table.truncate(1)
    memory.append(table, [9] * 7)
    assert memory.read(table) == [0, *[9] * 7] and not len(pool.index)
    pool.check_integrity()


def test_the_longest_unused_pages_go_first_and_ends_before_beginnings() -> None:
    pool = PagePool(4, 2)
    memory = Memory(pool)
    old, new = [1, 1, 1, 1], [2, 2, 2, 2]
    first, second = filled(pool, memory, old), filled(pool, memory, new)
    first.free()
    second.free()
    assert pool.stats().cached == 4

    def hits(ids: list[int]) -> int:
        table = pool.allocate(0)
        found = len(table.find(ROOT, ids, 4).pages)
        table.free()
        return found

    held = pool.allocate(2)
    assert (hits(old), hits(new)) == (1, 2)
    again = pool.allocate(2)
    assert (hits(old), hits(new)) == (0, 2)
    third = pool.allocate(2)
    assert (hits(old), hits(new)) == (0, 1)
    for table in (held, again, third):
        table.free()
    pool.check_integrity()


def test_copies_are_made_in_order() -> None:
    """The page copied from may be given away and copied into before the engine gets to it."""
    pool = PagePool(4, 2)
    memory = Memory(pool)
    a = filled(pool, memory, [1, 2])
    b = pool.allocate(0)
    b.adopt(a.shared(), 1)
    b.reserve(2)  # a's page -> a fresh one
    a.free()
    for source, to in pool.take_copies():
        memory.pages[to] = list(memory.pages[source])
    memory.append(b, [7])
    assert memory.read(b) == [1, 7]


@pytest.mark.parametrize("damage", ["count", "alias", "free", "name"])
def test_integrity_finds_damage(damage: str) -> None:
    pool = PagePool(6, 2)
    memory = Memory(pool)
    table = filled(pool, memory, [1, 2, 3, 4])
    if damage == "count":
        pool.hold([table.pages[0]])
    elif damage == "alias":
        table.pages.reverse()
        pool.allocate(0).adopt(Prefix(tuple(reversed(table.pages))), 4)
    elif damage == "free":
        pool._free.append(table.pages[0])
    else:
        table.names[0] = b"another"
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_names_do_not_collide() -> None:
    """Ids are hashed with their width and the chain: no two beginnings share a name."""
    names = {block_name(ROOT, ids) for ids in ([1, 2], [2, 1], [258, 0], [2, 256], [513, 0])}
    names |= {block_name(block_name(ROOT, [1]), [2]), block_name(ROOT, [1])}
    assert len(names) == 7 and chain_root("ab", "c") != chain_root("a", "bc")
