"""What one drafter's sessions try out, and when those that do not draft look again. Shared: any of
them may be over before it is time. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

# What each session that stopped leaves of the hope for the next ones, and the least.
_FADE, _LEAST_HOPE = 0.7, 0.25


@dataclass(slots=True)
class Probing:
    # Rounds that tried something out, to learn what it costs.
    trials: int = 0
    # Plain steps from one probe to the next, 0: nobody has looked in vain; and those since the last
    # one, of all sessions that do not draft.
    pause: int = 0
    waited: int = 0
    # How much better than it seems so far a session is hoped to be, in deviations: less with each
    # that stopped.
    hope: float = 1.0

    def pays(self) -> None:
        self.pause, self.hope = 0, 1.0

    def stopped(self) -> None:
        self.hope = max(_LEAST_HOPE, _FADE * self.hope)

    def begin(self) -> None:
        self.waited = 0

    def in_vain(self, pause: int) -> None:
        self.pause, self.waited = pause, 0

    def left(self, pause: int) -> int:
        """Plain steps to go of a session that has just stopped, and would wait for `pause` by
        itself; one at least."""
        return max(1, max(pause, self.pause) - self.waited) if self.pause else pause
