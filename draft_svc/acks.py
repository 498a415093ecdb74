"""What was taken of a target's rows, said with an answer that soon leaves anyway: a message of its
own would take the interpreter from the work on that, here and there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from specwire.errors import SpecwireError
from specwire.v1 import draft_pb2

# An answer is there by then, or the sender is told without it.
_WITHIN_S = 0.005
# More bytes are told of at once: the sender may wait for the credit.
_MOST_BYTES = 64 << 10


def ack_of(chunk: draft_pb2.FeatureChunk, refusal: SpecwireError | None) -> draft_pb2.FeatureAck:
    """Taken or refused, the sender may send as many bytes again."""
    ack = draft_pb2.FeatureAck()
    ack.key.CopyFrom(chunk.key)
    ack.step_id, ack.credit_bytes = chunk.step_id, len(chunk.rows)
    if refusal is not None:
        ack.error.CopyFrom(refusal.to_item())
    return ack


class Acks:
    """Of one stream of rows; `put` sends a message on it. What was taken is one credit for all of
    it, without a key."""

    def __init__(self, put: Callable[[draft_pb2.PushFeaturesResponse], None]) -> None:
        self._put = put
        self._credit_bytes = 0
        self._refused: list[draft_pb2.FeatureAck] = []
        # When the first of them was kept.
        self._since = 0.0
        # Goes on behind an answer: to set one anew in each round costs more.
        self._timer: asyncio.TimerHandle | None = None

    def add(self, chunk: draft_pb2.FeatureChunk, refusal: SpecwireError | None) -> None:
        """An answer may take it along. `keep` it behind that."""
        if not self._waits:
            self._since = time.monotonic()
        if refusal is not None:
            self._refused.append(ack_of(chunk, refusal))
        else:
            self._credit_bytes += len(chunk.rows)

    def keep(self) -> None:
        """What no answer took is said with the next one, or by itself where that is long in
        coming."""
        refused_bytes = sum(ack.credit_bytes for ack in self._refused)
        if self._credit_bytes + refused_bytes > _MOST_BYTES:
            self._flush()
        elif self._waits and self._timer is None:
            self._look_in(_WITHIN_S)

    @property
    def _waits(self) -> bool:
        return self._credit_bytes > 0 or len(self._refused) > 0

    def take(self) -> list[draft_pb2.FeatureAck]:
        """Those that were kept, to be sent by the caller."""
        kept, self._refused = self._refused, []
        if self._credit_bytes:
            kept.append(draft_pb2.FeatureAck(credit_bytes=self._credit_bytes))
            self._credit_bytes = 0
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
        if not self._waits:
            return
        left = self._since + _WITHIN_S - time.monotonic()
        if left > 0:
            self._look_in(left)
        else:
            self._flush()

    def _flush(self) -> None:
        if kept := self.take():
            self._put(draft_pb2.PushFeaturesResponse(acks=kept))
