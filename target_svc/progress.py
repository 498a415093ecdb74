"""Steps of single sessions: which one is next, how it ends, how it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.api import Item, ItemResult
from specwire.errors import Reason, SpecwireError
from specwire.v1 import target_pb2
from target_svc import results
from target_svc.answers import Answers, Ended
from target_svc.asking import HeldVerdict, asks_service, question
from target_svc.decode import key_to_wire
from target_svc.metrics import Metrics
from target_svc.outcome import usable_draft
from target_svc.proposing import REASON_K_LIMIT, REASON_LATE, Made
from target_svc.residency import Residency
from target_svc.session_table import SessionTable
from target_svc.sessions import Session, Step
from target_svc.shapes import Shapes
from target_svc.sharing import Sharing

# Rows of a session that wait for a later step: those of many sessions may go out together.
_WAITING_BYTES = 64 << 10


class Progress:
    """`ready` are the sessions with a step that may run; `idle` is set while there are none at
    all."""

    def __init__(
        self,
        shapes: Shapes,
        residency: Residency,
        sharing: Sharing,
        sessions: SessionTable,
        metrics: Metrics,
        answers: Answers,
        vocab_size: int,
    ) -> None:
        self.ready: dict[int, Session] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self._shapes, self._residency, self._sharing = shapes, residency, sharing
        self._sessions, self._metrics, self._answers = sessions, metrics, answers
        self._vocab_size = vocab_size
        # Told that a session may run which nobody has just submitted, and of its step.
        self.on_ready: Callable[[Step | None], None] = _nobody

    @property
    def alone(self) -> bool:
        """There is one session."""
        return len(self._sessions) == 1

    def add(self, session: Session) -> None:
        """Takes a new session with its step 0."""
        self._residency.enter(session)
        self._sessions.add(session)
        self.idle.clear()
        self.ready[id(session)] = session

    def submit(self, session: Session, step: Step) -> None:
        """Takes a verify step. It may have to wait: one step of a session runs at a time."""
        if session.next is not None:
            self._metrics.dropped("superseded_step")
        session.next = step
        if session.held is not None:
            session.held.settle(None)
            return
        if session.step is not None and not session.step.asked and not session.running:
            session.step = None  # the free run ends here
        self._begin_next(session)

    def remove(self, session: Session) -> None:
        """Forgets a session, even in the middle of a step; the next step finds its pages free."""
        self._sessions.remove(session)
        self.ready.pop(id(session), None)
        if session.held is not None:
            session.held.drop()
        if session.sink is not None:
            session.sink.release()
        self._residency.release(session)
        if not len(self._sessions):
            self.idle.set()

    def refuse(
        self, session: Session, step_id: int, error: SpecwireError, have_len: int = 0
    ) -> None:
        self._answers.flush()  # what came before it
        self._metrics.refused(error.reason)
        refused = target_pb2.TargetRefused(
            key=key_to_wire(session.key), step_id=step_id, error=error.to_item(), have_len=have_len
        )
        session.link.send(target_pb2.TargetReply(refused=refused))

    def fail(self, session: Session, error: SpecwireError, now: float) -> None:
        """Refuses the current step. A session that never opened goes with it."""
        assert session.step is not None
        step_id, session.step = session.step.step_id, None
        session.idle_since = now
        self.ready.pop(id(session), None)
        self.refuse(session, step_id, error, 0 if session.opening else len(session.ids))
        if session.opening:
            self.remove(session)
        else:
            self._begin_next(session)

    def end_item(
        self,
        session: Session,
        item: Item,
        result: ItemResult,
        now: float,
        proposal: Made | None = None,
    ) -> None:
        """What the engine made of a session's item: a chunk of its prompt, or its step. What is to
        be said of it waits in the `Answers`."""
        step = session.step
        assert step is not None
        ended = Ended(session, step, item, result, len(session.ids), None, proposal)
        if result.prompt_logprobs:
            results.keep_scores(session, item, result)
        self._answers.add(ended)  # before whatever the next step has said
        if item.draws:
            ended.opening, ended.kept = session.opening, results.commit(session, step, result)
            if asks_service(session, step):
                self._ask(session, step, ended, now)
                return
            self._end(session, step, now)
            self._go_on(session, step, proposal)
            ended.rows_wait = not ended.opening and _rows_wait(session, step)
        else:
            self._shapes.end_chunk(session, item.start)
            results.end_chunk(session)
        self._sharing.publish(session)

    def _ask(self, session: Session, step: Step, ended: Ended, now: float) -> None:
        """Asks the draft service behind the step's rows; its verdict waits for the answer."""
        self._end(session, step, now)
        self.ready.pop(id(session), None)
        ended.question = question(session, step, ended.base)
        if ended.question.k:
            session.held = held = HeldVerdict(
                session, ended, self._answers, self._metrics, self._answered
            )
            ended.answered = held.settle
        else:
            reason = REASON_LATE if session.remaining > 1 else REASON_K_LIMIT
            ended.proposal = Made(reason=reason)
            self._go_on(session, step, ended.proposal)
        self._sharing.publish(session)

    def _answered(self, session: Session, step: Step, proposal: Made | None) -> None:
        self._go_on(session, step, proposal)
        self._answers.settled(wanted=session.step is None)
        self.on_ready(session.step)

    def _end(self, session: Session, step: Step, now: float) -> None:
        if step.asked:
            session.renew(now)
        session.step, session.idle_since = None, now

    def _go_on(self, session: Session, step: Step, proposal: Made | None) -> None:
        """Begins what is next: a newer item, or the free run."""
        if session.next is None and step.free_run and not session.finished:
            draft = self._ahead(session, step, proposal)
            self._start(session, results.free_step(session, step, draft))
            return
        self.ready.pop(id(session), None)
        if session.next is not None:
            self._begin_next(session)

    def _ahead(self, session: Session, step: Step, proposal: Made | None) -> list[int]:
        """What the next step of a free run verifies. A drafter in this process is believed no more
        than one on a link."""
        if proposal is None or not step.drafts_ahead:
            return []
        most = min(step.then_propose, session.spec.draft_tokens or step.then_propose)
        draft, cause = usable_draft(proposal.ids, self._vocab_size, most)
        if cause:
            self._metrics.dropped(cause, len(proposal.ids) - len(draft))
        return draft

    def _start(self, session: Session, step: Step) -> None:
        session.step = step
        self.ready[id(session)] = session

    def _begin_next(self, session: Session) -> None:
        """Starts the step that waits, when the session is free and the lengths agree."""
        if session.step is not None or session.next is None or session.opening:
            return
        step, session.next = session.next, None
        self.ready.pop(id(session), None)
        have = len(session.ids)
        if step.base_len > have:
            text = f"the target has {have} committed tokens, base_len is {step.base_len}"
            self.refuse(session, step.step_id, SpecwireError(Reason.NEED_TOKENS, text), have)
            return
        if step.base_len < have:
            self._answers.flush()  # with the rows that are rolled back
            session.truncate(step.base_len)
        if session.finished:
            error = SpecwireError.field(
                "base_len", step.base_len, f"below {have}: the session has finished"
            )
            self.refuse(session, step.step_id, error, have)
            return
        self._start(session, step)


def _nobody(step: Step | None) -> None:
    """For a step of which nobody need be told."""


def _rows_wait(session: Session, step: Step) -> bool:
    """Whether the rows of a step that is over, behind which another began, wait for those of it."""
    goes_on = session.step is not None and not session.step.asked and not step.drafts_ahead
    if session.sink is None or not goes_on:
        return False
    most = session.history.may_wait(_WAITING_BYTES)
    if most < 2:
        return False
    first = step.base_len - 1 if session.waiting_from is None else session.waiting_from
    # Sessions whose runs began together push at different steps.
    in_turn = (len(session.ids) + session.rank[1]) % most == 0
    return len(session.ids) - first < most and not in_turn
