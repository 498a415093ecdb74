"""The SDK: `AsyncClient` and `Client`. Needs the base install only (no torch, no numpy).

    with Client("127.0.0.1:7070") as client:
        print(client.generate(prompt="The capital of France is", max_tokens=16).text)
        for answer in client.generate(prompt="Once", n=3, logprobs=2).choices:
            print(answer.text, answer.logprobs[0].top)
        for event in client.stream(messages=[{"role": "user", "content": "Hello"}]):
            if isinstance(event, Delta):
                print(event.text, end="")

Leaving a stream early (close, or dropping the last reference) cancels the work on the server. A
server that is not available is tried again only while nothing has been received.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Self, Unpack

import grpc

from specwire.errors import Reason, SpecwireError, from_rpc_error
from specwire.generation import (
    Acceptance,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generation,
    Sampling,
    TokenLogprobs,
    TopLogprob,
    Usage,
    collect,
    event_from,
)
from specwire.info import ServerInfo, info_from
from specwire.request import GenerateOptions, build_request
from specwire.rpc import ADDRESSES, channel_options, is_address
from specwire.v1 import generate_pb2, generate_pb2_grpc

__all__ = [
    "Acceptance",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Delta",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Generation",
    "Sampling",
    "ServerInfo",
    "Stream",
    "TokenLogprobs",
    "TopLogprob",
    "Usage",
]

_ATTEMPTS = 3
_INFO_TIMEOUT_S = 10.0
# gRPC takes an endless time for one that has passed; a year is endless enough.
_LONGEST_S = 365 * 86_400.0


class _Budget:
    """Time and attempts of one request."""

    def __init__(self, timeout_s: float | None) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise SpecwireError.field("timeout_s", timeout_s, "a number above 0, or None")
        if timeout_s is not None and timeout_s > _LONGEST_S:
            timeout_s = None
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._left = _ATTEMPTS

    def timeout_s(self) -> float | None:
        self._left -= 1
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def pause_s(self, error: SpecwireError) -> float:
        """How long to wait before the next attempt; raises the error when there is none."""
        pause = error.retry_after_ms / 1000 * random.uniform(1.0, 1.2)
        retryable = error.code is grpc.StatusCode.UNAVAILABLE and pause > 0 and self._left > 0
        if not retryable or (self._end is not None and time.monotonic() + pause >= self._end):
            raise error
        return pause


class _Receiver:
    """What both kinds of stream keep: whether anything came, and how many answers are to end."""

    def __init__(
        self, start: Callable[[float | None], Any], budget: _Budget, answers: int = 1
    ) -> None:
        self._start, self._budget = start, budget
        self._call: Any = None
        self._received = self._closed = False
        self._unfinished = answers

    def _open(self) -> Any:
        if self._call is None:
            self._call = self._start(self._budget.timeout_s())
        return self._call

    def _failed(self, error: grpc.RpcError) -> float:
        typed = from_rpc_error(error)
        if self._received:
            raise typed from error
        self._call = None
        try:
            return self._budget.pause_s(typed)
        except SpecwireError:
            self.cancel()
            raise

    def _decode(self, response: generate_pb2.GenerateResponse) -> Event | None:
        self._received = True
        event = event_from(response)
        self._unfinished -= isinstance(event, Finished)
        return event

    def _ended(self) -> None:
        self._closed = True
        if self._unfinished > 0:
            raise SpecwireError(Reason.INTERNAL, "the stream ended without a final message")

    def _over(self) -> bool:
        return self._closed

    def cancel(self) -> None:
        """Gives the request up; the server stops working on it."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()


class AsyncStream(_Receiver):
    """An async iterator of events, ending after the `Finished` of every choice."""

    def __init__(
        self, start: Callable[[float | None], Any], budget: _Budget, answers: int = 1
    ) -> None:
        super().__init__(start, budget, answers)
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._over():
            try:
                response = await self._open().read()
            except grpc.RpcError as error:
                await asyncio.sleep(self._failed(error))
                continue
            except asyncio.CancelledError:
                if self._over():  # by `cancel`, not by whoever runs this task
                    break
                raise
            if response is grpc.aio.EOF:
                self._ended()
            elif (event := self._decode(response)) is not None:
                return event
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.cancel()

    def __del__(self) -> None:
        # The library keeps running calls alive, so dropping ours would not end it. Collection may
        # happen in any thread, and after the loop has ended.
        call = self._call
        if call is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call.cancel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class Stream(_Receiver):
    """An iterator of events, ending after the `Finished` of every choice."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while not self._over():
            try:
                event = self._decode(next(self._open()))
            except StopIteration:
                self._ended()
            except grpc.RpcError as error:
                if self._over():  # by `cancel`
                    break
                time.sleep(self._failed(error))
            else:
                if event is not None:
                    return event
        raise StopIteration

    def close(self) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


def _options(address: str) -> list[tuple[str, int]]:
    if not is_address(address):
        raise SpecwireError.field("address", address, ADDRESSES)
    options = channel_options(link=False)
    if address.startswith(("unix:", "localhost:", "127.", "[::1]")):
        options.append(("grpc.enable_http_proxy", 0))
    return options


class AsyncClient:
    """A client for asyncio. Create it inside the running loop."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_options(address))
        self._stub: Any = generate_pb2_grpc.GenerationServiceStub(self._channel)

    def stream(self, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Starts a generation; iterate for `Delta`s and one `Finished` for each choice."""
        request, budget = build_request(options), _Budget(options.get("timeout_s"))
        n = max(1, request.n)
        return AsyncStream(lambda left: self._stub.Generate(request, timeout=left), budget, n)

    async def generate(self, **options: Unpack[GenerateOptions]) -> Generation:
        async with self.stream(**options) as stream:
            return collect([event async for event in stream])

    async def info(self, timeout_s: float = _INFO_TIMEOUT_S) -> ServerInfo:
        budget = _Budget(timeout_s)
        request = generate_pb2.GenerationServiceGetInfoRequest()
        while True:
            try:
                return info_from(await self._stub.GetInfo(request, timeout=budget.timeout_s()))
            except grpc.RpcError as error:
                await asyncio.sleep(budget.pause_s(from_rpc_error(error)))

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client:
    """A blocking client; may be used from several threads."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_options(address))
        self._stub: Any = generate_pb2_grpc.GenerationServiceStub(self._channel)

    def stream(self, **options: Unpack[GenerateOptions]) -> Stream:
        """Starts a generation; iterate for `Delta`s and one `Finished` for each choice."""
        request, budget = build_request(options), _Budget(options.get("timeout_s"))
        n = max(1, request.n)
        return Stream(lambda left: self._stub.Generate(request, timeout=left), budget, n)

    def generate(self, **options: Unpack[GenerateOptions]) -> Generation:
        with self.stream(**options) as stream:
            return collect(list(stream))

    def info(self, timeout_s: float = _INFO_TIMEOUT_S) -> ServerInfo:
        budget = _Budget(timeout_s)
        request = generate_pb2.GenerationServiceGetInfoRequest()
        while True:
            try:
                return info_from(self._stub.GetInfo(request, timeout=budget.timeout_s()))
            except grpc.RpcError as error:
                time.sleep(budget.pause_s(from_rpc_error(error)))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
