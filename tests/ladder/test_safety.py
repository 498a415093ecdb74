"""L0: every token was chosen by the target, whatever a hostile draft service answers.

Three sessions run side by side: the victim and a neighbour on the hostile service, which serves the
neighbour honestly, and a third on another service. All texts must be the target's, the other two
as fast as ever, and a counter must say what happened.
"""

from __future__ import annotations

import asyncio

import pytest

from specwire.generation import Generation
from specwire.rpc import ASKS_MINOR
from tests.ladder import hostile
from tests.ladder.hostile import VICTIM, HostileDraft, Trick
from tests.ladder.services import Services, services
from tests.service.coordinator_harness import ScriptedDraft, document, row_drafter
from tests.service.toy_engine import ToyEngine, continuation

TOKENS, K = 48, 3
PROMPTS = {"victim": [VICTIM, 1], "neighbour": [21, 2], "third": [34, 3]}

# What is counted, and where: `dropped` by the link, `fallback` in the victim's record. None: the
# answer is one that an honest draft could give.
ITEM_TRICKS: list[tuple[Trick, str | None, str]] = [
    (hostile.random_ids, None, ""),
    (hostile.one_wrong, None, ""),
    (hostile.empty, "fallback", "no_proposal"),
    (hostile.nan_confidences, None, ""),
    (hostile.out_of_range, "dropped", "vocab_range"),
    (hostile.too_many, "dropped", "too_many"),
    (hostile.huge, "dropped", "too_many"),
    (hostile.stale, "dropped", "step"),
    (hostile.duplicated, "dropped", "step"),
    (hostile.reordered, "dropped", "step"),
    (hostile.future, "dropped", "step"),
    (hostile.opened_again, "dropped", "step"),
    (hostile.flood, "dropped", "step"),
    (hostile.neighbours_session, "dropped", "step"),
    (hostile.other_session, "dropped", "session"),
    (hostile.other_generation, "dropped", "session"),
    (hostile.other_coordinator, "dropped", "session"),
    (hostile.foreign_session, "dropped", "session"),
    (hostile.after_close, "dropped", "session"),
    (hostile.closed_unasked, None, ""),
    (hostile.gap_above, "dropped", "length"),
    (hostile.gap_below, "dropped", "length"),
    (hostile.malformed_items, "dropped", "malformed"),
    (hostile.strange_refusals, "fallback", "need_tokens"),
    (hostile.forgotten, "fallback", "draft_lost"),
    (hostile.other_incarnation, "dropped", "incarnation"),
]
LINK_TRICKS: list[tuple[Trick, str]] = [
    (hostile.garbage_frame, "draft_lost"),
    (hostile.oversized_frame, "draft_lost"),
    (hostile.end_mid_frame, "draft_lost"),
    (hostile.dies, "draft_lost"),
]
LATE_TRICKS: list[Trick] = [hostile.never, hostile.slow]
# Played on a target that asks the service itself, on the stream of its rows.
ASKED_TRICKS: list[Trick] = [
    hostile.out_of_range,
    hostile.huge,
    hostile.stale,
    hostile.duplicated,
    hostile.future,
    hostile.other_session,
    hostile.gap_above,
    hostile.malformed_items,
    hostile.strange_refusals,
]


def name(trick: object) -> str | None:
    return getattr(trick, "__name__", None)


async def run(made: Services) -> dict[str, Generation]:
    async def one(who: str) -> Generation:
        return await made.client.generate(
            token_ids=PROMPTS[who],
            max_tokens=TOKENS,
            temperature=0.0,
            seed=0,
            method="other" if who == "third" else "toy",
            num_speculative_tokens=K,
            return_token_ids=True,
        )

    async with asyncio.timeout(30):
        results = await asyncio.gather(*map(one, PROMPTS))
    for who, result in zip(PROMPTS, results, strict=True):
        assert list(result.token_ids) == continuation(PROMPTS[who], TOKENS), who
    return dict(zip(PROMPTS, results, strict=True))


def made_by(trick: Trick) -> tuple[HostileDraft, ScriptedDraft]:
    draft, other = HostileDraft(trick), ScriptedDraft(method="other", is_default=False)
    draft.other = other
    return draft, other


async def closed(made: Services) -> None:
    """Nothing is left at the target."""
    async with asyncio.timeout(5):
        assert made.app.scheduler is not None
        await made.app.scheduler.idle.wait()


