"""The replies of one worker that wait for one session."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from coordinator.turns import Turns
from specwire.errors import SpecwireError

# Replies a session may leave unread; a worker that sends more is not answering it.
# A run of 1024, the most that settings allow, fits.
_MAILBOX_LIMIT = 2048


class Mailbox:
    """Replies of one worker to one generation of one session, with their arrival in nanoseconds."""

    def __init__(self, turns: Turns | None = None) -> None:
        self._turns = turns or Turns()
        # So many replies may wait for the session's turn to read: those behind which the worker
        # goes on by itself. With one more the worker waits, and the session reads at once.
        self.may_wait = 0
        self._queue: deque[tuple[int, Any]] = deque(maxlen=_MAILBOX_LIMIT)
        self._error: SpecwireError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._in_line = False
        # Since when a reply that could be read waits for the session's turn; 0: none does.
        self._since_ns = 0
        # For how long the reply that was read last did.
        self.waited_ns = 0

    def put(self, message: Any, arrived_ns: int = 0) -> None:
        """`arrived_ns` of `time.perf_counter_ns`; 0: now."""
        self._queue.append((arrived_ns or time.perf_counter_ns(), message))
        waiter = self._waiter
        if waiter is not None and not waiter.done() and self._may_read():
            waiter.set_result(None)

    def fail(self, error: SpecwireError) -> None:
        self._error = self._error or error
        self._wake()

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def first(self) -> Any:
        """The next reply, which stays; None: there is none."""
        return self._queue[0][1] if self._queue else None

    def take(self) -> tuple[int, Any] | None:
        """The next reply if there is one, without waiting."""
        return self._queue.popleft() if self._queue else None

    async def get(self, until: float | None) -> tuple[int, Any] | None:
        """The next reply; None at the loop time `until`. Raises what the link failed with."""
        self.waited_ns = self._since_ns = 0
        if self._queue and self._may_read():
            return self._queue.popleft()
        loop = asyncio.get_running_loop()
        while True:
            if not self._queue:
                if self._error is not None:
                    raise self._error
                if until is not None and loop.time() >= until:
                    return None
            self._waiter = loop.create_future()
            timer = None if until is None else loop.call_at(until, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
            if self._queue:
                self._note_wait()
                return self._queue.popleft()

    def _note_wait(self) -> None:
        if self._since_ns:
            self.waited_ns = time.perf_counter_ns() - self._since_ns
            self._since_ns = 0
            self._turns.waited(self.waited_ns / 1e9)

    def _may_read(self) -> bool:
        """Whether the session may read what is there now; else it is woken in its turn."""
        if len(self._queue) > self.may_wait or self._turns.take():
            return True
        self._since_ns = self._since_ns or time.perf_counter_ns()
        if not self._in_line:
            self._in_line = True
            self._turns.wait(self._turn)
        return False

    def _turn(self) -> None:
        self._in_line = False
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
