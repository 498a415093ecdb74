"""Ready sessions into the items of one engine step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from operator import attrgetter

from engine.api import Engine, Item
from target_svc.metrics import Metrics
from target_svc.residency import Residency, reserved
from target_svc.sessions import Session, Step
from target_svc.shapes import Shapes

_RANK = attrgetter("rank")


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
        filling = [session for session in resident if session.filling]
        chunks = self._chunks(filling) if filling else {}
        waiting = set(filling).difference(chunks) if filling else ()
        batch: list[tuple[Session, Item]] = []
        began = time.perf_counter()
        for session in sorted(resident, key=_RANK):
            if session.table is None or session in waiting:
                continue  # the first gave its pages away just now
            if session in chunks:
                item = self._chunk(session, chunks[session], now)
            else:
                item = self._block(session, session.step, now)
            if item is None:
                continue
            assert session.step is not None
            if session.step.started is None:
                session.step.started = began
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
            projected=tapped and spec.projected,
        )

    def _block(self, session: Session, step: Step | None, now: float) -> Item | None:
        """The anchor and as much of the draft as the session, the engine's block and the free
        pages allow: nobody gives up pages for a draft."""
        start, spec = len(session.ids) - 1, session.spec
        assert step is not None
        draft = step.draft
        limit, end = 0, start + 1
        if draft:
            limit = min(session.remaining, self._engine.block_limit(start, spec.exact)) - 1
            assert limit >= 0
            end += min(limit, len(draft))
        if not reserved(session, end):
            if not self._residency.reserve(session, start + 1, now):
                return None
            limit = min(limit, self._residency.reserve_most(session, end) - start - 1)
        if len(draft) > limit:
            self._metrics.dropped("draft_clipped", len(draft) - limit)
            del draft[limit:]
        assert session.table is not None
        return Item(
            table=session.table,
            ids=[session.ids[-1], *draft],
            start=start,
            draws=1 + len(draft),
            sampling=spec.sampling,
            taps=spec.taps if session.sink is not None else (),
            exact=spec.exact,
            margins=spec.margins,
            context=session.ids,
            prompt_len=spec.prompt_len,
            logprobs=spec.logprobs,
            drafted=self._draft_all or spec.draft_tokens > 0,
            projected=spec.projected and session.sink is not None,
        )
