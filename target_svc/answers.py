"""Verdicts and rows of steps that have ended: written once the next step is on its way.

What the next step needs is committed at once; a message is the business of others, and the device
must not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.api import Item, ItemResult, TokenLogprobs
from specwire.tensors import Rows
from specwire.v1 import common_pb2, target_pb2
from target_svc.asks import Answer, Answered, Question
from target_svc.metrics import Metrics
from target_svc.outcome import Outcome
from target_svc.proposing import Made
from target_svc.sessions import Link, Session, Step

Kept = tuple[int, Rows]  # a position and the rows from there on


@dataclass(slots=True)
class Ended:
    """A session's part of a step, committed; the last chunk of a prompt, or a block. `kept` is None
    for a chunk with more to come: it has rows only. `base`: the length before."""

    session: Session
    step: Step
    item: Item
    result: ItemResult
    base: int
    kept: Outcome | None = None
    proposal: Made | None = None
    opening: bool = False
    # What a draft service is asked behind the rows. While somebody is to be told of the answer the
    # rows alone go out; the verdict is said later, with it.
    question: Question | None = None
    answered: Answered | None = None
    rows_sent: bool = False
    # The rows go out with those of a later step: behind each plain step of a run nobody proposes
    # anything, and one message for all of them costs both sides less.
    rows_wait: bool = False
    # First of the rows that waited until this step's went out.
    rows_from: int | None = None

    @property
    def asked_from(self) -> int:
        """From which length on the question tells; 0 where nothing was asked."""
        return self.question.base_len if self.question is not None else 0


class Answers:
    """What is still to be said. Whoever says something else to a session says this first."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        # Told of a session and its step whose answer could not be written, such as one whose rows
        # never came from the device.
        self.on_lost: Callable[[Session, int, Exception], None] = _unexpected
        self._waiting: list[Ended] = []
        self._steps: list[tuple[int, float]] = []
        self._at_once = False

    def __len__(self) -> int:
        return len(self._waiting)

    def stepped(self, items: int, seconds: float) -> None:
        """A step is over; it is counted with what is said of it."""
        self._steps.append((items, seconds))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What is `settled` meanwhile does not wait for another step."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def settled(self, wanted: bool) -> None:
        """Something was added behind its step; `wanted`: somebody waits for it."""
        if wanted or self._at_once:
            self.flush()

    def add(self, ended: Ended) -> None:
        self._waiting.append(ended)

    def flush(self) -> None:
        """Sends everything. Sessions that were closed meanwhile hear nothing more."""
        if self._waiting:
            self._say()
        while self._steps:
            self._metrics.step(*self._steps.pop())

    def _say(self) -> None:
        waiting, self._waiting = self._waiting, []
        sent: list[tuple[Ended, Kept | None]] = []
        links: set[Link] = set()
        opens = verifies = accepted = tokens = 0
        for ended in waiting:
            session, kept = ended.session, ended.kept
            if session.closed:
                continue
            try:
                if kept is not None and ended.answered is None:
                    session.answer = reply = target_pb2.TargetReply()
                    _write(reply.verdict, ended, kept)
                    session.link.send(reply)
                    links.add(session.link)
                    if ended.opening:
                        opens += 1
                    else:
                        verifies += 1
                    accepted += kept.accepted
                    tokens += len(kept.tokens)
                # Behind the verdict, which has the longer way: through the coordinator, to the
                # draft.
                if session.sink is not None and not ended.rows_sent:
                    ended.rows_sent = True
                    _send_missed(ended)
                    sent.append((ended, _send_rows(ended)))
                    if ended.question is not None:
                        session.sink.ask(ended.question, ended.answered or _unheard)
            except Exception as error:  # of the engine, which failed late: the others go on
                self.on_lost(session, ended.step.step_id, error)
        _hurry(sent)
        for link in links:
            link.hurry()
        _after_sending(sent)
        if tokens:
            self._metrics.verdicts(opens, verifies, accepted, tokens - accepted)


def _unheard(answer: Answer) -> None:
    """Nothing was wanted: the draft follows, that is all."""


def _unexpected(session: Session, step_id: int, error: Exception) -> None:
    raise error


