"""Both peers of a draft service, for tests, and a toy method that reads rows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import grpc
import numpy as np

from draft_svc.host import DraftHost
from draft_svc.methods.base import (
    REASON_ROWS_MISSING,
    Draft,
    Method,
    MethodInfo,
    Request,
    RowBlock,
    RowNeeds,
)
from draft_svc.methods.ngram import NgramMethod
from draft_svc.protocol import Limits
from engine.api import Sampling
from engine.kv.pool import PoolStats
from specwire.rpc import channel_options, encode_ids
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2

WIDTH, PROJECTED = 4, 2
LIMITS = Limits(
    max_sessions=8, rows_wait_ms=1000, rows_buffer_bytes=4096, lease_ms=10_000, max_lease_ms=60_000
)
TARGET = 77
PAGES = 1000


@dataclass
class ToyContext:
    ids: list[int]
    sampling: Sampling
    rows: dict[int, list[int]] = field(default_factory=dict)
    projected: set[bool] = field(default_factory=set)


class ToyMethod(Method[ToyContext]):
    """Proposes from the last row: values [v, ...] at the last position give v, v+1, v+2, ..."""

    name: ClassVar[str] = "toy"

    def __init__(self) -> None:
        self.contexts: list[ToyContext] = []
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        # Set when a forward begins: what a test sends after that comes in the middle of it.
        self.entered = threading.Event()
        self.broken = False

    @property
    def info(self) -> MethodInfo:
        return MethodInfo(
            method="toy",
            name="toy-1",
            max_draft_tokens=5,
            max_length_tokens=64,
            rows=RowNeeds(tap_ids=(1, 3), width=WIDTH, projected_width=PROJECTED),
            target_hidden_size=WIDTH // 2,
            target_layer_count=4,
            target_vocab_size=1000,
            target_fingerprint="target-a",
            slot_mode="fill_in",
            block_size=6,
            mask_token_id=999,
            layer_attention=("non-causal",),
        )

    def open(self, ids: Sequence[int], sampling: Sampling) -> ToyContext:
        context = ToyContext(list(ids), sampling)
        self.contexts.append(context)
        return context

    def update(
        self, context: ToyContext, keep: int, tokens: Sequence[int], rows: Sequence[RowBlock]
    ) -> None:
        del context.ids[keep:]
        context.ids += tokens
        for block in rows:
            context.projected.add(block.projected)
            for offset, row in enumerate(block.rows):
                context.rows[block.start + offset] = row.tolist()

    def propose(self, requests: Sequence[Request[ToyContext]]) -> list[Draft]:
        self.entered.set()
        self.gate.wait(10)
        if self.broken:
            raise RuntimeError("a bug")
        self.batches.append(len(requests))
        drafts = []
        for request in requests:
            row = request.context.rows.get(len(request.context.ids) - 2)
            if row is None:  # a session of one token has no rows, and needs none
                drafts.append(Draft(reason=REASON_ROWS_MISSING))
                continue
            ids = tuple(range(row[0], row[0] + request.k))
            drafts.append(Draft(ids, (0.5,) * request.k))
        return drafts

    def close(self, context: ToyContext) -> None:
        self.contexts.remove(context)

    def stats(self) -> PoolStats:
        return PoolStats(PAGES - len(self.contexts), PAGES, tables=len(self.contexts))


def session_key(session_id: int = 1, generation: int = 1, coordinator: int = 5) -> Any:
    return common_pb2.SessionKey(
        coordinator=coordinator, session_id=session_id, generation=generation
    )


class Link:
    """One open link: sends items, hands out replies in order."""

    def __init__(self, stub: Any) -> None:
        self._call = stub.Link()
        self._replies: list[draft_pb2.DraftReply] = []
        self.incarnation = 0

    async def send(self, *items: draft_pb2.DraftItem) -> None:
        await self._call.write(draft_pb2.DraftServiceLinkRequest(items=items))

    async def reply(self, timeout_s: float = 5) -> draft_pb2.DraftReply:
        while not self._replies:
            frame = await asyncio.wait_for(self._call.read(), timeout_s)
            assert isinstance(frame, draft_pb2.DraftServiceLinkResponse), "the link ended"
            self.incarnation = frame.incarnation
            self._replies += frame.replies
        return self._replies.pop(0)

    async def ask(self, item: draft_pb2.DraftItem) -> draft_pb2.DraftReply:
        await self.send(item)
        return await self.reply()

    async def silent(self, item: draft_pb2.DraftItem) -> None:
        """Sends an item that must not be answered: the heartbeat after it is answered first."""
        reply = await self._after(item)
        assert reply.HasField("heartbeat_ack"), f"unexpected {reply}"

    async def _after(self, item: draft_pb2.DraftItem) -> draft_pb2.DraftReply:
        beat = draft_pb2.DraftItem(heartbeat=target_pb2.Heartbeat(coordinator=5))
        await self.send(item, beat)
        return await self.reply()

    async def end(self) -> None:
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            pass


class Rows:
    """A target's push stream."""

    def __init__(self, stub: Any, target: int = TARGET) -> None:
        self._call, self._target = stub.PushFeatures(), target

    async def push(
        self, key: Any, step_id: int, start: int, values: Sequence[int], width: int = WIDTH
    ) -> draft_pb2.FeatureAck:
        """Rows whose every element is the value of its position."""
        rows = np.repeat(np.array(values, dtype="<u2")[:, None], width, axis=1)
        return await self.push_bytes(key, step_id, start, len(values), rows.tobytes())

    async def push_bytes(
        self, key: Any, step_id: int, start: int, count: int, data: bytes
    ) -> draft_pb2.FeatureAck:
        chunk = draft_pb2.FeatureChunk(
            key=key, step_id=step_id, start=start, count=count, rows=data
        )
        request = draft_pb2.PushFeaturesRequest(target_incarnation=self._target, chunks=[chunk])
        await self._call.write(request)
        frame = await asyncio.wait_for(self._call.read(), 5)
        assert isinstance(frame, draft_pb2.PushFeaturesResponse), "the push stream ended"
        (ack,) = frame.acks
        assert ack.key == key and ack.step_id == step_id and ack.credit_bytes == len(data)
        return ack


