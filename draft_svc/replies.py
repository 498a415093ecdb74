"""Replies of the draft link, built in one place."""

from __future__ import annotations

import time
from collections.abc import Iterable

from draft_svc.jobs import Computed
from draft_svc.methods.base import REASON_K_LIMIT, Draft
from draft_svc.sessions import Session, Step
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2, draft_pb2, target_pb2


def opened(session: Session) -> draft_pb2.DraftReply:
    have = session.coverage.end if session.coverage is not None else 0
    return draft_pb2.DraftReply(opened=draft_pb2.DraftOpened(key=session.key, have_rows=have))


def closed(key: common_pb2.SessionKey) -> draft_pb2.DraftReply:
    return draft_pb2.DraftReply(closed=draft_pb2.DraftClosed(key=key))


def heartbeat(unknown: Iterable[common_pb2.SessionKey]) -> draft_pb2.DraftReply:
    return draft_pb2.DraftReply(heartbeat_ack=target_pb2.HeartbeatAck(unknown=unknown))


def proposal(
    key: common_pb2.SessionKey, step: Step, draft: Draft, computed: Computed | None
) -> draft_pb2.DraftReply:
    """The answer of a step; without `computed` nothing ran, and the time was spent waiting."""
    if computed is None:
        waited = time.monotonic_ns() - step.arrived_ns
        timings = common_pb2.Timings(queue_ns=waited)
    else:
        worked, once = computed.compute_ns, computed.once_ns
        waited = max(time.monotonic_ns() - step.arrived_ns - worked - once, 0)
        timings = common_pb2.Timings(queue_ns=waited, compute_ns=worked, once_ns=once)
    reason = draft.reason or (REASON_K_LIMIT if step.k_cut else "")
    return draft_pb2.DraftReply(
        proposal=common_pb2.Proposal(
            key=key,
            step_id=step.step_id,
            base_len=step.length,
            ids=draft.ids,
            confidences=draft.confidences,
            timings=timings,
            reason=reason,
            source=draft.source,
        )
    )


def refusal(key: common_pb2.SessionKey, step_id: int, error: SpecwireError) -> draft_pb2.DraftReply:
    have = error.metadata.get("have_len", "0") if error.reason is Reason.NEED_TOKENS else "0"
    return draft_pb2.DraftReply(
        refused=draft_pb2.DraftRefused(
            key=key, step_id=step_id, error=error.to_item(), have_len=int(have)
        )
    )


def refused(item: draft_pb2.DraftItem, error: SpecwireError) -> draft_pb2.DraftReply:
    """The refusal of an item that carries a key, or of one that is malformed and carries none."""
    if item.HasField("advance"):
        return refusal(item.advance.key, item.advance.step_id, error)
    if item.HasField("open"):
        return refusal(item.open.key, 0, error)
    return refusal(common_pb2.SessionKey(), 0, error)
