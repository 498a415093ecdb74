"""The draft service at a target's own address: the handshake of a drafter that has no link.

Sessions of the target in the same process reach it through `Verify`. Whoever opens a session here
is told so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from draft_svc import replies
from draft_svc.info import drafter_infos
from draft_svc.methods.base import MethodInfo
from draft_svc.service import worker_info
from engine.kv.pool import PoolStats
from specwire.errors import Reason, SpecwireError
from specwire.v1 import draft_pb2, draft_pb2_grpc

_TEXT = (
    "this drafter is co-located: it drafts for its own target's sessions only, "
    "which are opened there with `colocated` and ask with `then_propose`"
)


class ColocatedServicer(draft_pb2_grpc.DraftServiceServicer):
    """`info` is None until the drafter is loaded; `incarnation` is the target's."""

    def __init__(
        self,
        info: Callable[[], MethodInfo | None],
        stats: Callable[[], PoolStats],
        *,
        incarnation: int,
    ) -> None:
        self._info, self._stats, self._incarnation = info, stats, incarnation

    async def GetInfo(
        self, request: draft_pb2.DraftServiceGetInfoRequest, context: Any
    ) -> draft_pb2.DraftServiceGetInfoResponse:
        info = self._info()
        if info is None:
            raise SpecwireError(Reason.ENGINE_DOWN, "the drafter of this target is not loaded")
        return draft_pb2.DraftServiceGetInfoResponse(
            worker=worker_info(self._incarnation, info.device),
            drafters=drafter_infos([info], info.method),
            load=self._load(),
        )

    async def Link(
        self, request_iterator: AsyncIterator[draft_pb2.DraftServiceLinkRequest], context: Any
    ) -> AsyncIterator[draft_pb2.DraftServiceLinkResponse]:
        async for frame in request_iterator:
            yield draft_pb2.DraftServiceLinkResponse(
                incarnation=self._incarnation,
                replies=map(_answer, frame.items),
                load=self._load(),
            )

    async def PushFeatures(
        self, request_iterator: AsyncIterator[draft_pb2.PushFeaturesRequest], context: Any
    ) -> AsyncIterator[draft_pb2.PushFeaturesResponse]:
        error = _unsupported().to_item()
        async for frame in request_iterator:
            yield draft_pb2.PushFeaturesResponse(
                acks=[
                    draft_pb2.FeatureAck(
                        key=chunk.key,
                        step_id=chunk.step_id,
                        credit_bytes=len(chunk.rows),
                        error=error,
                    )
                    for chunk in frame.chunks
                ]
            )

    def _load(self) -> draft_pb2.DraftLoad:
        stats = self._stats()
        return draft_pb2.DraftLoad(
            sessions=stats.tables, pages_free=stats.free, pages_total=stats.total
        )


def _answer(item: draft_pb2.DraftItem) -> draft_pb2.DraftReply:
    if item.HasField("close"):
        return replies.closed(item.close.key)
    if item.HasField("heartbeat"):
        return replies.heartbeat(item.heartbeat.sessions)
    return replies.refused(item, _unsupported())


def _unsupported() -> SpecwireError:
    return SpecwireError(Reason.UNSUPPORTED, _TEXT)
