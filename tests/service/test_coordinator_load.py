"""Waiting, the breaker and K under load; whatever K a round gets, the text is the target's."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import pytest

from coordinator.policy import KPolicy
from engine.api import Item, ItemResult, nothing
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

SESSIONS = 12


async def test_many_sessions_on_slow_workers_keep_their_speculation() -> None:
    """Default waiting and breaker: proposals that are slow because all ask are waited for."""
    draft = ScriptedDraft()
    draft.ask_s = 0.015
    engine = {"step_s": 0.02, "item_s": 0.002, "pages": 256}
    defaults = {"proposal_wait_min_ms": 30}
    async with world(draft, engine, **defaults) as made:
        prompts = [[i, i + 1, i + 2] for i in range(SESSIONS)]
        options = {"num_speculative_tokens": 7, "max_tokens": 80}
        results = await asyncio.gather(
            *(made.generate(token_ids=prompt, **options) for prompt in prompts)
        )
        for prompt, result in zip(prompts, results, strict=True):
            assert list(result.token_ids) == continuation(prompt, 80)
        accepted = sum(r.acceptance.accepted_tokens for r in results)
        # A seventh of that where nobody waits longer; most of what there is on an idle machine.
        assert accepted > SESSIONS * 20


async def test_a_draft_that_was_late_under_load_is_used_again_after_it() -> None:
    """The breaker opens for a draft that stops, and a probe of one session closes it again."""
    stopped = {"on": True}

    def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        return [] if stopped["on"] else perfect(draft, item, ids)

    draft = ScriptedDraft(script)
    options = {"proposal_wait_min_ms": 20, "breaker_open_ms": 200, "num_speculative_tokens": 2}
    async with world(draft, {"step_s": 0.005, "pages": 256}, **options) as made:
        tasks = [
            asyncio.create_task(made.generate(token_ids=[i, 9], max_tokens=300)) for i in range(6)
        ]
        breaker = made.host.fleet.drafts[0].standings["toy"].breaker
        await until(lambda: breaker.open)
        asked = len([a for a in draft.advances if a.k])
        await asyncio.sleep(0.5)
        # Open: one session at a time asks, every 200 ms.
        assert len([a for a in draft.advances if a.k]) - asked <= 4
        stopped["on"] = False
        results = await asyncio.gather(*tasks)
        for i, result in enumerate(results):
            assert list(result.token_ids) == continuation([i, 9], 300)
            assert result.acceptance.fallbacks["breaker_open"] > 0
            assert result.acceptance.per_step_accepted[-4] == 2
        await made.until_idle()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_any_k_in_any_round_gives_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    rng = random.Random(5)
    chosen: list[int] = []

    def choose(
        self: KPolicy, step: int, limit: int, sessions: int, context: int, most_ahead: int
    ) -> int:
        chosen.append(rng.randint(0, limit) if limit > 0 else 0)
        return chosen[-1]

    def half(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        good = continuation(ids, item.k, draft.seed)
        return [proposal(item, len(ids), [t if rng.random() < 0.7 else 1 for t in good])]

    monkeypatch.setattr(KPolicy, "choose", choose)
    draft = ScriptedDraft(half)
    draft.seed = 4
    async with world(draft) as made:
        for _ in range(3):
            result = await made.generate(max_tokens=120, temperature=temperature, seed=4)
            assert list(result.token_ids) == continuation(PROMPT, 120, seed=4)
        assert set(chosen) == set(range(8))
        await made.until_idle()


def _useless(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
    wrong = [(token + 1) % 900 for token in continuation(ids, item.k, draft.seed)]
    return [proposal(item, len(ids), wrong)]


async def _comes_back(made: World, draft: ScriptedDraft) -> None:
    """Drafting pays from now on, and is found to."""
    draft.script, draft.ask_s = perfect, 0.0
    for _ in range(3):
        result = await made.generate(max_tokens=300)
        assert list(result.token_ids) == continuation(PROMPT, 300)
    assert result.acceptance.tau > 4
    await made.until_idle()


async def test_speculation_that_does_not_pay_stops_says_so_and_comes_back() -> None:
    """K = 0 with a free run, and rare probes that find when it pays."""
    draft = ScriptedDraft(_useless)
    draft.ask_s = 0.004
    async with world(draft, {"step_s": 0.004}) as made:
        result = await made.generate(max_tokens=300)
        assert list(result.token_ids) == continuation(PROMPT, 300)
        record = result.acceptance
        assert record.fallbacks["does_not_pay"] > 150
        drafted = [k > 0 for k in record.per_step_drafted]
        assert 0 < sum(drafted[60:]) < 30
        # The draft was told every token all the same: it can be used again at once.
        assert [a.step_id for a in draft.advances] == list(range(len(draft.advances)))
        await _comes_back(made, draft)


async def test_a_draft_that_reads_rows_hears_of_a_plain_run_when_it_is_over() -> None:
    draft = ScriptedDraft(_useless, **row_drafter())
    draft.ask_s = 0.004
    async with world(draft, {"step_s": 0.004}) as made:
        result = await made.generate(max_tokens=300)
        assert list(result.token_ids) == continuation(PROMPT, 300)
        assert result.acceptance.fallbacks["does_not_pay"] > 150
        steps = [item.step_id for item in draft.advances]
        assert steps == sorted(set(steps)) and len(steps) < 150
        assert max(len(item.tokens) for item in draft.advances) > 8
        # It has every token and row all the same: it can be used again at once.
        told = [len(PROMPT)]
        for item in draft.advances:
            assert item.base_len == told[-1]
            told.append(item.base_len + len(item.tokens))
            assert item.rows_start + item.rows_count == told[-1] - 1
            assert item.rows_start <= max(told[-2] - 1, 0)
        await _comes_back(made, draft)


async def test_drafting_that_slows_all_down_stops_for_all_and_changes_no_token() -> None:
    """Whoever drafts slows every step: two tokens a round seem to pay, and one a step pays more."""
    asked = [0.0]

    def first_right(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        if item.k:
            asked[0] = time.perf_counter()
        good = continuation(ids, item.k, draft.seed)
        return [proposal(item, len(ids), [*good[:1], *((t + 1) % 900 for t in good[1:])])]

    async with world(ScriptedDraft(first_right), {"max_length": 2048, "pages": 512}) as made:
        step = made.engine.step

        def slowed(
            items: Sequence[Item], launched: Callable[[], None] = nothing
        ) -> list[ItemResult]:
            drafted = time.perf_counter() < asked[0] + 0.04
            made.engine.step_s = 0.016 if drafted else 0.004
            return step(items, launched)

        made.engine.step = slowed  # type: ignore[method-assign]
        prompts = [[i, i + 1, i + 2] for i in range(5)]
        results = await asyncio.gather(
            *(made.generate(token_ids=prompt, max_tokens=450) for prompt in prompts)
        )
        for prompt, result in zip(prompts, results, strict=True):
            assert list(result.token_ids) == continuation(prompt, 450)
            record = result.acceptance
            assert record.fallbacks["does_not_pay"] > 100, record.fallbacks
            drafted = [k > 0 for k in record.per_step_drafted]
            assert sum(drafted[:40]) > 5 and sum(drafted[-150:]) < 75
        await made.until_idle()


async def test_a_request_that_names_k_gets_exactly_that_many() -> None:
    draft = ScriptedDraft(_useless)
    async with world(draft) as made:
        result = await made.generate(num_speculative_tokens=5)
        assert set(result.acceptance.per_step_drafted[:-5]) == {5}
        assert "does_not_pay" not in result.acceptance.fallbacks


@pytest.mark.alone  # K follows times that are measured
async def test_a_good_draft_gets_more_tokens_where_a_request_does_not_say() -> None:
    async with world(ScriptedDraft(), {"step_s": 0.012}) as made:
        assert (await made.client.info()).default_num_speculative_tokens == 0
        result = await made.generate(max_tokens=400)
        assert list(result.token_ids) == continuation(PROMPT, 400)
        assert result.acceptance.per_step_drafted[0] == 3
        assert result.acceptance.per_step_drafted[20:40].count(7) > 12
