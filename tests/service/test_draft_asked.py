"""A draft service that is asked by a target itself, on the stream of its rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from specwire.errors import Reason
from specwire.rpc import ASKS_MINOR, Outbox
from specwire.v1 import draft_pb2, target_pb2
from tests.service.draft_peer import (
    TARGET,
    WIDTH,
    Service,
    advance_item,
    close_item,
    open_item,
    serving,
    session_key,
)

KEY = session_key()
Reply = draft_pb2.DraftReply


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path) as running:
        yield running


def rows_of(key: Any, step_id: int, start: int, values: Sequence[int]) -> draft_pb2.FeatureChunk:
    """Rows whose every element is the value of its position."""
    rows = np.repeat(np.array(values, dtype="<u2")[:, None], WIDTH, axis=1).tobytes()
    return draft_pb2.FeatureChunk(
        key=key, step_id=step_id, start=start, count=len(values), rows=rows
    )


def ask(key: Any, step_id: int, base_len: int, tokens: Sequence[int], k: int, **f: Any) -> Any:
    return advance_item(key, step_id, base_len, tokens, k, **f).advance


class Stream:
    """A target's stream: rows and questions one way, acknowledgements and replies the other."""

    def __init__(self, service: Service, target: int = TARGET) -> None:
        self.call, self._target = service.stub.PushFeatures(), target
        self.acks: list[draft_pb2.FeatureAck] = []
        self._replies: list[Reply] = []

    async def send(
        self, *asks: draft_pb2.Advance, rows: Sequence[draft_pb2.FeatureChunk] = ()
    ) -> None:
        frame = draft_pb2.PushFeaturesRequest(
            target_incarnation=self._target, chunks=rows, asks=asks
        )
        await self.call.write(frame)

    async def reply(self) -> Reply:
        while not self._replies:
            frame = await asyncio.wait_for(self.call.read(), 5)
            assert isinstance(frame, draft_pb2.PushFeaturesResponse), "the stream ended"
            self.acks += frame.acks
            self._replies += frame.replies
        return self._replies.pop(0)

    async def ended(self) -> None:
        async with asyncio.timeout(5):
            while await self.call.read() is not grpc.aio.EOF:
                pass


async def test_a_question_is_answered_on_its_stream_behind_the_rows_of_its_frame(
    service: Service,
) -> None:
    """One exchange: the rows of the prompt and of the step, and what is wanted behind them."""
    link, stream = service.link(), Stream(service)
    await link.ask(open_item(KEY, [1, 2]))
    await stream.send(ask(KEY, 0, 2, [3], 2), rows=[rows_of(KEY, 0, 0, [10, 20])])
    proposal = (await stream.reply()).proposal
    assert (proposal.step_id, proposal.base_len, list(proposal.ids)) == (0, 3, [20, 21])
    assert [a.credit_bytes for a in stream.acks] == [2 * 2 * WIDTH]
    # The target goes on: rows of two tokens, and then a question whose rows come later.
    chunk = rows_of(KEY, 1, 2, [30, 40])
    await stream.send(ask(KEY, 1, 3, [4, 5], 3, rows_start=2, rows_count=2), rows=[chunk])
    assert list((await stream.reply()).proposal.ids) == [40, 41, 42]
    await stream.send(ask(KEY, 2, 5, [6], 1, rows_start=4, rows_count=1))
    await stream.send(rows=[rows_of(KEY, 2, 4, [50])])
    assert list((await stream.reply()).proposal.ids) == [50]
    beat = await link.ask(draft_pb2.DraftItem(heartbeat=target_pb2.Heartbeat(coordinator=5)))
    assert beat.HasField("heartbeat_ack"), "nothing of it went to the coordinator"


async def test_questions_of_many_sessions_share_a_frame_and_a_forward(service: Service) -> None:
    link, stream = service.link(), Stream(service)
    keys = [session_key(i) for i in (1, 2, 3)]
    for key in keys:
        await link.ask(open_item(key, [1, 2]))
    rows = [rows_of(key, 0, 0, [10, 20 * key.session_id]) for key in keys]
    rows.append(rows_of(session_key(9), 0, 0, [1]))
    await stream.send(*(ask(key, 0, 2, [3], 1) for key in keys), rows=rows)
    found = [(await stream.reply()).proposal for _ in keys]
    assert {p.key.session_id: list(p.ids) for p in found} == {1: [20], 2: [40], 3: [60]}
    # One credit for all that was taken; who is refused is told so.
    refused, taken = stream.acks
    assert taken.credit_bytes == 3 * 2 * 2 * WIDTH and not taken.HasField("key")
    assert refused.key == session_key(9) and refused.credit_bytes == 2 * WIDTH
    assert refused.error.reason == Reason.SESSION_UNKNOWN


@pytest.mark.parametrize(
    ("target", "key", "reason", "have"),
    [
        (TARGET + 1, KEY, Reason.SESSION_UNKNOWN, 0),
        (0, KEY, Reason.SESSION_UNKNOWN, 0),
        (TARGET, session_key(9), Reason.SESSION_UNKNOWN, 0),
        (TARGET, session_key(1, 2), Reason.SESSION_UNKNOWN, 0),
        (TARGET, KEY, Reason.NEED_TOKENS, 2),
    ],
)
async def test_what_may_not_be_asked_is_refused_on_the_stream(
    service: Service, target: int, key: Any, reason: Reason, have: int
) -> None:
    """Another target's session is not told of, nor touched; the stream and the session go on."""
    link, stream = service.link(), Stream(service, target)
    await link.ask(open_item(KEY, [1, 2]))
    await stream.send(ask(key, 3, 5, [9], 2))
    refused = (await stream.reply()).refused
    assert (refused.error.reason, refused.have_len, refused.step_id) == (reason, have, 3)
    assert refused.key == key
    own = Stream(service)
    await own.send(ask(KEY, 0, 2, [3], 2), rows=[rows_of(KEY, 0, 0, [10, 20])])
    assert list((await own.reply()).proposal.ids) == [20, 21]


