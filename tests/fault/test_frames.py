"""Frames that are too large or no messages, sent to each service.

Family: malformed input. The sender loses its call and is told why; sessions of others, and its own
once it is back, go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specwire.errors import Reason, from_rpc_error
from specwire.rpc import LINK_MESSAGE_BYTES, PUBLIC_MESSAGE_BYTES
from specwire.v1 import generate_pb2
from tests.service.coordinator_harness import PROMPT, ScriptedDraft, world
from tests.service.draft_peer import Service, advance_item, open_item, serving, session_key
from tests.service.target_harness import Target, key, open_target, target, verify
from tests.service.toy_engine import ToyEngine, continuation

UNLIMITED = [("grpc.max_send_message_length", -1)]
GARBAGE = b"\xff\xff\xff\xff\x07 no message"
FRAMES = {"garbage": GARBAGE, "oversized": b"\0" * (LINK_MESSAGE_BYTES + 1)}


@asynccontextmanager
async def raw_stream(address: str, method: str) -> AsyncIterator[Any]:
    """A call whose messages are plain bytes of any size."""
    async with grpc.aio.insecure_channel(address, options=UNLIMITED) as channel:
        yield channel.stream_stream(f"/specwire.v1.{method}")()


async def ended_with(call: Any, frame: bytes) -> Reason:
    """Sends one frame, and returns how the call ends."""
    await call.write(frame)
    async with asyncio.timeout(10):
        with pytest.raises(grpc.RpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
            assert await call.code() != grpc.StatusCode.OK, "the frame was taken"
    return from_rpc_error(caught.value).reason


def expected(kind: str) -> Reason:
    return Reason.MESSAGE_TOO_LARGE if kind == "oversized" else Reason.INTERNAL


async def target_step(made: Target, peer: Any, step: int) -> None:
    await peer.send(verify(step, 4 + step))
    assert list((await peer.verdict()).tokens) == [continuation([5, 6, 7, 8], 9)[step]]


@pytest.mark.parametrize("kind", FRAMES)
async def test_the_targets_link(kind: str) -> None:
    """WC-2, WC-13: another link's session makes its steps before, meanwhile and after."""
    async with target() as made:
        peer = made.peer()
        await peer.send(open_target([5, 6, 7, 8]))
        await peer.verdict()
        await target_step(made, peer, 1)
        async with raw_stream(made.app.address, "TargetService/Link") as call:
            assert await ended_with(call, FRAMES[kind]) is expected(kind)
        await target_step(made, peer, 2)
        assert await peer.heartbeat(key()) == []


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("method", ["Link", "PushFeatures"])
async def test_the_drafts_streams(kind: str, method: str, tmp_path: Path) -> None:
    """WC-2, WC-13: the session whose rows and questions come on other streams stays."""
    async with serving(tmp_path) as made:
        link = made.link()
        rows = made.rows()
        await link.ask(open_item(session_key(), [1, 2, 3]))
        async with raw_stream(made.host.address, f"DraftService/{method}") as call:
            assert await ended_with(call, FRAMES[kind]) is expected(kind)
        await rows.push(session_key(), 0, 0, [10, 11, 12])
        reply = await link.ask(advance_item(session_key(), 0, 3, [4], 2, rows_count=3))
        assert list(reply.proposal.ids) == [12, 13]
        await ended(made, link)


async def ended(made: Service, link: Any) -> None:
    await link.end()
    assert (await made.load())[0] == 1, "the end of a link closes nothing"


@pytest.mark.parametrize("kind", FRAMES)
async def test_the_coordinators_public_service(kind: str) -> None:
    """WC-2, GP-4: a generation beside it ends as it would have."""
    frame = GARBAGE if kind == "garbage" else b"\0" * (PUBLIC_MESSAGE_BYTES + 1)
    async with world(ScriptedDraft(), {"step_s": 0.005}) as made:
        beside = asyncio.create_task(made.generate())
        options = UNLIMITED
        async with grpc.aio.insecure_channel(made.host.address, options=options) as channel:
            generate = channel.unary_stream("/specwire.v1.GenerationService/Generate")
            with pytest.raises(grpc.RpcError) as caught:
                async for _ in generate(frame):
                    pass
        assert from_rpc_error(caught.value).reason is expected(kind)
        assert list((await beside).token_ids) == continuation(PROMPT, 40)
        await made.until_idle()


async def test_a_request_too_large_for_the_sdk_is_the_same_error() -> None:
    async with world() as made:
        size = PUBLIC_MESSAGE_BYTES
        request = generate_pb2.GenerateRequest(prompt="x" * size)
        async with grpc.aio.insecure_channel(made.host.address, options=UNLIMITED) as channel:
            call = channel.unary_stream(
                "/specwire.v1.GenerationService/Generate",
                request_serializer=generate_pb2.GenerateRequest.SerializeToString,
            )(request)
            with pytest.raises(grpc.RpcError) as caught:
                await call.read()
        error = from_rpc_error(caught.value)
        assert error.reason is Reason.MESSAGE_TOO_LARGE
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert list((await made.generate()).token_ids) == continuation(PROMPT, 40)


async def test_what_waits_for_a_slow_reader_is_cut_into_frames() -> None:
    """Answers that are fine one by one were too much as one frame: the link broke for all."""
    prompt = [5 + i % 900 for i in range(1500)]
    async with target(ToyEngine(pages=128, max_length=2000)) as made:
        peer = made.peer()
        await peer.send(open_target(prompt, 4, prompt_logprobs=20))
        size = (await peer.verdict()).ByteSize()
        count = LINK_MESSAGE_BYTES // size + 2
        await peer.send(*[open_target(prompt, 4, prompt_logprobs=20)] * count)
        for _ in range(count):
            assert (await peer.verdict()).new_len == 1501
        assert await peer.heartbeat(key()) == []
