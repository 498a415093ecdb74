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
    # Filled in place, and only with what there is: every round waits for it.
    reply = draft_pb2.DraftReply()
    made = reply.proposal
    made.key.CopyFrom(key)
    made.step_id, made.base_len = step.step_id, step.length
    made.ids.extend(draft.ids)
    if draft.confidences:
        made.confidences.extend(draft.confidences)
    if reason := draft.reason or (REASON_K_LIMIT if step.k_cut else ""):
        made.reason = reason
    if draft.source:
        made.source = draft.source
    waited, timings = time.monotonic_ns() - step.arrived_ns, made.timings
    if computed is not None:
        worked, once = computed.compute_ns, computed.once_ns
        waited = max(waited - worked - once, 0)
        timings.compute_ns, timings.once_ns = worked, once
    timings.queue_ns = waited
    return reply


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
