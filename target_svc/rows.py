"""Hidden-state rows of one session: out of the engine, the recent ones, and where they go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from specwire.tensors import Rows
from target_svc.asks import Answered, Question


class RowSink(Protocol):
    """Takes the rows of one session to its draft; never blocks, and drops what does not fit."""

    def push(self, step_id: int, start: int, rows: Rows) -> None: ...

    def ask(self, question: Question, answered: Answered) -> None: ...

    def hurry(self) -> None: ...

    def forget(self) -> None: ...

    def release(self) -> None: ...


class RowHistory:
    """The latest rows of a session in order of position, without gaps, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: deque[tuple[int, Rows]] = deque()

    @property
    def end(self) -> int:
        """Position after the last row; 0 when there are none."""
        if not self._parts:
            return 0
        start, rows = self._parts[-1]
        return start + len(rows)

    def add(self, start: int, rows: Rows) -> None:
        """Appends rows; rows that do not continue the kept ones replace them."""
        if start != self.end:
            self._parts.clear()
        skip = max(0, len(rows) - self._limit)
        # A copy: a part of the engine's tensor would keep the rows of the whole step alive.
        self._parts.append((start + skip, rows[skip:].copy()))
        while self._parts and self.end - self._first_end() >= self._limit:
            self._parts.popleft()

    def _first_end(self) -> int:
        start, rows = self._parts[0]
        return start + len(rows)

    def truncate(self, length: int) -> None:
        """Forgets rows of positions from `length` on."""
        while self._parts and self._parts[-1][0] >= length:
            self._parts.pop()
        if self._parts and self.end > length:
            start, rows = self._parts.pop()
            self._parts.append((start, rows[: length - start]))

    def since(self, position: int) -> Iterator[tuple[int, Rows]]:
        """The kept rows from `position` on, as (start, rows)."""
        wanted = []
        for start, rows in reversed(self._parts):  # there may be hundreds, and few are wanted
            if start + len(rows) <= position:
                break
            wanted.append((max(start, position), rows[max(0, position - start) :]))
        yield from reversed(wanted)

    def between(self, first: int, end: int) -> tuple[int, Rows] | None:
        """The kept rows of positions [first, end), as (start, rows); None: there are none."""
        found = [(start, rows[: end - start]) for start, rows in self.since(first) if start < end]
        if not found:
            return None
        return found[0][0], np.concatenate([rows for _, rows in found])

    def may_wait(self, most_bytes: int) -> int:
        """How many rows of the latest's size may wait here to be pushed."""
        if not self._parts:
            return 0
        row = int(self._parts[-1][1][0].nbytes)
        return min(most_bytes // max(row, 1), self._limit - 1)
