"""What was taken of a target's rows, said with an answer that soon leaves anyway: a message of its
own would take the interpreter from the work on that, here and there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from specwire.v1 import draft_pb2

# An answer is there by then, or the sender is told without it.
_WITHIN_S = 0.005
# More bytes are told of at once: the sender may wait for the credit.
_MOST_BYTES = 64 << 10


class Acks:
    """Of one stream of rows; `put` sends a message on it."""

    def __init__(self, put: Callable[[draft_pb2.PushFeaturesResponse], None]) -> None:
        self._put = put
        self._kept: list[draft_pb2.FeatureAck] = []
        self._bytes = 0
        # When the first of them was kept.
        self._since = 0.0
        # Goes on behind an answer: to set one anew in each round costs more.
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, acks: Sequence[draft_pb2.FeatureAck]) -> None:
        """Says them with the next answer, or by themselves where that is long in coming."""
        if not acks:
            return
        if not self._kept:
            self._since = time.monotonic()
        self._kept += acks
        self._bytes += sum(ack.credit_bytes for ack in acks)
        if self._bytes > _MOST_BYTES:
            self._flush()
        elif self._timer is None:
            self._look_in(_WITHIN_S)

    def take(self) -> list[draft_pb2.FeatureAck]:
        """Those that were kept, to be sent by the caller."""
        kept, self._kept, self._bytes = self._kept, [], 0
        return kept

    def close(self) -> None:
        """Nobody is told any more."""
        self.take()
        if self._timer is not None:
            self._timer.cancel()

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._kept:
            return
        left = self._since + _WITHIN_S - time.monotonic()
        if left > 0:
            self._look_in(left)
        else:
            self._flush()

    def _flush(self) -> None:
        if kept := self.take():
            self._put(draft_pb2.PushFeaturesResponse(acks=kept))