def open_item(key: Any, ids: Sequence[int], method: str = "toy", **fields: Any) -> Any:
    fields.setdefault("target_incarnation", TARGET)
    fields.setdefault("target_fingerprint", "target-a")
    return draft_pb2.DraftItem(
        open=draft_pb2.OpenDraft(key=key, method=method, ids=encode_ids(ids), **fields)
    )


def advance_item(
    key: Any, step_id: int, base_len: int, tokens: Sequence[int], k: int, **fields: Any
) -> Any:
    fields.setdefault("rows_count", 1)
    return draft_pb2.DraftItem(
        advance=draft_pb2.Advance(
            key=key, step_id=step_id, base_len=base_len, tokens=tokens, k=k, **fields
        )
    )


def close_item(key: Any) -> Any:
    return draft_pb2.DraftItem(close=target_pb2.CloseSession(key=key))


@dataclass
class Service:
    """A running draft service with its toy method, and what tests need of it."""

    host: DraftHost
    toy: ToyMethod
    stub: Any

    def link(self) -> Link:
        return Link(self.stub)

    def rows(self, target: int = TARGET) -> Rows:
        return Rows(self.stub, target)

    async def load(self) -> tuple[int, int]:
        info = await self.stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest())
        return info.load.sessions, info.load.pages_free

    async def computing(self, timeout_s: float = 5) -> None:
        """Waits until a forward has begun since the last call."""
        async with asyncio.timeout(timeout_s):
            while not self.toy.entered.is_set():  # noqa: ASYNC110 - set by the worker's thread
                await asyncio.sleep(0.005)
        self.toy.entered.clear()

    async def idle(self, timeout_s: float = 3) -> Self:
        """Waits until no session and no context is left."""
        async with asyncio.timeout(timeout_s):
            while await self.load() != (0, PAGES):  # noqa: ASYNC110 - the state is in the service
                await asyncio.sleep(0.02)
        return self


@asynccontextmanager
async def serving(folder: Path, limits: Limits = LIMITS) -> AsyncIterator[Service]:
    toy = ToyMethod()
    ngram = NgramMethod(min_n=2, max_n=4, max_draft_tokens=7)
    host = DraftHost(
        lambda: {"ngram": ngram, "toy": toy},
        address=f"unix:{folder}/draft.sock",
        limits=limits,
        default_method="toy",
    )
    async with (
        host,
        grpc.aio.insecure_channel(host.address, options=channel_options(link=True)) as channel,
    ):
        try:
            yield Service(host, toy, draft_pb2_grpc.DraftServiceStub(channel))
        finally:
            toy.gate.set()
