"""Rounds: whatever the draft does, the text is the target's; when it does well, steps are saved."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specwire.v1 import common_pb2, draft_pb2
from tests.service.coordinator_harness import (
    PROMPT,
    Reply,
    ScriptedDraft,
    perfect,
    proposal,
    refusal,
    row_drafter,
    world,
)
from tests.service.toy_engine import HIDDEN, VOCAB, continuation

WANTED = continuation(PROMPT, 40)


async def test_plain_is_the_targets_text() -> None:
    async with world(free_run=7) as made:
        result = await made.generate()
        assert list(result.token_ids) == WANTED
        assert result.text == "".join(f"w{i} " for i in WANTED)
        assert result.acceptance.method == "plain" and result.acceptance.tau == 1.0
        assert result.acceptance.rounds == 39
        await made.until_idle()


async def test_a_perfect_draft_saves_steps_and_changes_nothing() -> None:
    async with world(ScriptedDraft(), num_speculative_tokens=4) as made:
        result = await made.generate()
        assert list(result.token_ids) == WANTED
        record = result.acceptance
        assert record.method == "toy"
        # 39 tokens after the first in steps of 5.
        assert record.rounds == 8
        assert record.tau == pytest.approx(39 / 8)
        assert record.accepted_tokens == record.draft_tokens == 31
        assert record.accepted_by_position == record.drafted_by_position
        assert not record.fallbacks
        await made.until_idle()


@pytest.mark.parametrize(
    ("reason", "judged"), [("catching_up", False), ("deadline", False), ("no_match", True)]
)
async def test_a_proposal_without_rows_or_time_says_nothing_of_the_drafter(
    reason: str, judged: bool
) -> None:
    """What one session's drafter could not do yet must not lower K for all others."""

    def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        return [proposal(item, len(ids), [], reason=reason)] if item.k else []

    async with world(ScriptedDraft(script)) as made:
        result = await made.generate()
        assert list(result.token_ids) == WANTED
        assert result.acceptance.fallbacks[reason] > 0
        assert bool(made.host.fleet.drafts[0].standings["toy"].past.rounds) is judged


@pytest.mark.parametrize("k", [0, 3])
async def test_a_token_that_is_the_drafters_mask_stays(k: int) -> None:
    """DF-21: what the target chose is never filtered by what a drafter uses ids for."""
    mask, at = 77, 6

    def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        left = at - len(ids) + len(PROMPT)
        guess = continuation(ids, item.k)
        if 0 <= left < item.k:
            guess[left:] = [mask] * (item.k - left)
        return [proposal(item, len(ids), guess)]

    async with world(ScriptedDraft(script, mask_token_id=mask)) as made:
        made.engine.forced[len(PROMPT) + at] = mask
        result = await made.generate(num_speculative_tokens=k)
        before = WANTED[:at]
        assert list(result.token_ids) == [
            *before,
            mask,
            *continuation([*PROMPT, *before, mask], 40 - at - 1),
        ]
        assert f"w{mask} " in result.text
        if k:
            assert result.acceptance.accepted_tokens > 0


@pytest.mark.parametrize("k", [0, 1, 3, 7])
async def test_sampled_text_depends_on_the_seed_only(k: int) -> None:
    draft = ScriptedDraft()
    draft.seed = 11
    async with world(draft) as made:
        result = await made.generate(temperature=0.8, seed=11, num_speculative_tokens=k)
        assert list(result.token_ids) == continuation(PROMPT, 40, seed=11)
        assert result.sampling.seed == 11


async def test_an_unset_seed_is_drawn_and_returned() -> None:
    async with world() as made:
        first = await made.generate(temperature=1.0, seed=None)
        again = await made.generate(temperature=1.0, seed=first.sampling.seed)
        assert first.token_ids == again.token_ids
        assert first.sampling.seed != (await made.generate(seed=None)).sampling.seed


