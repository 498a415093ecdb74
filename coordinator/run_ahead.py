"""Rounds that a target goes on for with a draft service, asking it on the stream of its rows: what
would be four hops a round through here is two between them.
"""

from __future__ import annotations

from coordinator.brought import Brought
from coordinator.record import worked_ns
from specwire.v1 import common_pb2, target_pb2

# What a target says of a draft that did not answer in time, and what a draft says that has heard
# the question and has nothing to propose.
_LATE = "late"
_ANSWERED = ("no_match", "no_proposal", "k_limit")


class RunAhead(Brought):
    """Is `on` from the step that begins a run until its last verdict."""

    @property
    def on(self) -> bool:
        return self._asked > 0

    @property
    def asked(self) -> int:
        """Tokens that the target asks for with its next verdict; 0: it does not."""
        return self._asked

    @property
    def in_hand(self) -> list[int] | None:
        """None outside a run, but for what its last verdict brought."""
        return self._proposal if self.on or self._round_k else None

    def begin(self, asked: int, ahead: int) -> None:
        """After the step that is about to be sent the target goes on for `ahead` rounds, each with
        `asked` tokens: `Separate` decides, whose rounds begin a run."""
        self._proposal = []
        self._begin(asked, ahead)

    def end(self) -> None:
        self._proposal, self._asked, self._ahead = [], 0, 0

    def advance(self, verdict: target_pb2.Verdict, ids: list[int], most: int | None) -> bool:
        super().advance(verdict, ids, most)
        # By the target; a question that was not answered may never have come there.
        proposal = verdict.proposal
        answered = verdict.HasField("proposal") and (proposal.ids or proposal.reason in _ANSWERED)
        self._at.told = len(ids) if answered else verdict.base_len
        return False

    def believe(self, verdict: target_pb2.Verdict) -> None:
        """Of what the draft calls spent once for all, as much as is believed; the rest is work."""
        if self.on and self._at.choice is not None and verdict.HasField("proposal"):
            timings = verdict.proposal.timings
            believed = self._at.choice.standing.once_ns(timings.once_ns)
            timings.queue_ns += timings.once_ns - believed
            timings.once_ns = believed

    def _read(
        self, proposal: common_pb2.Proposal, asked: int, room: int, length: int, whole: bool
    ) -> None:
        if proposal.reason != _LATE or proposal.ids:
            super()._read(proposal, asked, room, length, whole)
            return
        waited_s = worked_ns(proposal.timings) / 1e9
        if waited_s:
            self._note_cost(asked, length, waited_s)
        if self.on:
            self._missing()
        else:
            self._round_k = 0  # it is asked for once more, on the link

    def _missing(self) -> None:
        assert self._at.choice is not None
        self._record.fell_back(_LATE)
        self._at.choice.standing.breaker.failure(self._asked_s)

    def _failed(self, cause: str) -> None:
        """Where the last verdict brought none the draft service is asked for it once more: that is
        the same round."""
        if self.on:
            super()._failed(cause)
        else:
            self._round_k = 0

    def _note_cost(self, asked: int, length: int, seconds: float) -> None:
        choice = self._at.choice
        assert choice is not None
        choice.standing.costs.note(asked, choice.worker.busy, length, seconds, True)
