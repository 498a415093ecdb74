"""The stream to a draft: what breaks it, and that it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specwire.v1 import common_pb2, draft_pb2
from target_svc import push_stream
from target_svc.asks import LOST, Answer, Question
from target_svc.decode import key_to_wire
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


@asynccontextmanager
async def served(draft: RawDraft, folder: Path) -> AsyncIterator[PushStream]:
    """A stream to it that somebody uses."""
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(draft.push)
    methods = {"PushFeatures": handler}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("specwire.v1.DraftService", methods),)
    )
    address = f"unix:{folder / 'd.sock'}"
    server.add_insecure_port(address)
    await server.start()
    stream = PushStream(address, TargetSettings(), 1, Metrics())
    stream.attach()
    try:
        yield stream
    finally:
        await stream.close()
        await server.stop(0)


async def answer_of(stream: PushStream, step_id: int) -> Answer:
    heard: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    stream.ask(KEY, key_to_wire(KEY), Question(step_id, 1, [5], 3, 1000), heard.set_result)
    return await asyncio.wait_for(heard, 5)


async def test_a_question_on_a_new_stream_waits_for_it(tmp_path: Path) -> None:
    """The first rounds of a first session are not without a draft."""
    key = common_pb2.SessionKey(coordinator=KEY[0], session_id=KEY[1], generation=KEY[2])
    proposal = common_pb2.Proposal(key=key, step_id=1, ids=[4, 5])
    reply = draft_pb2.PushFeaturesResponse(replies=[draft_pb2.DraftReply(proposal=proposal)])
    async with served(RawDraft(reply.SerializeToString()), tmp_path) as stream:
        answer = await answer_of(stream, 1)
        assert isinstance(answer, common_pb2.Proposal) and list(answer.ids) == [4, 5]


async def test_questions_to_nobody_are_lost_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_stream, "_BACKOFF_S", (60.0, 60.0))
    stream = PushStream(f"unix:{tmp_path / 'd.sock'}", TargetSettings(), 1, Metrics())
    stream.attach()
    try:
        assert await answer_of(stream, 1) is LOST  # the first try fails
        assert await answer_of(stream, 2) is LOST  # the next is not due yet
    finally:
        await stream.close()


async def test_who_comes_during_a_try_that_fails_waits_for_no_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its draft may have come up meanwhile."""
    monkeypatch.setattr(push_stream, "_BACKOFF_S", (60.0, 60.0))
    again = asyncio.Event()

    class Failing(PushStream):
        tries = 0

        async def _connection(self, stub: Any) -> bool:
            self.tries += 1
            if self.tries == 1:
                self.attach()
                return False
            again.set()
            return await super()._connection(stub)

    stream = Failing(f"unix:{tmp_path / 'd.sock'}", TargetSettings(), 1, Metrics())
    stream.attach()
    try:
        await asyncio.wait_for(again.wait(), 5)
    finally:
        await stream.close()


async def test_a_stream_that_is_closed_as_its_pause_ends_is_closed(tmp_path: Path) -> None:
    """A cancel that comes with the end of the wait must not be taken for it."""
    closing: list[asyncio.Task[None]] = []

    class Ending(PushStream):
        async def _connection(self, stub: Any) -> bool:
            if closing:
                await asyncio.sleep(60)
            self.attach()
            closing.append(asyncio.create_task(self.close()))
            return False

    stream = Ending(f"unix:{tmp_path / 'd.sock'}", TargetSettings(), 1, Metrics())
    stream.attach()
    async with asyncio.timeout(5):
        while not (closing and closing[0].done()):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", [b"\xff\xff\xff", spoilt_text()])
async def test_an_answer_that_cannot_be_read_ends_one_stream_only(
    tmp_path: Path, answer: bytes
) -> None:
    draft = RawDraft(answer)

    async def up(stream: PushStream) -> None:
        """Rows of four bytes, until one of them is acknowledged."""
        async with asyncio.timeout(5):
            stream.put(push_stream.Chunk(key_to_wire(KEY), 0, 0, 1, b"rows"))
            while not stream._up:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)

    async with served(draft, tmp_path) as stream:
        await up(stream)
        assert await answer_of(stream, 1) is LOST
        await up(stream)
        assert draft.streams == 2
