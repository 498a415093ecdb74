"""A target, several drafts and a coordinator behind their real gRPC servers, in one process."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coordinator.host import CoordinatorHost
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer_cache import TokenizerCache
from specwire.client import AsyncClient
from target_svc.app import Loaded, TargetApp
from target_svc.settings import TargetSettings
from tests.service.coordinator_harness import ScriptedDraft
from tests.service.toy_engine import ToyEngine


class Cable:
    """A proxy between two sockets that can be cut."""

    def __init__(self, here: str, there: str) -> None:
        self._here, self._there = here, there
        self._ends: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._connected, self._here)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.unplug()

    def unplug(self) -> None:
        """Cuts for good."""
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Drops every connection in the middle of whatever it carries; new ones are taken."""
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()

    async def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._ends.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._there)
        except OSError:
            writer.transport.abort()
            return
        self._ends.append(far_writer)
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))


async def _pump(reader: StreamReader, writer: StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@dataclass
class Services:
    """All parts; `cables` are those from the coordinator to the target and to the drafts."""

    folder: Path
    engine: ToyEngine
    document: bytes
    app: TargetApp
    host: CoordinatorHost
    client: AsyncClient
    cables: list[Cable]

    async def start_target(self, engine: ToyEngine) -> None:
        """A new process's worth of target at the old address."""
        self.engine = engine
        self.app = await started(self.folder, self.engine, self.document)

    async def kill_target(self) -> None:
        """Ends the target even in the middle of a step of its engine."""
        # The end waits for the engine's thread, and the event loop with it.
        threading.Timer(0.2, self.engine.gate.set).start()
        await self.app.stop()

    def dropped(self, draft: int = 0) -> dict[str, int]:
        """Replies of a draft that nobody got, by cause."""
        return dict(self.host.fleet.drafts[draft].link.dropped)

    async def until_ready(self, timeout_s: float = 10) -> None:
        """Every worker's link is up."""
        async with asyncio.timeout(timeout_s):
            while True:
                info = await self.client.info()
                if all(worker.state == "ready" for worker in info.workers):
                    return
                await asyncio.sleep(0.02)


async def started(folder: Path, engine: ToyEngine, document: bytes) -> TargetApp:
    settings = TargetSettings(address=f"unix:{folder}/t", drain_ms=0, reflection=False)
    app = TargetApp(settings, lambda _: Loaded(engine, document))
    await app.start()
    return app


@asynccontextmanager
async def services(
    engine: ToyEngine, document: bytes, drafts: Sequence[ScriptedDraft], **settings: Any
) -> AsyncIterator[Services]:
    """`settings` are the coordinator's; drafts listen at d0, d1, ... in the order given."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        app = await started(folder, engine, document)
        names = ["t", *(f"d{i}" for i in range(len(drafts)))]
        for draft, at in zip(drafts, names[1:], strict=True):
            await draft.start(f"unix:{name}/{at}")
        fields = {"drain_ms": 0, "reflection": False, **settings}
        target, *others = (f"unix:{name}/{at}.cable" for at in names)
        chosen = CoordinatorSettings(
            address=f"unix:{name}/c", target=target, draft=tuple(others), **fields
        )
        try:
            async with AsyncExitStack() as stack:
                enter = stack.enter_async_context
                cables = [await enter(Cable(f"{name}/{n}.cable", f"{name}/{n}")) for n in names]
                host = await enter(CoordinatorHost(chosen, TokenizerCache(folder)))
                client = await enter(AsyncClient(host.address))
                made = Services(folder, engine, document, app, host, client, cables)
                await made.until_ready()
                yield made
        finally:
            made.engine.gate.set()
            for draft in drafts:
                await draft.stop()
            await made.app.stop()
