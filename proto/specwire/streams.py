"""Streams of events as the SDK hands them out: both kinds, and what a request may take in all."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Self

import grpc

from specwire.errors import Reason, SpecwireError
from specwire.generation import Event, Finished, event_from
from specwire.v1 import generate_pb2

# Starts the call with so many seconds left; makes what it raised a typed error.
Start = Callable[[float | None], Any]
Failed = Callable[[grpc.RpcError | asyncio.CancelledError], SpecwireError]
_ATTEMPTS = 3
# gRPC takes an endless time for one that has passed; a year is endless enough.
_LONGEST_S = 365 * 86_400.0


class Budget:
    """Time and attempts of one request."""

    def __init__(self, timeout_s: float | None) -> None:
        number = isinstance(timeout_s, int | float)
        if timeout_s is not None and not (number and timeout_s > 0):
            raise SpecwireError.field("timeout_s", timeout_s, "a number above 0, or None")
        if timeout_s is not None and timeout_s > _LONGEST_S:
            timeout_s = None
        self.limit_s = timeout_s
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

    def __init__(self, start: Start, failed: Failed, budget: Budget, answers: int = 1) -> None:
        self._start, self._typed, self._budget = start, failed, budget
        self._call: Any = None
        self._received = self._closed = False
        self._unfinished = answers

    def _open(self) -> Any:
        if self._call is None:
            self._call = self._start(self._budget.timeout_s())
        return self._call

    def _failed(self, error: grpc.RpcError) -> float:
        typed = _late(self._typed(error), self._budget.limit_s, self._received)
        if self._received:
            raise _cut(typed) from error
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


def task_is_cancelled() -> bool:
    """Whether the running task is to end: a channel that closes raises the same in its calls."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncStream(_Receiver):
    """An async iterator of events, ending after the `Finished` of every choice."""

    def __init__(self, start: Start, failed: Failed, budget: Budget, answers: int = 1) -> None:
        super().__init__(start, failed, budget, answers)
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
            except asyncio.CancelledError as error:
                if self._over():  # by `cancel`, not by whoever runs this task
                    break
                if task_is_cancelled():
                    raise
                raise self._typed(error) from None
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


def _late(error: SpecwireError, limit_s: float | None, received: bool) -> SpecwireError:
    """The same with the limit that was passed. Where something came it is no wrong address."""
    address = error.metadata.get("address")
    if error.reason is not Reason.DEADLINE or limit_s is None or not (received or address):
        return error
    if received:
        text = f"the answer took longer than timeout_s = {limit_s:g}: the rest is missing"
    else:
        text = f"nothing came from {address} within timeout_s = {limit_s:g}; where nothing ever "
        text += "does, check that this is the coordinator's address"
    return SpecwireError(error.reason, text, error.metadata)


def _cut(error: SpecwireError) -> SpecwireError:
    """Of an answer that had begun: whoever was there is gone."""
    if error.reason is not Reason.UNREACHABLE:
        return error
    text = "the coordinator ended, or was lost, in the middle of the answer: the rest is missing"
    return SpecwireError(error.reason, text, error.metadata)
