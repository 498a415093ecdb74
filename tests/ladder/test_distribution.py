"""L1: whatever a drafter proposes, the law of the text is the target's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ladder.markov import (
    BLOCK,
    TARGET,
    VOCAB,
    FreshNoiseRejection,
    MarkovDraft,
    MarkovEngine,
    SharedNoiseRejection,
    chi_square,
    chi_square_limit,
    document,
    draw,
    pair_counts,
    texts,
)
from tests.ladder.services import services

SESSIONS = 64
ALL = ("coupled", "independent", "mostly_right", "biased")
FREEDOM = VOCAB * (VOCAB - 1)
# One in a million. Seeds are fixed and the text depends on nothing else, so a run that passes once
# passes always.
LIMIT = chi_square_limit(FREEDOM, 4.75)


async def measured(engine: MarkovEngine, ways: tuple[str, ...], pairs: int) -> tuple[float, Any]:
    """Chi-square of `pairs` token pairs against the transition matrix, and the generations."""
    tokens = pairs // SESSIONS
    async with services(
        engine,
        document(),
        [MarkovDraft(ways)],
        num_speculative_tokens=BLOCK - 1,
        # A slow machine must not turn proposals into late ones.
        proposal_wait_min_ms=5_000,
        draft_open_ms=10_000,
    ) as made:
        results = await texts(made.client, SESSIONS, tokens)
    sequences = [[number % VOCAB, *r.token_ids] for number, r in enumerate(results)]
    counts = pair_counts(sequences)
    assert counts.sum() == pairs
    return chi_square(counts, TARGET), results


async def test_the_law_of_token_pairs_is_the_targets_for_any_drafter() -> None:
    """WC-23, WC-38, NU-14: 131,072 pairs from 64 sessions at once, four kinds of guesses."""
    engine = MarkovEngine()
    statistic, results = await measured(engine, ALL, 131_072)
    assert statistic < LIMIT
    assert all(r.acceptance.accepted_tokens for r in results), "speculation was on everywhere"
    # Most of them share frames and steps; who came early stays a step ahead.
    assert max(engine.sizes) > SESSIONS // 2
    # Exactness is the stronger promise: every text is what plain decoding draws.
    for number, result in enumerate(results[:8]):
        ids = [number % VOCAB]
        for index in range(1, len(result.token_ids) + 1):
            ids.append(draw(TARGET[ids[-1]], 1000 + number, index))
        assert list(result.token_ids) == ids[1:]


@pytest.mark.parametrize(
    ("rule", "pairs"), [(SharedNoiseRejection, 65_536), (FreshNoiseRejection, 32_768)]
)
async def test_shared_noise_with_a_rejection_rule_is_found_out(
    rule: type[SharedNoiseRejection], pairs: int
) -> None:
    """WC-40, WC-45: the measure sees the bias, and nothing in the same rule with fresh noise."""
    statistic, results = await measured(rule(), ("coupled",), pairs)
    assert sum(r.acceptance.accepted_tokens for r in results) > 1000
    assert (statistic > LIMIT) == (rule is SharedNoiseRejection), statistic
