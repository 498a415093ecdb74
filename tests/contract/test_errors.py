from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from specwire.errors import DOMAIN, Reason, SpecwireError, from_item, from_rpc_error
from tests.contract.support import KINDS, call, hosted, raising

SECRET = "my private prompt"


class Rotation:
    """Raises an error of each reason in turn, so that one server serves the whole catalogue."""

    def __init__(self) -> None:
        self.reason = Reason.INTERNAL

    def __call__(self) -> SpecwireError:
        return SpecwireError(self.reason, f"it was {self.reason}", {"field": "x", "value": "é"})


async def test_every_reason_round_trips_on_every_handler_kind() -> None:
    make = Rotation()
    async with hosted(raising(make)) as channel:
        for kind in KINDS:
            for make.reason in Reason:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel, kind)
                error = from_rpc_error(caught.value)
                assert caught.value.code() is make.reason.code
                assert (error.reason, error.message) == (make.reason, f"it was {make.reason}")
                assert error.metadata == {"field": "x", "value": "é"}
                assert error.retry_after_ms == make.reason.retry_after_ms


async def call_expecting(channel: grpc.aio.Channel, kind: str, reason: Reason) -> SpecwireError:
    with pytest.raises(grpc.RpcError) as caught:
        await call(channel, kind)
    error = from_rpc_error(caught.value)
    assert error.reason is reason
    return error


async def test_status_has_one_of_each_detail() -> None:
    error = SpecwireError.field("sampling.top_p", 1.5, "a number in (0, 1]")
    async with hosted(raising(lambda: error)) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await call(channel, "unary_unary")
    status = rpc_status.from_call(caught.value)
    assert status is not None and len(status.details) == 2
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info) and status.details[1].Unpack(bad)
    assert (info.domain, info.reason) == (DOMAIN, "FIELD_INVALID")
    assert bad.field_violations[0].field == "sampling.top_p"
    assert "1.5" in status.message and "(0, 1]" in status.message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_", [ValueError, KeyError, AssertionError, StopAsyncIteration])
async def test_exception_text_never_reaches_the_client(
    kind: str, type_: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "specwire.serve"):
        async with hosted(raising(lambda: type_(SECRET))) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, kind)
    error = from_rpc_error(caught.value)
    assert error.reason is Reason.INTERNAL
    seen = repr(caught.value) + repr(caught.value.trailing_metadata())
    for leak in (SECRET, type_.__name__, "Traceback", ".py"):
        assert leak not in seen
    # The operator finds the same incident in the log, with the cause.
    assert error.metadata["incident"] in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_error_from_inside_does_not_hang_the_client(kind: str) -> None:
    async with hosted(raising(asyncio.CancelledError)) as channel:
        await call_expecting(channel, kind, Reason.CANCELLED)


async def test_an_abort_by_the_handler_passes() -> None:
    async def denied(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")
        return b""

    async with hosted({"unary_unary": denied}) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary")
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await call_expecting(channel, "stream_stream", Reason.UNSUPPORTED)


async def test_cancel_reaches_a_streaming_handler_at_once() -> None:
    ended = asyncio.Event()

    async def endless(request: bytes, context: Any) -> Any:
        try:
            while True:
                yield b"x" * 1000
                await asyncio.sleep(0)
        finally:
            ended.set()

    async with hosted({"unary_stream": endless}) as channel:
        for _ in range(20):
            ended.clear()
            running = channel.unary_stream("/specwire.test.EchoService/unary_stream")(b"")
            await running.read()
            running.cancel()
            await asyncio.wait_for(ended.wait(), 1.0)
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
    assert not [name for name in names if "guarded" in name]


@pytest.mark.parametrize("reason", Reason)
def test_item_round_trip(reason: Reason) -> None:
    error = SpecwireError(reason, "text", {"have": "3"}, retry_after_ms=7)
    back = from_item(error.to_item())
    assert vars(back) == vars(error)


def test_unknown_reason_of_a_newer_peer_keeps_its_name() -> None:
    item = SpecwireError(Reason.INTERNAL, "text").to_item()
    item.reason = "FROM_THE_FUTURE"
    assert from_item(item).metadata["reason"] == "FROM_THE_FUTURE"


def test_long_values_are_clipped_so_that_trailers_stay_small() -> None:
    error = SpecwireError.field("model", "x" * 100_000, "y" * 100_000)
    assert error.to_status().ByteSize() < 3000


def catalogue() -> Iterator[tuple[Reason, str]]:
    yield Reason.PROMPT_TOO_LONG, "INVALID_ARGUMENT"
    yield Reason.QUEUE_FULL, "RESOURCE_EXHAUSTED"
    yield Reason.DRAINING, "UNAVAILABLE"
    yield Reason.MODEL_MISMATCH, "FAILED_PRECONDITION"
    yield Reason.DEADLINE, "DEADLINE_EXCEEDED"


def test_codes_and_retry_hints_follow_the_catalogue() -> None:
    for reason, code in catalogue():
        assert reason.code.name == code
    for reason in Reason:
        assert reason.value == reason.name and len(reason.name) <= 63
        assert (reason.retry_after_ms > 0) <= (
            reason.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
        )
