"""Pages of KV memory: who holds which. Pure Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import OutOfPages


@dataclass(frozen=True, slots=True)
class PoolStats:
    free: int
    total: int
    tables: int


class PageTable:
    """The pages of one session, in order. `length` is how many positions hold valid KV."""

    __slots__ = ("_pool", "length", "pages")

    def __init__(self, pool: PagePool, pages: list[int]) -> None:
        self._pool = pool
        self.pages = pages
        self.length = 0

    @property
    def capacity(self) -> int:
        """Positions that fit into the pages held."""
        return len(self.pages) * self._pool.page_tokens

    def reserve(self, length: int) -> None:
        """Makes room for `length` positions. Raises OutOfPages and changes nothing when the pool
        is short."""
        missing = self._pool.pages_for(length) - len(self.pages)
        if missing > 0:
            self.pages.extend(self._pool.take(missing))

    def truncate(self, length: int) -> None:
        """Forgets positions from `length` on; the pages stay reserved."""
        assert length <= self.length, f"cannot truncate {self.length} to {length}"
        self.length = length

    def slot(self, position: int) -> int:
        """Index of `position` in the flat cache."""
        page, offset = divmod(position, self._pool.page_tokens)
        return self.pages[page] * self._pool.page_tokens + offset

    def free(self) -> None:
        """Gives every page back. Doing it twice is harmless."""
        self._pool.release(self)


class PagePool:
    """A fixed number of pages and the tables that hold them."""

    def __init__(self, page_count: int, page_tokens: int) -> None:
        assert page_count > 0 and page_tokens > 0
        self.page_count, self.page_tokens = page_count, page_tokens
        self._free = list(range(page_count - 1, -1, -1))
        self._tables: set[PageTable] = set()

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_tokens)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfPages(count, len(self._free), self.page_count)
        return [self._free.pop() for _ in range(count)]

    def allocate(self, length: int) -> PageTable:
        """A new table with room for `length` positions. Raises OutOfPages."""
        table = PageTable(self, self.take(self.pages_for(length)))
        self._tables.add(table)
        return table

    def release(self, table: PageTable) -> None:
        if table in self._tables:
            self._tables.remove(table)
            self._free.extend(reversed(table.pages))
            table.pages, table.length = [], 0

    def stats(self) -> PoolStats:
        return PoolStats(free=len(self._free), total=self.page_count, tables=len(self._tables))

    def check_integrity(self) -> None:
        """Every page is free or held by exactly one table, and no table is longer than its
        pages."""
        held = [page for table in self._tables for page in table.pages]
        everything = list(range(self.page_count))
        assert sorted(held + self._free) == everything, "a page leaked or is held twice"
        for table in self._tables:
            length, capacity = table.length, table.capacity
            assert length <= capacity, f"length {length} beyond capacity {capacity}"
