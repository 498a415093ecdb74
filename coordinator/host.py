"""Starts and stops a coordinator: links, public server, health that follows the targets."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

from coordinator.metrics import Metrics
from coordinator.placement import Fleet
from coordinator.service import SERVICE_NAME, GenerationServicer
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer_cache import TokenizerCache
from coordinator.turns import Turns
from specwire.serve import GrpcHost
from specwire.v1 import generate_pb2_grpc

_HEALTH_S = 0.05
# In which the last errors and closes leave.
_SAID_S = 0.2


class CoordinatorHost:
    """A coordinator in this process; an async context manager that serves while it is entered."""

    def __init__(self, settings: CoordinatorSettings, cache: TokenizerCache | None = None) -> None:
        self._settings, self._cache = settings, cache
        self.metrics = Metrics()

    async def __aenter__(self) -> Self:
        settings = self._settings
        waited = self.metrics.waited_for_turn
        self.fleet = Fleet(settings, self._cache, lambda: Turns(waited))
        self.servicer = GenerationServicer(self.fleet, self.metrics)
        self._host = GrpcHost(
            address=settings.address,
            services=[SERVICE_NAME],
            link=False,
            reflection=settings.reflection,
        )
        generate_pb2_grpc.add_GenerationServiceServicer_to_server(self.servicer, self._host.server)
        try:
            await self._host.start()
        except BaseException:
            await self.fleet.stop()
            raise
        self.fleet.start()
        self._watchers = [asyncio.create_task(self._watch())]
        if settings.log_stats_s:
            told = self.servicer.activity.tell(settings.log_stats_s)
            self._watchers.append(asyncio.create_task(told))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._host.set_serving(False)
        grace_s = self._settings.drain_ms / 1000
        with suppress(TimeoutError):
            await asyncio.wait_for(self.servicer.drain(grace_s), grace_s + _SAID_S)
        await self._host.drain(_SAID_S)
        # The closes of the last sessions leave before the links do.
        await asyncio.sleep(0.02)
        await self.fleet.stop()

    @property
    def address(self) -> str:
        return self._host.addresses[0]

    async def _watch(self) -> None:
        """Serving means: a request would find a target."""
        serving = False
        while True:
            if self.fleet.serving != serving:
                serving = not serving
                await self._host.set_serving(serving)
            await asyncio.sleep(_HEALTH_S)
