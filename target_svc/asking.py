"""Runs ahead with a draft service: a verdict waits for the proposal that continues it, for a while,
and the next step begins with that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from specwire.v1 import common_pb2
from target_svc.answers import Answers, Ended
from target_svc.asks import Question
from target_svc.metrics import Metrics
from target_svc.proposing import Made
from target_svc.sessions import Session, Step

# Told of a session whose proposal is there, or will not come.
GoOn = Callable[[Session, Step, Made | None], None]


def asks_service(session: Session, step: Step) -> bool:
    """Whether a draft service is asked behind this step."""
    return (
        step.drafts_ahead
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
        self._began_ns = time.perf_counter_ns()
        wait_s = ended.step.draft_wait_us / 1e6
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._late)

    def _late(self) -> None:
        self._metrics.dropped("draft_late")
        self.settle(None)

    def settle(self, proposal: common_pb2.Proposal | None) -> None:
        """The verdict is said with this, and the session goes on. Safe to repeat."""
        session = self._session
        if session.held is not self:
            return
        self.drop()
        waited_ns = time.perf_counter_ns() - self._began_ns
        self._ended.proposal = made = _made(proposal, len(session.ids), waited_ns)
        say_later(self._answers, self._ended)
        self._go_on(session, self._ended.step, made)

    def drop(self) -> None:
        """Nothing is said, and nobody waits any more."""
        self._session.held = None
        self._timer.cancel()
        if self._session.sink is not None:
            self._session.sink.forget()


def say_later(answers: Answers, ended: Ended) -> None:
    """What was asked is answered; the verdict is what is left to say."""
    ended.question, ended.answered, ended.rows_sent = None, None, True
    answers.add(ended)


def question(session: Session, step: Step, base: int) -> Question:
    """Behind a committed step that began with `base` ids. A service that misses tokens refuses,
    and is repaired by whoever drives the session."""
    told = min(base, session.told) if not step.asked and session.told else base
    session.told = length = len(session.ids)
    # A block never has more rows than the tokens that may still come.
    k = max(0, min(step.then_propose, session.remaining - 1))
    return Question(
        step.step_id, told, session.ids[told:], k, step.draft_wait_us, base - 1, length - base
    )


def _made(proposal: common_pb2.Proposal | None, length: int, waited_ns: int) -> Made | None:
    if proposal is None or proposal.base_len != length:
        return None
    spent = proposal.timings
    # Of what it says of its own time no more is believed than has passed.
    compute_ns = min(spent.compute_ns, waited_ns)
    once_ns = min(spent.once_ns, waited_ns - compute_ns)
    return Made(
        proposal.ids,
        proposal.confidences,
        proposal.reason,
        compute_ns,
        once_ns,
        waited_ns - compute_ns - once_ns,
        proposal.source,
    )
