"""What it is worth to leave out the end of a proposal, where the drafter says how sure it is.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

# Weight of the newest round in the mean of what a cut saves.
_WEIGHT = 0.1


class Cuts:
    """One drafter's, over all its sessions."""

    def __init__(self) -> None:
        # Seconds that cutting is worth in a round, by draft tokens; empty: the drafter never said.
        # Nothing is cut in a run, but the last proposal that it brings tells too.
        self.saves: list[float] = []

    def worth(self, chances: Sequence[float], verify: Sequence[float], rate: float) -> int:
        """How many tokens to verify of some that are accepted with such chances, each when all
        before it were: those that give the most over what `rate` (tokens per second) gives in the
        same time. `verify`: seconds by draft tokens; of longer proposals than this one it is taken
        that they would go on like its last token."""
        if not chances:
            return 0
        best, best_k, kept = 1.0 - rate * verify[0], 0, 0
        known, saves = len(chances), self.saves or [0.0]
        tokens = reach = 1.0
        for k in range(1, len(verify)):
            reach *= chances[min(k, known) - 1]
            tokens += reach
            gain = tokens - rate * verify[k]
            if gain >= best:
                best, best_k = gain, k
            if k == known:
                kept = best_k
            if k == len(saves):
                saves.append(0.0)
            saves[k] += _WEIGHT * ((best - gain) / rate - saves[k])
        self.saves = saves
        return kept