def _write(verdict: target_pb2.Verdict, ended: Ended, kept: Outcome) -> None:
    """Filled in place, and only with what there is: every round waits for it."""
    session, step, result, base = ended.session, ended.step, ended.result, ended.base
    count = len(kept.tokens)
    new_len = base + count
    verdict.MergeFrom(session.blank)
    verdict.step_id, verdict.base_len, verdict.new_len = step.step_id, base, new_len
    verdict.width = step.width
    verdict.tokens.extend(kept.tokens)
    if kept.accepted:
        verdict.accepted = kept.accepted
    if kept.finish:
        verdict.finish = kept.finish
    _put_timings(verdict.timings, step)
    if session.sink is not None and not ended.rows_wait:
        start = session.rows_start if ended.opening else base - 1
        waiting = session.waiting_from if ended.rows_from is None else ended.rows_from
        start = start if waiting is None else min(start, waiting)
        verdict.rows_start, verdict.rows_count = start, new_len - 1 - start
    if session.spec.margins:
        verdict.margins.extend(result.margins[:count])
    if result.logprobs:
        verdict.logprobs.extend(map(_scored, result.logprobs[:count]))
    if ended.opening:
        verdict.prompt_logprobs.extend(map(_scored, session.prompt_scores))
        verdict.cached_tokens = session.cached
        session.prompt_scores.clear()
    if ended.proposal is not None:
        _put_proposal(verdict.proposal, ended.proposal, session, step.step_id, new_len)


def _put_timings(at: common_pb2.Timings, step: Step) -> None:
    started = step.received if step.started is None else step.started
    if started > step.received:
        at.queue_ns = int((started - step.received) * 1e9)
    at.compute_ns = int(step.compute_s * 1e9)
    if step.once_ns:
        at.once_ns = step.once_ns


def _put_proposal(
    at: common_pb2.Proposal, made: Made, session: Session, step_id: int, base_len: int
) -> None:
    at.MergeFrom(session.blank_proposal)
    at.step_id, at.base_len = step_id, base_len
    at.ids.extend(made.ids)
    if made.confidences:
        at.confidences.extend(made.confidences)
    if made.reason:
        at.reason = made.reason
    if made.source:
        at.source = made.source
    if made.compute_ns:
        at.timings.compute_ns = made.compute_ns
    if made.queue_ns:
        at.timings.queue_ns = made.queue_ns
    if made.once_ns:
        at.timings.once_ns = made.once_ns


def _scored(scored: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=scored.token,
        logprob=scored.logprob,
        rank=scored.rank,
        top=[common_pb2.TopLogprob(token_id=i, logprob=value) for i, value in scored.top],
    )


def _hurry(sent: Sequence[tuple[Ended, Kept | None]]) -> None:
    """Questions leave now, those of all sessions together."""
    for ended, _ in sent:
        if ended.question is not None and ended.session.sink is not None:
            ended.session.sink.hurry()


def _after_sending(sent: Sequence[tuple[Ended, Kept | None]]) -> None:
    """What nobody waits for."""
    for ended, kept in sent:
        session = ended.session
        if session.held is not None and ended.answered is not None:
            session.held.asked()
        if kept is not None:
            session.history.add(*kept)


def _send_missed(ended: Ended) -> None:
    """Rows of earlier steps whose tokens the draft is told of only now: it has dropped those that
    it was not asked about, or never had them."""
    session, asked = ended.session, ended.question
    if session.sink is None or asked is None or asked.base_len >= ended.base:
        return
    for start, rows in session.history.since(asked.base_len - 1):
        missed = rows[: max(0, ended.base - 1 - start)]
        if len(missed):
            session.sink.push(asked.step_id, start, missed)


def _send_rows(ended: Ended) -> Kept | None:
    """Pushes the rows of the session's part, except those that the draft already has; or not yet.
    Returns what is to be kept."""
    session, start = ended.session, ended.item.start
    if session.sink is None or (found := ended.result.late_rows) is None:
        return None
    step_id = ended.step.step_id
    skip = max(0, session.rows_start - start) if step_id == 0 else 0
    # Behind a stop the engine's rows are valid, but not part of the text: rows end at new_len - 1.
    kept = ended.kept
    end = None if kept is None else ended.base + len(kept.tokens) - 1 - start
    wanted, first = found()[skip:end], start + skip
    if not len(wanted):
        return None
    if ended.rows_wait:
        if session.waiting_from is None:
            session.waiting_from = first
        return first, wanted
    if session.waiting_from is not None:
        earlier = session.history.between(session.waiting_from, first)
        ended.rows_from, session.waiting_from = session.waiting_from, None
        if earlier is not None:
            session.sink.push(step_id, *earlier)
    session.sink.push(step_id, first, wanted)
    return first, wanted
