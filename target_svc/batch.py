"""Ready sessions into the items of one engine step."""

from __future__ import annotations

import time
from collections.abc import Iterable

from engine.api import Engine, Item
from target_svc.metrics import Metrics
from target_svc.sessions import Session, Step


class BatchBuilder:
    def __init__(self, engine: Engine, chunk_tokens: int, metrics: Metrics) -> None:
        self._engine, self._chunk_tokens, self._metrics = engine, chunk_tokens, metrics

    def build(self, ready: Iterable[Session]) -> list[tuple[Session, Item]]:
        """All waiting verify blocks, and prompt chunks up to the budget.

        So a long prompt never stalls those who decode.
        """
        batch: list[tuple[Session, Item]] = []
        budget = self._chunk_tokens
        for session in ready:
            assert session.step is not None
            if session.opening:
                size = self._chunk_size(session)
                if size > budget and budget < self._chunk_tokens:
                    continue  # another prompt's chunk is in this step already
                size = size if session.spec.exact else min(size, budget)
                budget = max(0, budget - size)
                item = self._chunk(session, size)
            else:
                item = self._block(session, session.step)
            if session.step.started is None:
                session.step.started = time.perf_counter()
            session.running = True
            batch.append((session, item))
        return batch

    def _chunk_size(self, session: Session) -> int:
        """Tokens of the next prompt chunk; in exact mode the cuts do not depend on the load."""
        start, spec = session.prefilled, session.spec
        size = min(len(spec.ids) - start, self._engine.chunk_limit(start, spec.exact))
        if spec.exact and not self._engine.rows_independent and len(spec.ids) > spec.prompt_len:
            # A re-open: what verify steps ran once is run in blocks again, not in large chunks.
            if start >= spec.prompt_len:
                return min(size, self._engine.block_limit(start, exact=True))
            return min(size, spec.prompt_len - start)
        return size

    def _chunk(self, session: Session, size: int) -> Item:
        start, spec = session.prefilled, session.spec
        end = start + size
        assert session.table is not None and size > 0
        return Item(
            table=session.table,
            ids=spec.ids[start:end],
            start=start,
            draws=1 if end == len(spec.ids) else 0,
            sampling=spec.sampling,
            taps=spec.taps if session.sink is not None and end > spec.rows_from else (),
            exact=spec.exact,
            margins=spec.margins,
            context=session.ids,
            prompt_len=spec.prompt_len,
            logprobs=spec.logprobs,
            prompt_logprobs=spec.prompt_logprobs if session.opening else None,
        )

    def _block(self, session: Session, step: Step) -> Item:
        """The anchor and as much of the draft as the session and the engine's block allow."""
        start, spec = len(session.ids) - 1, session.spec
        limit = min(session.remaining, self._engine.block_limit(start, spec.exact)) - 1
        assert session.table is not None and limit >= 0
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
        )
