"""What both ends of a channel must agree on: protocol version, limits, keepalive, frame queues."""

from __future__ import annotations

import asyncio
import secrets
import sys
from array import array
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from specwire.errors import Reason, SpecwireError

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 2
# Since this minor version targets ask draft services themselves in a run ahead, and are answered.
ASKS_MINOR = 1

PUBLIC_MESSAGE_BYTES = 4 * 1024 * 1024
LINK_MESSAGE_BYTES = 16 * 1024 * 1024
# Items are put into one frame up to this size; the rest is room for one more.
FRAME_BYTES = LINK_MESSAGE_BYTES // 2
# Sessions that one heartbeat may list: a worker serves nobody else while it goes through them.
HEARTBEAT_SESSIONS = 1024
# Bulk data is cut into pieces of at most this size, so that small frames get between them.
CHUNK_BYTES = 1024 * 1024

# A client pings this often while calls run; the server must allow more than that, or it answers
# GOAWAY too_many_pings. gRPC's own server minimum is five minutes.
_PING_MS = {True: 10_000, False: 30_000}
# Whoever does not answer in this time is gone, or frozen; nothing of ours has to run for it.
_PING_TIMEOUT_MS = 10_000
_PING_MINIMUM_MS = 5_000
# How long one attempt to connect may take, which gRPC calls the shortest backoff; the pause between
# attempts follows from the other two. A server that is stopped or starved accepts late, so a public
# call waits as its own deadline has it; a link tries again sooner, as its worker may have moved.
_CONNECT_MS = {True: 5_000, False: 20_000}

# sockaddr_un holds 108 bytes, the closing zero included.
SOCKET_PATH_BYTES = 107
ADDRESSES = (
    "host:port with a port of 1 to 65535 and no http:// before it, or unix:/path of at most "
    f"{SOCKET_PATH_BYTES} bytes"
)
# Schemes of gRPC's resolvers that may come before host:port.
_SCHEMES = ("dns", "ipv4", "ipv6", "xds")


class Message(Protocol):
    """A protobuf message."""

    def ByteSize(self) -> int: ...


T = TypeVar("T", bound=Message)
Options = list[tuple[str, int]]


def is_address(address: str) -> bool:
    """Whether a server may be there. gRPC itself takes a port of 99999 for 34463, and calls 443
    where none is given; it takes an URL for the name of a host. Schemes of its resolvers, as
    `dns:///host:port`, are fine."""
    for scheme in ("unix:", "unix-abstract:"):
        if address.startswith(scheme):
            # gRPC takes the form of an URL too.
            path = address.removeprefix(scheme).removeprefix("//").encode(errors="replace")
            return 0 < len(path) <= SOCKET_PATH_BYTES
    host, _, port = address.rpartition(":")
    prefix, named, _ = host.partition("://")
    if prefix not in _SCHEMES if named else "/" in host:  # an URL, or a path without `unix:`
        return False
    known = port.isascii() and port.isdigit() and 0 < int(port) <= 65535
    return known and bool(host) and not any(c.isspace() for c in host)


def _limits(link: bool) -> Options:
    size = LINK_MESSAGE_BYTES if link else PUBLIC_MESSAGE_BYTES
    return [
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
        ("grpc.max_metadata_size", 16 * 1024),
    ]


def server_options(link: bool) -> Options:
    """Options of a server: `link` for worker services, else the public API."""
    return [
        *_limits(link),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_MINIMUM_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # With port sharing on, a second server on the same port would start and steal calls.
        ("grpc.so_reuseport", 0),
    ]


def channel_options(link: bool) -> Options:
    """Options of a channel to a server with `server_options(link)`."""
    return [
        *_limits(link),
        ("grpc.keepalive_time_ms", _PING_MS[link]),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        # The ping has a time of its own, a minute else, and it is what a frozen server keeps to.
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS[link]),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Retries are ours: a service config from a resolver must not add its own.
        ("grpc.enable_retries", 0),
    ]


def new_incarnation() -> int:
    """A random nonzero 64-bit number that names one life of a process."""
    return secrets.randbelow(2**64 - 1) + 1


def encode_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError) as error:
        accepted = "integers from 0 to 4294967295"
        bad = next((i for i in ids if not isinstance(i, int) or not 0 <= i < 2**32), "invalid")
        raise SpecwireError.field("token id", bad, accepted, Reason.VOCAB_RANGE) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def decode_ids(data: bytes) -> list[int]:
    if len(data) % 4:
        raise SpecwireError.field("ids", f"{len(data)} bytes", "a multiple of 4 bytes")
    packed = array("I", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def check_heartbeat(listed: int) -> None:
    """Raises FIELD_INVALID where a heartbeat lists more sessions than are renewed."""
    if listed > HEARTBEAT_SESSIONS:
        accepted = f"up to {HEARTBEAT_SESSIONS} in a heartbeat; those after them were not renewed"
        raise SpecwireError.field("sessions", listed, accepted)


class OutboxFull(Exception):
    """The reader of a stream is too slow; the stream should be given up."""


class Outbox(Generic[T]):
    """Items waiting for one stream. Everything that waits leaves together, as one frame, unless it
    is too large for one: the stream would end, and every session on it with it.

    For one event loop: other threads go through `loop.call_soon_threadsafe`.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._items: list[T] = []
        self._changed = asyncio.Event()
        self.closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Queues an item; after `close` it is dropped, since nobody will read it."""
        if self.closed:
            return
        if len(self._items) >= self._limit:
            raise OutboxFull(f"{self._limit} items wait already")
        self._items.append(item)
        self._changed.set()

    async def take_all(self) -> list[T]:
        """Waits for items and returns all that fit into a frame, the first in any case; an empty
        list means closed and drained."""
        if not self._items and not self.closed:
            self._changed.clear()
            await self._changed.wait()
        return self.take()

    def take(self) -> list[T]:
        """What `take_all` would return without waiting; empty where nothing waits."""
        count = _fitting(self._items)
        taken, self._items = self._items[:count], self._items[count:]
        return taken

    def close(self) -> None:
        """Ends the stream once what waits has been taken."""
        self.closed = True
        self._changed.set()


def _fitting(items: Sequence[Message]) -> int:
    """How many of the first items fit a frame: one at least, where there are any."""
    total = 0
    for count, item in enumerate(items):
        total += item.ByteSize()
        if count and total > FRAME_BYTES:
            return count
    return len(items)
