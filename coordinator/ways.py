"""The ways in which rounds may follow each other, and what a round costs in each.

Whoever asks for a step pays an exchange: a run pays it once, for its first round, and that is
shared out among all of them. Plain steps are runs too. Where the drafter says how sure it is, a
round that is asked for can leave out what it doubts; a run cannot. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from coordinator.round_costs import Curves

# A run that tries something out is as short as may be, but the exchange that begins it must be
# worth while: its rounds behind the first take so many times as long at least.
_WORTH_ASKING = 2.0


@dataclass(frozen=True, slots=True)
class Way:
    """Runs of `ahead` rounds that go on by themselves behind one that is asked for; 0: each is
    asked for. `seconds`: of a round in the end, by its draft tokens."""

    ahead: int
    verify: Curves
    draft: Curves
    seconds: Sequence[float]

    def first(self, k: int) -> float:
        """Seconds of a round that the coordinator asks both workers for."""
        return self.verify.driven[k] + self.draft.driven[k]

    def later(self, k: int) -> float:
        """Of each round behind that."""
        return self.verify.ahead[k] + self.draft.ahead[k] if self.ahead else self.first(k)

    def exchange(self, k: int) -> float:
        """Of what begins a run."""
        return max(0.0, self.verify.driven[k] - self.verify.ahead[k])

    def shortest(self, k: int) -> int:
        """Rounds, or plain steps, behind the first of a run that tries `k` out."""
        if k and not self.ahead:
            return 0
        rounds = ceil(_WORTH_ASKING * self.exchange(k) / self.later(k))
        return max(1, min(self.ahead or rounds, rounds))


def plain_seconds(verify: Curves, free_run: int) -> float:
    """Of a plain step, of which so many come unasked behind each that is asked for."""
    return (verify.driven[0] + free_run * verify.ahead[0]) / (1 + free_run)


def ways(verify: Curves, draft: Curves, ahead: int, saves: Sequence[float]) -> list[Way]:
    """`ahead`: rounds that may go on by themselves. `saves`: seconds that leaving out what the
    drafter doubts is worth in a round, by draft tokens; empty: it does not say."""
    found = []
    if ahead:
        share, curves = 1.0 / (1 + ahead), (verify.driven, verify.ahead, draft.ahead)
        seconds = [(d + ahead * a) * share + w for d, a, w in zip(*curves, strict=False)]
        found.append(Way(ahead, verify, draft, seconds))
    if saves or not ahead:
        seconds = [a + b for a, b in zip(verify.driven, draft.driven, strict=False)]
        last = len(saves) - 1
        if saves:
            # Learned at other loads and targets too: no cut saves more than all of the step's
            # tokens but its own.
            least = [verify.driven[0] + b for b in draft.driven]
            seconds = [
                max(s - saves[min(k, last)], low)
                for k, (s, low) in enumerate(zip(seconds, least, strict=False))
            ]
        found.append(Way(0, verify, draft, seconds))
    return found
