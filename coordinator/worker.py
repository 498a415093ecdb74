"""One worker's address: its channel, the link that greets who answers there, and its load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import grpc

from coordinator.links import Link
from coordinator.settings import CoordinatorSettings
from coordinator.turns import Turns
from specwire.rpc import Message, channel_options

ItemT = TypeVar("ItemT", bound=Message)
# Longest wait for what a worker says of itself.
INFO_TIMEOUT_S = 5.0


def _channel(address: str) -> grpc.aio.Channel:
    # Workers are local or in one network: a proxy from the environment is never meant for them.
    options = [*channel_options(link=True), ("grpc.enable_http_proxy", 0)]
    return grpc.aio.insecure_channel(address, options=options)


class Worker(ABC, Generic[ItemT]):
    """One address: the channel, and the link that greets who answers there."""

    role: ClassVar[str]

    def __init__(
        self,
        address: str,
        settings: CoordinatorSettings,
        coordinator: int,
        *,
        stub: Callable[[grpc.aio.Channel], Any],
        frame: Callable[..., Any],
        item: Callable[..., ItemT],
        turns: Turns | None = None,
    ) -> None:
        self.address = address
        self._channel = _channel(address)
        self._stub = stub(self._channel)
        self.link: Link[ItemT] = Link(
            address=address,
            role=self.role,
            coordinator=coordinator,
            lease_ms=settings.lease_ms,
            greet=self._greet,
            open_stream=lambda: self._stub.Link(),
            frame=lambda items: frame(items=items),
            heartbeat=lambda beat: item(heartbeat=beat),
            turns=turns,
        )

    @abstractmethod
    async def _greet(self) -> int:
        """Asks who answers, checks it, and returns its incarnation."""

    @property
    def busy(self) -> int:
        """Sessions it has, those of other coordinators included."""
        link = self.link
        return max(link.sessions, link.load_sessions)

    @property
    def waiting(self) -> int:
        """Sessions that wait there, as far as it says."""
        return int(getattr(self.link.load, "waiting", 0))

    async def stop(self) -> None:
        await self.link.stop()
        await self._channel.close()
