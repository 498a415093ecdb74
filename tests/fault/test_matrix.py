"""Who fails when: `docs/faults.md` as tests. A lost worker or link costs time, never a token.

Family: loss in the middle. A session is brought to a moment, somebody is lost, and the text must be
the one that plain decoding gives; afterwards nothing is left behind.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.host import CoordinatorHost
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer_cache import TokenizerCache
from specwire.client import AsyncClient
from specwire.errors import Reason, SpecwireError
from specwire.v1 import draft_pb2
from tests.ladder.services import Services, services
from tests.service.coordinator_harness import (
    PROMPT,
    Reply,
    ScriptedDraft,
    document,
    perfect,
)
from tests.service.toy_engine import ToyEngine, continuation

TOKENS = 40
MOMENTS = ("before open", "mid prefill", "mid verify", "mid propose", "at close")
ROOT = Path(__file__).resolve().parents[2]


class Scene:
    """One session with a drafter, held at a moment until `release`."""

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.engine = ToyEngine(step_s=0.003)
        self.draft = ScriptedDraft(self._script)
        self.reached = asyncio.Event()
        self._held = False

    def _script(self, draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        if self.moment == "mid propose" and item.step_id == 3 and not self._held:
            self._held = True  # this proposal never comes
            self.reached.set()
            return []
        return perfect(draft, item, ids)

    async def start(self, made: Services) -> asyncio.Task[Any]:
        """The generation, at the moment."""
        if self.moment == "mid prefill":
            self.engine.entered.clear()
            self.engine.gate.clear()
        task = asyncio.create_task(self.generate(made))
        async with asyncio.timeout(10):
            if self.moment == "before open":
                await asyncio.sleep(0)
            elif self.moment == "mid prefill":
                await asyncio.to_thread(self.engine.entered.wait, 10)
            elif self.moment == "mid verify":
                while len(self.engine.log) < 4:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                self.engine.gate.clear()
                self.engine.entered.clear()
                await asyncio.to_thread(self.engine.entered.wait, 10)
            elif self.moment == "at close":
                sessions = made.host.servicer.sessions
                while not (task.done() or any(s.emitted > TOKENS - 8 for s in sessions.values())):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            else:
                await self.reached.wait()
        return task

    async def generate(self, made: Services) -> Any:
        return await made.client.generate(
            token_ids=PROMPT,
            max_tokens=TOKENS,
            temperature=0.0,
            seed=0,
            method="toy",
            return_token_ids=True,
        )

    async def restart_target(self, made: Services) -> None:
        self.engine = ToyEngine()
        await made.start_target(self.engine)

    async def over(self, made: Services, workers: bool = True) -> None:
        """Nothing is left, and the next generation is whole and drafted again."""
        async with asyncio.timeout(10):
            while self.engine.stats().tables or (workers and self.draft.sessions):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.engine.check_integrity()
        await made.until_ready()
        result = await self.generate(made)
        assert list(result.token_ids) == continuation(PROMPT, TOKENS)
        assert result.acceptance.accepted_tokens > TOKENS / 2


def stage(scene: Scene, **settings: Any) -> Any:
    options = {"num_speculative_tokens": 3, "proposal_wait_min_ms": 300, "lease_ms": 900}
    options["adaptive_k"] = False  # else times decide how much is drafted
    return services(scene.engine, document(), [scene.draft], **{**options, **settings})


@pytest.mark.parametrize("moment", MOMENTS[1:])
async def test_the_target_dies_and_comes_back(moment: str) -> None:
    """WC-10, WC-22: opened again with the committed ids, the text goes on as it would have."""
    scene = Scene(moment)
    async with stage(scene) as made:
        task = await scene.start(made)
        await made.kill_target()
        await scene.restart_target(made)
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, TOKENS)
        assert moment == "at close" or result.acceptance.fallbacks["target_lost"] == 1
        await scene.over(made)


@pytest.mark.parametrize("moment", MOMENTS[1:])
async def test_the_draft_dies_and_comes_back(moment: str) -> None:
    """WC-12, WC-26, WC-31: speed is lost, and comes back with the draft."""
    scene = Scene(moment)
    async with stage(scene) as made:
        task = await scene.start(made)
        await scene.draft.stop()
        scene.engine.gate.set()
        await scene.draft.start(f"unix:{made.folder}/d0")
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, TOKENS)
        lost = result.acceptance.fallbacks
        assert moment == "at close" or lost.keys() & {"draft_lost", "draft_down"}, lost
        await scene.over(made)


@pytest.mark.parametrize("worker", [0, 1], ids=["target", "draft"])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_link_is_cut(moment: str, worker: int) -> None:
    """WC-10, WC-26, GP-17: both ends live on; the old generation's pages are freed."""
    scene = Scene(moment)
    async with stage(scene) as made:
        if moment == "before open":
            made.cables[worker].cut()
        task = await scene.start(made)
        made.cables[worker].cut()
        await asyncio.sleep(0)
        scene.engine.gate.set()
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, TOKENS)
        lost = result.acceptance.fallbacks
        cause = ("target_lost", "draft_lost")[worker]
        assert moment in ("before open", "at close") or cause in lost, lost
        # A scripted draft has no leases: what it keeps of a lost link is its own affair.
        await scene.over(made, workers=worker == 0)


