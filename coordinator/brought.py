"""Proposals that verdicts bring, of a drafter that the target asks: one beside it, or a draft
service in a run ahead.

    verify(proposal, then_propose=k) -> verdict and the next proposal

A run ahead repeats this at the target: it verifies the proposal at once, and verdicts come unasked,
each with the next proposal.
"""

from __future__ import annotations

import time

from coordinator.attachment import Attachment
from coordinator.drafting import Drafting
from coordinator.plan import Plan
from coordinator.record import Record, worked_ns
from coordinator.settings import CoordinatorSettings
from specwire.v1 import common_pb2, target_pb2

# What a target says of a drafter that broke.
_FAILED = "draft_failed"


class Brought(Drafting):
    def __init__(
        self, at: Attachment, plan: Plan, settings: CoordinatorSettings, record: Record
    ) -> None:
        super().__init__(at, plan, settings, record)
        # Tokens asked for with the verdict that comes next, and when (`time.perf_counter`).
        self._asked, self._asked_s = 0, 0.0
        self._proposal: list[int] = []
        # Verdicts of a run ahead that bring one which the target verifies by itself.
        self._ahead = 0

    @property
    def in_hand(self) -> list[int] | None:
        return self._proposal

    async def proposal(self) -> list[int]:
        return self._proposal

    def _begin(self, asked: int, ahead: int) -> None:
        self._asked, self._ahead, self._asked_s = asked, ahead, time.perf_counter()

    def _missing(self) -> None:
        """A verdict of a run ahead brought no proposal: the target is older than such runs, no
        fault of the drafter's."""
        self._at.target.drafts_ahead, self._round_k = False, 0
        self._record.fell_back("no_proposal")

    def _note_cost(self, asked: int, length: int, seconds: float) -> None:
        """Of a drafter in the target's process: the same whoever drives the rounds."""
        assert self._at.choice is not None
        self._at.choice.standing.costs.note(asked, self._at.target.busy, length, seconds, None)

    def advance(self, verdict: target_pb2.Verdict, ids: list[int], most: int | None) -> bool:
        self._proposal = []
        asked = self._asked if most is not None else 0
        proposal = verdict.proposal if verdict.HasField("proposal") else None
        found = proposal is not None and self._answers(verdict, proposal, asked)
        if most is None:
            return False
        runs_ahead = self._ahead > 0
        if runs_ahead:
            self._ahead, self._asked_s = self._ahead - 1, time.perf_counter()
        else:
            self._asked = 0
        # Where the last step brought much, there may be room for less than was asked for, or none.
        room = min(asked, most)
        if room > 0:
            self._round_k, self._proposed, self._source = room, False, ""
            if proposal is not None and found:
                self._read(proposal, asked, room, len(ids), runs_ahead)
            elif runs_ahead and proposal is None:
                self._missing()
            else:
                self._failed("no_proposal")
        return False

    def believe(self, verdict: target_pb2.Verdict) -> None:
        """One in the target's process is believed."""

    def _answers(
        self, verdict: target_pb2.Verdict, proposal: common_pb2.Proposal, asked: int
    ) -> bool:
        """Whether a proposal continues this verdict; another one is dropped and counted."""
        if proposal.key != verdict.key:
            cause = "session"
        elif proposal.step_id != verdict.step_id or not asked:
            cause = "step"
        elif proposal.base_len != verdict.new_len:
            cause = "length"
        else:
            return True
        self._at.dropped(cause)
        return False

    def _read(
        self, proposal: common_pb2.Proposal, asked: int, room: int, length: int, whole: bool
    ) -> None:
        assert self._at.choice is not None
        if proposal.reason == _FAILED and not proposal.ids:
            self._failed(_FAILED)
            return
        standing, worked_s = self._at.choice.standing, worked_ns(proposal.timings) / 1e9
        if proposal.ids or proposal.timings.compute_ns:  # else it refused, or was not asked
            standing.breaker.success()
            standing.note_proposal(worked_s)
            self._note_cost(asked, length, worked_s)
        self._proposal, _ = self._take(proposal, asked, length, room, whole)

    def _failed(self, cause: str) -> None:
        """Where it fails again and again its sessions go on plain, and one asks now and then."""
        assert self._at.choice is not None
        self._record.fell_back(cause)
        self._at.choice.standing.breaker.failure(self._asked_s)
