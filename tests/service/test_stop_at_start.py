"""Services that are told to end while they load: they end soon and never say that they serve."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_svc.host import DraftHost
from engine.api import never
from engine.errors import BackendUnavailable
from specwire.errors import SpecwireError
from specwire.process import started
from target_svc.app import Loaded, TargetApp
from target_svc.costs import prepared
from target_svc.settings import TargetSettings
from tests.load.free_model import FreeEngine
from tests.service.draft_peer import LIMITS, ToyMethod
from tests.service.target_harness import TOKENIZER

STEP_S = 0.05  # of which a whole warm-up has more than a hundred


async def serves(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        found = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return bool(found.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_target(tmp_path: Path) -> None:
    engine, stop = FreeEngine(8, pause_s=STEP_S), asyncio.Event()
    engine._info = replace(engine._info, device="cuda of its own")
    settings = TargetSettings(address=f"unix:{tmp_path}/t.sock", warm_draft="")

    def load(settings: TargetSettings) -> Loaded:
        costs = prepared(engine, settings, False, stopped=stop.is_set)
        return Loaded(engine, TOKENIZER, costs=costs)

    app = TargetApp(settings, load)
    starting = asyncio.ensure_future(app.start(stop.is_set))
    await asyncio.sleep(10 * STEP_S)
    assert not starting.done() and not await serves(app.address)
    stop.set()
    began = time.monotonic()
    await starting
    assert not await serves(app.address)
    await app.wait(stop)
    await app.stop()
    assert time.monotonic() - began < 60 * STEP_S
    stats = engine.stats()
    assert stats.free == stats.total and not stats.tables


class Slow(ToyMethod):
    def warm_up(self, stopped: Callable[[], bool] = never) -> None:
        while not stopped():
            time.sleep(STEP_S)


class Broken(ToyMethod):
    def warm_up(self, stopped: Callable[[], bool] = never) -> None:
        raise BackendUnavailable("a kernel of the step X cannot be compiled")


def host_of(folder: Path, method: ToyMethod, stop: asyncio.Event) -> DraftHost:
    return DraftHost(
        lambda: {"toy": method},
        address=f"unix:{folder}/d.sock",
        limits=LIMITS,
        default_method="toy",
        stopped=stop.is_set,
    )


async def test_a_draft_service(tmp_path: Path) -> None:
    stop = asyncio.Event()
    host = host_of(tmp_path, Slow(), stop)
    asyncio.get_running_loop().call_later(5 * STEP_S, stop.set)
    async with asyncio.timeout(10), host:
        assert stop.is_set() and not await serves(host.address)


async def test_a_kernel_that_a_draft_lacks_is_told_of_in_words(tmp_path: Path) -> None:
    with pytest.raises(SpecwireError, match="toy: a kernel of the step X") as caught:
        await host_of(tmp_path, Broken(), asyncio.Event()).__aenter__()
    assert caught.value.reason == "BACKEND_UNAVAILABLE"


async def test_a_load_that_goes_on_is_left_behind(tmp_path: Path) -> None:
    """Weights take minutes to load, and no library can be asked to stop in the middle."""
    over = threading.Event()

    def load(settings: TargetSettings | None = None) -> Any:
        over.wait(20)
        raise BackendUnavailable("nobody waits for this any more")

    stop = asyncio.Event()
    app = TargetApp(TargetSettings(address=f"unix:{tmp_path}/t.sock"), load)
    draft = DraftHost(load, address=f"unix:{tmp_path}/d.sock", limits=LIMITS, default_method="toy")
    asyncio.get_running_loop().call_later(2 * STEP_S, stop.set)
    try:
        async with asyncio.timeout(5):
            found = await asyncio.gather(
                started(stop, app.start(stop.is_set)), started(stop, draft.__aenter__())
            )
            assert found == [False, False]
            await app.stop()
    finally:
        over.set()