async def test_a_session_that_was_opened_for_no_target_is_asked_by_none(service: Service) -> None:
    """A drafter that reads no rows may be opened so: its coordinator alone speaks for it."""
    link, stream = service.link(), Stream(service)
    await link.ask(open_item(KEY, [5, 6, 7, 5, 6], method="ngram", target_incarnation=0))
    await stream.send(ask(KEY, 0, 5, [7], 2))
    assert (await stream.reply()).refused.error.reason == Reason.SESSION_UNKNOWN


async def test_the_coordinator_that_asks_again_gets_the_same_answer(service: Service) -> None:
    """The target did not wait for it, or its stream broke: whoever drives the session repeats the
    step and goes on."""
    link, stream = service.link(), Stream(service)
    await link.ask(open_item(KEY, [1, 2]))
    await stream.send(ask(KEY, 0, 2, [3], 2), rows=[rows_of(KEY, 0, 0, [10, 20])])
    first = await stream.reply()
    assert await link.ask(advance_item(KEY, 0, 2, [3], 2)) == first
    # The base may be what the coordinator believes that was told.
    assert await link.ask(advance_item(KEY, 0, 3, [], 2)) == first
    assert service.toy.batches == [1]
    # A step that still runs is joined: the answer goes to whoever asked last.
    service.toy.gate.clear()
    service.toy.entered.clear()
    chunk = rows_of(KEY, 1, 2, [30])
    await stream.send(ask(KEY, 1, 3, [4], 1, rows_start=2), rows=[chunk])
    await service.computing()
    await link.silent(advance_item(KEY, 1, 4, [], 1))
    service.toy.gate.set()
    assert list((await link.reply()).proposal.ids) == [30]
    # The run that the coordinator begins next is asked for by the target.
    await stream.send(ask(KEY, 2, 4, [5], 1), rows=[rows_of(KEY, 2, 3, [40])])
    assert list((await stream.reply()).proposal.ids) == [40]


async def test_answers_after_a_close_or_a_stream_that_ended_harm_nothing(service: Service) -> None:
    link, stream = service.link(), Stream(service)
    await link.ask(open_item(KEY, [1, 2]))
    service.toy.gate.clear()
    await stream.send(ask(KEY, 0, 2, [3], 2), rows=[rows_of(KEY, 0, 0, [10, 20])])
    await service.computing()
    stream.call.cancel()
    service.toy.gate.set()
    assert list((await link.ask(advance_item(KEY, 0, 2, [3], 2))).proposal.ids) == [20, 21]
    service.toy.gate.clear()
    other = Stream(service)
    await other.send(ask(KEY, 1, 3, [4], 1), rows=[rows_of(KEY, 1, 2, [30])])
    await service.computing()
    assert (await link.ask(close_item(KEY))).HasField("closed")
    service.toy.gate.set()
    await service.idle()
    await other.send(ask(KEY, 2, 4, [5], 1))
    assert (await other.reply()).refused.error.reason == Reason.SESSION_UNKNOWN


async def test_a_target_that_never_reads_loses_its_stream_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers pile up to a limit. Its sessions stay, and whoever reads is served."""
    link, lazy, busy = service.link(), Stream(service), Stream(service)
    await link.ask(open_item(KEY, [1, 2]))
    await busy.send(rows=[rows_of(KEY, 0, 0, [10])])  # both streams are there
    monkeypatch.setattr(Outbox.__init__, "__defaults__", (8,))
    lazy = Stream(service)
    frame = [ask(session_key(99), 1, 2, [3], 1) for _ in range(40)]
    await lazy.send(*frame)  # forty refusals at once
    await lazy.ended()
    assert service.host.metrics.value("events", cause="outbox_full") >= 1
    await busy.send(ask(KEY, 0, 2, [3], 1), rows=[rows_of(KEY, 0, 1, [20])])
    assert list((await busy.reply()).proposal.ids) == [20]


async def test_who_can_be_asked_says_so(service: Service) -> None:
    info = await service.stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest())
    assert info.worker.protocol_minor >= ASKS_MINOR


async def test_a_lost_question_is_mended_by_telling_again_with_its_rows(service: Service) -> None:
    """The rows of a step came, its question did not: those rows are gone with the next one, which
    is refused; the one after it tells from there, and its rows begin there."""
    link, stream = service.link(), Stream(service)
    await link.ask(open_item(KEY, [1, 2]))
    await stream.send(ask(KEY, 0, 2, [3], 2), rows=[rows_of(KEY, 0, 0, [10, 20])])
    await stream.reply()
    await stream.send(rows=[rows_of(KEY, 1, 2, [30, 40])])
    await stream.send(ask(KEY, 2, 5, [6], 1), rows=[rows_of(KEY, 2, 4, [50])])
    refused = (await stream.reply()).refused
    assert (refused.error.reason, refused.have_len) == (Reason.NEED_TOKENS, 3)
    again = [rows_of(KEY, 3, 2, [30, 40, 50]), rows_of(KEY, 3, 5, [60])]
    await stream.send(ask(KEY, 3, 3, [4, 5, 6, 7], 2), rows=again)
    proposal = (await stream.reply()).proposal
    assert (list(proposal.ids), proposal.reason) == ([60, 61], "")
