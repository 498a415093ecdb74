"""Runs ahead with a draft service: the target asks it, and the coordinator sends one message for a
window of rounds. Whatever fails in one, the text is the target's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.plan import Plan
from coordinator.policy import KPolicy
from specwire.generation import Generation
from specwire.rpc import ASKS_MINOR
from specwire.v1 import draft_pb2, target_pb2
from tests.service import toy_drafter
from tests.service.coordinator_harness import (
    PROMPT,
    Reply,
    ScriptedDraft,
    World,
    perfect,
    proposal,
    refusal,
    row_drafter,
    world,
)
from tests.service.fleet_harness import FleetWorld, fleet_world, until
from tests.service.toy_drafter import ToyDrafter
from tests.service.toy_engine import VOCAB, continuation

SLOW = {"step_s": 0.005}
LONG = 120


def rough(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
    """Wrong from a token on that depends on the position, as `toy_drafter.rough`."""
    right, wrong = continuation(ids, item.k, draft.seed), len(ids) % (item.k + 1)
    found = [(t + (i >= wrong)) % VOCAB for i, t in enumerate(right)]
    return [proposal(item, len(ids), found, source="toy_a")]


class AskedDraft(ScriptedDraft):
    """A draft that reads rows and answers targets; some of what they ask may be lost."""

    def __init__(self, script: Any = perfect, **drafter: Any) -> None:
        super().__init__(script, **{**row_drafter(), **drafter})
        self.minor = ASKS_MINOR
        self.lost: set[int] = set()

    def _told(self, item: draft_pb2.Advance) -> list[Reply]:
        ids = self.sessions.get((item.key.session_id, item.key.generation), [0])
        if 0 < len(ids) < item.base_len:
            reply = refusal(item, "NEED_TOKENS")
            reply.refused.have_len = len(ids)
            return [reply]
        return super()._told(item)

    def _asked(self, item: draft_pb2.Advance) -> list[Reply]:
        if item.step_id in self.lost:
            return []
        return super()._asked(item)


def steps_of(made: World | FleetWorld) -> list[target_pb2.Verify]:
    """The steps that the coordinator sends from now on."""
    steps: list[target_pb2.Verify] = []
    link = made.host.fleet.targets[0].link
    send = link.send

    def noted(item: target_pb2.TargetItem) -> bool:
        if item.HasField("verify"):
            steps.append(item.verify)
        return send(item)

    link.send = noted  # type: ignore[method-assign]
    return steps


def same_rounds(one: Generation, two: Generation) -> None:
    first, second = one.acceptance, two.acceptance
    assert first.per_step_drafted == second.per_step_drafted
    assert first.per_step_accepted == second.per_step_accepted
    assert first.rounds == second.rounds and first.accepted_by_source == second.accepted_by_source
    assert dict(first.fallbacks) == dict(second.fallbacks)


# -- who drives ------------------------------------------------------------------------------------


async def test_a_window_of_rounds_is_one_message() -> None:
    """K=3, all accepted: nineteen rounds after the prompt's. The coordinator asks the draft once,
    and the target three times, each time for nine rounds; so the last of a run brings what the next
    begins with."""
    draft = AskedDraft()
    async with world(draft, num_speculative_tokens=3, draft_ahead=8) as made:
        steps = steps_of(made)
        result = await made.generate(max_tokens=77)
        assert list(result.token_ids) == continuation(PROMPT, 77)
        record = result.acceptance
        assert (record.rounds, record.draft_tokens, record.accepted_tokens) == (19, 57, 57)
        assert record.placement == "separate" and not record.fallbacks
        assert record.phase_ms["draft"] > 0 and len(record.per_step_outside_us) == 19
        assert [s.step_id for s in steps] == [1, 10, 19]
        assert all(s.drafts_ahead and s.then_propose == 3 for s in steps[:2])
        assert [s.free_run for s in steps[:2]] == [8, 8] and steps[0].draft_wait_us > 0
        assert [a.step_id for a in draft.advances] == [0]
        assert [a.step_id for a in draft.asks] == list(range(1, 19))
        assert all(len(a.tokens) == 4 and a.k == 3 for a in draft.asks[:-1])
        assert not made.host.fleet.targets[0].link.dropped
        assert not made.host.fleet.drafts[0].link.dropped
        await made.until_idle()


@pytest.mark.parametrize("older", ["draft", "target", "no run", "no rows"])
async def test_each_round_is_driven_where_somebody_cannot(
    older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, settings = AskedDraft(rough), {"num_speculative_tokens": 3, "draft_ahead": 8}
    if older == "draft":
        draft.minor = ASKS_MINOR - 1
    elif older == "target":
        monkeypatch.setattr("target_svc.info.PROTOCOL_MINOR", ASKS_MINOR - 1)
    elif older == "no run":
        settings["draft_ahead"] = 0
    else:
        draft.drafter.needs_rows = False
    async with world(draft, **settings) as made:
        steps = steps_of(made)
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert result.acceptance.accepted_tokens > 10 and not draft.asks
        assert len(steps) == result.acceptance.rounds
        assert not any(s.drafts_ahead or s.then_propose or s.draft_wait_us for s in steps)
        assert [a.step_id for a in draft.advances] == list(range(len(steps)))


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (0.8, 5)])
async def test_who_drives_changes_neither_the_text_nor_the_record(
    temperature: float, seed: int
) -> None:
    """Plain, driven, ahead with a draft service, and with a drafter beside the target; at limits
    and stops wherever they fall in a run."""
    words = continuation(PROMPT, 61, seed)
    cases: list[dict[str, Any]] = [{"max_tokens": n} for n in (1, 2, 3, 4, 9, 10, 24, 61)]
    cases += [{"max_tokens": 61, "stop": [f"w{words[at]} "]} for at in (2, 11, 30)]
    both: list[list[Generation]] = []
    for ahead in (0, 3):
        draft = AskedDraft(rough)
        draft.seed = seed
        async with world(draft, num_speculative_tokens=3, draft_ahead=ahead) as made:
            options = {"temperature": temperature, "seed": seed}
            found = [await made.generate(**options, **case) for case in cases]
            plain = [await made.generate(**options, **case, method="plain") for case in cases]
            for one, other, case in zip(found, plain, cases, strict=True):
                assert one.text == other.text and one.token_ids == other.token_ids
                assert list(one.token_ids) == words[: len(one.token_ids)]
                assert "stop" in case or len(one.token_ids) == case["max_tokens"]
            assert bool(draft.asks) == (ahead > 0)
            both.append(found)
            await made.until_idle()
    beside = {"drafter": ToyDrafter(toy_drafter.rough)}
    async with fleet_world(infos=[beside], num_speculative_tokens=3, draft_ahead=3) as fleet:
        both.append([await fleet.generate(**options, **case) for case in cases])
    for driven, ahead_of_it, inside in zip(*both, strict=True):
        assert driven.token_ids == ahead_of_it.token_ids == inside.token_ids
        if len(driven.token_ids) == 61 or not driven.acceptance.rounds:
            same_rounds(driven, ahead_of_it)
        assert inside.acceptance.per_step_drafted == driven.acceptance.per_step_drafted


async def test_a_run_goes_on_while_k_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy says for how many rounds: one behind a round that tries a K out, and while nothing
    is known, else more."""
    stood: list[int] = []
    stands = KPolicy.stands

    def noted(policy: KPolicy, most: int) -> int:
        stood.append(stands(policy, most))
        return stood[-1]

    monkeypatch.setattr(KPolicy, "stands", noted)
    draft = AskedDraft(rough)
    async with world(draft, {"step_s": 0.001}, draft_ahead=8) as made:
        steps = steps_of(made)
        result = await made.generate(max_tokens=300)
        assert list(result.token_ids) == continuation(PROMPT, 300)
    runs = [s.free_run for s in steps if s.drafts_ahead]
    assert runs == [more for more in stood if more] and min(runs) == 1 and max(runs) == 8
    assert not any(s.then_propose for s in steps if not s.drafts_ahead)
    record = result.acceptance
    plain = sum(not tokens for tokens in record.per_step_drafted)
    # The last may have room for its own token alone.
    assert plain - sum(record.fallbacks.values()) in (0, 1), record.fallbacks


