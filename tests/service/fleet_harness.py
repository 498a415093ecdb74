"""A coordinator with several toy targets and scripted drafts, each stopped and started alone."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.host import CoordinatorHost
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer_cache import TokenizerCache
from specwire.client import AsyncClient
from specwire.generation import Generation
from target_svc.app import Loaded, TargetApp
from target_svc.sessions import Session
from target_svc.settings import TargetSettings
from tests.service.colocated_toy import ColocatedToy
from tests.service.coordinator_harness import PROMPT, ScriptedDraft, document
from tests.service.toy_drafter import ToyDrafter
from tests.service.toy_engine import ToyEngine


class ToyTarget:
    """One target process, as far as the coordinator can tell. `info` changes what it says it is;
    a `drafter` is in the same process."""

    def __init__(
        self, address: str, engine: dict[str, Any], drafter: ToyDrafter | None = None, **info: Any
    ) -> None:
        self.address, self._engine_options, self._info = address, engine, info
        self.drafter = drafter
        self.app: TargetApp | None = None
        # Sessions that were opened since the last start.
        self.opened = 0

    async def start(self, drain_ms: int = 0) -> None:
        self.engine = ToyEngine(**self._engine_options)
        self.engine.info = replace(self.engine.info, **self._info)
        settings = TargetSettings(address=self.address, drain_ms=drain_ms, reflection=False)
        if self.drafter is not None:
            self.drafter.engine = self.engine
        self.app = TargetApp(settings, lambda _: Loaded(self.engine, document()), self.drafter)
        await self.app.start()
        scheduler, self.opened = self.app.scheduler, 0
        assert scheduler is not None
        add = scheduler.add

        def counted(session: Session) -> None:
            self.opened += 1
            add(session)

        scheduler.add = counted  # type: ignore[method-assign]

    async def stop(self) -> None:
        app, self.app = self.app, None
        if app is not None:
            self.engine.gate.set()
            await app.stop()

    @property
    def sessions(self) -> int:
        """Sessions it has now."""
        return (
            0
            if self.app is None or self.app.scheduler is None
            else len(self.app.scheduler.sessions)
        )


class FleetWorld:
    def __init__(
        self, targets: list[ToyTarget | ColocatedToy], drafts: list[ScriptedDraft]
    ) -> None:
        self.targets, self.drafts = targets, drafts
        self.host: CoordinatorHost
        self.client: AsyncClient

    async def wait_ready(self) -> None:
        for worker in self.host.fleet.workers:
            assert await worker.link.wait_ready(10)

    async def generate(self, ids: Sequence[int] = PROMPT, **options: Any) -> Generation:
        defaults: dict[str, Any] = {
            "max_tokens": 40,
            "temperature": 0.0,
            "seed": 0,
            "return_token_ids": True,
        }
        return await self.client.generate(token_ids=list(ids), **{**defaults, **options})

    async def started(self, tokens: int, ids: Sequence[int] = PROMPT, **options: Any) -> Any:
        """A generation with its first tokens out."""
        task = asyncio.create_task(self.generate(ids, max_tokens=tokens, **options))
        await until(lambda: any(s.emitted >= 10 for s in self.host.servicer.sessions.values()))
        return task

    def at(self) -> ToyTarget | ColocatedToy:
        """The target of the only running session."""
        (session,) = self.host.servicer.sessions.values()
        return next(t for t in self.targets if t.address == session.target.address)

    def other(self, target: ToyTarget | ColocatedToy) -> ToyTarget | ColocatedToy:
        return next(t for t in self.targets if t is not target)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def fleet_world(
    drafts: Sequence[ScriptedDraft] = (),
    engine: dict[str, Any] | None = None,
    infos: Sequence[dict[str, Any] | ColocatedToy] = ({}, {}),
    *,
    start: bool = True,
    **settings: Any,
) -> AsyncIterator[FleetWorld]:
    """One target per entry of `infos`, or the co-located one that stands there; `start=False`
    leaves every worker absent."""
    with tempfile.TemporaryDirectory() as folder:
        targets: list[ToyTarget | ColocatedToy] = []
        for i, info in enumerate(infos):
            address = f"unix:{folder}/t{i}"
            if isinstance(info, ColocatedToy):
                info.address = address
                targets.append(info)
            else:
                targets.append(ToyTarget(address, engine or {}, **info))
        addresses = [f"unix:{folder}/d{i}" for i in range(len(drafts))]
        for draft, address in zip(drafts, addresses, strict=True):
            draft.address = address
        settings.setdefault("adaptive_k", "num_speculative_tokens" not in settings)
        fields = {"drain_ms": 0, "reflection": False, "proposal_wait_min_ms": 500, **settings}
        chosen = CoordinatorSettings(
            address=f"unix:{folder}/c",
            target=tuple(target.address for target in targets),
            draft=tuple(addresses),
            **fields,
        )
        made = FleetWorld(targets, list(drafts))
        try:
            if start:
                await asyncio.gather(*(target.start() for target in targets))
                await asyncio.gather(*(draft.start(draft.address) for draft in drafts))
            async with CoordinatorHost(chosen, TokenizerCache(Path(folder))) as made.host:
                if start:
                    await made.wait_ready()
                async with AsyncClient(made.host.address) as made.client:
                    yield made
        finally:
            for draft in drafts:
                await draft.stop()
            for target in targets:
                await target.stop()
        for target in targets:
            assert not (isinstance(target, ColocatedToy) and target.broken), target.broken