def unharmed(result: Generation) -> None:
    """Drafted in every round that had room, and every draft token accepted."""
    record = result.acceptance
    assert record.accepted_tokens == record.draft_tokens == TOKENS - 1 - record.rounds
    assert record.rounds == -(-(TOKENS - 1) // (K + 1)) and not record.fallbacks


@pytest.mark.parametrize(("trick", "where", "cause"), ITEM_TRICKS, ids=name)
async def test_tricks_with_items(trick: Trick, where: str | None, cause: str) -> None:
    """WC-11, WC-13, WC-17, WC-37, WC-39: one session pays, with speed."""
    drafts = made_by(trick)
    engine = ToyEngine(step_s=0.002)
    # Only a round that is not answered, as in `reordered`, waits so long.
    settings = {"proposal_wait_min_ms": 250, "breaker_lates": 1000, "draft_open_ms": 5_000}
    async with services(engine, document(), drafts, num_speculative_tokens=K, **settings) as made:
        results = await run(made)
        assert drafts[0].rounds >= 2, "the trick was played"
        unharmed(results["neighbour"])
        unharmed(results["third"])
        if where == "fallback":
            assert results["victim"].acceptance.fallbacks[cause] > 0
        elif where == "dropped":
            async with asyncio.timeout(5):
                while not made.dropped().get(cause):  # noqa: ASYNC110 - some come after the end
                    await asyncio.sleep(0.01)
        else:
            assert not made.dropped() and not results["victim"].acceptance.fallbacks
        await closed(made)
        assert drafts[0].links == 1, "no item may cost the link"
        # The service is still used, and a session without tricks is as fast as ever.
        drafts[0].trick = lambda draft, item, ids: hostile.perfect(draft, item, ids)
        unharmed((await run(made))["victim"])
    engine.check_integrity()


@pytest.mark.parametrize("trick", ASKED_TRICKS, ids=name)
async def test_tricks_with_a_target_that_asks(trick: Trick) -> None:
    """The same in a run ahead, where nobody else looks at what the target verifies next."""
    drafts = HostileDraft(trick, **row_drafter()), ScriptedDraft(method="other", is_default=False)
    drafts[0].other, drafts[0].minor = drafts[1], ASKS_MINOR
    engine = ToyEngine(step_s=0.002)
    settings = {"proposal_wait_min_ms": 500, "breaker_lates": 1000, "draft_open_ms": 5_000}
    async with services(engine, document(), drafts, num_speculative_tokens=K, **settings) as made:
        # The first proposal of a session is asked for by the coordinator, and begins the run.
        drafts[0].honest_steps = 1
        results = await run(made)
        assert len(drafts[0].asks) > 4 and drafts[0].rounds >= 2, "the trick was played"
        unharmed(results["third"])
        unharmed(results["neighbour"])
        await closed(made)
        drafts[0].trick = lambda draft, item, ids: hostile.perfect(draft, item, ids)
        unharmed((await run(made))["victim"])
    engine.check_integrity()


@pytest.mark.parametrize(("trick", "cause"), LINK_TRICKS, ids=name)
async def test_tricks_with_the_link(trick: Trick, cause: str) -> None:
    """WC-12, WC-26: the link's sessions lose their drafter for a while, nobody else does."""
    drafts = made_by(trick)
    settings = {"proposal_wait_min_ms": 2_000, "draft_open_ms": 5_000}
    async with services(
        ToyEngine(step_s=0.002), document(), drafts, num_speculative_tokens=K, **settings
    ) as made:
        results = await run(made)
        unharmed(results["third"])
        assert results["victim"].acceptance.fallbacks[cause] >= 1
        if trick is hostile.dies:
            await drafts[0].start(f"unix:{made.folder}/d0")
        async with asyncio.timeout(10):
            while drafts[0].links < 2:  # noqa: ASYNC110 - the coordinator comes when it can
                await asyncio.sleep(0.01)
        await made.until_ready()
        await closed(made)
        # And the drafter is back.
        unharmed((await run(made))["neighbour"])


@pytest.mark.parametrize("trick", LATE_TRICKS, ids=name)
async def test_tricks_with_time(trick: Trick) -> None:
    """WC-31: lateness trips the breaker of that draft; the text goes on."""
    drafts = made_by(trick)
    settings = {"proposal_wait_min_ms": 60, "breaker_lates": 3, "breaker_open_ms": 60_000}
    async with services(
        ToyEngine(step_s=0.002), document(), drafts, num_speculative_tokens=K, **settings
    ) as made:
        results = await run(made)
        unharmed(results["third"])
        fallbacks = results["victim"].acceptance.fallbacks
        assert 3 <= fallbacks["late"] < 20 < fallbacks["breaker_open"]
        assert made.host.fleet.drafts[0].standings["toy"].breaker.open
        if trick is hostile.slow:
            async with asyncio.timeout(5):
                while not made.dropped():  # noqa: ASYNC110 - late answers come at their own time
                    await asyncio.sleep(0.01)
        await closed(made)
