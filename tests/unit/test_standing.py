"""What is believed of a drafter."""

from __future__ import annotations

from coordinator.breaker import Breaker
from coordinator.round_costs import RoundCosts
from coordinator.standing import ONCE_NS, Standing


def test_claims_of_what_is_spent_once_have_an_end() -> None:
    """A drafter that captures graphs is believed; one that claims its whole time in every round
    would seem to draft for nothing, and stops being believed."""
    standing = Standing(Breaker(3, 1.0), RoundCosts())
    assert standing.once_ns(300_000_000) == 300_000_000
    rounds = ONCE_NS // 50_000_000
    believed = sum(standing.once_ns(50_000_000) for _ in range(2 * rounds))
    assert believed == ONCE_NS - 300_000_000
    assert standing.once_ns(1) == 0
