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
        began, once_before = time.perf_counter_ns(), drafter.once_ns
        proposed = _ask(drafter, [ask for ask, _ in asks.values()])
        once_ns = drafter.once_ns - once_before
        took_ns = time.perf_counter_ns() - began
        spent = common_pb2.Timings(compute_ns=took_ns - once_ns, once_ns=once_ns)
        for (index, (ask, wish)), answer in zip(asks.items(), proposed, strict=True):
            cut = REASON_K_LIMIT if ask.k < wish.k else ""
            proposals[index] = common_pb2.Proposal(
                ids=answer.ids,
                confidences=answer.confidences,
                timings=spent,
                reason=answer.reason or cut,
            )
    return proposals


def _ask(drafter: Drafter, asks: Sequence[Ask]) -> list[Proposed]:
    try:
        return drafter.propose(asks)
    except Exception as bug:  # a drafter's failure is never the target's
        internal_error(log, f"the {drafter.method} drafter failed to propose", bug)
        return [Proposed(reason=REASON_FAILED)] * len(asks)
