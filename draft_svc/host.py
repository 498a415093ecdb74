"""Starts and stops a draft service: engine thread, protocol, gRPC server, lease sweep."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from draft_svc.metrics import Metrics
from draft_svc.protocol import Limits, Protocol
from draft_svc.service import SERVICE_NAME, DraftServicer
from draft_svc.ticks import Methods
from draft_svc.worker import Worker
from engine.api import never
from specwire.poll import BusyPoll
from specwire.rpc import new_incarnation
from specwire.serve import GrpcHost
from specwire.v1 import draft_pb2_grpc

_SWEEP_S = 0.1
_DRAINED_S = 0.02
# In which a coordinator whose link broke has a new one; its first attempts are 0.1 s apart.
_RECONNECTED_S = 0.3


class DraftHost:
    """A draft service in this process; an async context manager that serves while it is entered.

    Health answers NOT_SERVING from the first moment, and SERVING once every method is loaded and
    warm.
    """

    def __init__(
        self,
        load: Callable[[], Methods],
        *,
        address: str,
        limits: Limits,
        default_method: str,
        push_address: str = "",
        reflection: bool = False,
        drain_s: float = 0.5,
        stopped: Callable[[], bool] = never,
        busy_poll_us: int | None = None,
    ) -> None:
        """Never says that it serves where the start is `stopped` while methods load."""
        self.incarnation = new_incarnation()
        self.metrics = Metrics()
        self.worker, self._stopped = Worker(load, stopped, BusyPoll(busy_poll_us)), stopped
        self.protocol = Protocol(self.worker, default_method, limits, self.metrics)
        self._address, self._push_address = address, push_address
        self._reflection, self._drain_s = reflection, drain_s

    async def __aenter__(self) -> Self:
        self._host = GrpcHost(
            address=self._address, services=[SERVICE_NAME], link=True, reflection=self._reflection
        )
        self._servicer = DraftServicer(
            self.protocol,
            incarnation=self.incarnation,
            push_address=self._push_address,
        )
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, self._host.server)
        try:
            await self._host.start()
            await self.worker.start()
        except BaseException:
            await self._host.drain(0)
            await self.worker.stop()
            raise
        if not self._stopped():
            await self._host.set_serving(True)
        self._sweeper = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.protocol.draining = True
        await self._host.set_serving(False)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._drained(), self._drain_s)
        await self._host.drain(0)
        self._sweeper.cancel()
        for session in self.protocol.sessions:
            self.protocol.end(session, "shutdown")
        await self.worker.stop()

    @property
    def address(self) -> str:
        """Where the service listens; with the real port where the settings said 0."""
        return self._host.addresses[0]

    async def _drained(self) -> None:
        """Until no session is left whose coordinator is there, or may be connecting again: idle
        links are not waited for."""
        now = asyncio.get_running_loop().time
        heard = defaultdict[int, float](now)
        while True:
            heard.update(dict.fromkeys(self._servicer.linked, now()))
            last = max((heard[s.key.coordinator] for s in self.protocol.sessions), default=0.0)
            if now() >= last + _RECONNECTED_S:
                return
            await asyncio.sleep(_DRAINED_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.protocol.expire()
