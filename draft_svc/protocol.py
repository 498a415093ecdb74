"""The rules of the draft link: what each item does to a session. Runs on the event loop, holds no
gRPC.

An item is answered through the `Reply` it came with; an item that is wrong fails alone, as
`DraftRefused`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from draft_svc import replies
from draft_svc.coverage import Coverage
from draft_svc.jobs import CloseJob, Handle, OpenJob
from draft_svc.methods.base import MethodInfo
from draft_svc.metrics import Metrics
from draft_svc.requests import checked_ids, sampling_of, takes_projected
from draft_svc.rounds import Rounds
from draft_svc.sessions import Reply, Session, SessionTable
from draft_svc.worker import Worker
from specwire.errors import Reason, SpecwireError
from specwire.rpc import HEARTBEAT_SESSIONS, check_heartbeat, decode_ids
from specwire.v1 import draft_pb2, target_pb2


@dataclass(frozen=True, slots=True)
class Limits:
    """What sessions may take; from the settings."""

    max_sessions: int
    rows_wait_ms: int
    rows_buffer_bytes: int
    lease_ms: int
    max_lease_ms: int


@dataclass(slots=True)
class Protocol:
    """All sessions of one service."""

    worker: Worker
    default_method: str
    limits: Limits
    metrics: Metrics
    sessions: SessionTable = field(default_factory=SessionTable)
    draining: bool = False
    rounds: Rounds = field(init=False)

    def __post_init__(self) -> None:
        wait_ms = self.limits.rows_wait_ms
        self.rounds = Rounds(self.worker, self.sessions, wait_ms, self.metrics)

    def handle(self, item: draft_pb2.DraftItem, reply: Reply) -> None:
        """Carries out one item. Never raises for what a peer sent."""
        kind = item.WhichOneof("item")
        try:
            if kind == "open":
                self._open(item.open, reply)
            elif kind == "advance":
                self.rounds.advance(item.advance, reply)
            elif kind == "close":
                self._close_item(item.close, reply)
            elif kind == "heartbeat":
                reply(self._heartbeat(item.heartbeat))
                check_heartbeat(len(item.heartbeat.sessions))
            else:
                accepted = "one of open, advance, close, heartbeat"
                raise SpecwireError.field("item", "empty or unknown", accepted)
        except SpecwireError as error:
            self.metrics.event(error.reason.value.lower())
            reply(replies.refused(item, error))

    def asked(self, target_incarnation: int, advance: draft_pb2.Advance, reply: Reply) -> None:
        """An Advance of the target itself, about a session that was opened for it. Never raises
        for what a peer sent."""
        try:
            self.rounds.advance(advance, reply, target_incarnation)
        except SpecwireError as error:
            self.metrics.event(error.reason.value.lower())
            reply(replies.refusal(advance.key, advance.step_id, error))

    def _open(self, request: draft_pb2.OpenDraft, reply: Reply) -> None:
        known = self.sessions.any_generation(request.key)
        if known is not None and known.key.generation > request.key.generation:
            text = "a newer generation of this session is open"
            newest = str(known.key.generation)
            raise SpecwireError(Reason.STALE_STEP, text, {"generation": newest})
        if known is not None and known.key.generation == request.key.generation:
            self._open_again(known, reply)
            return
        session, open_job = self._new_session(request, reply, replaces=known is not None)
        if known is not None:
            self.end(known, "replaced")
        self.sessions.add(session)
        self.worker.put(open_job)

    def _open_again(self, session: Session, reply: Reply) -> None:
        self.metrics.event("repeated_open")
        session.open_reply = reply
        session.renew(_now())
        if session.opened:
            reply(replies.opened(session))

    def _new_session(
        self, request: draft_pb2.OpenDraft, reply: Reply, *, replaces: bool
    ) -> tuple[Session, OpenJob]:
        info = self._method(request)
        ids = checked_ids(decode_ids(request.ids), "ids", info)
        if not ids:
            raise SpecwireError.field("ids", "empty", "at least one token")
        sampling = sampling_of(request.sampling, info)
        projected = takes_projected(request, info)
        if self.draining:
            raise SpecwireError(Reason.DRAINING, "this draft service is shutting down")
        if not replaces and len(self.sessions) >= self.limits.max_sessions:
            text = f"{self.limits.max_sessions} sessions are open already"
            raise SpecwireError(Reason.QUEUE_FULL, text)
        now = _now()
        deadline_at = now + request.deadline_ms / 1000 if request.deadline_ms else None
        buffer_bytes = self.limits.rows_buffer_bytes
        session = Session(
            key=request.key,
            info=info,
            handle=Handle(info.method),
            length=len(ids),
            k_limit=min(request.max_draft_tokens or info.max_draft_tokens, info.max_draft_tokens),
            lease_ms=self._lease(request.lease_ms),
            expires_at=now,
            deadline_at=deadline_at,
            target_incarnation=request.target_incarnation,
            coverage=Coverage(len(ids), buffer_bytes) if info.rows is not None else None,
            open_reply=reply,
            projected=projected,
        )
        session.renew(now)

        def done(error: SpecwireError | None, have_rows: tuple[int, int]) -> None:
            self._opened(session, error, have_rows)

        return session, OpenJob(session.handle, ids, sampling, request.target_fingerprint, done)

    def _method(self, request: draft_pb2.OpenDraft) -> MethodInfo:
        if not self.worker.ready:
            raise SpecwireError(Reason.ENGINE_DOWN, "the drafters of this service are not loaded")
        infos = self.worker.infos
        info = infos.get(request.method or self.default_method)
        if info is None:
            accepted = ", ".join(infos)
            raise SpecwireError.field("method", request.method, accepted, Reason.METHOD_UNKNOWN)
        draft, target = info.target_fingerprint, request.target_fingerprint
        if draft and target and draft != target:
            text = f"draft {info.name} was made for target {draft}, not for {target}"
            values = {"field": "target_fingerprint", "draft": draft, "target": target}
            raise SpecwireError(Reason.MODEL_MISMATCH, text, values)
        return info

    def _lease(self, wanted_ms: int) -> int:
        return min(wanted_ms or self.limits.lease_ms, self.limits.max_lease_ms)

    def _opened(
        self, session: Session, error: SpecwireError | None, have_rows: tuple[int, int]
    ) -> None:
        if not self.sessions.holds(session):
            self.metrics.event("late_open")
            return
        session.opened = True
        session.renew(_now())
        if error is None:
            start, end = have_rows
            if session.coverage is not None and start < end:
                session.coverage.restore(start, end)
                self.metrics.cached(session.info.method, end - start)
            session.open_reply(replies.opened(session))
            return
        self.metrics.event(error.reason.value.lower())
        self.end(session, "open_failed")
        session.open_reply(replies.refusal(session.key, 0, error))

    def _close_item(self, request: target_pb2.CloseSession, reply: Reply) -> None:
        session = self.sessions.any_generation(request.key)
        if session is not None and session.key.generation <= request.key.generation:
            self.end(session, "closed")
        reply(replies.closed(request.key))

    def _heartbeat(self, request: target_pb2.Heartbeat) -> draft_pb2.DraftReply:
        now, unknown = _now(), []
        for key in request.sessions[:HEARTBEAT_SESSIONS]:
            session = self.sessions.find(key)
            if session is None:
                unknown.append(key)
                continue
            if request.lease_ms:
                session.lease_ms = self._lease(request.lease_ms)
            session.renew(now)
        return replies.heartbeat(unknown)

    def end(self, session: Session, cause: str) -> None:
        """Ends a session for good; a step that runs finishes unheard."""
        self.metrics.event(cause)
        if session.step is not None and session.step.timer is not None:
            session.step.timer.cancel()
        self.sessions.remove(session)
        self.worker.put(CloseJob(session.handle))

    def expire(self) -> None:
        """Ends the sessions whose lease ran out. Called regularly."""
        for session in self.sessions.expired(_now()):
            self.end(session, "lease_expired")


def _now() -> float:
    return time.monotonic()
