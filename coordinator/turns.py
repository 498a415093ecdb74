"""Whose turn it is to read, where more sessions have verdicts than there is time for.

A session that reads at once finds one verdict, and writes one message for it. Where many sessions
have verdicts of runs ahead, a few read in each pass of the event loop: between two passes the links
are read, and a session whose turn comes finds all that arrived for it meanwhile. Nobody waits for
anything but others' turns, which take the same time in any order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# Sessions that read in one pass. As few as that never wait.
AT_ONCE = 4


def _untold(seconds: float) -> None:
    """Nobody keeps count."""


class Turns:
    def __init__(self, waited: Callable[[float], None] = _untold) -> None:
        """`waited` is told of each wait that has ended, in seconds."""
        self.waited = waited
        self._left = AT_ONCE
        self._waiting: deque[Callable[[], None]] = deque()
        self._passing = False

    def take(self) -> bool:
        """Whether there is a turn left in this pass, which is the caller's then."""
        if not self._left:
            return False
        self._left -= 1
        if not self._passing:
            self._passing = True
            asyncio.get_running_loop().call_soon(self._next_pass)
        return True

    def wait(self, wake: Callable[[], None]) -> None:
        """Behind `take` had none: `wake` is called when the turn comes, after those before."""
        self._waiting.append(wake)

    def _next_pass(self) -> None:
        self._left = AT_ONCE
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft()()
        self._passing = self._left < AT_ONCE
        if self._passing:
            asyncio.get_running_loop().call_soon(self._next_pass)
