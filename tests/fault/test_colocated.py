"""The process that hosts target and drafter is killed: `docs/faults.md`, its row of the matrix.

Family: loss in the middle. Both roles are lost at once, at any moment; the session goes on from its
committed ids wherever there is a target of the model, with a drafter or without.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specwire.v1 import common_pb2, target_pb2
from tests.service.colocated_toy import ColocatedToy, proposal
from tests.service.coordinator_harness import PROMPT, ScriptedDraft
from tests.service.fleet_harness import FleetWorld, fleet_world, until
from tests.service.toy_engine import continuation

TOKENS = 40
MOMENTS = ("before open", "mid prefill", "mid verify", "mid propose", "at close")
# Who is there to go on: the same process again, another with a drafter inside, one without, one
# without beside a draft service.
PLACES = ("again", "co-located", "plain", "separate")


class Held:
    """A co-located target with a session held at a moment."""

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.toy = ColocatedToy(self._script, step_s=0.001)
        self.reached = asyncio.Event()
        if moment == "mid prefill":
            self.toy.gate.clear()

    def _script(
        self, verdict: target_pb2.Verdict, ids: list[int], k: int
    ) -> common_pb2.Proposal | None:
        made = proposal(verdict, continuation(ids, k))
        if self.moment == "mid propose" and verdict.step_id == 3 and not self.reached.is_set():
            self.reached.set()
            made.timings.compute_ns = 60_000_000_000  # killed before it is done
        return made

    async def start(self, made: FleetWorld) -> asyncio.Task[Any]:
        task = asyncio.create_task(made.generate(max_tokens=TOKENS, method="toy"))
        sessions, toy = made.host.servicer.sessions, self.toy
        async with asyncio.timeout(10):
            if self.moment == "mid prefill":
                await toy.entered.wait()
            elif self.moment == "mid verify":
                await until(lambda: toy.begun >= 5)
                toy.gate.clear()
                toy.entered.clear()
                await toy.entered.wait()
            elif self.moment == "mid propose":
                await self.reached.wait()
            else:
                left = TOKENS - 8
                await until(lambda: task.done() or any(s.emitted > left for s in sessions.values()))
        return task


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("moment", MOMENTS[1:])
async def test_the_process_of_both_dies(moment: str, place: str) -> None:
    """WC-10, WC-12, WC-22: the client's stream goes on with the same tokens."""
    held, other, draft = Held(moment), ColocatedToy(), ScriptedDraft()
    infos: list[Any] = [held.toy]
    if place != "again":
        infos.append(other if place == "co-located" else {})
    drafts = [draft] if place == "separate" else []
    async with fleet_world(drafts, infos=infos, num_speculative_tokens=3) as made:
        if drafts:  # the session begins inside, with nobody to choose from but the two targets
            made.host.fleet.targets[1].draining = True
        else:
            made.host.fleet.targets[-1].placed += 10 * (len(infos) > 1)
        task = await held.start(made)
        assert held.toy.opens, "the session is at the target that is killed"
        await held.toy.stop()
        held.toy.gate.set()
        if place == "again":
            await held.toy.start()
        result = await asyncio.wait_for(task, 20)
        assert list(result.token_ids) == continuation(PROMPT, TOKENS)
        record = result.acceptance
        if moment != "at close":
            assert record.fallbacks["target_lost"] == 1
            assert record.target_moves == (place != "again")
            inside = place in ("again", "co-located")
            assert record.placement == ("colocated" if inside or place == "plain" else "separate")
            assert (record.fallbacks.get("draft_down", 0) > 0) == (place == "plain")
            expected = {"again": held.toy, "co-located": other}.get(place)
            if expected is not None:
                assert expected.opens[-1].HasField("colocated")
            if place == "separate":
                assert draft.opens and draft.advances
        await until(lambda: not (held.toy.sessions or other.sessions or draft.sessions))


async def test_both_are_absent_before_the_open() -> None:
    """A request finds the other target; the next one finds the drafter again."""
    toy = ColocatedToy()
    async with fleet_world(infos=[toy, {}], num_speculative_tokens=3) as made:
        await toy.stop()
        worker = made.host.fleet.targets[0]
        await until(lambda: not worker.link.ready)
        result = await made.generate(method="toy")
        assert list(result.token_ids) == continuation(PROMPT, TOKENS)
        assert result.acceptance.draft_tokens == 0 and result.acceptance.fallbacks["draft_down"]
        await toy.start()
        await until(lambda: worker.link.ready)
        result = await made.generate(method="toy")
        assert result.acceptance.placement == "colocated"
        assert result.acceptance.accepted_tokens > TOKENS / 2


async def test_what_a_process_hosts_is_asked_at_each_of_its_starts() -> None:
    """It comes back without the drafter, then with it."""
    toy = ColocatedToy(step_s=0.002)
    async with fleet_world(infos=[toy], num_speculative_tokens=3) as made:
        task = await made.started(TOKENS)
        await toy.stop()
        drafters, toy.drafters = toy.drafters, []
        await toy.start()
        result = await asyncio.wait_for(task, 20)
        assert list(result.token_ids) == continuation(PROMPT, TOKENS)
        assert [o.HasField("colocated") for o in toy.opens] == [True, False]
        assert (await made.client.info()).methods == ("plain",)
        await toy.stop()
        toy.drafters = drafters
        await toy.start()
        worker = made.host.fleet.targets[0]
        await until(lambda: worker.link.ready and worker.link.incarnation == toy.incarnation)
        result = await made.generate()
        assert result.acceptance.placement == "colocated" and not result.acceptance.fallbacks
