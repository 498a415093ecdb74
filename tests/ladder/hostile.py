"""A draft service that plays tricks on one session and serves the others honestly."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from specwire.rpc import server_options
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2
from tests.service.coordinator_harness import (
    Reply,
    ScriptedDraft,
    perfect,
    proposal,
    refusal,
)
from tests.service.toy_engine import VOCAB, continuation

# First token of the prompt that is played tricks on.
VICTIM = 13
END = object()  # the stream ends here
Trick = Callable[["HostileDraft", draft_pb2.Advance, list[int]], list[Any]]


class HostileDraft(ScriptedDraft):
    """Frames leave whenever they like and may be any bytes. `bare` frames are sent as they are."""

    def __init__(self, trick: Trick, **drafter: Any) -> None:
        super().__init__(self._play, **drafter)
        self.trick = trick
        self.other: ScriptedDraft | None = None
        self.rounds = 0
        # Steps of the victim before the first trick.
        self.honest_steps = 0
        self.links = 0
        self.memory: list[Any] = []
        self._frames: asyncio.Queue[Any] = asyncio.Queue()

    def _play(self, draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
        if ids[0] != VICTIM or not item.k or item.step_id < self.honest_steps:
            return perfect(self, item, ids) if item.k else []
        self.rounds += 1
        return self.trick(self, item, ids)

    def later(self, delay_s: float, replies: list[Reply]) -> None:
        frame = self._frame(replies)
        asyncio.get_running_loop().call_later(delay_s, self._frames.put_nowait, frame)

    def _frame(self, replies: list[Reply], incarnation: int = 0) -> bytes:
        return draft_pb2.DraftServiceLinkResponse(
            incarnation=incarnation or self.incarnation, replies=replies
        ).SerializeToString()

    async def start(self, address: str) -> None:
        """The link's replies are bytes of our own making; the rest is the ordinary service."""
        self.server = grpc.aio.server(options=server_options(link=True))
        # Registered handlers would win over the generic ones.
        self.server.add_registered_method_handlers = lambda *_: None
        link = grpc.stream_stream_rpc_method_handler(
            self.Link,
            request_deserializer=draft_pb2.DraftServiceLinkRequest.FromString,
            response_serializer=bytes,
        )
        name = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
        own = grpc.method_handlers_generic_handler(name, {"Link": link})
        self.server.add_generic_rpc_handlers([own])
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, self.server)
        self.server.add_insecure_port(address)
        await self.server.start()

    async def Link(self, request_iterator: Any, context: Any) -> AsyncIterator[bytes]:
        self.links += 1
        self._frames = frames = asyncio.Queue()
        reading = asyncio.create_task(self._read(request_iterator, frames))
        try:
            while (frame := await frames.get()) is not END:
                yield frame
        finally:
            reading.cancel()

    async def _read(self, requests: Any, frames: asyncio.Queue[Any]) -> None:
        async for request in requests:
            for item in request.items:
                for reply in self._handle(item):
                    bare = reply if isinstance(reply, bytes) or reply is END else None
                    frames.put_nowait(bare or self._frame([reply]))
        frames.put_nowait(END)


def _key(item: draft_pb2.Advance, **changes: int) -> common_pb2.SessionKey:
    key = common_pb2.SessionKey()
    key.CopyFrom(item.key)
    for name, value in changes.items():
        setattr(key, name, value)
    return key


# Every trick gets the committed ids; what follows a lie is often the honest answer, so that a lie
# that is believed shows in the text or in the acceptance.


