"""Heartbeats list a bounded number of sessions: nobody waits while a worker reads a huge one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from coordinator.links import Link
from specwire.errors import Reason
from specwire.rpc import HEARTBEAT_SESSIONS
from specwire.v1 import common_pb2, draft_pb2, target_pb2
from tests.service.draft_peer import close_item, open_item, serving, session_key
from tests.service.target_harness import key, open_target, target

MANY = 300_000


def endless(coordinator: int, first: int = 10_000) -> target_pb2.Heartbeat:
    """Of sessions that nobody knows; session 1 is the last."""
    ids = [*range(first, first + MANY), 1]
    keys = [common_pb2.SessionKey(coordinator=coordinator, session_id=i, generation=1) for i in ids]
    return target_pb2.Heartbeat(coordinator=coordinator, sessions=keys)


def check(ack: target_pb2.HeartbeatAck, error: common_pb2.ItemError) -> None:
    assert len(ack.unknown) == HEARTBEAT_SESSIONS
    assert error.reason == Reason.FIELD_INVALID
    assert error.metadata["field"] == "sessions" and error.metadata["value"] == str(MANY + 1)
    assert str(HEARTBEAT_SESSIONS) in error.metadata["accepted"]


async def test_the_target_renews_the_first_and_refuses_the_excess() -> None:
    async with target() as service:
        peer, other = service.peer(), service.peer()
        await peer.send(open_target([1, 2, 3], max_new=2))
        await peer.verdict()
        await peer.send(endless(coordinator=1))
        check((await peer.reply()).heartbeat_ack, (await peer.refused()).error)
        assert await peer.heartbeat(key(1), key(9)) == [9]
        assert await other.heartbeat() == []


async def test_the_draft_renews_the_first_and_refuses_the_excess(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        link = service.link()
        await link.ask(open_item(session_key(), [1, 2, 3], method="ngram"))
        await link.send(draft_pb2.DraftItem(heartbeat=endless(coordinator=5)))
        check((await link.reply()).heartbeat_ack, (await link.reply()).refused.error)
        beat = target_pb2.Heartbeat(coordinator=5, sessions=[session_key(), session_key(9)])
        reply = await link.ask(draft_pb2.DraftItem(heartbeat=beat))
        assert list(reply.heartbeat_ack.unknown) == [session_key(9)]
        await link.ask(close_item(session_key()))


class Call:
    """A stream that takes everything and says nothing."""

    def __init__(self) -> None:
        self.beats: list[target_pb2.Heartbeat] = []
        self.news = asyncio.Event()

    async def write(self, frame: list[target_pb2.Heartbeat]) -> None:
        self.beats += frame
        self.news.set()

    async def __aiter__(self) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None

    def cancel(self) -> None:
        self.news.set()


async def test_the_coordinator_splits_what_it_renews() -> None:
    call, count = Call(), 2 * HEARTBEAT_SESSIONS + 17

    async def greet() -> int:
        return 3

    link: Link[target_pb2.Heartbeat] = Link(
        address="unix:/nowhere",
        role="target",
        coordinator=7,
        lease_ms=300,
        greet=greet,
        open_stream=lambda: call,
        frame=lambda items: items,
        heartbeat=lambda beat: beat,
    )
    for session_id in range(count):
        link.open_mailbox(key(session_id, coordinator=7))
    link.start()
    try:
        await asyncio.wait_for(call.news.wait(), 20)
    finally:
        await link.stop()
    beats = call.beats[:3]
    assert [len(beat.sessions) for beat in beats] == [HEARTBEAT_SESSIONS, HEARTBEAT_SESSIONS, 17]
    assert [k.session_id for beat in beats for k in beat.sessions] == list(range(count))
    assert {(beat.coordinator, beat.lease_ms) for beat in beats} == {(7, 300)}
