"""Proposals of a co-located drafter: asked for with a step, made on the engine's thread as soon as
the step's verdicts are decided, sent with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import Ask, Drafter, ItemResult, Proposed
from engine.kv.pool import PageTable
from specwire.errors import internal_error
from specwire.v1 import common_pb2
from target_svc.outcome import trim
from target_svc.sessions import OpenSpec, Session

log = logging.getLogger(__name__)

REASON_FAILED = "draft_failed"
REASON_K_LIMIT = "k_limit"


@dataclass(frozen=True, slots=True)
class Wish:
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
) -> list[common_pb2.Proposal | None]:
    """On the engine's thread. A proposal for each wish of a session that goes on; whatever becomes
    of it, the verdicts stand."""
    proposals: list[common_pb2.Proposal | None] = [None] * len(wishes)
    asks: dict[int, tuple[Ask, Wish]] = {}
    for index, (wish, result) in enumerate(zip(wishes, results, strict=True)):
        if wish is None or not result.tokens:
            continue
        kept = trim(result.tokens, result.accepted, wish.spec.stop_ids, wish.room)
        if kept.finish:
            continue
        # A block never has more rows than the tokens that may still come.
        k = min(wish.k, wish.spec.draft_tokens, wish.room - len(kept.tokens) - 1)
        if k < 1:
            proposals[index] = common_pb2.Proposal(reason=REASON_K_LIMIT)
        else:
            asks[index] = Ask(wish.table, kept.tokens[-1], k, wish.spec.sampling), wish
    if asks:
        for index, proposal in zip(asks, _ask(drafter, list(asks.values())), strict=True):
            proposals[index] = proposal
    return proposals


def _ask(drafter: Drafter, asks: Sequence[tuple[Ask, Wish]]) -> list[common_pb2.Proposal]:
    """One proposal each, whatever the drafter does: raise, answer for too few, name what is no
    token id."""
    began, once_before = time.perf_counter_ns(), drafter.once_ns
    try:
        answers = drafter.propose([ask for ask, _ in asks])
        made = [_made(*asked, answer) for asked, answer in zip(asks, answers, strict=True)]
    except Exception as bug:  # a drafter's failure is never the target's
        internal_error(log, f"the {drafter.method} drafter failed to propose", bug)
        made = [common_pb2.Proposal(reason=REASON_FAILED) for _ in asks]
    once_ns = drafter.once_ns - once_before
    took_ns = time.perf_counter_ns() - began
    spent = common_pb2.Timings(compute_ns=max(0, took_ns - once_ns), once_ns=once_ns)
    for proposal in made:
        proposal.timings.CopyFrom(spent)
    return made


def _made(ask: Ask, wish: Wish, answer: Proposed) -> common_pb2.Proposal:
    cut = REASON_K_LIMIT if ask.k < wish.k else ""
    return common_pb2.Proposal(
        ids=answer.ids, confidences=answer.confidences, reason=answer.reason or cut
    )
