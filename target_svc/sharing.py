"""What a session begins with: pages of the prefix cache, or of the session that it is a fork of."""

from __future__ import annotations

from engine.api import Engine
from engine.kv.pool import PageTable
from engine.kv.prefix import Prefix
from target_svc.metrics import Metrics
from target_svc.session_table import SessionTable
from target_svc.sessions import Session
from target_svc.shapes import Shapes


class Sharing:
    def __init__(
        self, engine: Engine, sessions: SessionTable, shapes: Shapes, metrics: Metrics
    ) -> None:
        self._page_tokens = engine.attention.page_tokens
        self._sessions, self._shapes, self._metrics = sessions, shapes, metrics

    def find_parent(self, session: Session) -> None:
        """Keeps the parent of a fork in mind. It must have come before: none waits for a later
        one, so no two wait for each other."""
        if session.spec.fork_of is not None:
            parent = self._sessions.get(session.spec.fork_of)
            if parent is not None and self._same_prompt(parent, session):
                session.parent = parent

    def waits(self, session: Session) -> bool:
        """The parent's prompt is being run, for both."""
        parent = session.parent
        return parent is not None and parent.opening and not parent.closed

    def prefix(self, session: Session, table: PageTable) -> tuple[Prefix, int]:
        """The pages that the session may begin with, and how many positions of them."""
        shapes, prefix, length = self._shapes, Prefix(), 0
        if session.spec.takes_prefix:
            limit = shapes.reusable(session, same_prompt=False)
            prefix = table.find(shapes.root(session), session.ids, limit)
            length = shapes.start_at(session, len(prefix.pages) * self._page_tokens)
        parent = session.parent
        # A parent that is gone or rolled back has less to share, or nothing: an ordinary open then.
        if parent is not None and parent.table is not None and not parent.closed:
            shared = shapes.reusable(session, same_prompt=True)
            held = min(parent.kv, parent.prompt_end)
            shared = shared if shared <= held else shapes.start_at(session, held)
            if shared > length:
                prefix, length = parent.table.shared(), shared
        return prefix, self._with_rows(session, length)

    def begin(self, session: Session, table: PageTable, prefix: Prefix, start: int) -> None:
        """Gives the session its table, with the first `start` positions of `prefix` in it."""
        table.adopt(prefix, start)
        session.table = table
        if session.computed is None:
            session.computed = start
            session.rows_start = max(session.spec.rows_from, start)
            session.cached = min(start, session.spec.prompt_len)
            session.parent = None
            self._metrics.prompt(session.cached, len(session.ids) - start)
        elif session.opening and session.sink is None:
            session.computed = max(session.computed, start)

    def publish(self, session: Session) -> None:
        """Lets others find what the session has computed."""
        table = session.table
        if not session.spec.publishes or table is None:
            return
        if table.length < self._page_tokens * (len(table.names) + 1):
            return  # no page more is full
        root, end = self._shapes.root(session), self._shapes.publishable(session)
        table.publish(root, session.ids, end)

    def _same_prompt(self, one: Session, other: Session) -> bool:
        end = one.spec.prompt_len
        return (
            end == other.spec.prompt_len
            and one.spec.ids[:end] == other.spec.ids[:end]
            and self._shapes.root(one) == self._shapes.root(other)
        )

    def _with_rows(self, session: Session, length: int) -> int:
        """Where to begin for the rows that the draft lacks: at most `row_window` tokens earlier."""
        if session.sink is None or not session.opening:
            return length
        if session.computed is not None:  # its rows must go on where they stopped
            return self._shapes.start_at(session, min(length, session.computed))
        earliest = max(0, length - session.spec.row_window)
        wanted = max(session.spec.rows_from, earliest)
        if wanted >= length:
            return length
        start = self._shapes.start_at(session, wanted)
        return start if start >= earliest else self._shapes.start_behind(session, wanted, length)
