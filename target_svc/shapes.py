"""In which shape each position is computed, and so which cached pages a session may take.

Where the engine's rows are independent, KV of an `exact` session is the same bits however it was
computed: every page of accepted tokens is published for all of them. Where they are not,
an `exact` session computes prompt tokens in chunks cut on an absolute grid, the last one at the
prompt's end, and later tokens in blocks of one width. It publishes and takes whole chunks of the
grid only, for those are cut alike in every prompt; and after preemption it runs again what it ran
before. `fast` sessions promise less and have pages of their own: an engine
may compute them by other kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import Engine
from engine.kv.prefix import chain_root
from target_svc.sessions import Session


class Shapes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        parts = (engine.info.fingerprint, engine.info.numerics)
        self._roots = {exact: chain_root(*parts, str(exact)) for exact in (False, True)}

    def fixed(self, session: Session) -> bool:
        """Whether the session's positions must keep the shape that first computed them."""
        return session.spec.exact and not self._engine.rows_independent

    def root(self, session: Session) -> bytes:
        """Names begin here; sessions with different roots never share published pages."""
        return self._roots[session.spec.exact]

    def edge(self, length: int) -> int:
        """The last edge of the grid that is not behind `length`."""
        edge = 0
        while (behind := edge + self._engine.chunk_limit(edge, exact=True)) <= length:
            edge = behind
        return edge

    def publishable(self, session: Session) -> int:
        """Up to which position the session's pages may be found by others."""
        accepted = min(session.kv, len(session.ids) - 1)
        if not self.fixed(session):
            return accepted
        return self.edge(min(accepted, session.prompt_end))

    def reusable(self, session: Session, same_prompt: bool) -> int:
        """How much KV of others the session may use; its next token always runs.

        `same_prompt`: of a session whose prompt is the same to its end, so that the last chunk is
        cut alike too; otherwise of the prefix cache.
        """
        needed = len(session.ids) - 1
        if not self.fixed(session):
            return min(needed, session.prompt_end) if same_prompt else needed
        if same_prompt and needed >= session.prompt_end:
            return session.prompt_end
        return self.edge(min(needed, session.prompt_end))

    def start_at(self, session: Session, position: int) -> int:
        """Where a chunk may begin, at or before `position`."""
        return self.edge(position) if self.fixed(session) else position

    def start_behind(self, session: Session, position: int, end: int) -> int:
        """Where a chunk may begin, at or behind `position`; `end` is allowed."""
        if not self.fixed(session):
            return position
        edge = self.edge(position)
        return (
            edge
            if edge == position
            else min(end, edge + self._engine.chunk_limit(edge, exact=True))
        )

    def chunk(self, session: Session, budget: int) -> int:
        """Tokens of the session's next prompt chunk; `budget` counts where any cut will do."""
        start, exact = session.kv, session.spec.exact
        # A session that has opened needs everything before its anchor; the block does the rest.
        end = len(session.ids) - (0 if session.opening else 1)
        if not self.fixed(session):
            assert session.computed is not None
            if session.opening and start < session.computed:
                end = session.computed
            return min(end - start, self._engine.chunk_limit(start, exact), budget)
        if start < session.prompt_end:
            whole = session.spec.prompt_len - start
            return min(whole, self._engine.chunk_limit(start, exact=True))
        return min(end - start, self._engine.block_limit(start, exact=True))

    def chunk_ids(self, session: Session) -> Sequence[int]:
        """What chunks are cut from. Behind a rollback into the prompt, what is left of a chunk runs
        together with its old rest, as it did at first."""
        if self.fixed(session) and session.kv < session.prompt_end:
            return session.spec.ids
        return session.ids

    def end_chunk(self, session: Session, start: int) -> None:
        """Forgets the old rest of a chunk that began at `start`."""
        if self.fixed(session) and start < session.prompt_end < session.kv:
            assert session.table is not None
            session.table.truncate(session.prompt_end)
