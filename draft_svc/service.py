"""The gRPC adapter: decodes frames, calls the protocol, encodes frames. No policy lives here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from draft_svc.info import drafter_infos
from draft_svc.protocol import Protocol
from draft_svc.row_stream import RowStream
from specwire.errors import Reason, SpecwireError
from specwire.rpc import PROTOCOL_MAJOR, PROTOCOL_MINOR, Outbox, OutboxFull
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc

SERVICE_NAME = "specwire.v1.DraftService"


def worker_info(incarnation: int, device: str) -> common_pb2.WorkerInfo:
    return common_pb2.WorkerInfo(
        protocol_major=PROTOCOL_MAJOR,
        protocol_minor=PROTOCOL_MINOR,
        incarnation=incarnation,
        version=metadata.version("specwire"),
        device=device,
    )


@asynccontextmanager
async def _reading(
    read: Coroutine[Any, Any, None], outbox: Outbox[draft_pb2.DraftReply]
) -> AsyncIterator[None]:
    """Reads a stream, which fills the outbox, while the block answers it out of that."""
    reader = asyncio.create_task(read)
    try:
        yield
        if reader.done():  # else the outbox was given up: the stream ends here
            await reader
    finally:
        outbox.close()
        reader.cancel()


def _coordinator(item: draft_pb2.DraftItem) -> int:
    """Incarnation of the coordinator that sent it; 0: an item of no kind that is known."""
    kind = item.WhichOneof("item")
    if kind is None:
        return 0
    return (
        item.heartbeat.coordinator if kind == "heartbeat" else getattr(item, kind).key.coordinator
    )


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """One draft service. `incarnation` names this life of the process."""

    def __init__(self, protocol: Protocol, *, incarnation: int, push_address: str) -> None:
        self._protocol, self._push_address = protocol, push_address
        self._incarnation = incarnation
        # The coordinators heard of on each link that is open.
        self._links: list[set[int]] = []

    @property
    def linked(self) -> frozenset[int]:
        """Incarnations of the coordinators that have a link open, and have said something on it."""
        return frozenset().union(*self._links)

    async def GetInfo(
        self, request: draft_pb2.DraftServiceGetInfoRequest, context: Any
    ) -> draft_pb2.DraftServiceGetInfoResponse:
        protocol = self._protocol
        if not protocol.worker.ready:
            raise SpecwireError(Reason.ENGINE_DOWN, "the drafters of this service are not loaded")
        return draft_pb2.DraftServiceGetInfoResponse(
            worker=worker_info(self._incarnation, protocol.worker.device),
            drafters=drafter_infos(protocol.worker.infos.values(), protocol.default_method),
            load=self._load(),
            push_address=self._push_address,
        )

    async def Link(
        self, request_iterator: AsyncIterator[draft_pb2.DraftServiceLinkRequest], context: Any
    ) -> AsyncIterator[draft_pb2.DraftServiceLinkResponse]:
        outbox: Outbox[draft_pb2.DraftReply] = Outbox()
        heard: set[int] = set()
        self._links.append(heard)
        try:
            async with _reading(self._read(request_iterator, outbox, heard), outbox):
                while replies := await outbox.take_all():
                    yield draft_pb2.DraftServiceLinkResponse(
                        incarnation=self._incarnation,
                        replies=replies,
                        load=self._load(),
                    )
        finally:
            # Not by equality: others may have heard the same.
            self._links = [link for link in self._links if link is not heard]

    async def _read(
        self,
        frames: AsyncIterator[draft_pb2.DraftServiceLinkRequest],
        outbox: Outbox[draft_pb2.DraftReply],
        heard: set[int],
    ) -> None:
        def reply(message: draft_pb2.DraftReply) -> None:
            self._put(outbox, message)

        try:
            async for frame in frames:
                for item in frame.items:
                    heard.add(_coordinator(item))
                    self._protocol.handle(item, reply)
        finally:
            outbox.close()

    async def PushFeatures(  # type: ignore[override]  # it writes, instead of yielding
        self, request_iterator: AsyncIterator[draft_pb2.PushFeaturesRequest], context: Any
    ) -> None:
        await RowStream(self._protocol, context.write).serve(request_iterator)

    def _put(self, outbox: Outbox[draft_pb2.DraftReply], answer: draft_pb2.DraftReply) -> None:
        try:
            outbox.put(answer)
        except OutboxFull:
            # The peer does not read. Its sessions stay; it gets a new stream when it comes back.
            self._protocol.metrics.event("outbox_full")
            outbox.close()

    def _load(self) -> draft_pb2.DraftLoad:
        stats = self._protocol.worker.stats
        return draft_pb2.DraftLoad(
            sessions=len(self._protocol.sessions), pages_free=stats.free, pages_total=stats.total
        )
