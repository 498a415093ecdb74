"""Several clients at once, and what is left when they finish, vanish or are killed."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import Any

import grpc
import pytest

from coordinator.bench_prompts import Prompt
from coordinator.local import LocalDeployment
from specwire.client import AsyncClient, Delta, Finished
from specwire.errors import Reason, SpecwireError
from specwire.rpc import channel_options
from specwire.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

pytestmark = pytest.mark.model

TOKENS = 40


OPTIONS = channel_options(link=True)


async def target_load(deployment: LocalDeployment) -> target_pb2.TargetLoad:
    async with grpc.aio.insecure_channel(deployment.target_address, options=OPTIONS) as channel:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        reply = await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest(), timeout=5)
        load: target_pb2.TargetLoad = reply.load
        return load


async def draft_load(deployment: LocalDeployment) -> draft_pb2.DraftLoad:
    async with grpc.aio.insecure_channel(deployment.draft_address, options=OPTIONS) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        reply = await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest(), timeout=5)
        load: draft_pb2.DraftLoad = reply.load
        return load


async def assert_all_freed_within_a_second(deployment: LocalDeployment) -> None:
    deadline = time.monotonic() + 1.0
    while True:
        loads = await target_load(deployment), await draft_load(deployment)
        sessions = loads[0].waiting + sum(load.sessions for load in loads)
        if not sessions and all(load.pages_free == load.pages_total for load in loads):
            return
        assert time.monotonic() < deadline, f"a second later: {loads}"
        await asyncio.sleep(0.02)


async def follow(
    address: str, prompt: Prompt, method: str, vanish_after: int | None = None
) -> tuple[str, tuple[int, ...], Finished | None]:
    """A client with a channel of its own; it may leave after some deltas."""
    text, ids = "", []
    async with (
        AsyncClient(address) as client,
        client.stream(
            messages=prompt.messages,
            max_tokens=TOKENS if vanish_after is None else 400,
            ignore_eos=vanish_after is not None,
            temperature=0.0,
            method=method,
        ) as stream,
    ):
        deltas = 0
        async for event in stream:
            if isinstance(event, Finished):
                return text, tuple(ids), event
            assert isinstance(event, Delta)
            assert event.accepted_count <= len(event.token_ids)
            assert event.accepted_chars <= len(event.text)
            text, deltas = text + event.text, deltas + 1
            ids += event.token_ids
            if deltas == vanish_after:
                break
    return text, tuple(ids), None


async def test_four_clients_stream_and_leave_nothing(
    deployment: LocalDeployment, prompts: list[Prompt]
) -> None:
    chosen = prompts[::3]
    alone = [await follow(deployment.address, prompt, "plain") for prompt in chosen]
    methods = ("dflash", "ngram", "plain", "")
    together = await asyncio.gather(
        *(follow(deployment.address, p, m) for p, m in zip(chosen, methods, strict=True))
    )
    await assert_all_freed_within_a_second(deployment)
    assert [(text, ids) for text, ids, _ in together] == [(text, ids) for text, ids, _ in alone]
    for _, ids, finished in together:
        assert finished is not None and finished.usage.completion_tokens == len(ids)


async def test_one_client_vanishes_and_the_others_do_not_notice(
    deployment: LocalDeployment, prompts: list[Prompt]
) -> None:
    chosen = prompts[1::3]
    alone = [await follow(deployment.address, prompt, "plain") for prompt in chosen[:3]]
    *others, gone = await asyncio.gather(
        *(follow(deployment.address, prompt, "dflash") for prompt in chosen[:3]),
        follow(deployment.address, chosen[3], "dflash", vanish_after=4),
    )
    await assert_all_freed_within_a_second(deployment)
    assert gone[2] is None and gone[1]
    assert [ids for _, ids, _ in others] == [ids for _, ids, _ in alone]


@pytest.mark.parametrize("method", ["plain", "dflash"])
async def test_a_killed_client_frees_its_pages(deployment: LocalDeployment, method: str) -> None:
    command = [sys.executable, "-m", "coordinator.cli", "generate", "--max-tokens", "2000"]
    command += ["--address", deployment.address, "--method", method, "Once upon a time"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    await process.stdout.read(8)
    assert (await target_load(deployment)).sessions == 1
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    await assert_all_freed_within_a_second(deployment)


async def test_a_deadline_ends_the_work_too(
    deployment: LocalDeployment, prompts: list[Prompt]
) -> None:
    async with AsyncClient(deployment.address) as client:
        with pytest.raises(SpecwireError) as caught:
            await client.generate(
                messages=prompts[0].messages, max_tokens=2000, ignore_eos=True, timeout_s=1.0
            )
    assert caught.value.reason is Reason.DEADLINE
    await assert_all_freed_within_a_second(deployment)
