"""The stream to a draft: what breaks it, and that it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from specwire.v1 import common_pb2, draft_pb2
from target_svc.asks import LOST, Answer
from target_svc.metrics import Metrics
from target_svc.push_stream import PushStream
from target_svc.sessions import Key
from target_svc.settings import TargetSettings

KEY = Key(1, 2, 3)


def spoilt_text() -> bytes:
    """A proposal whose reason is no UTF-8."""
    proposal = common_pb2.Proposal(reason="ZZZZ")
    whole = draft_pb2.PushFeaturesResponse(replies=[draft_pb2.DraftReply(proposal=proposal)])
    return whole.SerializeToString().replace(b"ZZZZ", b"\xff\xfe\xff\xfe")


class RawDraft:
    """Acknowledges rows; the first question is answered with these bytes."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.streams = answer, 0

    async def push(self, frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.streams += 1
        async for frame in frames:
            message = draft_pb2.PushFeaturesRequest.FromString(frame)
            if message.asks and self.streams == 1:
                yield self.answer
            acks = [draft_pb2.FeatureAck(credit_bytes=len(c.rows)) for c in message.chunks]
            yield draft_pb2.PushFeaturesResponse(acks=acks).SerializeToString()


@pytest.mark.parametrize("answer", [b"\xff\xff\xff", spoilt_text()])
async def test_an_answer_that_cannot_be_read_ends_one_stream_only(
    tmp_path: Path, answer: bytes
) -> None:
    draft, server = RawDraft(answer), grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(draft.push)
    methods = {"PushFeatures": handler}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("specwire.v1.DraftService", methods),)
    )
    address = f"unix:{tmp_path / 'd.sock'}"
    server.add_insecure_port(address)
    await server.start()
    stream = PushStream(address, TargetSettings(), 1, Metrics())
    stream.attach()

    async def up() -> None:
        """Rows of four bytes, until one of them is acknowledged."""
        async with asyncio.timeout(5):
            stream.put(draft_pb2.FeatureChunk(rows=b"rows"))
            while not stream._up:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)

    try:
        await up()
        heard: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        stream.ask(KEY, draft_pb2.Advance(step_id=1, k=3), heard.set_result)
        assert await asyncio.wait_for(heard, 5) is LOST
        await up()
        assert draft.streams == 2
    finally:
        await stream.close()
        await server.stop(0)
