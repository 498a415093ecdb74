"""Waiting without sleeping, for a message that will be there soon."""

from __future__ import annotations

import asyncio
import os
import time

# With fewer cores somebody else would wait for the one that is kept busy.
_CORES = 8
_UNLESS_TOLD_US = 10_000


class BusyPoll:
    """Keeps the running event loop from going to sleep for a while: to be woken takes as long as
    some messages do, and a thread that slept finds its caches cold. It costs one core for that
    while.
    """

    def __init__(self, longest_us: int | None) -> None:
        """`longest_us`, of a setting: behind each `begin`; 0: never. None: as long as a round of a
        large model takes, where there are cores to spare."""
        spare = len(os.sched_getaffinity(0)) >= _CORES
        unset_us = _UNLESS_TOLD_US if spare else 0
        self._longest_s = (unset_us if longest_us is None else longest_us) / 1e6
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
        """Nothing is due, or another thread is to have the interpreter."""
        self._until = 0.0

    def _poll(self) -> None:
        # A loop with something to call looks at its sockets and does not wait for them.
        self._polls = time.monotonic() < self._until
        if self._polls:
            asyncio.get_running_loop().call_soon(self._poll)
