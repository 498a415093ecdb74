"""A target, several drafts and a coordinator behind their real gRPC servers, in one process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.host import CoordinatorHost
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer_cache import TokenizerCache
from specwire.client import AsyncClient
from target_svc.app import Loaded, TargetApp
from target_svc.settings import TargetSettings
from tests.service.coordinator_harness import ScriptedDraft
from tests.service.toy_engine import ToyEngine


@dataclass
class Services:
    app: TargetApp
    host: CoordinatorHost
    client: AsyncClient
    folder: Path

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


@asynccontextmanager
async def services(
    engine: ToyEngine, document: bytes, drafts: Sequence[ScriptedDraft], **settings: Any
) -> AsyncIterator[Services]:
    """`settings` are the coordinator's; drafts listen at d0, d1, ... in the order given."""
    with tempfile.TemporaryDirectory() as name:
        addresses = tuple(f"unix:{name}/d{i}" for i in range(len(drafts)))
        target = TargetSettings(address=f"unix:{name}/t", drain_ms=0, reflection=False)
        app = TargetApp(target, lambda _: Loaded(engine, document))
        await app.start()
        for draft, address in zip(drafts, addresses, strict=True):
            await draft.start(address)
        fields = {"drain_ms": 0, "reflection": False, **settings}
        chosen = CoordinatorSettings(
            address=f"unix:{name}/c", target=target.address, draft=addresses, **fields
        )
        try:
            async with (
                CoordinatorHost(chosen, TokenizerCache(Path(name))) as host,
                AsyncClient(host.address) as client,
            ):
                made = Services(app, host, client, Path(name))
                await made.until_ready()
                yield made
        finally:
            for draft in drafts:
                await draft.stop()
            await app.stop()