@pytest.mark.parametrize("max_tokens", range(1, 10))
async def test_the_limit_is_exact(max_tokens: int) -> None:
    async with world(ScriptedDraft(), num_speculative_tokens=4) as made:
        result = await made.generate(max_tokens=max_tokens)
        assert list(result.token_ids) == WANTED[:max_tokens]
        assert result.usage.completion_tokens == max_tokens
        assert result.finish_reason == "length"


def _random(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
    rng = random.Random(len(ids))
    return [proposal(item, len(ids), [rng.randrange(VOCAB) for _ in range(item.k)])]


def _out_of_range(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
    return [proposal(item, len(ids), [VOCAB, 2**32 - 1, 3])]


def _too_many(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
    return [proposal(item, len(ids), continuation(ids, 100))]


def _wrong_length(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
    wrong = proposal(item, len(ids) + 1, [1, 2])
    return [wrong, *perfect(draft, item, ids)]


def _wrong_session(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
    key = common_pb2.SessionKey(coordinator=item.key.coordinator, session_id=99, generation=1)
    other = common_pb2.SessionKey(
        coordinator=1, session_id=item.key.session_id, generation=item.key.generation
    )
    strange = [proposal(item, len(ids), [1], key=k) for k in (key, other)]
    return [*strange, *perfect(draft, item, ids)]


def _twice(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
    return perfect(draft, item, ids) * 3


def _refusing(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
    return [refusal(item, "KV_PAGES_EXHAUSTED")]


def _empty_replies(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
    return [Reply(), Reply(proposal=common_pb2.Proposal()), *perfect(draft, item, ids)]


@pytest.mark.parametrize(
    "script",
    [
        _random,
        _out_of_range,
        _too_many,
        _wrong_length,
        _wrong_session,
        _twice,
        _refusing,
        _empty_replies,
    ],
)
async def test_a_hostile_draft_changes_nothing(script: Any) -> None:
    async with world(ScriptedDraft(script), num_speculative_tokens=4) as made:
        result = await made.generate()
        assert list(result.token_ids) == WANTED
        await made.until_idle()
        dropped = made.host.fleet.drafts[0].link.dropped
        expected = {
            "_out_of_range": "vocab_range",
            "_too_many": "too_many",
            "_wrong_length": "length",
            "_wrong_session": "session",
            "_twice": "step",
        }.get(script.__name__)
        assert expected is None or dropped[expected] > 0, dropped


async def test_replies_of_another_incarnation_are_dropped() -> None:
    draft = ScriptedDraft()
    draft.false_incarnation = 12345
    async with world(draft, draft_open_ms=100) as made:
        result = await made.generate()
        assert list(result.token_ids) == WANTED
        assert result.acceptance.fallbacks["open_late"] == 1
        assert made.host.fleet.drafts[0].link.dropped["incarnation"] > 0


class OneRoundLate:
    """Holds each proposal back until the next Advance."""

    def __init__(self) -> None:
        self.held: list[Reply] = []

    def __call__(
        self, draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]
    ) -> list[Reply]:
        now, self.held = self.held, perfect(draft, item, ids)
        return now


async def test_proposals_that_are_one_round_late_are_dropped() -> None:
    """WC-10, WC-39: an answer is used only for the question that is open."""
    draft = ScriptedDraft(OneRoundLate())
    options = {"proposal_wait_min_ms": 5, "breaker_lates": 1000, "num_speculative_tokens": 3}
    async with world(draft, **options) as made:
        result = await made.generate()
        assert list(result.token_ids) == WANTED
        assert result.acceptance.accepted_tokens == 0
        assert result.acceptance.fallbacks["late"] > 10
        assert made.host.fleet.drafts[0].link.dropped["step"] > 10


async def test_rounds_without_tokens_keep_the_draft_current() -> None:
    """WC-14: K = 3, 0, 0, 3; each step's tokens reach the draft, acceptance is whole after."""

    def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        if item.step_id % 4 in (1, 2):
            return [proposal(item, len(ids), [], reason="pause")]
        return perfect(draft, item, ids)

    draft = ScriptedDraft(script)
    async with world(draft, num_speculative_tokens=3) as made:
        result = await made.generate()
        assert list(result.token_ids) == WANTED
        record = result.acceptance
        assert record.per_step_drafted[:8] == (3, 0, 0, 3, 3, 0, 0, 3)
        assert record.per_step_accepted == record.per_step_drafted
        assert record.fallbacks["pause"] == record.per_step_drafted.count(0)
        steps = [item.step_id for item in draft.advances]
        assert steps == list(range(len(steps)))


async def test_stop_strings_end_the_text_before_them_across_token_borders() -> None:
    plain = "".join(f"w{i} " for i in WANTED)
    stop = plain[len("".join(f"w{i} " for i in WANTED[:12])) - 3 :][:6]
    cut = plain.index(stop)
    async with world(ScriptedDraft(), num_speculative_tokens=4) as made:
        for method in ("plain", "toy"):
            result = await made.generate(method=method, stop=[stop, "never"])
            assert result.text == plain[:cut]
            assert result.finish_reason == "stop_string" and result.stop_string == stop
            whole = len("".join(f"w{i} " for i in WANTED[: result.usage.completion_tokens]))
            assert whole >= cut + len(stop)
            assert len(result.token_ids) == result.usage.completion_tokens
        await made.until_idle()


async def test_stop_tokens_end_inside_an_accepted_block() -> None:
    async with world(ScriptedDraft(), num_speculative_tokens=7) as made:
        result = await made.generate(stop_token_ids=[WANTED[5]])
        assert list(result.token_ids) == WANTED[:6]
        assert result.finish_reason == "stop_token" and result.stop_token_id == WANTED[5]


async def test_rows_travel_to_a_drafter_that_needs_them() -> None:
    draft = ScriptedDraft(**row_drafter())
    async with world(draft, num_speculative_tokens=3) as made:
        result = await made.generate()
        assert list(result.token_ids) == WANTED
        assert result.acceptance.tau == pytest.approx(39 / 10)
        await made.until_idle()
        rows = sum(item.rows_count for item in draft.advances)
        sent = sum(draft.row_bytes.values())
        assert sent >= rows * 2 * HIDDEN * 2
        assert rows == len(PROMPT) + sum(len(item.tokens) for item in draft.advances) - 1


def sure_of_its_first_tokens(
    draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]
) -> list[Reply]:
    """Right for a while, then wrong, and it knows; sometimes what it says makes no sense."""
    tokens, turn = continuation(ids, item.k, draft.seed), len(draft.advances)
    right = turn % 8
    wrong = [(token + 1) % VOCAB for token in tokens[right:]]
    said = [0.97] * min(right, len(tokens)) + [0.02] * len(wrong)
    if turn % 19 == 0:
        said = [float("nan"), -4.0, 1e30, float("inf"), 0.0, 1.0, 0.5][: item.k]
    elif turn % 11 == 0:
        said = said[1:]
    return [proposal(item, len(ids), tokens[:right] + wrong, confidences=said)]


@pytest.mark.parametrize("seed", [0, 11])
async def test_a_proposal_cut_by_confidence_changes_no_token(seed: int) -> None:
    """Where rows are dear, what the drafter is unsure of is not verified; the text is the same."""
    draft = ScriptedDraft(sure_of_its_first_tokens)
    draft.seed = seed
    options = {"seed": seed, "temperature": 0.8 if seed else 0.0, "max_tokens": 150}
    async with world(draft, engine={"step_s": 0.02, "row_s": 0.002}) as made:
        result = await made.generate(**options)
        assert list(result.token_ids) == continuation(PROMPT, 150, seed=seed)
        asked = sum(advance.k for advance in draft.advances)
        assert "late" not in result.acceptance.fallbacks
        assert 0 < result.acceptance.draft_tokens < asked, "nothing was cut"
        fixed = await made.generate(**options, num_speculative_tokens=3)
        assert fixed.token_ids == result.token_ids
        # A number that is asked for is not cut: at most the end is in the way.
        assert fixed.acceptance.draft_tokens >= 3 * (fixed.acceptance.rounds - 2)
        await made.until_idle()
