"""One stream of rows and questions from a target, as the draft serves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from draft_svc.acks import Acks, ack_of
from draft_svc.protocol import Protocol
from specwire.rpc import Outbox, OutboxFull
from specwire.v1.draft_pb2 import DraftReply, PushFeaturesRequest, PushFeaturesResponse
from specwire.writer import Writer


class RowStream:
    """`write` sends a message to the target."""

    def __init__(
        self, protocol: Protocol, write: Callable[[PushFeaturesResponse], Coroutine[Any, Any, None]]
    ) -> None:
        self._protocol = protocol
        self._outbox: Outbox[PushFeaturesResponse] = Outbox()
        self._acks = Acks(self._put)
        self._alone = False
        self._writer = Writer(write, self._following)

    async def serve(self, frames: AsyncIterator[PushFeaturesRequest]) -> None:
        """Until the target ends its stream, or reads no more of the answers."""
        reader = asyncio.create_task(self._read(frames))
        try:
            await self._writer.run()
            if reader.done():  # else the outbox was given up: the stream ends here
                await reader
        finally:
            self._outbox.close()
            reader.cancel()

    async def _read(self, frames: AsyncIterator[PushFeaturesRequest]) -> None:
        try:
            async for frame in frames:
                if frame.asks:
                    self._answer(frame)
                else:
                    self._take(frame)
                self._writer.hurry()
        finally:
            self._acks.close()
            self._close()

    def _take(self, frame: PushFeaturesRequest) -> None:
        rounds, target = self._protocol.rounds, frame.target_incarnation
        acks = [ack_of(chunk, rounds.take_rows(target, chunk)) for chunk in frame.chunks]
        self._put(PushFeaturesResponse(acks=self._acks.take() + acks))

    def _answer(self, frame: PushFeaturesRequest) -> None:
        """Rows before the questions that came with them, which need them."""
        protocol, target, asks = self._protocol, frame.target_incarnation, frame.asks
        for chunk in frame.chunks:
            self._acks.add(chunk, protocol.rounds.take_rows(target, chunk))
        for ask in asks:
            protocol.asked(target, ask, self._reply)
        # No other answer comes from what is done here: that of a single question leaves at once.
        self._alone = len(asks) == 1
        protocol.worker.hand_over()
        self._alone = False
        self._acks.keep()

    def _reply(self, message: DraftReply) -> None:
        answer = PushFeaturesResponse(acks=self._acks.take(), replies=[message])
        first = self._alone and not len(self._outbox)
        if not (first and self._writer.begin(answer)):
            self._put(answer)

    def _put(self, answer: PushFeaturesResponse) -> None:
        try:
            self._outbox.put(answer)
            self._writer.wake()
        except OutboxFull:
            # The peer does not read. Its sessions stay; it gets a new stream when it comes back.
            self._protocol.metrics.event("outbox_full")
            self._close()

    def _close(self) -> None:
        self._outbox.close()
        self._writer.close()

    def _following(self) -> PushFeaturesResponse | None:
        answers = self._outbox.take()
        if not answers:
            return None
        response = answers[0]
        for more in answers[1:]:
            response.MergeFrom(more)
        return response
