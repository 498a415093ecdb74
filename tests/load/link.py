"""A coordinator's end of one `Link`, for synthetic sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import grpc

from specwire.errors import Reason, SpecwireError, from_item, from_rpc_error
from specwire.rpc import Outbox, new_incarnation
from specwire.v1 import common_pb2, target_pb2

LEASE_MS = 10_000


class Link:
    """Frames many sessions' items, hands replies to their sessions, renews leases.

    `frame` makes a request of items, `item` an item of one field.
    """

    def __init__(self, stub: Any, frame: Callable[..., Any], item: Callable[..., Any]) -> None:
        self.coordinator = new_incarnation()
        self._frame, self._item = frame, item
        self._call = stub.Link()
        self._outbox: Outbox[Any] = Outbox(limit=1 << 20)
        self._replies: dict[int, asyncio.Queue[Any]] = {}
        self._lost: SpecwireError | None = None

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(t()) for t in (self._read, self._write, self._beat)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._outbox.close()  # what waits still leaves: closes, above all
        with suppress(TimeoutError):
            await asyncio.wait_for(self._tasks[1], 2)
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def open(self, number: int) -> common_pb2.SessionKey:
        self._replies[number + 1] = asyncio.Queue()
        return common_pb2.SessionKey(
            coordinator=self.coordinator, session_id=number + 1, generation=1
        )

    def close(self, key: common_pb2.SessionKey) -> None:
        self._replies.pop(key.session_id, None)
        self.send(close=target_pb2.CloseSession(key=key))

    def send(self, **item: Any) -> None:
        self._outbox.put(self._item(**item))

    async def reply(self, key: common_pb2.SessionKey) -> Any:
        """The next reply to a session; refusals and a lost link are raised."""
        if self._lost is not None:
            raise self._lost
        message = await self._replies[key.session_id].get()
        if isinstance(message, SpecwireError):
            raise message
        if message.DESCRIPTOR.name.endswith("Refused"):
            raise from_item(message.error)
        return message

    async def _read(self) -> None:
        error = SpecwireError(Reason.ENGINE_DOWN, "the service ended the link")
        try:
            async for frame in self._call:
                for reply in frame.replies:
                    self._hand_out(getattr(reply, reply.WhichOneof("reply")))
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
        self._lost = error
        for queue in self._replies.values():
            queue.put_nowait(error)

    def _hand_out(self, message: Any) -> None:
        if not isinstance(message, (target_pb2.HeartbeatAck, target_pb2.TargetClosed)):
            queue = self._replies.get(message.key.session_id)
            if queue is not None:
                queue.put_nowait(message)

    async def _write(self) -> None:
        while items := await self._outbox.take_all():
            await self._call.write(self._frame(items=items))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(LEASE_MS / 3000)
            keys = [
                common_pb2.SessionKey(coordinator=self.coordinator, session_id=i, generation=1)
                for i in self._replies
            ]
            self.send(
                heartbeat=target_pb2.Heartbeat(
                    coordinator=self.coordinator, sessions=keys, lease_ms=LEASE_MS
                )
            )
