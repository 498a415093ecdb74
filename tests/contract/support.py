"""A raw echo service with all four handler kinds, hosted the way every service is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from specwire.rpc import channel_options
from specwire.serve import GrpcHost

SERVICE = "specwire.test.EchoService"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def raising(make: Callable[[], BaseException]) -> dict[str, Callable[[Any, Any], Any]]:
    """Handlers of every kind, in both styles for streams, that raise what `make` makes."""

    async def unary(request: Any, context: Any) -> bytes:
        raise make()

    async def generator(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise make()

    async def writer(request: Any, context: Any) -> None:
        await context.write(b"first")
        raise make()

    return {
        "unary_unary": unary,
        "unary_stream": generator,
        "stream_unary": unary,
        "stream_stream": writer,
    }


def add_handlers(host: GrpcHost, handlers: dict[str, Callable[[Any, Any], Any]]) -> None:
    methods = {k: getattr(grpc, f"{k}_rpc_method_handler")(v) for k, v in handlers.items()}
    host.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])


@asynccontextmanager
async def running(
    address: str | list[str] = "127.0.0.1:0",
    handlers: dict[str, Callable[[Any, Any], Any]] | None = None,
    link: bool = True,
    reflection: bool = False,
) -> AsyncIterator[GrpcHost]:
    """A started host, drained whatever the test does: a server must not outlive its loop."""
    host = GrpcHost(address=address, services=[SERVICE], link=link, reflection=reflection)
    add_handlers(host, handlers or {})
    await host.start()
    try:
        yield host
    finally:
        await host.drain(0)


@asynccontextmanager
async def hosted(
    handlers: dict[str, Callable[[Any, Any], Any]], link: bool = False
) -> AsyncIterator[grpc.aio.Channel]:
    options = [*channel_options(link), ("grpc.enable_http_proxy", 0)]
    async with (
        running(handlers=handlers, link=link) as host,
        grpc.aio.insecure_channel(host.addresses[0], options=options) as channel,
    ):
        yield channel


async def call(channel: grpc.aio.Channel, kind: str, payload: bytes = b"x") -> list[bytes]:
    """One call of any kind; returns every reply."""
    method = getattr(channel, kind)(f"/{SERVICE}/{kind}")

    async def requests() -> AsyncIterator[bytes]:
        yield payload

    request = payload if kind.startswith("unary") else requests()
    async with asyncio.timeout(20):
        if kind.endswith("unary"):
            return [await method(request)]
        return [reply async for reply in method(request)]
