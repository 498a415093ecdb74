"""A target service with the toy engine on a UNIX socket, and a hand-driven link to it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from specwire.rpc import channel_options, encode_ids
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from target_svc.app import Loaded, TargetApp
from target_svc.settings import TargetSettings
from tests.service.toy_engine import HIDDEN, ToyEngine

TOKENIZER = b'{"tokenizer": {}, "chat_template": "", "special": {}}' + b" " * 2_500_000
TAPS = (1, 3)


class Peer:
    """A coordinator's end of one link. Replies are read one by one."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Link()
        self._replies: list[target_pb2.TargetReply] = []
        self.load = target_pb2.TargetLoad()

    async def send(self, *messages: Any) -> None:
        names = {
            target_pb2.OpenTarget: "open",
            target_pb2.Verify: "verify",
            target_pb2.ExportRows: "export_rows",
            target_pb2.CloseSession: "close",
            target_pb2.Heartbeat: "heartbeat",
        }
        items = [target_pb2.TargetItem(**{names[type(m)]: m}) for m in messages]
        await self.call.write(target_pb2.TargetServiceLinkRequest(items=items))

    async def reply(self, timeout: float = 5.0) -> target_pb2.TargetReply:
        while not self._replies:
            frame = await asyncio.wait_for(self.call.read(), timeout)
            assert frame is not grpc.aio.EOF, "the link ended"
            self._replies += frame.replies
            self.load = frame.load
        return self._replies.pop(0)

    async def verdict(self) -> target_pb2.Verdict:
        reply = await self.reply()
        assert reply.HasField("verdict"), reply
        return reply.verdict

    async def refused(self) -> target_pb2.TargetRefused:
        reply = await self.reply()
        assert reply.HasField("refused"), reply
        return reply.refused

    async def heartbeat(self, *keys: common_pb2.SessionKey, lease_ms: int = 0) -> list[int]:
        """Session ids that the target does not know. Also a barrier: earlier items were handled."""
        message = target_pb2.Heartbeat(coordinator=1, sessions=keys, lease_ms=lease_ms)
        await self.send(message)
        reply = await self.reply()
        assert reply.HasField("heartbeat_ack"), reply
        return [k.session_id for k in reply.heartbeat_ack.unknown]


def key(session_id: int = 1, generation: int = 1, coordinator: int = 1) -> common_pb2.SessionKey:
    return common_pb2.SessionKey(
        coordinator=coordinator, session_id=session_id, generation=generation
    )


def open_target(
    ids: list[int], max_new: int = 64, at: common_pb2.SessionKey | None = None, **fields: Any
) -> target_pb2.OpenTarget:
    fields.setdefault("sampling", common_pb2.Sampling(temperature=0.0))
    return target_pb2.OpenTarget(
        key=at or key(), ids=encode_ids(ids), max_new_tokens=max_new, **fields
    )


def verify(
    step_id: int,
    base_len: int,
    draft: list[int] | tuple[int, ...] = (),
    at: common_pb2.SessionKey | None = None,
    **fields: Any,
) -> target_pb2.Verify:
    return target_pb2.Verify(
        key=at or key(), step_id=step_id, base_len=base_len, draft_ids=draft, **fields
    )


def push_to(address: str, **changes: Any) -> target_pb2.PushTo:
    fields: dict[str, Any] = {
        "encoding": 1,
        "convention": 1,
        "tap_ids": TAPS,
        "dtype": common_pb2.D_TYPE_BFLOAT16,
        "width": len(TAPS) * HIDDEN,
        **changes,
    }
    return target_pb2.PushTo(address=address, format=common_pb2.RowFormat(**fields))


class Target:
    def __init__(self, app: TargetApp, engine: ToyEngine, channel: grpc.aio.Channel) -> None:
        self.app, self.engine, self.channel = app, engine, channel
        self.stub = target_pb2_grpc.TargetServiceStub(channel)

    def peer(self) -> Peer:
        return Peer(self.stub)

    def count(self, name: str, **labels: str) -> float:
        return self.app.metrics.value(name, **labels)

    async def until_idle(self, timeout: float = 3.0) -> None:
        """All sessions gone and all pages free, in time."""
        async with asyncio.timeout(timeout):
            await self.app.scheduler.idle.wait()
            while self.engine.stats().tables:  # noqa: ASYNC110  (the engine tells nobody)
                await asyncio.sleep(0.01)
        self.engine.check_integrity()
        assert self.engine.stats().free == self.engine.stats().total


