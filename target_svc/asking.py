"""Runs ahead with a draft service: a verdict waits for the proposal that continues it, for a while,
and the next step begins with that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from specwire.errors import Reason
from specwire.v1 import common_pb2, draft_pb2
from target_svc.answers import Answers, Ended
from target_svc.asks import LOST, Answer, Question
from target_svc.metrics import Metrics
from target_svc.proposing import REASON_LATE, Made
from target_svc.sessions import Session, Step

# Shorter waits are no waits by the event loop's clock, which counts milliseconds.
_SHORTEST_S = 0.001
# Late answers of a run after which the rest of it waits for none.
_LATES = 2
# Of the names that a draft gives, as much goes on.
_NAME_CHARS, _NO_REASON = 64, "refused"

# Told of a session whose proposal is there, or will not come.
GoOn = Callable[[Session, Step, Made | None], None]


def asks_service(session: Session, step: Step) -> bool:
    """Whether a draft service is asked behind this step."""
    return (
        step.drafts_ahead
        and session.sink is not None
        and not session.spec.draft_tokens
        and session.next is None
        and not session.finished
    )


class HeldVerdict:
    """One verdict, from the end of its step until it is said."""

    def __init__(
        self, session: Session, ended: Ended, answers: Answers, metrics: Metrics, go_on: GoOn
    ) -> None:
        self._session, self._ended, self._answers = session, ended, answers
        self._metrics, self._go_on = metrics, go_on
        self._began_ns = 0
        self._timer: asyncio.TimerHandle | None = None

    def asked(self) -> None:
        """The question is on its way: from now on the draft's time runs."""
        self._began_ns = time.perf_counter_ns()
        self._timer = self._timed(self._ended.step)

    def _timed(self, step: Step) -> asyncio.TimerHandle:
        """No longer than the step's own time: what was drawn in it is said."""
        loop = asyncio.get_running_loop()
        until = loop.time() + max(step.draft_wait_us / 1e6, _SHORTEST_S)
        if step.deadline is not None:
            until = min(until, step.deadline)
        return loop.call_at(until, self._late)

    def _late(self) -> None:
        self._metrics.dropped("draft_late")
        self._session.late += 1
        self._settle(Made(reason=REASON_LATE, queue_ns=self._waited_ns()))

    def _waited_ns(self) -> int:
        return time.perf_counter_ns() - self._began_ns if self._began_ns else 0

    def settle(self, answer: Answer | None) -> None:
        """The verdict is said with this, or None where it is waited for no longer, and the session
        goes on. Safe to repeat."""
        session, made, waited_ns = self._session, None, self._waited_ns()
        if session.held is not self:
            return
        if isinstance(answer, draft_pb2.DraftRefused):
            made = self._refused(answer, waited_ns)
        elif answer is not None and answer.base_len == len(session.ids):
            made = _made(answer, self._ended.step.then_propose, waited_ns)
        elif answer is not None:
            self._metrics.dropped("draft_length")
        self._settle(made)

    def _settle(self, made: Made | None) -> None:
        session, ended = self._session, self._ended
        self.drop()
        # Until now nobody could ask anything of it.
        session.idle_since = asyncio.get_running_loop().time()
        ended.proposal, ended.answered = made, None
        if ended.rows_sent:  # else it waits there still, with its rows
            self._answers.add(ended)
        self._go_on(session, ended.step, made)

    def _refused(self, refused: draft_pb2.DraftRefused, waited_ns: int) -> Made:
        """The reason goes on. A draft that misses tokens of this run is told of them with the next
        question, and given their rows; what it misses besides, whoever drives the session mends."""
        session, reason = self._session, refused.error.reason
        if refused is LOST and self._ended.asked_from:
            session.told = self._ended.asked_from  # nobody knows whether it came
        elif reason == Reason.NEED_TOKENS and refused.have_len >= session.told_first:
            session.told = min(refused.have_len, session.told)
        name = (reason or _NO_REASON)[:_NAME_CHARS].lower()
        return Made(reason=name, queue_ns=waited_ns)

    def drop(self) -> None:
        """Nothing is said, and nobody waits any more."""
        self._session.held = None
        if self._timer is not None:
            self._timer.cancel()
        if self._session.sink is not None:
            self._session.sink.forget()


def question(session: Session, step: Step, base: int) -> Question:
    """Behind a committed step that began with `base` ids, of which whoever asked for the step has
    told the service. One that misses tokens refuses, and is told from there (`Session.told`)."""
    if step.asked or not session.told:
        session.told = session.told_first = base
        session.late = 0
    told = min(base, session.told)
    session.told = len(session.ids)
    # A block never has more rows than the tokens that may still come. One that is late again and
    # again follows, and is waited for no longer.
    k = max(0, min(step.then_propose, session.remaining - 1)) if session.late < _LATES else 0
    return Question(step.step_id, told, session.ids[told:], k, step.draft_wait_us)


def _made(proposal: common_pb2.Proposal, k: int, waited_ns: int) -> Made:
    """What goes on to the coordinator, which counts one id too many, but whose link must not break
    of what a draft makes up."""
    spent, most = proposal.timings, k + 1
    # Of what it says of its own time no more is believed than has passed.
    compute_ns = min(spent.compute_ns, waited_ns)
    once_ns = min(spent.once_ns, waited_ns - compute_ns)
    return Made(
        proposal.ids[:most],
        proposal.confidences[:most],
        proposal.reason[:_NAME_CHARS],
        compute_ns,
        once_ns,
        waited_ns - compute_ns - once_ns,
        proposal.source[:_NAME_CHARS],
    )
