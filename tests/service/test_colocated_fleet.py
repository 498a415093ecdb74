"""The coordinator and the target service with a drafter inside, over a toy engine: many sessions,
few pages, and whoever leaves in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from engine.api import Ask, Proposed
from specwire.errors import Reason, SpecwireError
from tests.service.coordinator_harness import PROMPT
from tests.service.fleet_harness import FleetWorld, ToyTarget, fleet_world, until
from tests.service.toy_drafter import ToyDrafter, perfect, rough
from tests.service.toy_engine import continuation


async def idle(made: FleetWorld) -> None:
    for target in made.targets:
        assert isinstance(target, ToyTarget)
        await until(lambda t=target: not t.engine.stats().tables)  # type: ignore[misc]
        target.engine.check_integrity()


@pytest.mark.parametrize("k", [1, 3, 7, None])
async def test_many_sessions_on_few_pages(k: int | None) -> None:
    """Sessions give their pages away in the middle of rounds and are computed again; proposals are
    made over whole contexts only, and share forwards."""
    drafter = ToyDrafter(rough)
    engine = {"pages": 24, "page_tokens": 4}
    async with fleet_world(engine=engine, infos=[{"drafter": drafter}]) as made:
        prompts = [[*PROMPT, 20 + i] for i in range(12)]
        calls = [made.generate(ids, max_tokens=40, num_speculative_tokens=k) for ids in prompts]
        found = await asyncio.gather(*calls)
        for ids, result in zip(prompts, found, strict=True):
            assert list(result.token_ids) == continuation(ids, 40)
            assert result.acceptance.placement == "colocated"
        assert sum(r.acceptance.accepted_tokens for r in found) > 0
        assert max(drafter.forwards) > 1
        await idle(made)


async def test_choices_share_the_prompt_and_draft_their_own_noise() -> None:
    drafter = ToyDrafter()
    settings = {"num_speculative_tokens": 3}
    async with fleet_world(infos=[{"drafter": drafter}], **settings) as made:
        ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        accepted = 0
        stream = made.client.stream(
            token_ids=list(range(40)),
            max_tokens=20,
            temperature=1.0,
            seed=4,
            n=3,
            return_token_ids=True,
        )
        async with stream:
            async for event in stream:
                ids[event.choice] += getattr(event, "token_ids", ())
                if hasattr(event, "acceptance"):
                    accepted += event.acceptance.accepted_tokens
        for choice in range(3):
            assert ids[choice][:20] == continuation(range(40), 20, 4 + 7919 * choice)
        assert accepted > 30
        await idle(made)


async def test_one_round_is_one_engine_step() -> None:
    drafter = ToyDrafter()
    settings = {"num_speculative_tokens": 3}
    async with fleet_world(infos=[{"drafter": drafter}], **settings) as made:
        result = await made.generate(max_tokens=41)
        assert list(result.token_ids) == continuation(PROMPT, 41)
        assert result.acceptance.rounds == 10 and not result.acceptance.fallbacks
        (target,) = made.targets
        assert isinstance(target, ToyTarget)
        assert len(target.engine.log) == 11 and drafter.forwards == [1] * 10


async def test_a_drafter_that_raises_hurts_nobody() -> None:
    broken = True

    def script(drafter: ToyDrafter, ask: Ask, ids: list[int]) -> Proposed:
        if broken:
            raise RuntimeError("scripted")
        return perfect(drafter, ask, ids)

    settings = {"num_speculative_tokens": 3, "breaker_open_ms": 100}
    async with fleet_world(infos=[{"drafter": ToyDrafter(script)}], **settings) as made:
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        lost = result.acceptance.fallbacks
        assert lost["draft_failed"] == 3 and lost["breaker_open"] > 20, lost
        broken = False
        worker = made.host.fleet.targets[0].colocated
        assert worker is not None
        await until(lambda: not worker.standings["toy"].breaker.open)
        again = await made.generate()
        assert again.acceptance.accepted_tokens > 20
        await idle(made)


@pytest.mark.parametrize(
    "answer",
    [((-1,),), ((2**32,),), (("a",),), ((1,), (), "\ud800"), ((1,), ("a",)), ((1,), (), 3)],
)
async def test_what_no_message_can_hold_is_the_drafters_failure(answer: tuple[Any, ...]) -> None:
    """Not the target's: the step is over, and its verdicts go out."""

    def script(drafter: ToyDrafter, ask: Ask, context: list[int]) -> Proposed:
        return Proposed(*answer)

    settings = {"num_speculative_tokens": 3}
    async with fleet_world(infos=[{"drafter": ToyDrafter(script)}], **settings) as made:
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert result.acceptance.fallbacks["draft_failed"] == 3
        await idle(made)


async def test_a_drafter_that_answers_for_too_few_hurts_nobody() -> None:
    class Short(ToyDrafter):
        def propose(self, asks: Sequence[Ask]) -> list[Proposed]:
            return super().propose(asks)[1:]

    settings = {"num_speculative_tokens": 3}
    async with fleet_world(infos=[{"drafter": Short()}], **settings) as made:
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert result.acceptance.fallbacks["draft_failed"] == 3
        await idle(made)


async def test_clients_that_leave_and_deadlines_free_the_pages() -> None:
    drafter = ToyDrafter()
    engine = {"step_s": 0.002}
    async with fleet_world(engine=engine, infos=[{"drafter": drafter}]) as made:
        task = await made.started(400)
        task.cancel()
        await asyncio.wait([task])
        await idle(made)
        with pytest.raises(SpecwireError) as caught:
            await made.generate(max_tokens=400, timeout_s=0.1)
        assert caught.value.reason is Reason.DEADLINE
        await idle(made)


@pytest.mark.parametrize("other", ["co-located", "plain"])
async def test_a_target_that_drains_hands_its_sessions_on(other: str) -> None:
    """WC-22: the same tokens, there with a drafter or without."""
    infos = [{"drafter": ToyDrafter()}, {"drafter": ToyDrafter()} if other == "co-located" else {}]
    engine = {"step_s": 0.003}
    settings = {"num_speculative_tokens": 2}
    async with fleet_world(engine=engine, infos=infos, **settings) as made:
        task = await made.started(60, method="toy")
        here = made.at()
        assert here.address == made.targets[0].address or other == "co-located"
        await here.stop()
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, 60)
        assert result.acceptance.target_moves == 1
        await until(lambda: not made.other(here).sessions)
