"""Which hidden-state rows a session has: the interval [start, end) that is confirmed, and chunks
held until their step is.

Rows of a step are provisional until the Advance with that step id; then they count as far as the
committed text goes. Rows that come later than their Advance count at once. Everything else is
refused with a reason, and costs acceptance only.
"""

from __future__ import annotations

from draft_svc.methods.base import RowBlock

# Confirmed steps that are remembered for late rows.
_KEEP_STEPS = 64


class RowsRefused(Exception):
    """A chunk that was not taken; the text is a cause that may be counted and sent."""


class Coverage:
    """Rows of one session. `opened_length` tokens were committed when the session was opened."""

    def __init__(self, opened_length: int, limit_bytes: int) -> None:
        self._opened_length, self._limit_bytes = opened_length, limit_bytes
        self.start = self.end = 0
        self._restored = False
        self._last_step = -1
        self._held: dict[int, list[RowBlock]] = {}
        self._held_bytes = 0
        # Confirmed step -> end of the rows it may still bring.
        self._confirmed: dict[int, int] = {}

    @property
    def empty(self) -> bool:
        return self.start == self.end

    def restore(self, start: int, end: int) -> None:
        """A cache had the rows [start, end). Rows that begin later replace them: a target does not
        run every cached token again.
        """
        if self.empty and self._last_step < 0:
            self.start, self.end, self._restored = start, end, True

    def offer(self, step_id: int, block: RowBlock) -> list[RowBlock]:
        """Takes a chunk. Returns what it confirms at once, which is something only for a step that
        was confirmed before.

        Raises `RowsRefused`: stale step, gap, or more bytes than one session may hold.
        """
        if step_id in self._confirmed:
            return self._append([block], self._confirmed[step_id])
        if step_id <= self._last_step:
            raise RowsRefused("stale_step")
        frontier = self._frontier(step_id)
        if frontier is not None and block.start > frontier:
            raise RowsRefused("gap")
        if self._held_bytes + block.rows.nbytes > self._limit_bytes:
            raise RowsRefused("overflow")
        self._held.setdefault(step_id, []).append(block)
        self._held_bytes += block.rows.nbytes
        return []

    def confirm(self, step_id: int, base_length: int, length: int) -> list[RowBlock]:
        """The Advance of `step_id` came: `length` tokens are committed, `base_length` of them
        before it.

        Returns the rows that this confirms, in order and without gaps. Rows of steps that were left
        out are dropped, except those that belong to the text the session was opened with: a draft
        that joins late gets them under older step ids.
        """
        # The target runs the anchor at base_length - 1 again, and sends its row again.
        self._truncate(base_length - 1)
        blocks = []
        if self._last_step < 0:
            for step in sorted(step for step in self._held if step < step_id):
                blocks += [block.clip(0, self._opened_length) for block in self._held[step]]
        if self._held:
            blocks += self._held.get(step_id, [])
            self._held = {step: held for step, held in self._held.items() if step > step_id}
            self._held_bytes = sum(b.rows.nbytes for held in self._held.values() for b in held)
        self._last_step = step_id
        self._confirmed[step_id] = length - 1
        if len(self._confirmed) > _KEEP_STEPS:
            del self._confirmed[next(iter(self._confirmed))]  # the lowest: they rise
        return self._append(blocks, length - 1, strict=False)

    def _append(self, blocks: list[RowBlock], limit: int, *, strict: bool = True) -> list[RowBlock]:
        taken = []
        for block in blocks:
            if self.empty and block.start < limit:
                self.start = self.end = block.start
            if self._restored and self.end < block.start < limit:
                self.start = self.end = block.start
            if block.start > self.end:
                if strict:
                    raise RowsRefused("gap")
                break
            new = block.clip(self.end, limit)
            if len(new.rows):
                self.end, self._restored = new.end, False
                taken.append(new)
        return taken

    def _frontier(self, step_id: int) -> int | None:
        """Where the next chunk of this step may start at the latest; None: anywhere."""
        ends = [held[-1].end for step, held in self._held.items() if step <= step_id]
        if not self.empty and not self._restored:
            ends.append(self.end)
        return max(ends, default=None)

    def _truncate(self, length: int) -> None:
        self.end = min(self.end, length)
        if self.end <= self.start:
            self.start = self.end = 0
        # No step before it may bring more than the last one.
        if self._confirmed.get(self._last_step, 0) > length:
            self._confirmed = {step: min(end, length) for step, end in self._confirmed.items()}
