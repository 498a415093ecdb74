"""What the log tells of the load: one line for each stretch of time in which anything was done."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, fields
from typing import Protocol, Self

from coordinator.record import Record

log = logging.getLogger(__name__)


class Running(Protocol):
    """Of a session what is counted."""

    record: Record

    @property
    def emitted(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of answers that ended, and of what was done for those and for the running ones."""

    answered: int = 0
    failed: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, session: Running, answered: int = 0, failed: int = 0) -> Self:
        record = session.record
        drafted, accepted = sum(record.drafted), sum(record.accepted)
        return cls(answered, failed, session.emitted, len(record.drafted), drafted, accepted)

    def _each(self, other: Work, sign: int) -> Work:
        names = (field.name for field in fields(self))
        return Work(*(getattr(self, name) + sign * getattr(other, name) for name in names))

    def __add__(self, other: Work) -> Work:
        return self._each(other, 1)

    def __sub__(self, other: Work) -> Work:
        return self._each(other, -1)

    def text(self, running: int, seconds: float) -> str:
        parts = [f"{running} running", f"{self.answered} answered"]
        if self.failed:
            parts.append(f"{self.failed} ended otherwise")
        parts.append(f"{self.tokens / seconds:.1f} tokens/s")
        if self.drafted:
            # The first token of an answer is of no round; over seconds of many it hardly counts.
            parts.append(f"{self.tokens / max(self.rounds, 1):.2f} tokens a round")
            share = self.accepted / self.drafted
            parts.append(f"{share:.0%} of {self.drafted} draft tokens accepted")
        return ", ".join(parts)


class Activity:
    def __init__(self) -> None:
        self._running: set[Running] = set()
        self._ended = self._told = Work()
        self._since = time.monotonic()

    def began(self, session: Running) -> None:
        self._running.add(session)

    def ended(self, session: Running, well: bool) -> None:
        self._running.discard(session)
        self._ended += Work.of(session, answered=int(well), failed=int(not well))

    def line(self) -> str:
        """Of the time since the last call; empty where nothing was done in it."""
        now = time.monotonic()
        total = sum(map(Work.of, self._running), self._ended)
        done, seconds = total - self._told, max(now - self._since, 1e-3)
        self._told, self._since = total, now
        return (
            f"{done.text(len(self._running), seconds)} ({seconds:.0f} s)" if done != Work() else ""
        )

    async def tell(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            if line := self.line():
                log.info("%s", line)