@pytest.mark.parametrize("moment", MOMENTS[1:])
async def test_the_client_leaves(moment: str) -> None:
    """WC-3, WC-4: both workers are told, and the pages are free within a second."""
    scene = Scene(moment)
    async with stage(scene) as made:
        task = await scene.start(made)
        task.cancel()
        await asyncio.wait([task])
        scene.engine.gate.set()
        async with asyncio.timeout(1):
            while scene.engine.stats().tables or made.host.servicer.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await scene.over(made)


@pytest.mark.parametrize("moment", MOMENTS[1:])
async def test_the_coordinator_dies(moment: str) -> None:
    """WC-6: its links end without a close; the lease frees the target's pages."""
    scene = Scene(moment)
    async with stage(scene) as made:
        task = await scene.start(made)
        for cable in made.cables:
            cable.unplug()
        task.cancel()
        await asyncio.wait([task])
        scene.engine.gate.set()
        async with asyncio.timeout(5):
            while scene.engine.stats().tables:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        scene.engine.check_integrity()
        # Another one finds the workers as if nothing had been.
        settings = CoordinatorSettings(
            address=f"unix:{made.folder}/second",
            target=f"unix:{made.folder}/t",
            draft=(f"unix:{made.folder}/d0",),
        )
        cache = TokenizerCache(made.folder)
        async with (
            CoordinatorHost(settings, cache) as made.host,
            AsyncClient(made.host.address) as made.client,
        ):
            await made.until_ready()
            result = await scene.generate(made)
        assert list(result.token_ids) == continuation(PROMPT, TOKENS)


async def test_nobody_is_there_before_the_open() -> None:
    """The target is needed, the draft is not."""
    scene = Scene("before open")
    async with stage(scene) as made:
        await scene.draft.stop()
        result = await scene.generate(made)
        assert list(result.token_ids) == continuation(PROMPT, TOKENS)
        assert result.acceptance.draft_tokens == 0 and result.acceptance.fallbacks
        await made.kill_target()
        with pytest.raises(SpecwireError) as caught:
            await made.client.generate(token_ids=PROMPT, max_tokens=2, timeout_s=1)
        assert caught.value.reason is Reason.NO_TARGET
        await scene.restart_target(made)
        await scene.draft.start(f"unix:{made.folder}/d0")
        await made.until_ready()
        await scene.over(made)


def test_the_published_matrix_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
    table = text[text.index("| who") :].split("\n\n")[0].splitlines()
    assert [cell.strip() for cell in table[0].strip("|").split("|")][1:] == list(MOMENTS)
    assert all("::" in cell for row in table[2:] for cell in row.strip("|").split("|")[1:])
