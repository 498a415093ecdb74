"""Rounds with a drafter in the target's own process: one exchange a round, or none.

How many tokens the next proposal has is decided before the verdict over this one is known, so the
policy sees each round one round late: what it learns from a verdict changes the proposal after the
next. What the drafter is unsure of is still cut before it is verified.
"""

from __future__ import annotations

from coordinator.brought import Brought


class Colocated(Brought):
    @property
    def in_hand(self) -> list[int] | None:
        return self._proposal if self._at.colocated else None

    def then_propose(self, step: int, length: int, most: int, drafted: bool) -> tuple[int, int]:
        k = self._plan.tokens(step, length, most)
        ahead = self._plan.ahead() if drafted and k else 0
        self._begin(k, ahead)
        return k, ahead
