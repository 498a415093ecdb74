"""Hosting of a gRPC service: binding, health, reflection, error mapping. Needs `serve`."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection as grpc_reflection
from grpc_status import rpc_status

from specwire.errors import Reason, SpecwireError, internal_error
from specwire.rpc import server_options

log = logging.getLogger(__name__)

Behaviour = Callable[[Any, Any], Any]
_HEALTH_NAME = "grpc.health.v1.Health"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Outermost: turns whatever a handler raises into a rich status, on all four handler kinds."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: the library answers UNIMPLEMENTED
            return handler
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour: Behaviour | None = getattr(handler, kind)
            if behaviour is not None:
                wrap = _guard_stream if kind.endswith("_stream") else _guard_unary
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                return make(
                    wrap(behaviour), handler.request_deserializer, handler.response_serializer
                )
        return handler


def _guard_unary(behaviour: Behaviour) -> Behaviour:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except BaseException as error:
            await _fail(context, error)

    return guarded


def _guard_stream(behaviour: Behaviour) -> Behaviour:
    # A coroutine that writes, not a generator: a cancel then arrives inside this frame, and the
    # handler's `finally` runs at once instead of when its generator is collected.
    async def guarded(request: Any, context: Any) -> None:
        try:
            result = behaviour(request, context)
            if not hasattr(result, "__aiter__"):
                await result
                return
            async with aclosing(result) as messages:
                async for message in messages:
                    await context.write(message)
        except BaseException as error:
            await _fail(context, error)

    return guarded


async def _fail(context: Any, error: BaseException) -> None:
    task = asyncio.current_task()
    if isinstance(error, grpc.aio.AbortError) or (task is not None and task.cancelling()):
        raise error  # aborted on purpose, or nobody is there to be told
    if isinstance(error, SpecwireError):
        typed = error
    elif isinstance(error, asyncio.CancelledError):
        # Something inside was cancelled, not this call. Let out, it would leave the client hanging.
        typed = SpecwireError(Reason.CANCELLED, "the server gave this call up")
    elif isinstance(error, Exception):
        typed = internal_error(log, "a handler failed", error)
    else:
        raise error
    status = rpc_status.to_status(typed.to_status())
    await context.abort(status.code, status.details, status.trailing_metadata)


class GrpcHost:
    """One gRPC server. Create it inside the running loop, add servicers to `server`, `start`."""

    def __init__(
        self,
        *,
        address: str | Sequence[str],
        services: Sequence[str],
        link: bool,
        reflection: bool = False,
    ) -> None:
        self._requested = [address] if isinstance(address, str) else list(address)
        self._services = list(services)
        self.addresses: list[str] = []
        self.server: grpc.aio.Server = grpc.aio.server(
            interceptors=[ErrorInterceptor()], options=server_options(link)
        )
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        if reflection:
            names = [*self._services, _HEALTH_NAME, grpc_reflection.SERVICE_NAME]
            grpc_reflection.enable_server_reflection(names, self.server)

    async def start(self) -> None:
        """Binds and answers; health says NOT_SERVING until `set_serving(True)`."""
        await self.set_serving(False)  # the library's default is SERVING
        self.addresses = [_bind(self.server, address) for address in self._requested]
        await self.server.start()

    def set_serving(self, serving: bool) -> asyncio.Task[None]:
        """Sets what health says from now on. Awaiting the result is optional."""
        kinds = health_pb2.HealthCheckResponse
        state = kinds.SERVING if serving else kinds.NOT_SERVING
        # Kept here, since the loop alone would not keep the task alive.
        self._setting = asyncio.create_task(self._set_health(state))
        return self._setting

    async def _set_health(self, state: int) -> None:
        for name in ("", *self._services):
            await self._health.set(name, state)

    async def drain(self, grace_s: float) -> None:
        """Reports NOT_SERVING for good, lets running calls end, cuts them after `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def _bind(server: grpc.aio.Server, address: str) -> str:
    """Binds, and returns the address with the port that was taken."""
    path = address.removeprefix("unix:") if address.startswith("unix:") else None
    if path is None:
        _check_port(address)
    else:
        _refuse_live_socket(address, path)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise _not_bindable(address) from error
    if path is not None:
        os.chmod(path, 0o600)
        return address
    return f"{address.rpartition(':')[0]}:{port}"


def _refuse_live_socket(address: str, path: str) -> None:
    """gRPC removes the socket file of a running server without a word; ask first."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise _in_use(address)


def _check_port(address: str) -> None:
    """Tries with plain sockets, which say why; gRPC takes 99999 and half of a `localhost` pair."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise _not_bindable(address)
    usable = False
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _not_bindable(address) from error
    for family, kind, proto, _, target in infos:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
                usable = True
        except OSError as error:  # one of several families may be missing
            if error.errno == errno.EADDRINUSE:
                raise _in_use(address) from error
    if not usable:
        raise _not_bindable(address)


def _in_use(address: str) -> SpecwireError:
    text = f"{address} is in use by another process"
    return SpecwireError(Reason.PORT_IN_USE, text, {"address": address})


def _not_bindable(address: str) -> SpecwireError:
    accepted = "host:port of this machine, or unix:/path (107 characters) in a writable directory"
    return SpecwireError.field("address", address, accepted, Reason.SETTINGS_INVALID)