def random_ids(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    rng = random.Random(len(ids))
    return [proposal(item, len(ids), [rng.randrange(VOCAB) for _ in range(item.k)])]


def one_wrong(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """Right, wrong, and then right again given what would have been right."""
    guess = continuation(ids, item.k)
    guess[len(guess) // 2] = (guess[len(guess) // 2] + 1) % VOCAB
    return [proposal(item, len(ids), guess)]


def out_of_range(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    return [proposal(item, len(ids), [*continuation(ids, 1), VOCAB, 2**32 - 1])]


def too_many(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    return [proposal(item, len(ids), continuation(ids, item.k + 20))]


def huge(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    return [proposal(item, len(ids), [7] * 100_000)]


def empty(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    return [proposal(item, len(ids), [])]


def stale(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """Last round's answer first, then this round's."""
    old, draft.memory = draft.memory, perfect(draft, item, ids)
    return [*old, *draft.memory]


def duplicated(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    return perfect(draft, item, ids) * 3


def reordered(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """Every second round stays open; the next one is answered first, the open one after it."""
    if draft.rounds % 2:
        draft.memory = perfect(draft, item, ids)
        return []
    return [*perfect(draft, item, ids), *draft.memory]


def future(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """An answer to a step that has not been asked for."""
    return [proposal(item, len(ids), [1, 2], step_id=item.step_id + 1), *perfect(draft, item, ids)]


def other_session(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    lie = proposal(item, len(ids), [1], key=_key(item, session_id=item.key.session_id + 1000))
    return [lie, *perfect(draft, item, ids)]


def other_generation(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    lie = proposal(item, len(ids), [1], key=_key(item, generation=item.key.generation + 1))
    return [lie, *perfect(draft, item, ids)]


def other_coordinator(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    lie = proposal(item, len(ids), [1], key=_key(item, coordinator=1))
    return [lie, *perfect(draft, item, ids)]


def foreign_session(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """Answers for sessions that another draft service serves."""
    assert draft.other is not None
    lies = []
    for advance in draft.other.advances[-1:]:
        for step in range(advance.step_id, advance.step_id + 3):
            lies.append(proposal(advance, advance.base_len + 1, [1, 2], step_id=step))
    return [*lies, *perfect(draft, item, ids)]


def neighbours_session(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """Answers in the name of the session beside it, for steps past and to come."""
    lies = []
    for advance in draft.advances:
        if advance.key.session_id != item.key.session_id and advance.k:
            for step in {max(1, advance.step_id) - 1, advance.step_id + 2} - {advance.step_id}:
                lies.append(proposal(advance, advance.base_len, [1, 2], step_id=step))
    return [*lies, *perfect(draft, item, ids)]


def gap_above(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    return [proposal(item, len(ids) + 3, [1, 2]), *perfect(draft, item, ids)]


def gap_below(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    return [proposal(item, len(ids) - 1, [1, 2]), *perfect(draft, item, ids)]


def nan_confidences(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    values = [math.nan, math.inf, -math.inf, -1.0, 2.0, *[math.nan] * 100]
    return [proposal(item, len(ids), continuation(ids, item.k), confidences=values)]


def malformed_items(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    strange = [
        Reply(),
        Reply(proposal=common_pb2.Proposal()),
        Reply(refused=draft_pb2.DraftRefused()),
    ]
    return [*strange, *perfect(draft, item, ids)]


def strange_refusals(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """An unknown reason, and lengths that cannot be."""
    reply = refusal(item, ("NO_SUCH_REASON", "NEED_TOKENS")[draft.rounds % 2])
    reply.refused.have_len = (0, 2**32 - 1)[draft.rounds % 3 // 2]
    return [reply]


def opened_again(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    lie = Reply(opened=draft_pb2.DraftOpened(key=item.key, have_rows=2**32 - 1))
    return [lie, *perfect(draft, item, ids)]


def closed_unasked(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    lie = Reply(closed=draft_pb2.DraftClosed(key=item.key))
    return [lie, *perfect(draft, item, ids)]


def forgotten(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """A heartbeat answer that nobody asked for says that the session is unknown."""
    lie = Reply(heartbeat_ack=target_pb2.HeartbeatAck(unknown=[item.key]))
    return [*perfect(draft, item, ids), lie] if draft.rounds % 4 == 2 else perfect(draft, item, ids)


def flood(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    lies = [proposal(item, len(ids), [1], step_id=item.step_id + 1)] * 1500
    return [draft._frame([*lies, *perfect(draft, item, ids)])]


def after_close(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """Each answer comes again and again, long after the session is over."""
    for i in range(1, 30):
        draft.later(i * 0.02, perfect(draft, item, ids))
    return perfect(draft, item, ids)


def never(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    return []


def slow(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    draft.later(0.15, perfect(draft, item, ids))
    return []


def other_incarnation(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    return [draft._frame(perfect(draft, item, ids), incarnation=4711), *perfect(draft, item, ids)]


def garbage_frame(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """No protobuf message at all."""
    return [b"\xff\xff\xff\xff\x07garbage"] if draft.rounds == 3 else perfect(draft, item, ids)


def oversized_frame(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """One frame larger than a link takes."""
    return [b"\0" * (17 * 2**20)] if draft.rounds == 3 else perfect(draft, item, ids)


def end_mid_frame(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """The stream ends where the answer should be."""
    return [END] if draft.rounds == 3 else perfect(draft, item, ids)


def dies(draft: HostileDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
    """The server is gone in the middle of a round and stays away."""
    if draft.rounds == 3:
        assert draft.server is not None
        draft.memory.append(asyncio.ensure_future(draft.server.stop(0)))
    return perfect(draft, item, ids)
