"""Pages of KV memory: who holds which, who shares which. Pure Python, no torch.

A page may be written by the one table that holds it, as long as it is not published. Everything
else is copied first: `reserve` notes the copy, and the engine, which owns the tensors, makes it
before the next step writes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.errors import OutOfPages
from engine.kv.prefix import Prefix, PrefixIndex, block_name


@dataclass(frozen=True, slots=True)
class PoolStats:
    """`free` counts the `cached` pages too: published, held by no table, there for the taking."""

    free: int
    total: int
    tables: int
    cached: int = 0


class PageTable:
    """The pages of one session, in order. `length` is how many positions hold valid KV.

    `names` are those of its leading full pages, as far as they were looked up or published.
    `covered` says of each KV group beside the target's from which position up to `length` it is
    written; a group that is not in it is written nowhere that counts.
    """

    __slots__ = ("_pool", "covered", "length", "names", "pages")

    def __init__(self, pool: PagePool, pages: list[int]) -> None:
        self._pool = pool
        self.pages = pages
        self.names: list[bytes] = []
        self.covered: dict[str, int] = {}
        self.length = 0

    @property
    def capacity(self) -> int:
        """Positions that fit into the pages held."""
        return len(self.pages) * self._pool.page_tokens

    def reserve(self, length: int) -> None:
        """Makes room for `length` positions, and those from `self.length` on writable.

        Raises OutOfPages and changes nothing when the pool is short.
        """
        self._pool.make_writable(self, length)

    def truncate(self, length: int) -> None:
        """Forgets positions from `length` on; the pages stay reserved."""
        if length == self.length:
            return
        assert length < self.length, f"cannot truncate {self.length} to {length}"
        self.length = length
        del self.names[length // self._pool.page_tokens :]
        self.covered = {group: at for group, at in self.covered.items() if at < length}

    def extend(self, length: int, groups: Collection[str]) -> None:
        """Positions up to `length` are written now, in the target's group and in `groups`."""
        begun = self.length
        self.length = length
        self.covered = {group: self.covered.get(group, begun) for group in groups}

    def trim(self, pages: int = 0) -> None:
        """Gives back the pages behind `length`, but keeps the first `pages`."""
        kept = max(pages, self._pool.pages_for(self.length))
        self._pool.drop(self.pages[kept:])
        del self.pages[kept:]

    def find(self, root: bytes, ids: Sequence[int], limit: int) -> Prefix:
        """The longest published beginning of `ids` that has at most `limit` tokens."""
        return self._pool.index.find(root, ids, limit, self._pool.page_tokens)

    def adopt(self, prefix: Prefix, length: int) -> None:
        """Begins an empty table with the first `length` positions of `prefix`, which are shared."""
        assert not self.pages and not self.length
        self.pages = list(prefix.pages[: self._pool.pages_for(length)])
        assert length <= self.capacity
        self._pool.hold(self.pages)
        self.names = list(prefix.names[: length // self._pool.page_tokens])
        self.length = length
        self.covered = _covered(prefix.groups[: len(self.pages)], self._pool.page_tokens)

    def lacking(self, prefix: Prefix, shared: int, length: int) -> int:
        """Free pages that adopting `shared` positions and a `reserve(length)` would take."""
        whole = prefix.pages[: shared // self._pool.page_tokens]
        return self._pool.pages_for(length) - sum(self._pool.held(page) for page in whole)

    def shared(self) -> Prefix:
        """What another table may adopt."""
        groups = tuple(self._groups(page) for page in range(len(self.pages)))
        return Prefix(tuple(self.pages), tuple(self.names), groups)

    def _groups(self, page: int) -> frozenset[str]:
        """Those that are written in all of a page, as far as the table reaches."""
        first = page * self._pool.page_tokens
        return frozenset(group for group, at in self.covered.items() if at <= first)

    def publish(self, root: bytes, ids: Sequence[int], end: int) -> None:
        """Lets others find the full pages before `end`; from now on they are read-only.

        `ids` are the tokens whose KV the table holds.
        """
        assert end <= self.length
        size = self._pool.page_tokens
        if end < size * (len(self.names) + 1):
            return
        for page in range(len(self.names), end // size):
            parent = self.names[-1] if self.names else root
            name = block_name(parent, ids[page * size : (page + 1) * size])
            self.names.append(name)
            self._pool.index.add(name, self.pages[page], self._groups(page))

    def slot(self, position: int) -> int:
        """Index of `position` in the flat cache."""
        page, offset = divmod(position, self._pool.page_tokens)
        return self.pages[page] * self._pool.page_tokens + offset

    def free(self) -> None:
        """Gives every page back. Doing it twice is harmless."""
        self._pool.release(self)


class TableView:
    """A table from page `first` on: its positions count from there. For a context in the table's
    pages that begins late."""

    __slots__ = ("_first", "_offset", "_table")

    def __init__(self, table: PageTable, first: int, page_tokens: int) -> None:
        self._table, self._first, self._offset = table, first, first * page_tokens

    @property
    def pages(self) -> list[int]:
        return self._table.pages[self._first :]

    @property
    def length(self) -> int:
        return self._table.length - self._offset

    def reserve(self, length: int) -> None:
        """As `PageTable.reserve`."""
        self._table.reserve(self._offset + length)

    def slot(self, position: int) -> int:
        return self._table.slot(self._offset + position)


def _covered(groups: Sequence[frozenset[str]], page_tokens: int) -> dict[str, int]:
    """From where on each group is written, in pages with these `groups`."""
    covered: dict[str, int] = {}
    for page, written in enumerate(groups):
        covered = {group: covered.get(group, page * page_tokens) for group in written}
    return covered


class PagePool:
    """A fixed number of pages, counted by the tables that hold them, and the published ones."""

    def __init__(self, page_count: int, page_tokens: int) -> None:
        assert page_count > 0 and page_tokens > 0
        self.page_count, self.page_tokens = page_count, page_tokens
        self.index = PrefixIndex()
        self._free = list(range(page_count - 1, -1, -1))
        self._holders = [0] * page_count
        self._tables: set[PageTable] = set()
        self._copies: list[tuple[int, int]] = []

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_tokens)

    def held(self, page: int) -> bool:
        return self._holders[page] > 0

    def allocate(self, length: int) -> PageTable:
        """A new table with room for `length` positions. Raises OutOfPages."""
        table = PageTable(self, self._take(self.pages_for(length)))
        self._tables.add(table)
        return table

    def release(self, table: PageTable) -> None:
        if table in self._tables:
            self._tables.remove(table)
            self.drop(table.pages)
            table.pages, table.names, table.length, table.covered = [], [], 0, {}

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) of the pages to copy, one after the other in this order, before anything is
        written."""
        copies, self._copies = self._copies, []
        return copies

    def make_writable(self, table: PageTable, length: int) -> None:
        """See `PageTable.reserve`."""
        needed = -(-length // self.page_tokens)
        first = table.length // self.page_tokens
        if needed <= len(table.pages):  # as almost always
            holders, index = self._holders, self.index
            for page in table.pages[first:needed]:
                if holders[page] > 1 or page in index:
                    break
            else:
                return
        locked = [i for i in range(first, min(needed, len(table.pages))) if self._locked(table, i)]
        missing = max(0, needed - len(table.pages))
        free = len(self._free) + len(self.index.idle)
        if len(locked) + missing > free:
            # A page that only this table holds need not be copied: it can leave the cache instead.
            # So a table can always be written when the pages that it lacks are free.
            own = [i for i in locked if self._holders[table.pages[i]] == 1]
            if len(locked) - len(own) + missing > free:
                raise OutOfPages(len(locked) - len(own) + missing, free, self.page_count)
            for i in own:
                self.index.remove(table.pages[i])
                locked.remove(i)
        fresh = self._take(len(locked) + missing)
        for i in locked:
            old, table.pages[i] = table.pages[i], fresh.pop()
            if i * self.page_tokens < table.length:
                self._copies.append((old, table.pages[i]))
            self.drop([old])
        table.pages += fresh

    def _locked(self, table: PageTable, i: int) -> bool:
        page = table.pages[i]
        return self._holders[page] > 1 or page in self.index

    def _take(self, count: int) -> list[int]:
        free = len(self._free) + len(self.index.idle)
        if count > free:
            raise OutOfPages(count, free, self.page_count)
        pages = [self._free.pop() if self._free else self.index.evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """One more table holds these pages."""
        for page in pages:
            self._holders[page] += 1
            self.index.idle.pop(page, None)

    def drop(self, pages: Sequence[int]) -> None:
        """One table fewer holds these pages. The last of them become idle first: a cached block is
        of no use without those before it."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self.index:
                self.index.idle[page] = None
            else:
                self._free.append(page)

    def stats(self) -> PoolStats:
        cached = len(self.index.idle)
        return PoolStats(len(self._free) + cached, self.page_count, len(self._tables), cached)

    def check_integrity(self) -> None:
        """Every page is free, cached or held, and counted right; tables that share a page have it
        at the same place; names fit the pages they stand for."""
        places: dict[int, set[int]] = {}
        holders = [0] * self.page_count
        for table in self._tables:
            length, capacity = table.length, table.capacity
            assert length <= capacity, f"length {length} beyond capacity {capacity}"
            assert len(table.names) * self.page_tokens <= length, "a name without its tokens"
            assert all(at < length for at in table.covered.values()), "a group beyond the length"
            for place, page in enumerate(table.pages):
                holders[page] += 1
                places.setdefault(page, set()).add(place)
                if place < len(table.names):
                    name = self.index.name_of(page)
                    assert name in (None, table.names[place]), "a page has another's name"
        assert holders == self._holders, "a page leaked or is held twice: the counts disagree"
        assert all(len(at) == 1 for at in places.values()), "a page stands at two places"
        at_rest = [page for page in range(self.page_count) if not holders[page]]
        assert sorted([*self._free, *self.index.idle]) == at_rest, "a page leaked or is held twice"
        assert not any(page in self.index for page in self._free), "a free page is published"
        self.index.check_integrity()
