"""The gRPC adapter of the target service: frames to the intake, replies to the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from specwire.errors import Reason, SpecwireError
from specwire.rpc import CHUNK_BYTES, Outbox, OutboxFull
from specwire.v1 import target_pb2, target_pb2_grpc
from specwire.writer import Writer
from target_svc.intake import Intake
from target_svc.metrics import Metrics

SERVICE_NAME = "specwire.v1.TargetService"

Load = Callable[[], target_pb2.TargetLoad]


class LinkStream:
    """The replies that wait for one stream; `write` sends a message on it, which `frame` makes.

    Those that find it closed are dropped: a step can be asked for again.
    """

    def __init__(
        self,
        metrics: Metrics,
        write: Callable[[target_pb2.TargetServiceLinkResponse], Coroutine[Any, Any, None]],
        frame: Callable[[Sequence[target_pb2.TargetReply]], target_pb2.TargetServiceLinkResponse],
    ) -> None:
        self._outbox: Outbox[target_pb2.TargetReply] = Outbox()
        self._metrics, self._frame = metrics, frame
        self._writer = Writer(write, self._following)

    @property
    def closed(self) -> bool:
        return self._outbox.closed

    def send(self, reply: target_pb2.TargetReply) -> None:
        if self.closed:
            self._metrics.dropped("reply_without_link")
            return
        try:
            self._outbox.put(reply)
            self._writer.wake()
        except OutboxFull:
            self._metrics.dropped("reply_link_slow")
            self.close()

    def hurry(self) -> None:
        """What was sent leaves before this returns, where the stream is free for it."""
        self._writer.hurry()

    def close(self) -> None:
        """Ends the stream once what waits is written."""
        self._outbox.close()
        self._writer.close()

    async def run(self) -> None:
        """Writes until `close`."""
        await self._writer.run()

    def _following(self) -> target_pb2.TargetServiceLinkResponse | None:
        replies = self._outbox.take()
        return self._frame(replies) if replies else None


class Hosted:
    """What the adapter needs once the engine is warm."""

    def __init__(
        self,
        info: target_pb2.TargetServiceGetInfoResponse,
        tokenizer: bytes,
        intake: Intake,
        load: Load,
    ) -> None:
        self.info, self.tokenizer, self.intake, self.load = info, tokenizer, intake, load


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Answers ENGINE_DOWN until `hosted` is set."""

    def __init__(self, incarnation: int, metrics: Metrics) -> None:
        self.hosted: Hosted | None = None
        self._incarnation, self._metrics = incarnation, metrics

    def _ready(self) -> Hosted:
        if self.hosted is None:
            raise SpecwireError(Reason.ENGINE_DOWN, "the target is still loading its model")
        return self.hosted

    async def GetInfo(
        self, request: target_pb2.TargetServiceGetInfoRequest, context: Any
    ) -> target_pb2.TargetServiceGetInfoResponse:
        hosted = self._ready()
        response = target_pb2.TargetServiceGetInfoResponse()
        response.CopyFrom(hosted.info)
        response.load.CopyFrom(hosted.load())
        return response

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        hosted = self._ready()
        current = hosted.info.model.tokenizer_hash
        if request.known_hash == current:
            yield target_pb2.GetTokenizerResponse(hash=current)
            return
        for start in range(0, len(hosted.tokenizer), CHUNK_BYTES):
            chunk = hosted.tokenizer[start : start + CHUNK_BYTES]
            yield target_pb2.GetTokenizerResponse(hash=current, chunk=chunk)

    async def Link(  # type: ignore[override]  # it writes, instead of yielding
        self, request_iterator: AsyncIterator[target_pb2.TargetServiceLinkRequest], context: Any
    ) -> None:
        hosted = self._ready()

        def frame(
            replies: Sequence[target_pb2.TargetReply],
        ) -> target_pb2.TargetServiceLinkResponse:
            return target_pb2.TargetServiceLinkResponse(
                incarnation=self._incarnation, replies=replies, load=hosted.load()
            )

        link = LinkStream(self._metrics, context.write, frame)
        reader = asyncio.ensure_future(_read(request_iterator, link, hosted.intake))
        try:
            await link.run()
        finally:
            link.close()
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader


async def _read(
    frames: AsyncIterator[target_pb2.TargetServiceLinkRequest], link: LinkStream, intake: Intake
) -> None:
    """Until the stream ends, which closes no session: they live on their leases."""
    try:
        async for frame in frames:
            intake.take(link, frame.items)
    finally:
        link.close()
