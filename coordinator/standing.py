"""What is known of one drafter at one worker: how punctual it is, how fast and how good."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.acceptance import Acceptance
from coordinator.breaker import Breaker
from coordinator.round_costs import RoundCosts

# Weight of the newest time in the running mean of proposals.
_WEIGHT = 0.1
# Graphs of all shapes are captured in less.
ONCE_NS = 60_000_000_000


@dataclass(slots=True)
class Standing:
    """Each drafter has its own: one that is slow says nothing of its neighbours in the process."""

    breaker: Breaker
    costs: RoundCosts
    past: Acceptance = field(default_factory=Acceptance)
    # Running mean of how long proposals take, late ones included; 0 before the first.
    proposal_s: float = 0.0
    # What it may still claim to have spent once only, in nanoseconds. One that claims it in every
    # round would seem to draft for nothing.
    once_left_ns: int = ONCE_NS

    def once_ns(self, claimed_ns: int) -> int:
        """As much of the claim as is believed."""
        believed = min(claimed_ns, self.once_left_ns)
        self.once_left_ns -= believed
        return believed

    def note_proposal(self, seconds: float) -> None:
        if not self.proposal_s:
            self.proposal_s = seconds
        self.proposal_s += _WEIGHT * (seconds - self.proposal_s)
