"""Proposals of a co-located drafter: asked for with a step, made on the engine's thread as soon as
the step's verdicts are decided, sent with them."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from engine.api import Ask, Drafter, ItemResult, Proposed
from engine.kv.pool import PageTable
from specwire.errors import internal_error
from target_svc.outcome import trim
from target_svc.sessions import OpenSpec, Session

log = logging.getLogger(__name__)

REASON_FAILED = "draft_failed"
REASON_K_LIMIT = "k_limit"
REASON_LATE = "late"


class Made(NamedTuple):
    """A proposal as the drafter made it, fit for the wire, and what the call that made it took."""

    ids: Sequence[int] = ()
    confidences: Sequence[float] = ()
    reason: str = ""
    compute_ns: int = 0
    once_ns: int = 0
    # Of a draft service: the rest of the time until its answer was here, and who proposed.
    queue_ns: int = 0
    source: str = ""


class Wish(NamedTuple):
    """What a session asked for with the step that runs: `k` tokens behind its verdict. Taken when
    the step is built; `room` is how many tokens may still be committed."""

    table: PageTable
    spec: OpenSpec
    k: int
    room: int


def wish_of(session: Session) -> Wish | None:
    """Of a session whose step draws in the batch that is built; the last step of a free run
    proposes, or each of its steps."""
    step = session.step
    if step is None or not step.then_propose or session.table is None:
        return None
    if step.free_run and not step.drafts_ahead:
        return None
    return Wish(session.table, session.spec, step.then_propose, session.remaining)


def propose(
    drafter: Drafter, wishes: Sequence[Wish | None], results: Sequence[ItemResult]
) -> list[Made | None]:
    """On the engine's thread. A proposal for each wish of a session that goes on; whatever becomes
    of it, the verdicts stand."""
    proposals: list[Made | None] = [None] * len(wishes)
    at, asks, wanted = [], [], []
    for index, (wish, result) in enumerate(zip(wishes, results, strict=True)):
        if wish is None or not result.tokens:
            continue
        table, spec, most, room = wish
        kept, _, finish = trim(result.tokens, result.accepted, spec.stop_ids, room)
        if finish:
            continue
        # A block never has more rows than the tokens that may still come.
        k = min(most, spec.draft_tokens, room - len(kept) - 1)
        if k < 1:
            proposals[index] = Made(reason=REASON_K_LIMIT)
        else:
            at.append(index)
            asks.append(Ask(table, kept[-1], k, spec.sampling))
            wanted.append(most)
    if asks:
        for index, proposal in zip(at, _ask(drafter, asks, wanted), strict=True):
            proposals[index] = proposal
    return proposals


def _ask(drafter: Drafter, asks: list[Ask], wanted: list[int]) -> list[Made]:
    """One proposal each, whatever the drafter does: raise, answer for too few, name what is no
    token id."""
    began, once_before = time.perf_counter_ns(), drafter.once_ns
    try:
        answers = [_checked(answer) for answer in drafter.propose(asks)]
        once_ns = drafter.once_ns - once_before
        spent_ns = max(0, time.perf_counter_ns() - began - once_ns)
        return [
            Made(ids, confidences, reason or _cut(ask, k), spent_ns, once_ns)
            for ask, k, (ids, confidences, reason) in zip(asks, wanted, answers, strict=True)
        ]
    except Exception as bug:  # a drafter's failure is never the target's
        internal_error(log, f"the {drafter.method} drafter failed to propose", bug)
    once_ns = drafter.once_ns - once_before
    spent_ns = max(0, time.perf_counter_ns() - began - once_ns)
    return [Made((), (), REASON_FAILED, spent_ns, once_ns)] * len(asks)


def _checked(answer: Proposed) -> tuple[Sequence[int], Sequence[float], str]:
    """As it goes over the wire. Raises where something is no uint32, no number or no text."""
    ids, confidences, reason = answer
    reason.encode()
    return array("I", ids), array("f", confidences) if len(confidences) else (), reason


def _cut(ask: Ask, k: int) -> str:
    return REASON_K_LIMIT if ask.k < k else ""