# -- drafts that fail in a run ---------------------------------------------------------------------


async def test_a_question_that_is_lost_leaves_a_gap_that_is_mended() -> None:
    """The draft never heard of step 3. It refuses what comes after it, is told from where it
    stands, and the run goes on."""
    draft = AskedDraft()
    draft.lost = {3}
    settings = {"num_speculative_tokens": 2, "draft_ahead": 5, "proposal_wait_min_ms": 30}
    async with world(draft, **settings) as made:
        result = await made.generate(max_tokens=60)
        assert list(result.token_ids) == continuation(PROMPT, 60)
        record = result.acceptance
        assert dict(record.fallbacks) == {"late": 1, "need_tokens": 1}
        assert record.per_step_drafted[:6] == (2, 2, 2, 0, 0, 2) and len(draft.opens) == 1
        assert [a.step_id for a in draft.advances] == [0]


@pytest.mark.parametrize("asked_again", [True, False])
async def test_the_last_question_of_a_run_may_be_lost(asked_again: bool) -> None:
    """The coordinator asks it once more, as the same round; where more was lost before, it tells
    the draft anew."""
    draft = AskedDraft()
    draft.lost = {6} if asked_again else {4, 5, 6}
    settings = {"num_speculative_tokens": 2, "draft_ahead": 5, "proposal_wait_min_ms": 30}
    async with world(draft, **settings, breaker_lates=9) as made:
        result = await made.generate(max_tokens=60)
        assert list(result.token_ids) == continuation(PROMPT, 60)
        record = result.acceptance
        expected = {} if asked_again else {"late": 2, "need_tokens": 1}
        assert dict(record.fallbacks) == expected
        assert [a.step_id for a in draft.advances] == [0, 6] if asked_again else [0, 6, 7]
        assert record.per_step_accepted[-3] == 2 and draft.asks[-1].step_id > 9


