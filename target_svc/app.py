"""Puts the target service together: load, serve, drain."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from engine.api import Drafter, Engine, never
from specwire.errors import Reason, SpecwireError
from specwire.rpc import new_incarnation
from specwire.serve import GrpcHost
from specwire.v1 import common_pb2, target_pb2_grpc
from target_svc.decode import Limits
from target_svc.engine_thread import EngineThread
from target_svc.features import FeatureExporter
from target_svc.info import info_response
from target_svc.intake import Intake
from target_svc.metrics import Metrics
from target_svc.scheduler import Scheduler
from target_svc.service import SERVICE_NAME, Hosted, TargetServicer
from target_svc.settings import TargetSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine and the tokenizer document that clients fetch."""

    engine: Engine
    tokenizer: bytes
    tokenizer_hash: str = ""
    # What steps of the engine cost, where that was measured.
    costs: tuple[common_pb2.StepCost, ...] = ()

    @property
    def document_hash(self) -> str:
        return self.tokenizer_hash or hashlib.sha256(self.tokenizer).hexdigest()


class TargetApp:
    """One target process. `start` returns when it serves; `stop` drains and ends it."""

    def __init__(
        self,
        settings: TargetSettings,
        load: Callable[[TargetSettings], Loaded],
        drafter: Drafter | None = None,
    ) -> None:
        """`load` attaches the `drafter`, whose services stand beside the target's."""
        self.settings, self._load, self._drafter = settings, load, drafter
        self.metrics = Metrics()
        self.incarnation = new_incarnation()
        self.engine_down = asyncio.Event()
        # The engine is loaded on the thread that will run it: threads of its kernels belong to it.
        self._thread = EngineThread()
        self._servicer = TargetServicer(self.incarnation, self.metrics)
        self._host = GrpcHost(
            address=settings.address,
            services=[SERVICE_NAME, *(drafter.services if drafter is not None else ())],
            link=True,
            reflection=settings.reflection,
        )
        target_pb2_grpc.add_TargetServiceServicer_to_server(self._servicer, self._host.server)
        if drafter is not None:
            registry, incarnation = self.metrics.registry, self.incarnation
            drafter.register(self._host.server, incarnation=incarnation, registry=registry)
        self._exporter = FeatureExporter(settings, self.incarnation, self.metrics)
        self._intake: Intake | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self.scheduler: Scheduler | None = None

    @property
    def address(self) -> str:
        return self._host.addresses[0]

    async def start(self, stopped: Callable[[], bool] = never) -> None:
        """Serves once everything is loaded, unless the process is to end by then."""
        await self._host.start()
        log.info("loading %s", self.settings.model)
        before = time.monotonic()
        loaded = await self._thread.call(self._load, self.settings)
        self._assemble(loaded)
        if stopped():
            return
        await self._host.set_serving(True)
        log.info("ready in %.1f s on %s", time.monotonic() - before, self.address)

    def _assemble(self, loaded: Loaded) -> None:
        engine, settings = loaded.engine, self.settings
        self.scheduler = Scheduler(
            engine, self._thread, settings, self.metrics, self.engine_down.set, self._drafter
        )
        self._exporter.on_answers = self.scheduler.hurry
        limits = Limits.of(engine.info, settings, self._drafter)
        self._intake = Intake(
            self.scheduler, self._exporter, limits, settings.row_history_tokens, self.metrics
        )
        info = info_response(engine, settings, self.incarnation, loaded.document_hash)
        info.costs.extend(loaded.costs)
        self._servicer.hosted = Hosted(info, loaded.tokenizer, self._intake, self.scheduler.load)
        self._loop_task = asyncio.ensure_future(self.scheduler.run())

    async def wait(self, stop: asyncio.Event) -> None:
        """Until somebody stops the service. Raises ENGINE_DOWN when its engine is given up, and
        what the step loop raises."""
        assert self._loop_task is not None
        waits = [asyncio.ensure_future(e.wait()) for e in (stop, self.engine_down)]
        try:
            await asyncio.wait([*waits, self._loop_task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        if self._loop_task.done():
            self._loop_task.result()
        if self.engine_down.is_set() and not stop.is_set():
            text = "the engine was given up: one step after another failed, as the log above says"
            raise SpecwireError(Reason.ENGINE_DOWN, text)

    async def stop(self) -> None:
        """Takes no new sessions, lets the running ones end within `drain_ms`, closes everything.
        A load that has not come to its end is left behind."""
        if self._intake is not None:
            self._intake.draining = True
        await self._host.set_serving(False)
        if self.scheduler is not None and not self.engine_down.is_set():
            self.scheduler.remove_unlinked()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.scheduler.idle.wait(), self.settings.drain_ms / 1000)
        await self._host.drain(0)
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])
        await self._exporter.close()
        # A load that was given up may take minutes yet.
        self._thread.close(wait=self.scheduler is not None)
