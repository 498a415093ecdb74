"""A session's rounds: an Advance commits tokens, waits for its rows, and is answered with one
Proposal.

Runs on the event loop, holds no gRPC. Items that are late or repeated are dropped and counted: they
are normal after a restart or a fail-over.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from functools import partial

from draft_svc import replies
from draft_svc.coverage import RowsRefused
from draft_svc.jobs import Computed, ProposeJob, UpdateJob
from draft_svc.methods.base import (
    REASON_DEADLINE,
    REASON_K_LIMIT,
    REASON_ROWS_MISSING,
    REASON_SUPERSEDED,
    Draft,
    RowBlock,
)
from draft_svc.metrics import Metrics
from draft_svc.requests import checked_ids, row_block
from draft_svc.sessions import Reply, Session, SessionTable, Step
from draft_svc.worker import Worker
from specwire.errors import Reason, SpecwireError
from specwire.v1 import draft_pb2

# Of the time that the one who asks waits for a proposal, the share that work may take.
_WORK_SHARE = 0.9


@dataclass(slots=True)
class Rounds:
    """Advances and rows of all sessions."""

    worker: Worker
    sessions: SessionTable
    rows_wait_ms: int
    metrics: Metrics

    def advance(
        self, request: draft_pb2.Advance, reply: Reply, asked_by: int | None = None
    ) -> None:
        """`asked_by`: the incarnation of the target that asks itself. Raises SpecwireError."""
        session = self.sessions.find(request.key)
        if session is None:
            raise SpecwireError(Reason.SESSION_UNKNOWN, "no such session; open it")
        if asked_by is not None and asked_by != session.target_incarnation:
            text = "the session was opened for another target"
            raise SpecwireError(Reason.SESSION_UNKNOWN, text)
        session.renew(time.monotonic())
        last, step_id = session.step, request.step_id
        if last is None or step_id > last.step_id:
            self._begin(session, step_id, request, reply)
        elif step_id == last.step_id:
            self._repeat(last, reply)
        else:
            self.metrics.event("stale_step")

    def _repeat(self, step: Step, reply: Reply) -> None:
        self.metrics.event("repeated_step")
        step.reply = reply
        if step.answer is not None:
            reply(step.answer)

    def _begin(
        self, session: Session, step_id: int, request: draft_pb2.Advance, reply: Reply
    ) -> None:
        # A field of a message is read once: each time costs as much as a call.
        tokens = checked_ids(list(request.tokens), "tokens", session.info)
        base_len, k, deadline_ms = request.base_len, request.k, request.deadline_ms
        if base_len > session.length:
            text = f"{session.length} tokens are known here, the item builds on {base_len}"
            have = {"have_len": str(session.length)}
            raise SpecwireError(Reason.NEED_TOKENS, text, have)
        if base_len == 0:
            raise SpecwireError.field("base_len", 0, f"1 to {session.length}")
        if session.step is not None and session.step.open:
            self._finish(session, session.step, Draft(reason=REASON_SUPERSEDED))
        length, limit = base_len + len(tokens), session.k_limit
        step = Step(
            step_id=step_id,
            base_len=base_len,
            length=length,
            k=min(k, limit),
            k_cut=k > limit,
            reply=reply,
            arrived_ns=time.monotonic_ns(),
            deadline=_deadline(deadline_ms),
        )
        session.step, session.length = step, length
        rows: list[RowBlock] = []
        if session.coverage is not None:
            rows = session.coverage.confirm(step_id, base_len, length)
        self.worker.put(UpdateJob(session.handle, base_len, tokens, rows))
        self._wait_or_propose(session, step, request.rows_count, deadline_ms)

    def _wait_or_propose(
        self, session: Session, step: Step, rows_count: int, deadline_ms: int
    ) -> None:
        if step.k == 0:
            self._finish(session, step, Draft(reason=REASON_K_LIMIT if step.k_cut else ""))
        elif _covered(session):
            self._propose(session, step)
        elif rows_count == 0:  # none are on their way
            self._go_without_rows(session, step, REASON_ROWS_MISSING)
        else:
            wait_ms, reason = float(self.rows_wait_ms), REASON_ROWS_MISSING
            if 0 < deadline_ms < wait_ms:
                wait_ms, reason = deadline_ms, REASON_DEADLINE
            if session.info.rows_optional:  # in time to propose without them
                wait_ms /= 2
            wait = asyncio.get_running_loop().call_later
            step.timer = wait(wait_ms / 1000, self._go_without_rows, session, step, reason)

    def _go_without_rows(self, session: Session, step: Step, reason: str) -> None:
        if session.info.rows_optional:
            self._propose(session, step)
        else:
            self._finish(session, step, Draft(reason=reason))

    def _propose(self, session: Session, step: Step) -> None:
        step.proposing = True
        if step.timer is not None:
            step.timer.cancel()

        done = partial(self._computed, session, step)
        self.worker.put(ProposeJob(session.handle, step.k, step.deadline, done))

    def _computed(self, session: Session, step: Step, computed: Computed) -> None:
        if not step.open or not self.sessions.holds(session):
            self.metrics.event("late_proposal")
        elif computed.error is not None:
            self._answer(session, step, replies.refusal(session.key, step.step_id, computed.error))
        else:
            draft, seconds = computed.draft, computed.compute_ns / 1e9
            self._finish(session, step, draft, computed)
            self.metrics.proposed(session.info.method, len(draft.ids), seconds)

    def _finish(
        self, session: Session, step: Step, draft: Draft, computed: Computed | None = None
    ) -> None:
        if draft.reason:
            self.metrics.event(draft.reason)
        self._answer(session, step, replies.proposal(session.key, step, draft, computed))

    def _answer(self, session: Session, step: Step, answer: draft_pb2.DraftReply) -> None:
        if step.timer is not None:
            step.timer.cancel()
        step.answer = answer
        session.renew(time.monotonic())
        step.reply(answer)

    def take_rows(
        self, target_incarnation: int, chunk: draft_pb2.FeatureChunk
    ) -> SpecwireError | None:
        """Takes a chunk of rows, or returns why not."""
        try:
            self._take_rows(target_incarnation, chunk)
        except SpecwireError as error:
            self.metrics.event(f"rows_{error.metadata.get('cause', error.reason.value.lower())}")
            return error
        return None

    def _take_rows(self, target_incarnation: int, chunk: draft_pb2.FeatureChunk) -> None:
        session = self.sessions.find(chunk.key)
        if session is None:
            raise SpecwireError(Reason.SESSION_UNKNOWN, "no such session")
        if session.target_incarnation not in (0, target_incarnation):
            raise _refused("other_target")
        if session.coverage is None or session.info.rows is None:
            raise _refused("not_needed")
        block = row_block(chunk, session.info.rows, session.projected)
        try:
            blocks = session.coverage.offer(chunk.step_id, block)
        except RowsRefused as refusal:
            raise _refused(str(refusal)) from refusal
        if blocks:
            self._append_rows(session, blocks)

    def _append_rows(self, session: Session, blocks: list[RowBlock]) -> None:
        """Rows of a confirmed step count at once, and a step that waits for them may go on."""
        self.worker.put(UpdateJob(session.handle, session.length, (), blocks))
        step = session.step
        if step is not None and step.open and not step.proposing and _covered(session):
            self._propose(session, step)


def _deadline(deadline_ms: int) -> float:
    """Until when an answer is of use; the way back takes its share of the time."""
    if deadline_ms == 0:
        return math.inf
    return time.monotonic() + _WORK_SHARE * deadline_ms / 1000


def _covered(session: Session) -> bool:
    return session.coverage is None or session.coverage.end == session.length - 1


def _refused(cause: str) -> SpecwireError:
    text = f"rows were not taken: {cause}"
    return SpecwireError(Reason.ROWS_REFUSED, text, {"cause": cause})
