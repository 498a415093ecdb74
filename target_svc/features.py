"""Row export: where the rows of each session go, one stream for each draft."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from fnmatch import fnmatchcase

from engine.api import nothing
from specwire.errors import Reason, SpecwireError
from specwire.rpc import CHUNK_BYTES
from specwire.tensors import Rows, chunk_rows, rows_to_bytes
from target_svc.asks import Answered, Question
from target_svc.decode import key_to_wire
from target_svc.metrics import Metrics
from target_svc.push_stream import Chunk, PushStream
from target_svc.sessions import Key
from target_svc.settings import TargetSettings


class FeatureExporter:
    """The streams by address. An idle one stays open until its place is needed."""

    def __init__(self, settings: TargetSettings, incarnation: int, metrics: Metrics) -> None:
        self._settings, self._incarnation, self._metrics = settings, incarnation, metrics
        self._streams: OrderedDict[str, PushStream] = OrderedDict()
        # Called behind answers of drafts to what was asked of them.
        self.on_answers: Callable[[], None] = nothing
        self._closing: set[asyncio.Task[None]] = set()

    def open(self, address: str, key: Key) -> SessionRows:
        """Where one session's rows go. Refuses addresses that the settings do not allow."""
        if not _allowed(address, self._settings.push_allow):
            accepted = "an address that the target's setting push_allow names"
            raise SpecwireError.field(
                "push_to.address", address, accepted, Reason.PUSH_ADDRESS_REFUSED
            )
        stream = self._streams.get(address)
        if stream is None:
            self._make_place()
            stream = PushStream(
                address, self._settings, self._incarnation, self._metrics, self.on_answers
            )
            self._streams[address] = stream
        self._streams.move_to_end(address)
        return SessionRows(stream, key)

    def _make_place(self) -> None:
        if len(self._streams) < self._settings.push_max_streams:
            return
        idle = next((address for address, s in self._streams.items() if not s.users), None)
        if idle is None:
            limit = self._settings.push_max_streams
            raise SpecwireError(
                Reason.ROWS_REFUSED, f"rows already go to {limit} draft addresses, the limit"
            )
        task = asyncio.ensure_future(self._streams.pop(idle).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for stream in self._streams.values():
            await stream.close()
        self._streams.clear()
        await asyncio.gather(*self._closing)


def _allowed(address: str, patterns: tuple[str, ...]) -> bool:
    """Only `unix:` paths and `host:port` pass at all: a star must not swallow a second host."""
    if not address.startswith("unix:"):
        host, _, port = address.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", "/")
        if not (port.isascii() and port.isdigit()) or not bare or set(bare) & set("/,% "):
            return False
    return any(fnmatchcase(address, pattern) for pattern in patterns)


class SessionRows:
    """The row sink of one session."""

    def __init__(self, stream: PushStream, key: Key) -> None:
        self._stream, self._name, self._key = stream, key, key_to_wire(key)
        stream.attach()

    def push(self, step_id: int, start: int, rows: Rows) -> None:
        parts = ((0, rows),) if rows.nbytes <= CHUNK_BYTES else chunk_rows(rows)
        for offset, part in parts:
            data = rows_to_bytes(part)
            self._stream.put(Chunk(self._key, step_id, start + offset, len(part), data))

    def ask(self, question: Question, answered: Answered) -> None:
        """Asks the draft for a proposal, behind the rows that were pushed before. `answered` is
        called once, with a refusal where the stream breaks too; never from here."""
        self._stream.ask(self._name, self._key, question, answered)

    def hurry(self) -> None:
        """Nothing more comes soon: what was pushed and asked leaves at once, where it can."""
        self._stream.hurry()

    def forget(self) -> None:
        """Nobody waits for an answer any more."""
        self._stream.forget(self._name)

    def release(self) -> None:
        self.forget()
        self._stream.detach(self._name)
