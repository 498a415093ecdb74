"""A coordinator that is told to end while answers run."""

from __future__ import annotations

import asyncio
import time

import pytest

from coordinator.host import CoordinatorHost
from coordinator.settings import CoordinatorSettings
from specwire.client import AsyncClient, AsyncStream, Delta, Finished
from specwire.errors import Reason, SpecwireError
from tests.service.coordinator_harness import PROMPT, ScriptedDraft, world

LONG = 400


async def first(stream: AsyncStream) -> AsyncStream:
    assert isinstance(await anext(stream), Delta)
    return stream


async def rest(stream: AsyncStream) -> list[object]:
    return [event async for event in stream]


@pytest.mark.parametrize("n", [1, 2])
async def test_answers_that_are_cut_say_that_it_shuts_down(n: int) -> None:
    async with world(ScriptedDraft(), engine={"step_s": 0.01}) as made:
        settings = CoordinatorSettings(
            address=f"unix:{made.folder}/c2",
            target=(made.target_address,),
            draft=(made.draft_address,),
            drain_ms=300,
        )
        host = CoordinatorHost(settings)
        async with AsyncClient(settings.address) as client:
            async with host:
                for worker in host.fleet.workers:
                    assert await worker.link.wait_ready(10)
                long = await first(client.stream(token_ids=PROMPT, max_tokens=LONG, n=n))
                short = await first(client.stream(token_ids=PROMPT, max_tokens=8))
                ends = [asyncio.create_task(rest(stream)) for stream in (long, short)]
                began = time.monotonic()

                async def late() -> None:
                    await asyncio.sleep(0.05)
                    await client.generate(token_ids=PROMPT, max_tokens=4, timeout_s=0.9)

                refused = asyncio.create_task(late())
            assert 0.3 <= time.monotonic() - began < 2
            cut, whole, new = await asyncio.gather(*ends, refused, return_exceptions=True)
        assert isinstance(whole, list) and isinstance(whole[-1], Finished)
        for error in (cut, new):
            assert isinstance(error, SpecwireError) and error.reason is Reason.DRAINING
            assert error.retry_after_ms == Reason.DRAINING.retry_after_ms
        assert "the rest of the answer is missing" in str(cut)
        await made.until_idle()
