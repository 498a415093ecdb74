"""A breaker for one draft: after repeated lateness it is left alone, then tried by one session.

Sessions share a draft's steps, so one slow step makes many proposals late. Those are one incident:
a question counts only when it was asked after the latest lateness that counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Closed; open for `open_s` after `lates_allowed` incidents in a row; then half open, where one
    session asks and the rest wait for what becomes of it. Times are those of `clock`, in seconds.
    """

    lates_allowed: int
    open_s: float
    clock: Callable[[], float] = time.perf_counter
    _lates: int = 0
    _counted_at: float = -math.inf
    _opened_at: float | None = None
    _probe_at: float | None = None

    def allows(self) -> bool:
        """Whether the draft may be asked. A caller that may in the half-open state is the probe."""
        if self.open:
            return False
        if self._opened_at is not None:
            self._probe_at = self.clock()
        return True

    @property
    def open(self) -> bool:
        """Whether a question would have to wait: for the pause to end, or for the probe."""
        if self._opened_at is None:
            return False
        # A probe whose session ended unheard of holds the others up no longer than the pause.
        since = self._opened_at if self._probe_at is None else self._probe_at
        return self.clock() - since < self.open_s

    def success(self) -> None:
        self._lates, self._opened_at, self._probe_at = 0, None, None

    def failure(self, asked_at: float) -> None:
        """A late answer, or none, to a question of time `asked_at`."""
        if asked_at < self._counted_at:
            return
        self._counted_at = self.clock()
        self._lates += 1
        if self._lates >= self.lates_allowed:
            self._opened_at, self._probe_at = self._counted_at, None
