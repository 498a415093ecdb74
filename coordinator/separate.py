"""Rounds with a draft service: `Advance` after each verdict, a bounded wait for the proposal. Where
the target can ask it and K stands, it goes on by itself for a while (`run_ahead.py`)."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from coordinator.attachment import Attachment
from coordinator.drafting import Drafting
from coordinator.plan import Plan
from coordinator.record import Record, worked_ns
from coordinator.run_ahead import RunAhead
from coordinator.settings import CoordinatorSettings
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2, draft_pb2, target_pb2

# Rounds in a row without the rows it needs after which a re-attached drafter is given up.
_ROWLESS_ROUNDS = 3
# A proposal may take so many times what proposals take now.
_USUAL_FACTOR = 2.0


class _Question(NamedTuple):
    step_id: int
    ids: list[int]
    length: int
    k: int
    sent_ns: int
    budget_s: float
    # The target has asked it before, for so many tokens: that answer is kept, and may come. 0: not.
    before: int
    # It tells of more than a round brings, which the draft takes in first: no time of a round.
    catches_up: bool = False

    @property
    def timed(self) -> bool:
        """Whether the wait for its answer says how long proposals take."""
        return not (self.before or self.catches_up)


class Separate(Drafting):
    def __init__(
        self, at: Attachment, plan: Plan, settings: CoordinatorSettings, record: Record
    ) -> None:
        super().__init__(at, plan, settings, record)
        self._rowless = 0
        self._run = RunAhead(at, plan, settings, record)
        # Tokens of the latest decision, and those decided on for the next question already.
        self._k = 0
        self._next_k: int | None = None
        self._asked: _Question | None = None
        # A question whose answer did not come in time; it still tells how long answers take.
        self._overdue: _Question | None = None

    @property
    def in_hand(self) -> list[int] | None:
        """None too while no drafter is there, so that somebody looks for one before the step."""
        found = self._run.in_hand
        nothing_asked = self._asked is None and self._at.attached
        return [] if found is None and nothing_asked else found

    @property
    def wait_us(self) -> int:
        return max(1, min(int(self._budget_s(self._k) * 1e6), 2**32 - 1))

    def then_propose(self, step: int, length: int, most: int, drafted: bool) -> tuple[int, int]:
        """Tokens of this round where K may stand; those of a round that a run ahead brought were
        not decided on."""
        brought = bool(self._run.in_hand)
        self._run.end()
        self._next_k = None
        if not drafted or not self._plan.most_ahead:
            return 0, 0
        if brought:
            self._k = self._next_k = self._plan.tokens(step, length, most)
        k = min(self._k, most)
        ahead = self._plan.ahead() if k > 0 else 0
        if not ahead:
            return 0, 0
        self._next_k = None
        self._run.begin(k, ahead)
        return k, ahead

    def believe(self, verdict: target_pb2.Verdict) -> None:
        self._run.believe(verdict)

    def judged(self, accepted: int) -> None:
        super().judged(accepted)
        self._run.judged(accepted)

    def advance(self, verdict: target_pb2.Verdict, ids: list[int], most: int | None) -> bool:
        self._asked, self.waited_ns, self.drafted_ns = None, 0, 0
        before = self._run.asked
        if before:
            self._run.advance(verdict, ids, most)
            if self._run.in_hand is not None:
                return False
        if verdict.step_id == 0:
            # How long the target took for the context that the drafter is taking in now.
            self._at.grace_s = worked_ns(verdict.timings) / 1e9
        k = 0
        if most is not None and self._next_k is not None:
            k = min(self._next_k, most)
        elif most is not None:
            k = self._plan.tokens(verdict.step_id, len(ids), most)
        self._k, self._next_k = k, None
        if not self._at.attached or self._at.mail is None:
            return False
        if self._at.mail.failed:
            self._at.lose("draft_lost")
            return False
        self._read_old()
        if most is None and self._rows_wait(verdict):
            return False
        budget_s = self._budget_s(k) if k else 0.0
        rows = verdict.rows_start, verdict.rows_count
        behind = len(ids) - self._at.told > len(verdict.tokens)
        if self._at.advance(verdict.step_id, ids, k, budget_s, *rows) and k:
            now = time.perf_counter_ns()
            self._asked = _Question(
                verdict.step_id, ids, len(ids), k, now, budget_s, before, behind
            )
            self._round_k, self._proposed, self._source = k, False, ""
        return k > 0

    def _rows_wait(self, verdict: target_pb2.Verdict) -> bool:
        """Whether the rows behind a plain step come with those of a later one of the run: the draft
        is told of all their tokens together."""
        choice = self._at.choice
        return choice is not None and choice.drafter.needs_rows and not verdict.rows_count

    def _read_old(self) -> None:
        """Answers to questions that nobody waits for any more."""
        while self._at.mail is not None and (got := self._at.mail.take()) is not None:
            self._stray(*got)

    def _budget_s(self, k: int) -> float:
        """Longest wait for `k` tokens: a share of a step; more where proposals take longer at the
        present load, but never beyond the steps that a proposal accepted whole would save."""
        step_s = max(self._at.target.round_s or 0.0, self._at.grace_s)
        usual_s = self._at.choice.standing.proposal_s if self._at.choice is not None else 0.0
        return max(
            self._settings.proposal_wait_share * step_s,
            min(_USUAL_FACTOR * usual_s, k * step_s),
            self._settings.proposal_wait_min_ms / 1000,
        )

    async def proposal(self) -> list[int]:
        asked = self._asked
        if asked is None or self._at.mail is None:
            return []
        elapsed_s = (time.perf_counter_ns() - asked.sent_ns) / 1e9
        loop = asyncio.get_running_loop()
        limit = self._at.capped(loop.time() + asked.budget_s - elapsed_s)
        ids: list[int] = []
        try:
            while (got := await self._at.mail.get(limit)) is not None:
                if (found := self._read(*got, asked)) is not None:
                    ids = found
                    break
            else:
                self._late(asked)
        except SpecwireError:
            self._at.lose("draft_lost")
        self._asked, self._at.grace_s = None, 0.0
        return ids

    def _late(self, asked: _Question) -> None:
        self._record.fell_back("late")
        self.waited_ns = time.perf_counter_ns() - asked.sent_ns
        self._record.spent("draft", self.waited_ns)
        self._overdue = asked if asked.timed else None
        if self._at.grace_s:
            # The drafter was taking in the context: that says nothing of the rounds to come.
            self._round_k = 0
        if self._at.choice is not None:
            self._at.choice.standing.breaker.failure(asked.sent_ns / 1e9)
            self._note_cost(asked, self.waited_ns)

    def _read(self, arrived_ns: int, message: Any, asked: _Question) -> list[int] | None:
        """Usable tokens of a reply to this round's question; None for a reply to anything else."""
        if isinstance(message, draft_pb2.DraftRefused) and message.step_id == asked.step_id:
            self._refused(message, asked)
            return []
        if not isinstance(message, common_pb2.Proposal) or message.step_id != asked.step_id:
            self._stray(arrived_ns, message)
            return None
        if message.base_len != asked.length:
            self._at.dropped("length")
            return None
        assert self._at.choice is not None
        self.waited_ns = arrived_ns - asked.sent_ns
        worked = worked_ns(message.timings)
        # What is not spent again is no cost of a round.
        standing = self._at.choice.standing
        once = standing.once_ns(min(message.timings.once_ns, self.waited_ns))
        answered_ns = self.waited_ns - once
        self._record.spent("draft", min(worked, answered_ns))
        self._record.spent("link", answered_ns - worked)
        standing.breaker.success()
        if asked.timed:
            standing.note_proposal(answered_ns / 1e9)
        self._note_cost(asked, answered_ns)
        self.drafted_ns = message.timings.compute_ns + once
        ids, cause = self._take(message, max(asked.k, asked.before), asked.length, asked.k)
        self._rowless = self._rowless + 1 if cause == "rows_missing" else 0
        if self._rowless >= _ROWLESS_ROUNDS:
            self._at.give_up()
        return ids

    def _stray(self, arrived_ns: int, message: Any) -> None:
        """Drops a reply to another question; a late one still says how long proposals take."""
        self._at.dropped("step")
        overdue, choice = self._overdue, self._at.choice
        if (
            overdue is not None
            and choice is not None
            and isinstance(message, common_pb2.Proposal)
            and message.step_id == overdue.step_id
        ):
            choice.standing.note_proposal((arrived_ns - overdue.sent_ns) / 1e9)
            self._overdue = None

    def _note_cost(self, asked: _Question, wall_ns: int) -> None:
        choice = self._at.choice
        # The first round takes in the whole context: no cost of a round, nor is the rest of a wait.
        if choice is not None and not self._at.grace_s and asked.timed:
            busy, seconds = choice.worker.busy, wall_ns / 1e9
            choice.standing.costs.note(asked.k, busy, asked.length, seconds, False)

    def _refused(self, message: draft_pb2.DraftRefused, asked: _Question) -> None:
        reason = message.error.reason
        self._record.fell_back(reason.lower() or "refused")
        if reason == Reason.NEED_TOKENS and 0 < message.have_len <= self._at.told:
            self._at.mend(message.have_len, asked.step_id, asked.ids)
        else:
            self._at.detach()
