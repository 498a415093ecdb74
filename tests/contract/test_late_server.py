"""A coordinator that is there, but accepts late: stopped, starved, or loading beside its socket."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from specwire.client import AsyncClient, Client
from specwire.errors import Reason, SpecwireError
from specwire.info import ServerInfo
from specwire.serve import GrpcHost
from specwire.v1 import generate_pb2, generate_pb2_grpc

LATE_S = 0.6


class Quick(generate_pb2_grpc.GenerationServiceServicer):
    async def GetInfo(self, request: Any, context: Any) -> Any:
        return generate_pb2.GenerationServiceGetInfoResponse(version="late")


def listening(kind: str, tmp_path: Any) -> tuple[socket.socket, str]:
    """The kernel takes connections at once; nobody says a word on them yet."""
    if kind == "unix":
        door = socket.socket(socket.AF_UNIX)
        door.bind(f"{tmp_path}/door")
        address = f"unix:{tmp_path}/door"
    else:
        door = socket.socket()
        door.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{door.getsockname()[1]}"
    door.listen()
    door.setblocking(False)
    return door, address


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def late(kind: str, tmp_path: Any) -> AsyncIterator[str]:
    """The address of a server that begins to speak after LATE_S."""
    path = f"{tmp_path}/inner"
    host = GrpcHost(address=f"unix:{path}", services=[], link=False)
    generate_pb2_grpc.add_GenerationServiceServicer_to_server(Quick(), host.server)
    await host.start()
    door, address = listening(kind, tmp_path)

    async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(path)
        with closing(writer), closing(inner_writer):
            await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    async def open_late() -> None:
        await asyncio.sleep(LATE_S)
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(door)
            streams = await asyncio.open_connection(sock=connection)
            proxies.append(asyncio.create_task(through(*streams)))

    proxies = [asyncio.create_task(open_late())]
    try:
        yield address
    finally:
        for task in proxies:
            task.cancel()
        await asyncio.gather(*proxies, return_exceptions=True)
        door.close()
        await host.drain(0)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_client_waits_as_long_as_its_timeout(kind: str, tmp_path: Any) -> None:
    def blocking(address: str, timeout_s: float) -> ServerInfo:
        with Client(address) as client:
            return client.info(timeout_s)

    async with late(kind, tmp_path) as address, AsyncClient(address) as client:
        began = time.monotonic()
        with pytest.raises(SpecwireError) as caught:
            await asyncio.to_thread(blocking, address, 0.2)
        assert caught.value.reason is Reason.DEADLINE and time.monotonic() - began >= 0.2
        infos = await asyncio.gather(client.info(), asyncio.to_thread(blocking, address, 10.0))
        assert [info.version for info in infos] == ["late", "late"]