@asynccontextmanager
async def target(engine: Any = None, **settings: Any) -> AsyncIterator[Target]:
    """Starts a target on a fresh socket; `settings` are those of `TargetSettings`. The engine is a
    toy unless one is given."""
    engine = engine or ToyEngine()
    with tempfile.TemporaryDirectory() as folder:
        chosen = {"address": f"unix:{Path(folder) / 't.sock'}", "drain_ms": 0, **settings}
        app = TargetApp(TargetSettings(**chosen), lambda _: Loaded(engine, TOKENIZER))
        await app.start()
        try:
            async with grpc.aio.insecure_channel(
                app.address, options=channel_options(link=True)
            ) as channel:
                yield Target(app, engine, channel)
        finally:
            if isinstance(engine, ToyEngine):
                engine.gate.set()
            await app.stop()
            loop = app._loop_task
            assert loop is not None
            if not loop.cancelled():
                loop.result()  # why the step loop ended by itself


class FakeDraft(draft_pb2_grpc.DraftServiceServicer):
    """Takes rows and keeps them."""

    def __init__(self, credit: bool = True) -> None:
        self.chunks: list[draft_pb2.FeatureChunk] = []
        self.streams = 0
        self._credit = credit
        self._changed = asyncio.Condition()

    async def PushFeatures(self, request_iterator: Any, context: Any) -> Any:
        self.streams += 1
        async for request in request_iterator:
            async with self._changed:
                self.chunks += request.chunks
                self._changed.notify_all()
            if self._credit:
                acks = [
                    draft_pb2.FeatureAck(key=c.key, credit_bytes=len(c.rows))
                    for c in request.chunks
                ]
                yield draft_pb2.PushFeaturesResponse(acks=acks)

    async def rows(self, count: int) -> list[draft_pb2.FeatureChunk]:
        """Waits until so many rows have come."""
        async with asyncio.timeout(5), self._changed:
            await self._changed.wait_for(lambda: sum(c.count for c in self.chunks) >= count)
        return self.chunks


# What a scripted draft answers to a target that asks it.
AskScript = Callable[[draft_pb2.Advance], list[draft_pb2.DraftReply]]


def answer(ask: draft_pb2.Advance, ids: Sequence[int], **changes: Any) -> draft_pb2.DraftReply:
    """A proposal that answers an ask, but for the `changes`."""
    fields: dict[str, Any] = {
        "key": ask.key,
        "step_id": ask.step_id,
        "base_len": ask.base_len + len(ask.tokens),
    }
    return draft_pb2.DraftReply(proposal=common_pb2.Proposal(**{**fields, "ids": ids, **changes}))


def no_answer(ask: draft_pb2.Advance, reason: str = "NEED_TOKENS") -> draft_pb2.DraftReply:
    error = common_pb2.ItemError(reason=reason, message="scripted")
    refused = draft_pb2.DraftRefused(key=ask.key, step_id=ask.step_id, error=error)
    return draft_pb2.DraftReply(refused=refused)


class AskedDraft(FakeDraft):
    """Keeps what it is asked; answers by its script, or what a test says."""

    def __init__(self, script: AskScript = lambda _: []) -> None:
        super().__init__()
        self.script = script
        self.asks: list[draft_pb2.Advance] = []
        # Rows that had come when each was asked, and who asked.
        self.rows_before: list[int] = []
        self.asked_by: set[int] = set()
        self._out: asyncio.Queue[draft_pb2.PushFeaturesResponse | None] = asyncio.Queue()

    async def PushFeatures(self, request_iterator: Any, context: Any) -> Any:
        self.streams += 1
        self._out = out = asyncio.Queue()
        reader = asyncio.create_task(self._take(request_iterator))
        try:
            while (response := await out.get()) is not None:
                yield response
        finally:
            reader.cancel()

    async def _take(self, requests: Any) -> None:
        async for request in requests:
            acks = [
                draft_pb2.FeatureAck(key=c.key, credit_bytes=len(c.rows)) for c in request.chunks
            ]
            replies = [reply for ask in request.asks for reply in self.script(ask)]
            self._out.put_nowait(draft_pb2.PushFeaturesResponse(acks=acks, replies=replies))
            async with self._changed:
                self.chunks += request.chunks
                self.asks += request.asks
                rows = sum(chunk.count for chunk in self.chunks)
                self.rows_before += [rows] * len(request.asks)
                self.asked_by |= {request.target_incarnation} if request.asks else set()
                self._changed.notify_all()

    def say(self, *replies: draft_pb2.DraftReply) -> None:
        self._out.put_nowait(draft_pb2.PushFeaturesResponse(replies=replies))

    def end_stream(self) -> None:
        self._out.put_nowait(None)

    async def asked(self, count: int) -> draft_pb2.Advance:
        """The `count`-th thing that it was asked, once it is."""
        async with asyncio.timeout(5), self._changed:
            await self._changed.wait_for(lambda: len(self.asks) >= count)
        return self.asks[count - 1]


@asynccontextmanager
async def draft_server(address: str, servicer: FakeDraft) -> AsyncIterator[FakeDraft]:
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(0)
