"""One multiplexed stream per worker: items out, replies to the sessions they belong to, reconnect.

Replies go from the reader straight to the session that waits, without another task in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc

from coordinator.mailbox import Mailbox
from coordinator.turns import Turns
from specwire.errors import Reason, SpecwireError, from_rpc_error
from specwire.rpc import HEARTBEAT_SESSIONS, Message, Outbox, OutboxFull
from specwire.v1 import common_pb2, target_pb2

log = logging.getLogger(__name__)

ItemT = TypeVar("ItemT", bound=Message)
# Pause before the next try. An absent worker may come any moment, and the channel below paces the
# connects themselves (0.1-2 s); one that does not fit will hardly change.
_BACKOFF_S, _ABSENT_S, _REFUSED_S = 0.1, 0.25, 2.0
_REFUSALS = (Reason.MODEL_MISMATCH, Reason.UNSUPPORTED)


class Link(Generic[ItemT]):
    """The link to one worker, whose `role` is "target" or "draft". `greet` asks who it is, checks
    it, and returns its incarnation.

    `dropped` counts replies by the cause for which nobody got them.
    """

    def __init__(
        self,
        *,
        address: str,
        role: str,
        coordinator: int,
        lease_ms: int,
        greet: Callable[[], Awaitable[int]],
        open_stream: Callable[[], Any],
        frame: Callable[[list[ItemT]], Any],
        heartbeat: Callable[[target_pb2.Heartbeat], ItemT],
        turns: Turns | None = None,
    ) -> None:
        self.address, self.role, self.lease_ms = address, role, lease_ms
        self.state, self.reason = "connecting", ""
        self.incarnation = 0
        self.dropped: Counter[str] = Counter()
        # What the worker last said of its load; None before the first frame that says it.
        self.load: Any = None
        # Sessions it has, by that: read for every verdict.
        self.load_sessions = 0
        self._coordinator = coordinator
        self._greet, self._open_stream, self._frame = greet, open_stream, frame
        self._heartbeat = heartbeat
        self._mailboxes: dict[tuple[int, int], Mailbox] = {}
        self._turns = turns or Turns()
        self._outbox: Outbox[ItemT] = Outbox()
        self._ready = asyncio.Event()
        self._call: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def sessions(self) -> int:
        """Sessions of this coordinator that the worker holds."""
        return len(self._mailboxes)

    async def wait_ready(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def send(self, item: ItemT) -> bool:
        """Queues an item for the next frame; False when the link is down."""
        if not self.ready:
            return False
        try:
            self._outbox.put(item)
        except OutboxFull:
            self._lose("the worker does not read")
            self._call.cancel()
            return False
        return True

    def open_mailbox(self, key: common_pb2.SessionKey) -> Mailbox:
        mailbox = self._mailboxes[key.session_id, key.generation] = Mailbox(self._turns)
        return mailbox

    def close_mailbox(self, key: common_pb2.SessionKey) -> None:
        self._mailboxes.pop((key.session_id, key.generation), None)

    # -- the stream ------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = _BACKOFF_S
        while True:
            try:
                self.incarnation = await self._greet()
                backoff = _BACKOFF_S
                await self._stream()
                self._lose("the worker ended the stream")
            except SpecwireError as error:
                self._lose(error.message, refused=error.reason in _REFUSALS)
            except grpc.RpcError as error:
                typed = from_rpc_error(error, self.address, self.role)
                self._lose(typed.message, refused=typed.reason in _REFUSALS)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # A read of a call that was given up; `send` has said why.
            await asyncio.sleep(backoff)
            longest = _REFUSED_S if self.state == "refused" else _ABSENT_S
            backoff = min(2 * backoff, longest)

    async def _stream(self) -> None:
        self._call = call = self._open_stream()
        self.load, self.load_sessions = None, 0
        self._outbox = Outbox()
        helpers = [asyncio.create_task(self._write(call)), asyncio.create_task(self._beat())]
        self.state, self.reason = "ready", ""
        self._ready.set()
        log.info("link ready", extra={"address": self.address})
        try:
            async for frame in call:
                if frame is None:  # what gRPC gives for bytes that it cannot decode
                    raise SpecwireError(Reason.INTERNAL, "the worker sent a malformed frame")
                self._read(frame)
        finally:
            self._ready.clear()
            for helper in helpers:
                helper.cancel()
            call.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        while items := await self._outbox.take_all():
            await call.write(self._frame(items))

    async def _beat(self) -> None:
        """Renews the leases of every session that is open here."""
        while True:
            await asyncio.sleep(self.lease_ms / 3000)
            keys = [self._key(*name) for name in self._mailboxes]
            # One without sessions too: it says that the coordinator is there.
            for start in range(0, len(keys) or 1, HEARTBEAT_SESSIONS):
                beat = target_pb2.Heartbeat(
                    coordinator=self._coordinator,
                    sessions=keys[start : start + HEARTBEAT_SESSIONS],
                    lease_ms=self.lease_ms,
                )
                self.send(self._heartbeat(beat))

    def _key(self, session_id: int, generation: int) -> common_pb2.SessionKey:
        return common_pb2.SessionKey(
            coordinator=self._coordinator, session_id=session_id, generation=generation
        )

    def _read(self, frame: Any) -> None:
        """Hands a frame's replies out. Nothing a worker sends ends the reader."""
        if frame.incarnation != self.incarnation:
            self.dropped["incarnation"] += max(1, len(frame.replies))
            return
        if frame.HasField("load"):
            self.load, self.load_sessions = frame.load, int(frame.load.sessions)
        mailboxes, own, arrived_ns = self._mailboxes, self._coordinator, time.perf_counter_ns()
        for reply in frame.replies:
            kind = reply.WhichOneof("reply")
            if kind == "heartbeat_ack":
                self._forgotten(reply.heartbeat_ack)
            elif kind is None:
                self.dropped["malformed"] += 1
            elif kind != "closed":
                message = getattr(reply, kind)
                key = message.key
                mailbox = mailboxes.get((key.session_id, key.generation))
                if mailbox is None or key.coordinator != own:
                    self.dropped["session"] += 1
                else:
                    mailbox.put(message, arrived_ns)

    def _forgotten(self, ack: target_pb2.HeartbeatAck) -> None:
        for key in ack.unknown:
            mailbox = self._mailboxes.get((key.session_id, key.generation))
            if mailbox is not None:
                mailbox.fail(SpecwireError(Reason.SESSION_UNKNOWN, "the worker lost the session"))

    def _lose(self, reason: str, *, refused: bool = False) -> None:
        if self.state != "connecting" or refused:
            self.state = "refused" if refused else "down"
        if reason != self.reason:
            log.warning("link %s", self.state, extra={"address": self.address, "why": reason})
        self.reason = reason
        self._ready.clear()
        for mailbox in self._mailboxes.values():
            mailbox.fail(SpecwireError(Reason.ENGINE_DOWN, "the link to the worker was lost"))
