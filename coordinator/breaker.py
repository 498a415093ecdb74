"""A breaker for one draft: after repeated lateness it is left alone, then tried once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    lates_allowed: int
    open_s: float
    clock: Callable[[], float] = time.monotonic
    _lates: int = 0
    _opened_at: float | None = None

    def allows(self) -> bool:
        """Whether the draft may be asked. After the pause one caller may, as a probe."""
        if self._opened_at is None:
            return True
        if self.clock() - self._opened_at < self.open_s:
            return False
        self._opened_at = self.clock()
        return True

    @property
    def open(self) -> bool:
        return self._opened_at is not None and self.clock() - self._opened_at < self.open_s

    def success(self) -> None:
        self._lates, self._opened_at = 0, None

    def failure(self) -> None:
        self._lates += 1
        if self._lates >= self.lates_allowed:
            self._opened_at = self.clock()
