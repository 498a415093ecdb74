from __future__ import annotations

import asyncio
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire import rpc
from specwire.errors import Reason, SpecwireError
from specwire.rpc import FRAME_BYTES, Outbox, OutboxFull, decode_ids, encode_ids
from specwire.tensors import chunk_rows, rows_from_bytes, rows_to_bytes
from specwire.v1 import common_pb2


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_ids_round_trip_as_little_endian(ids: list[int]) -> None:
    assert encode_ids(ids) == struct.pack(f"<{len(ids)}I", *ids)
    assert decode_ids(encode_ids(ids)) == ids


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "a"])
def test_ids_out_of_range_are_named(bad: object) -> None:
    with pytest.raises(SpecwireError, match="token id is") as caught:
        encode_ids([1, bad])  # type: ignore[list-item]
    assert caught.value.reason is Reason.VOCAB_RANGE


def test_torn_ids_are_refused() -> None:
    with pytest.raises(SpecwireError, match="7 bytes"):
        decode_ids(b"1234567")


def test_incarnations_are_nonzero_and_differ() -> None:
    drawn = {rpc.new_incarnation() for _ in range(1000)}
    assert len(drawn) == 1000 and min(drawn) > 0 and max(drawn) < 2**64


def test_limits_are_explicit_on_both_sides() -> None:
    for link, size in ((True, 16 * 2**20), (False, 4 * 2**20)):
        for options in (rpc.server_options(link), rpc.channel_options(link)):
            found = dict(options)
            assert found["grpc.max_receive_message_length"] == size
            assert found["grpc.max_send_message_length"] == size
    backoff = dict(rpc.channel_options(True))
    assert backoff["grpc.initial_reconnect_backoff_ms"] == 100
    assert backoff["grpc.max_reconnect_backoff_ms"] == 2000


@pytest.mark.parametrize(
    "address",
    ["host:80", "[::1]:7070", "ipv4:10.0.0.1:80", "dns:///host:80", "unix:/x", "unix:///x"],
)
def test_addresses_that_grpc_knows_are_taken(address: str) -> None:
    assert rpc.is_address(address)


class Item(int):
    """A message as far as an outbox knows: its value is its size."""

    def ByteSize(self) -> int:
        return int(self)


async def test_outbox_merges_what_waits() -> None:
    outbox: Outbox[Item] = Outbox()
    for item in range(3):
        outbox.put(Item(item))
    assert await outbox.take_all() == [0, 1, 2]
    waiting = asyncio.create_task(outbox.take_all())
    await asyncio.sleep(0)
    outbox.put(Item(3))
    outbox.put(Item(4))
    assert await waiting == [3, 4]


async def test_outbox_is_bounded() -> None:
    outbox: Outbox[Item] = Outbox(limit=2)
    outbox.put(Item(0))
    outbox.put(Item(1))
    with pytest.raises(OutboxFull):
        outbox.put(Item(2))
    assert await outbox.take_all() == [0, 1]
    outbox.put(Item(2))
    assert len(outbox) == 1


async def test_outbox_delivers_the_rest_before_it_ends() -> None:
    outbox: Outbox[Item] = Outbox()
    outbox.put(Item(1))
    outbox.close()
    outbox.put(Item(2))
    assert await outbox.take_all() == [1]
    assert await outbox.take_all() == []
    waiting: Outbox[Item] = Outbox()
    task = asyncio.create_task(waiting.take_all())
    await asyncio.sleep(0)
    waiting.close()
    assert await task == []


async def test_a_cancelled_take_loses_nothing() -> None:
    outbox: Outbox[Item] = Outbox()
    task = asyncio.create_task(outbox.take_all())
    await asyncio.sleep(0)
    outbox.put(Item(1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await outbox.take_all() == [1]


async def test_a_frame_is_never_larger_than_its_peer_takes() -> None:
    outbox: Outbox[Item] = Outbox()
    half, whole = FRAME_BYTES // 2, FRAME_BYTES
    for size in (half, half, 1, whole - 1, whole, 2 * whole, 1, 1):
        outbox.put(Item(size))
    outbox.close()
    frames = [await outbox.take_all() for _ in range(6)]
    assert frames == [[half, half], [1, whole - 1], [whole], [2 * whole], [1, 1], []]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (common_pb2.D_TYPE_BFLOAT16, np.uint16),
        (common_pb2.D_TYPE_FLOAT16, np.uint16),
        (common_pb2.D_TYPE_FLOAT32, np.float32),
    ],
)
def test_rows_round_trip_as_a_read_only_view(dtype: int, kind: type) -> None:
    rows = np.arange(12).reshape(3, 4).astype(kind)
    back = rows_from_bytes(rows_to_bytes(rows), 3, 4, dtype)
    assert back.dtype == kind and np.array_equal(back, rows)
    with pytest.raises(ValueError, match="read-only"):
        back[0, 0] = 1


def test_rows_that_are_not_contiguous() -> None:
    rows = np.arange(24, dtype=np.uint16).reshape(4, 6)[::2, 1:5]
    assert rows_to_bytes(rows) == np.ascontiguousarray(rows).tobytes()


def test_rows_of_the_wrong_size_are_named() -> None:
    with pytest.raises(SpecwireError, match=r"24 bytes \(3 rows of 4 values\)"):
        rows_from_bytes(b"\0" * 23, 3, 4, common_pb2.D_TYPE_BFLOAT16)
    with pytest.raises(SpecwireError, match="dtype is 9"):
        rows_from_bytes(b"", 0, 4, 9)
    with pytest.raises(SpecwireError, match="float64"):
        rows_to_bytes(np.zeros((1, 1)))


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 100))
def test_chunks_cover_the_rows_in_order(count: int, width: int, limit: int) -> None:
    rows = np.arange(count * width, dtype=np.uint16).reshape(count, width)
    chunks = list(chunk_rows(rows, limit))
    assert b"".join(part.tobytes() for _, part in chunks) == rows.tobytes()
    expected = 0
    for offset, part in chunks:
        assert offset == expected and (part.nbytes <= limit or len(part) == 1)
        expected += len(part)
