"""Ready sessions into the items of one engine step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from engine.api import Engine, Item
from target_svc.metrics import Metrics
from target_svc.residency import Residency
from target_svc.sessions import Session, Step
from target_svc.shapes import Shapes


class BatchBuilder:
    def __init__(
        self,
        engine: Engine,
        chunk_tokens: int,
        shapes: Shapes,
        residency: Residency,
        metrics: Metrics,
        draft_all: bool = True,
    ) -> None:
        """`draft_all`: every session's steps write the context of a co-located drafter, not only
        those of sessions that were opened for it."""
        self._draft_all = draft_all
        self._engine, self._chunk_tokens, self._metrics = engine, chunk_tokens, metrics
        self._shapes, self._residency = shapes, residency

    def build(self, ready: Iterable[Session], now: float) -> list[tuple[Session, Item]]:
        """All waiting verify blocks, and prompt chunks up to the budget.

        So a long prompt never stalls those who decode. Pages are taken in the order of rank: who
        comes first may take them from those behind.
        """
        resident = [session for session in ready if session.table is not None]
        chunks = self._chunks([session for session in resident if session.filling])
        batch: list[tuple[Session, Item]] = []
        for session in sorted(resident, key=lambda s: s.rank):
            if session.table is None:
                continue  # it gave its pages away just now
            if not session.filling:
                item = self._block(session, session.step, now)
            elif session in chunks:
                item = self._chunk(session, chunks[session], now)
            else:
                continue
            if item is None:
                continue
            assert session.step is not None
            if session.step.started is None:
                session.step.started = time.perf_counter()
            session.running = True
            batch.append((session, item))
        return batch

    def _chunks(self, filling: Sequence[Session]) -> dict[Session, int]:
        """Whose prompts this step runs a chunk of, and its size: in turn, within a priority."""
        chunks: dict[Session, int] = {}
        budget = self._chunk_tokens
        for session in sorted(filling, key=lambda s: (s.spec.priority, s.turn)):
            size = self._shapes.chunk(session, max(1, budget))
            if size > budget and chunks:
                continue  # another prompt's chunk is in this step already
            chunks[session] = size
            budget -= size
            self._residency.next_turn(session)
        return chunks

    def _chunk(self, session: Session, size: int, now: float) -> Item | None:
        start, spec = session.kv, session.spec
        end = start + size
        if not self._residency.reserve(session, end, now):
            return None
        assert session.table is not None and session.computed is not None and size > 0
        # What runs again for its KV alone has no rows to give.
        fresh = session.opening and start >= session.computed
        tapped = session.sink is not None and fresh and end > session.rows_start
        return Item(
            table=session.table,
            ids=self._shapes.chunk_ids(session)[start:end],
            start=start,
            draws=1 if session.opening and end == len(spec.ids) else 0,
            sampling=spec.sampling,
            taps=spec.taps if tapped else (),
            exact=spec.exact,
            margins=spec.margins,
            context=session.ids,
            prompt_len=spec.prompt_len,
            logprobs=spec.logprobs,
            prompt_logprobs=spec.prompt_logprobs if session.opening else None,
            drafted=self._draft_all or spec.draft_tokens > 0,
        )

    def _block(self, session: Session, step: Step | None, now: float) -> Item | None:
        """The anchor and as much of the draft as the session, the engine's block and the free
        pages allow: nobody gives up pages for a draft."""
        start, spec = len(session.ids) - 1, session.spec
        if not self._residency.reserve(session, start + 1, now):
            return None
        assert session.table is not None and step is not None
        limit = min(session.remaining, self._engine.block_limit(start, spec.exact)) - 1
        assert limit >= 0
        end = start + 1 + min(limit, len(step.draft))
        limit = min(limit, self._residency.reserve_most(session, end) - start - 1)
        if len(step.draft) > limit:
            self._metrics.dropped("draft_clipped", len(step.draft) - limit)
            del step.draft[limit:]
        return Item(
            table=session.table,
            ids=[session.ids[-1], *step.draft],
            start=start,
            draws=1 + len(step.draft),
            sampling=spec.sampling,
            taps=spec.taps if session.sink is not None else (),
            exact=spec.exact,
            margins=spec.margins,
            context=session.ids,
            prompt_len=spec.prompt_len,
            logprobs=spec.logprobs,
            drafted=self._draft_all or spec.draft_tokens > 0,
        )
