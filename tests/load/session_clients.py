"""Sessions of a closed loop: in this process, or spread over several, which is where one client is
what limits them."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from specwire.client import AsyncClient, Finished
from specwire.generation import Acceptance, Delta
from specwire.info import ServerInfo

Asked = dict[str, Any]  # options of a request


@dataclass(frozen=True)
class Stream:
    """What one session did: when tokens came (`time.perf_counter`, which all processes of a machine
    share), and its record."""

    arrivals: tuple[tuple[float, int], ...]
    record: Acceptance


async def session(client: AsyncClient, asked: Asked) -> Stream:
    arrivals: list[tuple[float, int]] = []
    async with client.stream(**asked) as stream:
        async for event in stream:
            if isinstance(event, Delta) and event.token_ids:
                arrivals.append((time.perf_counter(), len(event.token_ids)))
            elif isinstance(event, Finished):
                return Stream(tuple(arrivals), event.acceptance)
    raise AssertionError("the client raises when the final message is missing")


class Clients:
    """`count` clients of one server, each in a process of its own where there are several."""

    def __init__(self, address: str, count: int) -> None:
        self._address, self._count = address, count
        self._client = AsyncClient(address)
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            # Not forked: a library of this process has threads.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(count, mp_context=context)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        if self._pool is not None:
            self._pool.shutdown()

    async def info(self) -> ServerInfo:
        return await self._client.info()

    async def sessions(self, asked: Sequence[Asked]) -> list[Stream]:
        """All at once; in the order of the requests."""
        if self._pool is None:
            return await asyncio.gather(*(session(self._client, each) for each in asked))
        loop = asyncio.get_running_loop()
        parts = [asked[i :: self._count] for i in range(self._count)]
        done = await asyncio.gather(
            *(loop.run_in_executor(self._pool, _part, self._address, part) for part in parts)
        )
        return [done[i % self._count][i // self._count] for i in range(len(asked))]


def _part(address: str, asked: Sequence[Asked]) -> list[Stream]:
    """In a process of its own."""

    async def run() -> list[Stream]:
        async with AsyncClient(address) as client:
            return await asyncio.gather(*(session(client, each) for each in asked))

    return asyncio.run(run())
