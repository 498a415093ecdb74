"""Sessions that a draft service does not follow while drafting is off at their load: no rows, no
draft session, the same text; and back again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from coordinator.yields import Yields
from engine.api import Item, ItemResult, nothing
from specwire.generation import Generation
from specwire.v1 import draft_pb2
from tests.service.coordinator_harness import (
    PROMPT,
    Reply,
    ScriptedDraft,
    World,
    perfect,
    proposal,
    row_drafter,
    world,
)
from tests.service.fleet_harness import until
from tests.service.toy_engine import continuation

SESSIONS, TOKENS = 8, 150
ENGINE = {"step_s": 0.003, "pages": 512, "max_length": 4096}


def yields(made: World) -> Yields:
    return made.host.fleet.targets[0].yields("toy", "separate")


def found_off(made: World, sessions: int) -> None:
    """As if drafting had lost at this load a while ago."""
    judge, now = yields(made), time.perf_counter() - 100
    for _ in range(2000):
        drafts, follows = judge.allows(sessions), judge.follows(sessions)
        now += 0.02
        for i in range(sessions):
            judge.note(now + 1e-6 * i, 1 if drafts or follows else 3, sessions, drafts, follows)
        if not (judge.trying or drafts or follows):
            return
    raise AssertionError("drafting is still on")


async def together(made: World, first: int, tokens: int = TOKENS, **options: int) -> None:
    prompts = [[first + i, 7, 8] for i in range(SESSIONS)]
    answers = (made.generate(token_ids=each, max_tokens=tokens, **options) for each in prompts)
    for prompt, result in zip(prompts, await asyncio.gather(*answers), strict=True):
        assert list(result.token_ids) == continuation(prompt, tokens)


def rows_of(draft: ScriptedDraft, session_id: int) -> int:
    return sum(size for (session, _), size in draft.row_bytes.items() if session == session_id)


async def test_no_rows_are_asked_for_where_drafting_is_off() -> None:
    draft = ScriptedDraft(**row_drafter())
    async with world(draft, ENGINE) as made:
        found_off(made, SESSIONS)
        await together(made, 20)
        await made.until_idle()
        # The first few are followed, as few are, until there are more.
        followed = {item.key.session_id for item in draft.opens}
        assert len(followed) <= 3
        asked = {item.key.session_id for item in draft.advances}
        assert asked <= followed and len(draft.advances) <= 3 * 3
        assert {key.session_id for key in draft.closes} <= followed
        told = sum(len(item.tokens) for item in draft.advances)
        assert told < 30
        row = draft.drafter.row_format.width * 2
        # Rows of the prompt, and of the steps before the target heard.
        assert all(rows_of(draft, each) < 45 * row for each in followed)
        assert {each for each, _ in draft.row_bytes} <= followed
        # A request that names its K is followed, and so is one alone.
        draft.opens.clear()
        await together(made, 40, num_speculative_tokens=2)
        assert len(draft.opens) == SESSIONS
        result = await made.generate(max_tokens=100)
        assert len(draft.opens) == SESSIONS + 1 and result.acceptance.accepted_tokens > 50


async def test_what_follows_stops_once_drafting_is_off_and_is_called_back() -> None:
    """All in the middle of long texts: the target sends no more rows, the draft service forgets the
    sessions; when drafting is wanted again they are opened anew, and the text goes on."""
    draft = ScriptedDraft(**row_drafter())
    async with world(draft, ENGINE) as made:
        judge = yields(made)
        wanted = {"drafts": True, "follows": True}
        judge.allows = lambda _: wanted["drafts"]  # type: ignore[method-assign]
        judge.follows = lambda _: wanted["follows"]  # type: ignore[method-assign]
        judge.recalls = lambda *_: wanted["follows"]  # type: ignore[method-assign]
        answers = asyncio.create_task(together(made, 60, tokens=2000))
        await until(lambda: len(draft.sessions) == SESSIONS and len(draft.row_bytes) > 2 * SESSIONS)
        wanted.update(drafts=False, follows=False)
        await until(lambda: not draft.sessions)
        assert len(draft.opens) == SESSIONS
        await asyncio.sleep(0.1)
        told, pushed = len(draft.advances), sum(draft.row_bytes.values())
        await asyncio.sleep(0.3)
        assert (told, pushed) == (len(draft.advances), sum(draft.row_bytes.values()))
        wanted.update(drafts=True, follows=True)
        await until(lambda: len(draft.sessions) == SESSIONS and len(draft.opens) == 2 * SESSIONS)
        await until(lambda: sum(draft.row_bytes.values()) > pushed)
        await answers
        await made.until_idle()


async def test_following_that_costs_is_found_out() -> None:
    """A draft whose proposals are wrong, and steps that take longer where rows are read."""

    def useless(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        good = continuation(ids, item.k, draft.seed)
        return [proposal(item, len(ids), [(t + 1) % 900 for t in good])]

    draft = ScriptedDraft(useless, **row_drafter())
    async with world(draft, ENGINE) as made:
        step = made.engine.step

        def slowed(
            items: Sequence[Item], launched: Callable[[], None] = nothing
        ) -> list[ItemResult]:
            made.engine.step_s = 0.003 + 0.0008 * sum(bool(item.taps) for item in items)
            return step(items, launched)

        made.engine.step = slowed  # type: ignore[method-assign]
        for turn in range(30):
            draft.opens.clear()
            await together(made, 20 * turn)
            if len(draft.opens) <= 3:
                break
        assert len(draft.opens) <= 3


async def test_no_text_waits_for_a_draft_that_does_not_answer() -> None:
    """A session is called back, and its drafter says nothing for a second."""
    draft = ScriptedDraft(**row_drafter())
    async with world(draft, ENGINE) as made:
        judge, wanted = yields(made), {"on": False}
        for name in ("allows", "follows", "recalls"):
            setattr(judge, name, lambda *_: wanted["on"])
        times: list[float] = []
        stream = made.client.stream(token_ids=PROMPT, max_tokens=600, return_token_ids=True)
        draft.silent_open = True
        async for _ in stream:
            times.append(time.perf_counter())
            wanted["on"] = wanted["on"] or times[-1] > times[0] + 0.1
        assert len(draft.opens) == 1
        assert max(b - a for a, b in pairwise(times)) < 0.5


async def test_one_that_needs_no_rows_comes_back_without_the_target() -> None:
    draft = ScriptedDraft(perfect)
    async with world(draft, ENGINE) as made:
        judge = yields(made)
        wanted = {"on": False}
        for name in ("allows", "follows", "recalls"):
            setattr(judge, name, lambda *_: wanted["on"])
        answer: asyncio.Task[Generation] = asyncio.create_task(made.generate(max_tokens=900))
        await asyncio.sleep(0.3)
        assert not draft.opens and not draft.advances
        wanted["on"] = True
        result = await answer
        assert list(result.token_ids) == continuation(PROMPT, 900)
        assert result.acceptance.accepted_tokens > 300
        assert [item.key.generation for item in draft.opens] == [1]
        # It was off, and then the session was not called back at once.
        why = result.acceptance.fallbacks
        assert why["does_not_pay"] > 50 and why["not_followed"] > 50
