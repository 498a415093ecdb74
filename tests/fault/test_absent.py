"""Workers that are not there when the coordinator starts, or are not what they should be.

Family: start order. Nothing waits for ever and nothing has to be started again.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.host import CoordinatorHost
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer_cache import TokenizerCache
from specwire.client import AsyncClient
from specwire.errors import Reason, SpecwireError
from specwire.probe import check
from target_svc.app import Loaded, TargetApp
from target_svc.settings import TargetSettings
from tests.service.coordinator_harness import PROMPT, ScriptedDraft, document
from tests.service.toy_engine import ToyEngine, continuation


@asynccontextmanager
async def lonely(draft: bool = False) -> AsyncIterator[tuple[Path, AsyncClient]]:
    """A coordinator whose workers have yet to come, to the sockets t and d of the folder."""
    with tempfile.TemporaryDirectory() as name:
        settings = CoordinatorSettings(
            address=f"unix:{name}/c",
            target=f"unix:{name}/t",
            draft=(f"unix:{name}/d",) if draft else (),
            drain_ms=0,
            proposal_wait_min_ms=500,
        )
        async with (
            CoordinatorHost(settings, TokenizerCache(Path(name))) as host,
            AsyncClient(host.address) as client,
        ):
            yield Path(name), client


@asynccontextmanager
async def target_at(folder: Path) -> AsyncIterator[None]:
    settings = TargetSettings(address=f"unix:{folder}/t", drain_ms=0, reflection=False)
    app = TargetApp(settings, lambda _: Loaded(ToyEngine(), document()))
    await app.start()
    try:
        yield
    finally:
        await app.stop()


async def until(condition: Callable[[], object], timeout_s: float = 15) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.02)


async def generated(client: AsyncClient, **options: object) -> object:
    return await client.generate(
        token_ids=PROMPT, max_tokens=20, temperature=0.0, seed=0, return_token_ids=True, **options
    )


async def test_a_target_that_is_absent_at_the_start() -> None:
    """Refused at once with a reason and a hint when to try again; served as soon as it is there."""
    async with lonely() as (folder, client):
        async with asyncio.timeout(5):
            with pytest.raises(SpecwireError) as caught:
                await generated(client, timeout_s=2)
        assert caught.value.reason is Reason.NO_TARGET and caught.value.retry_after_ms > 0
        serving, line = await asyncio.to_thread(check, f"unix:{folder}/c")
        assert not serving and line.endswith("NOT_SERVING")
        (worker,) = (await client.info()).workers
        assert worker.role == "target" and worker.state != "ready" and worker.reason
        async with target_at(folder):
            await until(lambda: check(f"unix:{folder}/c")[0])
            result = await generated(client)
            assert list(result.token_ids) == continuation(PROMPT, 20)
        await until(lambda: not check(f"unix:{folder}/c")[0])


async def test_a_draft_that_is_absent_at_the_start() -> None:
    """WC-12, WC-26: plain at first, and drafted without a restart once the draft has come."""
    draft = ScriptedDraft()
    async with lonely(draft=True) as (folder, client), target_at(folder):
        await until(lambda: check(f"unix:{folder}/c")[0])
        result = await generated(client)
        assert list(result.token_ids) == continuation(PROMPT, 20)
        assert result.acceptance.method == "plain" and not result.acceptance.draft_tokens
        with pytest.raises(SpecwireError) as caught:
            await generated(client, method="toy")
        assert caught.value.reason is Reason.METHOD_UNKNOWN
        await draft.start(f"unix:{folder}/d")
        try:
            async with asyncio.timeout(15):
                while "toy" not in (await client.info()).methods:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            result = await generated(client)
            assert list(result.token_ids) == continuation(PROMPT, 20)
            assert result.acceptance.method == "toy"
            assert result.acceptance.accepted_tokens == result.acceptance.draft_tokens > 0
        finally:
            await draft.stop()


async def test_something_else_at_the_targets_address() -> None:
    """A draft service where the target should be: named in the info, and nobody hangs."""
    draft = ScriptedDraft()
    async with lonely() as (folder, client):
        await draft.start(f"unix:{folder}/t")
        try:
            async with asyncio.timeout(15):
                while not (worker := (await client.info()).workers[0]).reason:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert worker.state != "ready"
            with pytest.raises(SpecwireError) as caught:
                await generated(client, timeout_s=2)
            assert caught.value.reason is Reason.NO_TARGET
        finally:
            await draft.stop()
        async with target_at(folder):
            await until(lambda: check(f"unix:{folder}/c")[0])
            assert list((await generated(client)).token_ids) == continuation(PROMPT, 20)
