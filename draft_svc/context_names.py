"""Names of shared context pages, of contexts that begin late too.

A context that begins at position 0 names its pages as a target's prefix cache does. One that begins
at `origin` > 0, because no rows came for what is before, uses names of its own, derived from the
text before it: its pages never mix with those of another origin. Where such contexts begin is
remembered by the name of that text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv.pool import PageTable
from engine.kv.prefix import Prefix, block_name, chain_root

_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """A shared context of positions [origin, end); `root` begins the names of its pages."""

    origin: int
    end: int
    root: bytes
    prefix: Prefix


class ContextNames:
    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._late: OrderedDict[bytes, None] = OrderedDict()

    def begin(self, base: bytes, ids: Sequence[int], origin: int) -> bytes | None:
        """The root for a context of `ids` that begins at `origin`; None where it is not at the edge
        of a page: then it is not shared.
        """
        size = self._page_tokens
        if origin == 0 or origin % size:
            return None if origin else base
        name = base
        for start in range(0, origin, size):
            name = block_name(name, ids[start : start + size])
        self._late[name] = None
        self._late.move_to_end(name)
        if len(self._late) > _REMEMBERED:
            self._late.popitem(last=False)
        return _late_root(name)

    def find(self, table: PageTable, base: bytes, ids: Sequence[int], limit: int) -> Found:
        """The shared context that reaches furthest below `limit`, of those the longest."""
        size = self._page_tokens
        best, name = self._found(table, base, ids, 0, limit), base
        for start in range(0, limit - size + 1, size):
            if name in self._late:
                late = self._found(table, _late_root(name), ids, start, limit)
                best = max(best, late, key=lambda found: found.end)
            name = block_name(name, ids[start : start + size])
        return best

    def _found(
        self, table: PageTable, root: bytes, ids: Sequence[int], origin: int, limit: int
    ) -> Found:
        prefix = table.find(root, ids[origin:], limit - origin)
        count = len(prefix.pages) * self._page_tokens
        return Found(origin, origin + count if count else 0, root, prefix)


def _late_root(name: bytes) -> bytes:
    return chain_root("late", name.hex())
