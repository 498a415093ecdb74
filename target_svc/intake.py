"""What arrives on a link: sessions by generation, steps by id, leases. One bad item fails alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from specwire.errors import Reason, SpecwireError
from specwire.rpc import HEARTBEAT_SESSIONS, check_heartbeat
from specwire.v1 import common_pb2, target_pb2
from target_svc.decode import Limits, check_asking, key_of, key_to_wire, open_spec
from target_svc.features import FeatureExporter
from target_svc.metrics import Metrics
from target_svc.outcome import usable_draft
from target_svc.rows import RowHistory
from target_svc.scheduler import Scheduler
from target_svc.sessions import Key, Link, Session, Step

_LAST_STEP = 2**32 - 1
_LONGEST_WAIT_US = 10_000_000  # for a proposal; the lease runs on meanwhile


class Intake:
    def __init__(
        self,
        scheduler: Scheduler,
        exporter: FeatureExporter,
        limits: Limits,
        row_history: int,
        metrics: Metrics,
    ) -> None:
        self._scheduler, self._exporter, self._limits = scheduler, exporter, limits
        self._row_history, self._metrics = row_history, metrics
        self._now = asyncio.get_running_loop().time
        self.draining = False

    def take(self, link: Link, items: Sequence[target_pb2.TargetItem]) -> None:
        """Handles the items of one frame in order, behind the answers to what came before."""
        self._scheduler.flush()
        for item in items:
            kind = item.WhichOneof("item")
            try:
                if kind == "verify":
                    self._verify(link, item.verify)
                elif kind == "open":
                    self._open(link, item.open)
                elif kind == "close":
                    self._close(link, item.close)
                elif kind == "heartbeat":
                    self._heartbeat(link, item.heartbeat)
                elif kind == "export_rows":
                    self._export_rows(link, item.export_rows)
                else:
                    self._metrics.dropped("empty_item")
            except SpecwireError as error:
                self._refuse(link, item, error)

    def _refuse(self, link: Link, item: target_pb2.TargetItem, error: SpecwireError) -> None:
        self._metrics.refused(error.reason)
        body = getattr(item, item.WhichOneof("item") or "close")
        refused = target_pb2.TargetRefused(
            key=getattr(body, "key", None),
            step_id=getattr(body, "step_id", 0),
            error=error.to_item(),
        )
        link.send(target_pb2.TargetReply(refused=refused))

    def _find(self, link: Link, key: Key) -> Session | None:
        """The session, from now on answering on this link; None when the item is outdated."""
        session = self._scheduler.sessions.named(key)
        if session is None or session.key.generation < key.generation:
            raise SpecwireError(Reason.SESSION_UNKNOWN, "this target has no such session")
        if session.key.generation > key.generation:
            self._metrics.dropped("stale_generation")
            return None
        session.link = link
        session.renew(self._now())
        return session

    def _open(self, link: Link, request: target_pb2.OpenTarget) -> None:
        key = key_of(request.key)
        sessions = self._scheduler.sessions
        known = sessions.named(key)
        if known is not None and known.key.generation == key.generation:
            known.link = link
            known.renew(self._now())
            self._repeat(known, 0)
            return
        if sessions.was_closed(key) or (
            known is not None and known.key.generation > key.generation
        ):
            self._metrics.dropped("stale_generation")
            return
        if self.draining:
            raise SpecwireError(Reason.DRAINING, "this target is shutting down")
        if self._scheduler.engine_down:
            raise SpecwireError(Reason.ENGINE_DOWN, "this target's engine has failed")
        if known is not None:
            self._metrics.dropped("replaced")
            self._scheduler.remove(known)
        self._scheduler.add(self._new_session(link, key, request))

    def _new_session(self, link: Link, key: Key, request: target_pb2.OpenTarget) -> Session:
        spec = open_spec(request, self._limits)
        self._scheduler.check_room(spec)
        now = self._now()
        address = request.push_to.address
        return Session(
            key=key,
            spec=spec,
            link=link,
            ids=list(spec.ids),
            history=RowHistory(self._row_history),
            lease_s=spec.lease_s,
            lease_until=now + spec.lease_s,
            sink=self._exporter.open(address, key) if spec.taps else None,
            prompt_end=spec.prompt_len,
            step=Step(
                step_id=0,
                base_len=len(spec.ids),
                draft=[],
                free_run=spec.free_run,
                deadline=self._deadline(request.deadline_ms),
                received=time.perf_counter(),
                then_propose=spec.then_propose,
            ),
        )

    def _deadline(self, remaining_ms: int) -> float | None:
        return self._now() + remaining_ms / 1000 if remaining_ms else None

    def _verify(self, link: Link, request: target_pb2.Verify) -> None:
        session = self._find(link, key_of(request.key))
        if session is None or self._repeat(session, request.step_id):
            return
        if request.then_propose:
            check_asking(request, session.spec.draft_tokens > 0, session.sink is not None)
        elif request.drafts_ahead:
            accepted = "false where then_propose is 0"
            raise SpecwireError.field("drafts_ahead", True, accepted)
        if not request.base_len:
            raise SpecwireError.field("base_len", 0, "1 to the committed length")
        draft, cause = usable_draft(
            request.draft_ids, self._limits.vocab_size, self._limits.max_draft_tokens
        )
        if cause:
            self._metrics.dropped(cause, len(request.draft_ids) - len(draft))
        step = Step(
            step_id=request.step_id,
            base_len=request.base_len,
            draft=draft,
            # The steps of a free run are numbered on, and a step id has an end.
            free_run=min(request.free_run, _LAST_STEP - request.step_id),
            deadline=self._deadline(request.deadline_ms),
            received=time.perf_counter(),
            then_propose=min(request.then_propose, self._limits.max_draft_tokens),
            drafts_ahead=request.drafts_ahead,
            draft_wait_us=min(request.draft_wait_us, _LONGEST_WAIT_US),
        )
        self._scheduler.submit(session, step)

    def _repeat(self, session: Session, step_id: int) -> bool:
        """Whether this step was seen before.

        A lower one is dropped; an equal one is answered again, or joins the running one.
        """
        if step_id == session.done_step and session.answer is not None:
            self._metrics.dropped("repeated_step")
            session.link.send(session.answer)
            return True
        current = session.step
        if current is None and session.next is None and step_id > session.done_step:
            return False
        # A free run's step that has not begun gives way to whatever was asked for.
        begun = current is not None and (current.asked or session.running)
        seen = [session.done_step]
        seen += [current.step_id] if current is not None and begun else []
        seen += [session.next.step_id] if session.next is not None else []
        if step_id > max(seen):
            return False
        self._metrics.dropped("repeated_step" if step_id in seen else "stale_step")
        return True

    def _export_rows(self, link: Link, request: target_pb2.ExportRows) -> None:
        """Sends the kept rows again, under the latest step's id. What is older is gone; where some
        of that was asked for, a refusal names what was sent instead. From beyond the session's end
        on none are wanted any more."""
        session = self._find(link, key_of(request.key))
        if session is None:
            return
        wanted, first = getattr(request, "from"), len(session.ids) - 1
        if session.spec.taps and wanted >= session.spec.limit_len:
            session.drop_rows()
            return
        if session.sink is None:
            text = "no rows of the session are wanted any more, since an ExportRows said so"
            if not session.spec.taps:
                text = "the session was opened without push_to"
            raise SpecwireError(Reason.ROWS_REFUSED, text)
        for start, rows in session.history.since(wanted):
            session.sink.push(max(0, session.done_step), start, rows)
            first = min(first, start)
        if wanted < first and not session.opening:
            end = max(first, session.history.end)
            text = f"rows from {wanted} on: only [{first}, {end}) are kept, and were sent"
            known = {"from": str(wanted), "kept_from": str(first), "kept_to": str(end)}
            raise SpecwireError(Reason.ROWS_REFUSED, text, known)

    def _close(self, link: Link, request: target_pb2.CloseSession) -> None:
        key = key_of(request.key)
        session = self._scheduler.sessions.get(key)
        if session is not None:
            self._scheduler.remove(session)
        elif self._scheduler.sessions.named(key) is not None:
            self._metrics.dropped("stale_generation")
        self._scheduler.sessions.remember_closed(key)
        closed = target_pb2.TargetClosed(key=key_to_wire(key))
        link.send(target_pb2.TargetReply(closed=closed))

    def _heartbeat(self, link: Link, request: target_pb2.Heartbeat) -> None:
        """Renews leases. The replies of the listed sessions go to this link from now on."""
        unknown: list[common_pb2.SessionKey] = []
        for wire_key in request.sessions[:HEARTBEAT_SESSIONS]:
            key = Key(wire_key.coordinator, wire_key.session_id, wire_key.generation)
            session = self._scheduler.sessions.get(key)
            if session is None:
                unknown.append(wire_key)
                continue
            session.link = link
            session.renew(self._now(), request.lease_ms / 1000)
        ack = target_pb2.HeartbeatAck(unknown=unknown)
        link.send(target_pb2.TargetReply(heartbeat_ack=ack))
        check_heartbeat(len(request.sessions))