class KeepingDraft(AskedDraft):
    """Answers a step that is asked for once more as it did before; `more` tokens too many."""

    def __init__(self, more: int = 0) -> None:
        def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
            if item.step_id not in kept:
                found = continuation(ids, item.k + more, draft.seed)
                kept[item.step_id] = [proposal(item, len(ids), found)]
            return kept[item.step_id]

        kept: dict[int, list[Reply]] = {}
        super().__init__(script)

    def _asked(self, item: draft_pb2.Advance) -> list[Reply]:
        self.asks.append(item)
        answer = self._told(item)
        return [] if item.step_id in self.lost else answer


@pytest.mark.parametrize("more", [0, 1])
async def test_a_kept_answer_is_cut_to_what_is_asked_for_now_and_no_fault(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target asked for three tokens, and the answer was late for its last verdict; the policy
    wants one by now. A draft that says more than anybody asked for is at fault all the same."""
    tokens = Plan.tokens

    def fewer(plan: Plan, step: int, length: int, most: int) -> int:
        found = tokens(plan, step, length, most)
        return min(found, 1) if step == 6 else found

    monkeypatch.setattr(Plan, "tokens", fewer)
    draft = KeepingDraft(more)
    draft.lost = {6}
    settings = {"num_speculative_tokens": 3, "draft_ahead": 5, "proposal_wait_min_ms": 30}
    async with world(draft, **settings) as made:
        result = await made.generate(max_tokens=40)
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert [(a.step_id, a.k) for a in draft.advances] == [(0, 3), (6, 1)]
        assert result.acceptance.per_step_drafted[:7] == (3, 3, 3, 3, 3, 3, 1)
        dropped = made.host.fleet.drafts[0].link.dropped
        assert bool(dropped["too_many"]) is bool(more) and set(dropped) <= {"too_many"}


async def test_a_draft_that_is_silent_in_a_run_opens_its_breaker() -> None:
    silent = {"on": False}

    def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        return [] if silent["on"] and item.k else perfect(draft, item, ids)

    settings = {
        "num_speculative_tokens": 2,
        "proposal_wait_min_ms": 15,
        "breaker_lates": 3,
        "breaker_open_ms": 150,
    }
    async with world(AskedDraft(script), SLOW, **settings) as made:
        task = asyncio.create_task(made.generate(max_tokens=LONG))
        await emitted(made, 10)
        silent["on"] = True
        (session,) = made.host.servicer.sessions.values()
        await until(lambda: session.record.fallbacks["breaker_open"] > 3)
        silent["on"] = False
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, LONG)
        lost = result.acceptance.fallbacks
        assert 3 <= lost["late"] <= 11 and set(lost) == {"late", "breaker_open"}, lost
        assert result.acceptance.per_step_accepted[-4] == 2
        await made.until_idle()


async def emitted(made: World | FleetWorld, tokens: int) -> None:
    sessions = made.host.servicer.sessions
    await until(lambda: any(s.emitted >= tokens for s in sessions.values()))


async def test_a_draft_that_dies_in_a_run_and_comes_back() -> None:
    """WC-26: the target goes on plain at once; speculation is back soon after the draft is."""
    draft = AskedDraft()
    async with world(draft, SLOW, num_speculative_tokens=2) as made:
        task = asyncio.create_task(made.generate(max_tokens=LONG))
        await emitted(made, 20)
        await draft.stop()
        await made.start_draft()
        before = len(draft.asks)
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, LONG)
        assert result.acceptance.fallbacks["draft_lost"] >= 1
        assert len(draft.opens) == 2 and len(draft.asks) > before + 5
        assert result.acceptance.per_step_accepted[-4] == 2
        await made.until_idle()


async def test_a_draft_that_stays_away_leaves_the_session_plain() -> None:
    draft = AskedDraft()
    async with world(draft, SLOW, num_speculative_tokens=2) as made:
        task = asyncio.create_task(made.generate(max_tokens=60))
        await emitted(made, 20)
        await draft.stop()
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, 60)
        assert result.acceptance.fallbacks["draft_lost"] >= 1


async def test_rows_that_do_not_come_end_the_runs() -> None:
    """The drafter lacks rows from some step on: plain, with the reason, after a run at most."""

    def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        if item.step_id > 2 and item.k:
            return [proposal(item, len(ids), [], reason="rows_missing")]
        return perfect(draft, item, ids)

    draft = AskedDraft(script)
    async with world(draft, num_speculative_tokens=2, draft_ahead=4) as made:
        result = await made.generate(max_tokens=60)
        assert list(result.token_ids) == continuation(PROMPT, 60)
        record = result.acceptance
        # Of the run those of steps 3 to 5, and three driven ones before the drafter is given up.
        assert dict(record.fallbacks) == {"rows_missing": 6}
        assert record.per_step_drafted[:4] == (2, 2, 2, 0)


# -- targets that fail in a run --------------------------------------------------------------------


async def test_a_target_that_restarts_in_a_run_goes_on() -> None:
    draft = AskedDraft()
    draft.seed = 3
    async with world(draft, SLOW, num_speculative_tokens=2) as made:
        task = asyncio.create_task(made.generate(max_tokens=LONG, temperature=0.8, seed=3))
        await emitted(made, 20)
        await made.app.stop()
        await made.start_target()
        before = len(draft.asks)
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, LONG, seed=3)
        assert result.acceptance.fallbacks["target_lost"] == 1
        assert len(draft.asks) > before + 5 and result.acceptance.per_step_accepted[-4] == 2
        await made.until_idle()


async def test_a_target_that_dies_in_a_run_hands_its_sessions_on() -> None:
    """The other target asks the same draft, and the text is what it would have been."""
    draft = AskedDraft()
    settings = {"num_speculative_tokens": 2}
    async with fleet_world([draft], engine=SLOW, **settings) as made:
        task = await made.started(LONG)
        here = made.at()
        await here.stop()
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, LONG)
        assert result.acceptance.target_moves == 1
        moved = [a for a in draft.asks if a.key.generation > 1]
        assert len(moved) > 5 and result.acceptance.per_step_accepted[-4] == 2
        await until(lambda: not made.other(here).sessions and not draft.sessions)


async def test_a_client_that_leaves_in_a_run_frees_both() -> None:
    draft = AskedDraft()
    async with world(draft, SLOW, num_speculative_tokens=2) as made:
        task = asyncio.create_task(made.generate(max_tokens=400))
        await emitted(made, 10)
        task.cancel()
        await asyncio.wait([task])
        await made.until_idle(1.0)


async def test_many_sessions_run_ahead_together() -> None:
    """Each has its own questions on the one stream."""
    draft = AskedDraft(rough)
    async with world(draft, {"pages": 256}, num_speculative_tokens=3) as made:
        prompts = [[*PROMPT, 20 + i] for i in range(8)]
        calls = [made.generate(token_ids=ids, max_tokens=40) for ids in prompts]
        for ids, result in zip(prompts, await asyncio.gather(*calls), strict=True):
            assert list(result.token_ids) == continuation(ids, 40)
            assert result.acceptance.accepted_tokens > 10 and not result.acceptance.fallbacks
        assert len(draft.advances) == 8
        await made.until_idle()
