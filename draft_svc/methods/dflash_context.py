"""The context of one DFlash session: what is written, and the rows that wait to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from draft_svc.methods.base import RowBlock
from engine.api import Sampling
from engine.kv.pool import PageTable
from engine.models.draft_context import ContextRows

# Rows that a session keeps while it has no pages.
_PENDING_ROWS = 8192


@dataclass(slots=True, eq=False)
class DFlashContext:
    """Committed ids and the context K/V: positions [origin, end) are in `table`, `pending` rows
    follow it.

    `root` begins the names of its pages in the cache, `base` those of a context from position 0 on;
    None: they are not shared.
    """

    ids: list[int]
    sampling: Sampling
    table: PageTable
    origin: int = 0
    base: bytes | None = None
    root: bytes | None = None
    pending: list[RowBlock] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.origin + self.table.length

    @property
    def pending_rows(self) -> int:
        return sum(len(block.rows) for block in self.pending)

    @property
    def begins_anew(self) -> bool:
        """The pending rows are the first, or leave a gap behind what there is."""
        start = self.pending[0].start
        return self.table.length == 0 or start > self.end

    def add_rows(self, blocks: Sequence[RowBlock]) -> None:
        """Rows to be written. Where pages are short for long, the oldest rows are given up."""
        self.pending += blocks
        while len(self.pending) > 1 and self.pending_rows > _PENDING_ROWS:
            self.pending.pop(0)

    def begin(self, origin: int) -> None:
        """Forgets the context; another one begins at `origin`."""
        self.table.truncate(0)
        self.table.trim()
        self.origin = origin
        self.pending = nonempty(block.clip(origin, block.end) for block in self.pending)

    def next_rows(self, limit: int) -> ContextRows:
        """The first pending rows, at most `limit`, that are not in the table yet."""
        start = self.end
        blocks = [block.clip(start, start + limit) for block in self.pending]
        parts = [block.rows for block in blocks]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return ContextRows(self.table, start, rows, self.origin, blocks[0].projected)

    def drop_written(self) -> None:
        self.pending = nonempty(block.clip(self.end, block.end) for block in self.pending)

    def truncate(self, keep: int) -> None:
        """Forgets ids beyond `keep`, and the context of what they made: the anchor's row comes
        again.
        """
        if keep >= len(self.ids):
            return
        del self.ids[keep:]
        limit = max(keep - 1, 0)
        self.table.truncate(min(self.table.length, max(limit - self.origin, 0)))
        self.pending = nonempty(block.clip(0, limit) for block in self.pending)


def nonempty(blocks: Iterable[RowBlock]) -> list[RowBlock]:
    return [block for block in blocks if len(block.rows)]
