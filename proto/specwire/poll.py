"""Waiting without sleeping, for a message that will be there soon."""

from __future__ import annotations

import asyncio
import os
import time

# With fewer cores somebody else would wait for the one that is kept busy.
_CORES = 8
_UNLESS_TOLD_S = 0.01


class BusyPoll:
    """Keeps the running event loop from going to sleep for a while: to be woken takes as long as
    some messages do, and a thread that slept finds its caches cold. It costs one core for that
    while.
    """

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: behind each `begin`; 0: never."""
        self._longest_s = longest_s
        self._until = 0.0
        self._polls = False

    def begin(self) -> None:
        """Something is due soon. To say so again begins anew."""
        if not self._longest_s:
            return
        self._until = time.monotonic() + self._longest_s
        if not self._polls:
            self._polls = True
            asyncio.get_running_loop().call_soon(self._poll)

    def end(self) -> None:
        """Nothing is due any more."""
        self._until = 0.0

    def _poll(self) -> None:
        # A loop with something to call looks at its sockets and does not wait for them.
        self._polls = time.monotonic() < self._until
        if self._polls:
            asyncio.get_running_loop().call_soon(self._poll)


def longest_s(set_us: int | None) -> float:
    """What a setting in microseconds says. Unset: as long as a round of a large model takes, where
    there are cores to spare."""
    if set_us is not None:
        return set_us / 1e6
    return _UNLESS_TOLD_S if len(os.sched_getaffinity(0)) >= _CORES else 0.0
