"""One `PushFeatures` stream to a draft: rows, and the questions of runs ahead.

Rows may be dropped, but never hold up a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import grpc

from engine.api import nothing
from specwire.errors import Reason, internal_error
from specwire.rpc import CHUNK_BYTES, channel_options
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from specwire.writer import Writer
from target_svc.asks import LOST, Answered, OpenAsks, Question
from target_svc.metrics import Metrics
from target_svc.sessions import Key
from target_svc.settings import TargetSettings

log = logging.getLogger(__name__)

_BACKOFF_S = (0.1, 2.0)


class Chunk(NamedTuple):
    """`length` rows of one session and step, from position `start` on. Bytes, since an array would
    keep the rows of its whole step in the memory that the device writes to."""

    key: common_pb2.SessionKey
    step_id: int
    start: int
    length: int
    rows: bytes


class PushStream:
    """Sends chunks in order while the draft gives credit, and connects again after a break."""

    def __init__(
        self,
        address: str,
        settings: TargetSettings,
        incarnation: int,
        metrics: Metrics,
        on_answers: Callable[[], None] = nothing,
    ) -> None:
        """`on_answers` is called behind each message with answers."""
        self._on_answers = on_answers
        self._address, self._incarnation, self._metrics = address, incarnation, metrics
        self._queue_bytes, self._window = settings.push_queue_bytes, settings.push_window_bytes
        self._queue: deque[Chunk] = deque()
        # Not sent yet: of a session the latest, however long the stream stands still.
        self._asks: dict[Key, tuple[common_pb2.SessionKey, Question]] = {}
        self._open_asks = OpenAsks()
        # The draft has answered on the present stream.
        self._up = False
        # There is a stream, or one is about to be tried: else a question is lost at once.
        self._hopeful = True
        self._queued = 0
        self._in_flight = 0
        self._writer: Writer[draft_pb2.PushFeaturesRequest] | None = None
        self._changed = asyncio.Event()
        self._hurry = asyncio.Event()
        self.users = 0
        self._task = asyncio.ensure_future(self._run())

    def attach(self) -> None:
        """Counts a user. Its draft is there, or it would not have been named: no pause is due."""
        self.users += 1
        self._changed.set()
        self._hurry.set()

    def detach(self, name: Key) -> None:
        self.users -= 1
        self._asks.pop(name, None)

    def put(self, chunk: Chunk) -> None:
        size = len(chunk.rows)
        if self._queued + size > self._queue_bytes:
            self._metrics.rows("overflow", size)
            return
        self._queue.append(chunk)
        self._queued += size
        self._wake()

    def ask(
        self, name: Key, key: common_pb2.SessionKey, question: Question, answered: Answered
    ) -> None:
        """Questions need no credit: a session has one at a time."""
        if not self._hopeful:
            asyncio.get_running_loop().call_soon(answered, LOST)
            return
        self._open_asks.add(name, question.step_id, answered)
        self._asks[name] = key, question
        self._wake()

    def hurry(self) -> None:
        """Sends what waits before it returns, where the stream is free for it."""
        if self._writer is not None:
            self._writer.hurry()

    def _wake(self) -> None:
        self._changed.set()
        if self._writer is not None:
            self._writer.wake()

    def forget(self, name: Key) -> None:
        """The session is over, or waits no longer: nobody is told of an answer any more."""
        self._open_asks.pop(name)

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        delay, longest = _BACKOFF_S
        # A channel for each try, sharing nothing: one that has failed would pause by itself.
        options = [*channel_options(link=True), ("grpc.use_local_subchannel_pool", 1)]
        while True:
            while not self._queue and not self.users:
                await self._wait()
            self._hopeful = True
            self._hurry.clear()
            async with grpc.aio.insecure_channel(self._address, options=options) as channel:
                worked = await self._connection(draft_pb2_grpc.DraftServiceStub(channel))
            delay = _BACKOFF_S[0] if worked else min(delay * 2, longest)
            # Not `wait_for`: of Python 3.11 it drops a cancel that comes with the end of the wait.
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._hurry.wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _connection(self, stub: Any) -> bool:
        """One stream until it breaks; whether the draft ever answered on it.

        What was on its way is lost.
        """
        call = stub.PushFeatures()
        self._in_flight = 0

        async def write(request: draft_pb2.PushFeaturesRequest) -> None:
            await call.write(request)
            self._metrics.rows("sent", sum(len(chunk.rows) for chunk in request.chunks))

        self._writer = writer = Writer(write, self._following)
        tasks = [
            asyncio.ensure_future(writer.run()),
            asyncio.ensure_future(self._read(call)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            self._metrics.rows("lost", self._in_flight)
            worked, self._up, self._hopeful = self._up, False, False
            self._writer = None
            self._asks.clear()
            self._open_asks.fail()
        for outcome in outcomes:
            if isinstance(outcome, (grpc.RpcError, asyncio.InvalidStateError)):
                log.debug("the row stream to %s broke: %s", self._address, outcome)
            elif isinstance(outcome, Exception):  # of ours: the next stream is another try
                internal_error(log, f"the row stream to {self._address} failed", outcome)
        return worked

    def _following(self) -> draft_pb2.PushFeaturesRequest | None:
        """What goes next, of all sessions in one message."""
        # Filled in place: a message that is put into another is copied, and rows are large.
        request = draft_pb2.PushFeaturesRequest()
        self._add_chunks(request)
        for key, question in self._asks.values():
            _add_ask(request, key, question)
        self._asks.clear()
        if not request.chunks and not request.asks:
            return None
        request.target_incarnation = self._incarnation
        return request

    def _add_chunks(self, request: draft_pb2.PushFeaturesRequest) -> None:
        """As many rows as the draft's credit and a frame have room for. They count as in
        flight."""
        size = 0
        while self._queue:
            more = len(self._queue[0].rows)
            if (size and size + more > CHUNK_BYTES) or not self._has_credit(more):
                break
            key, step_id, start, length, rows = self._queue.popleft()
            chunk = request.chunks.add(step_id=step_id, start=start, count=length, rows=rows)
            chunk.key.CopyFrom(key)
            size += more
            self._queued -= more
            self._in_flight += more

    def _has_credit(self, size: int) -> bool:
        return self._in_flight == 0 or self._in_flight + size <= self._window

    async def _read(self, call: Any) -> None:
        async for response in call:
            if response is None:
                return  # what gRPC cannot decode: the stream is given up
            self._up = True
            for ack in response.acks:
                self._in_flight = max(0, self._in_flight - ack.credit_bytes)
                if ack.HasField("error"):
                    self._metrics.dropped("rows_" + _cause(ack.error.reason))
            for reply in response.replies:
                if not self._open_asks.answer(reply):
                    self._metrics.dropped("draft_stray")
            if response.replies:
                self._on_answers()
            if response.acks and self._queue:
                self._wake()


def _add_ask(
    request: draft_pb2.PushFeaturesRequest, key: common_pb2.SessionKey, question: Question
) -> None:
    ask = request.asks.add(
        step_id=question.step_id,
        base_len=question.base_len,
        k=question.k,
        deadline_ms=-(-question.wait_us // 1000),
        rows_start=question.base_len - 1,
        rows_count=len(question.tokens),
    )
    ask.key.CopyFrom(key)
    ask.tokens.extend(question.tokens)


def _cause(reason: str) -> str:
    """A reason as a metric label; a peer must not be able to make up labels."""
    try:
        return Reason(reason).lower()
    except ValueError:
        return "other"
