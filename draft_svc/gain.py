"""How many tokens of a proposal the target will take: estimates that learn from what it committed.

Position i of a proposal survives with probability p_1 * ... * p_i, where p_j is the share of
proposals right at j among those right before j. A position is graded only when everything before it
was right: the first wrong token says nothing about those after it. Old counts fade, so an estimate
follows the text; a session's own counts are shrunk towards those of all sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_FADE = 0.98
# Graded tokens that what is believed beforehand weighs as much as.
_PRIOR_WEIGHT = 4.0
_PRIOR = 0.5


@dataclass(slots=True)
class Survival:
    """Counts of one source by position; `parent` holds what is believed before there are any."""

    parent: Survival | None = None
    _right: list[float] = field(default_factory=list)
    _graded: list[float] = field(default_factory=list)

    def grade(self, proposed: Sequence[int], committed: Sequence[int]) -> None:
        """`committed` is what came where `proposed` was expected, the target's own token
        included.
        """
        for position, (ours, theirs) in enumerate(zip(proposed, committed, strict=False)):
            if position == len(self._graded):
                self._right.append(0.0)
                self._graded.append(0.0)
            self._right[position] = _FADE * self._right[position] + (ours == theirs)
            self._graded[position] = _FADE * self._graded[position] + 1
            if ours != theirs:
                break
        if self.parent is not None:
            self.parent.grade(proposed, committed)

    def chances(self, count: int) -> list[float]:
        """p_1 .. p_count."""
        above = self.parent.chances(count) if self.parent is not None else []
        chances: list[float] = []
        for position in range(count):
            # A position that was never reached does as well as the one before.
            believed = (above[position:] or chances[-1:] or [_PRIOR])[0]
            right, graded = 0.0, 0.0
            if position < len(self._graded):
                right, graded = self._right[position], self._graded[position]
            chances.append((right + _PRIOR_WEIGHT * believed) / (graded + _PRIOR_WEIGHT))
        return chances

    def expected(self, count: int) -> float:
        """Mean number of leading tokens that will be accepted of `count`."""
        total, survives = 0.0, 1.0
        for chance in self.chances(count):
            survives *= chance
            total += survives
        return total


class Average:
    """An exponential moving average of durations, 0 before the first; one outlier moves it
    little.
    """

    def __init__(self, rate: float = 0.1) -> None:
        self.value, self._rate = 0.0, rate

    def add(self, sample: float) -> None:
        if self.value:
            self.value += self._rate * (min(sample, 4 * self.value) - self.value)
        else:
            self.value = sample


def tokens_per_second(expected: float, draft_s: float, step_s: float) -> float:
    """A round gives what is accepted and one token of the target's own."""
    return (1 + expected) / (step_s + draft_s)
