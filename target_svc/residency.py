"""Which sessions have pages: admission and preemption.

Lower rank comes first: priority, then arrival. A session that needs a page and finds none takes
those of sessions that have finished or that nobody asked anything of for a while (a coordinator
that keeps still must not stop the others), then those of the sessions behind it, the last one
first. So the first session that has something to do always gets on, and those behind wait.

Pages change hands between steps only.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.api import Engine
from engine.errors import OutOfPages
from engine.kv.pool import PageTable
from specwire.errors import Reason, SpecwireError
from target_svc.metrics import Metrics
from target_svc.session_table import SessionTable
from target_svc.sessions import OpenSpec, Session
from target_svc.settings import TargetSettings
from target_svc.sharing import Sharing


class Residency:
    def __init__(
        self,
        engine: Engine,
        settings: TargetSettings,
        sessions: SessionTable,
        sharing: Sharing,
        metrics: Metrics,
    ) -> None:
        self._engine, self._max_waiting = engine, settings.max_waiting
        self._idle_s = settings.preempt_idle_ms / 1000
        self._sessions, self._sharing, self._metrics = sessions, sharing, metrics
        self._released: list[PageTable] = []
        self._arrivals = 0
        self._turns = 0

    # -- at any time -----------------------------------------------------------------------------

    def check_room(self, spec: OpenSpec) -> None:
        """Refuses a session that could never run, or that would have to wait in a full queue."""
        stats, needed = self._engine.stats(), self._pages(spec.limit_len)
        if needed > stats.total:
            raise SpecwireError(
                Reason.KV_PAGES_EXHAUSTED,
                f"prompt and max_new_tokens need {needed} KV pages; the target has {stats.total}",
                {"needed": str(needed), "total": str(stats.total)},
                retry_after_ms=0,
            )
        if len(self._sessions) < self._max_waiting:
            return
        waiting = [s for s in self._sessions if s.table is None and not s.preempted]
        # Those that came in this moment wait too, but not for pages: what is free may be for them.
        ahead = sum(self._pages(len(session.ids)) for session in waiting)
        free = stats.free + sum(len(table.pages) for table in self._released)
        if len(waiting) >= self._max_waiting and ahead + self._pages(len(spec.ids)) > free:
            text = f"{self._max_waiting} sessions already wait for KV pages"
            raise SpecwireError(Reason.QUEUE_FULL, text, {"limit": str(self._max_waiting)})

    def enter(self, session: Session) -> None:
        """Gives a new session its place."""
        self._arrivals += 1
        session.rank = session.spec.priority, self._arrivals
        self._sharing.find_parent(session)

    def release(self, session: Session) -> None:
        """The session is gone; a step may be running in its pages."""
        if session.table is not None:
            self._released.append(session.table)

    # -- between steps ---------------------------------------------------------------------------

    def free_released(self) -> None:
        for table in self._released:
            table.free()
        self._released.clear()

    def admit(self, ready: Iterable[Session], now: float) -> None:
        """Gives tables to sessions that have none, by rank.

        The first that does not fit holds the others back, or long ones would wait for ever.
        """
        waiting = sorted((s for s in ready if s.table is None), key=lambda s: s.rank)
        spare = self._spare() if waiting else 0
        for session in waiting:
            if self._sharing.waits(session):
                continue
            table = self._engine.allocate(0)
            prefix, start = self._sharing.prefix(session, table)
            needed = table.lacking(prefix, start, len(session.ids))
            if needed > spare and self._make_room(session, needed - spare, now):
                spare = self._spare()
                prefix, start = self._sharing.prefix(
                    session, table
                )  # it may have lost or gained pages
                needed = table.lacking(prefix, start, len(session.ids))
            if needed > spare:
                table.free()
                return
            self._sharing.begin(session, table, prefix, start)
            self.next_turn(session)
            spare -= needed + self._claim(session) - self._pages(len(session.ids))

    def reserve(self, session: Session, length: int, now: float) -> bool:
        """Pages for `length` positions, if need be those of sessions that come behind."""
        while not reserved(session, length):
            if self._trim(session):
                continue
            victims = self._victims(session, now)
            if not victims:
                return False
            self._preempt(victims[0])
        return True

    def reserve_most(self, session: Session, length: int) -> int:
        """As many of `length` positions as there are free pages for, at least those reserved."""
        page_tokens = self._engine.attention.page_tokens
        while not reserved(session, length):
            length = (length - 1) // page_tokens * page_tokens
        return length

    def next_turn(self, session: Session) -> None:
        self._turns += 1
        session.turn = self._turns

    # -- pages -----------------------------------------------------------------------------------

    def _pages(self, length: int) -> int:
        return -(-length // self._engine.attention.page_tokens)

    def _spare(self) -> int:
        """Free pages that nobody is about to take."""
        residents = [s.table for s in self._sessions if s.table is not None]
        held = sum(len(table.pages) for table in residents)
        claimed = sum(self._claim(s) for s in self._sessions if s.table is not None)
        return self._engine.stats().free - (claimed - held)

    def _claim(self, session: Session) -> int:
        """Pages that the session has or, unless it is at its end, is about to take: the rest of
        its prompt's and another one."""
        held = len(session.table.pages) if session.table is not None else 0
        if session.finished:
            return held
        soon = max(held, self._pages(len(session.ids)))
        return soon + int(self._pages(session.spec.limit_len) > soon)

    def _trim(self, session: Session) -> bool:
        """Frees what others hold and do not use, such as the room of rejected drafts."""
        before = self._engine.stats().free
        for other in self._sessions:
            if other is not session and other.table is not None and not other.running:
                other.table.trim()
        return self._engine.stats().free > before

    def _victims(self, session: Session, now: float) -> list[Session]:
        """Whose pages the session may take: first of those that have no use for them."""

        def unused(other: Session) -> bool:
            idle = other.finished or now - other.idle_since >= self._idle_s
            return other.step is None and other.held is None and idle

        others = [
            other
            for other in self._sessions
            if other is not session and other.table is not None and not other.running
        ]
        victims = [other for other in others if unused(other) or other.rank > session.rank]
        return sorted(victims, key=lambda other: (unused(other), other.rank), reverse=True)

    def _make_room(self, session: Session, missing: int, now: float) -> bool:
        """Takes pages from those behind, if theirs are enough; whether anybody gave."""
        victims = self._victims(session, now)
        if sum(self._claim(victim) for victim in victims) < missing:
            return False
        wanted = self._spare() + missing
        for victim in victims:
            if self._spare() >= wanted:
                break
            self._preempt(victim)
        return True

    def _preempt(self, session: Session) -> None:
        """Takes a session's pages; it keeps its ids and runs again what it needs."""
        assert session.table is not None and not session.running
        session.table.free()
        session.table = None
        self._metrics.preempted()


def reserved(session: Session, length: int) -> bool:
    """Whether there were free pages for `length` positions."""
    assert session.table is not None
    try:
        session.table.reserve(length)
    except OutOfPages:
        return False
    return True
