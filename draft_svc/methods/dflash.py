"""DFlash: a block of masked slots filled in one forward over context made from the target's hidden
states.

Confirmed rows become context K/V once, those of all sessions together; a proposal is one ragged
forward over the blocks of every session that is ready. Tokens are drawn as the target draws them:
same noise, same filters, the index of the token being drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from draft_svc.context_names import ContextNames
from draft_svc.costs import measure
from draft_svc.methods.base import (
    REASON_CAPACITY,
    REASON_CATCHING_UP,
    REASON_PAGES,
    REASON_ROWS_MISSING,
    Draft,
    Method,
    MethodInfo,
    Request,
    RowBlock,
)
from draft_svc.methods.dflash_context import DFlashContext, nonempty
from draft_svc.methods.dflash_info import info_of
from draft_svc.methods.first_runs import first_runs
from draft_svc.methods.host_draws import draft_on_host
from engine.api import Sampling, never
from engine.block_call import Wanted
from engine.errors import OutOfPages
from engine.kv.pool import PoolStats
from engine.kv.prefix import chain_root
from engine.models.dflash import Block
from engine.models.draft_context import CAPTURED_ROWS, ContextRows
from engine.models.draft_loading import LoadedDraft
from engine.warm_shapes import prompt_rows

# Rows that one forward writes at most, and at least where nobody waits for them.
_FORWARD_ROWS, _WORTH_WRITING = 512, 64


class DFlashMethod(Method[DFlashContext]):
    """A loaded DFlash draft. `max_length` bounds positions: no block reaches beyond it."""

    name = "dflash"

    def __init__(
        self,
        loaded: LoadedDraft,
        *,
        max_draft_tokens: int,
        max_length: int | None,
        tokenizer_hash: str,
        confidences: bool = True,
        warm_sessions: int = 0,
    ) -> None:
        """`warm_sessions`: at so many at once nobody waits for what is met for the first time."""
        self._model, self._confidences = loaded.model, confidences
        self._stepper, self._warm_sessions = loaded.stepper, warm_sessions
        self._worth_writing = _WORTH_WRITING if loaded.stepper is not None else 1
        config = loaded.model.config
        self._unwritten: dict[DFlashContext, None] = {}
        self._names = ContextNames(loaded.model.pool.page_tokens)
        self._row_width = config.row_width
        self._max_length = min(max_length or config.max_positions, config.max_positions)
        self._info = info_of(self.name, loaded, max_draft_tokens, self._max_length, tokenizer_hash)

    @property
    def info(self) -> MethodInfo:
        return self._info

    @property
    def once_ns(self) -> int:
        return self._stepper.once_ns if self._stepper is not None else 0

    def open(self, ids: Sequence[int], sampling: Sampling) -> DFlashContext:
        return DFlashContext(list(ids), sampling, self._model.pool.allocate(0))

    def restore(self, context: DFlashContext, target: str) -> tuple[int, int]:
        """Context K/V of position p follows from the ids up to p, the target and the draft: other
        sessions' pages will do.
        """
        if not target:
            return 0, 0
        context.base = chain_root(self.name, self._info.fingerprint, target)
        limit = min(len(context.ids) - 1, self._max_length)
        found = self._names.find(context.table, context.base, context.ids, limit)
        context.origin, context.root = found.origin, found.root
        context.table.adopt(found.prefix, max(found.end - found.origin, 0))
        return found.origin, found.end

    def update(
        self, context: DFlashContext, keep: int, tokens: Sequence[int], rows: Sequence[RowBlock]
    ) -> None:
        context.truncate(keep)
        context.ids += tokens
        context.add_rows(nonempty(block.clip(0, self._max_length) for block in rows))
        if context.pending and context.begins_anew:
            self._begin(context)
        context.drop_written()  # a cache had some of these rows
        if context.pending:
            self._unwritten[context] = None
        else:  # a rollback may have taken the rows that waited
            self._unwritten.pop(context, None)

    def _begin(self, context: DFlashContext) -> None:
        """Begins where the pending rows do, or a little later, at the edge of a page, where enough
        of them are left: then other sessions can use it.
        """
        size = self._model.pool.page_tokens
        start, end = context.pending[0].start, context.pending[-1].end
        edge = -(-start // size) * size
        context.begin(edge if edge + size < end else start)
        context.root = None
        if context.base is not None:
            context.root = self._names.begin(context.base, context.ids, context.origin)

    def _publish(self, context: DFlashContext) -> None:
        """Lets other sessions use the pages that are full by now."""
        table = context.table
        if context.root is not None and table.length // self._model.pool.page_tokens > len(
            table.names
        ):
            table.publish(context.root, context.ids[context.origin :], table.length)

    def work(self) -> bool:
        """Writes what rounds without a proposal leave. On a GPU, which the target may share, only
        once there is something to it: a proposal writes what is left in front of it."""
        waiting = sum(context.pending_rows for context in self._unwritten)
        return waiting >= self._worth_writing and self._catch_up()

    def _catch_up(self) -> bool:
        """Writes some of what waits; whether more does."""
        self._write(list(self._unwritten), _FORWARD_ROWS)
        # What lacks pages waits for a proposal to ask again.
        for context in list(self._unwritten):
            if self._lacks_pages(context):
                del self._unwritten[context]
        return bool(self._unwritten)

    def _write(self, contexts: Sequence[DFlashContext], room: int) -> None:
        """Turns at most `room` pending rows into context K/V, in one forward. Where pages are short
        they stay pending.
        """
        writes: dict[DFlashContext, ContextRows] = {}
        for context in contexts:
            if room > 0 and context.pending and not self._lacks_pages(context):
                writes[context] = write = context.next_rows(room)
                room -= write.rows.shape[0]
        if writes:
            self._model.write_contexts(list(writes.values()))
        for context in writes:
            context.drop_written()
            if not context.pending:
                self._unwritten.pop(context, None)
            self._publish(context)

    def _lacks_pages(self, context: DFlashContext) -> bool:
        try:
            context.table.reserve(context.pending[-1].end - context.origin)
        except OutOfPages:
            return True
        return False

    def propose(
        self, requests: Sequence[Request[DFlashContext]], capture: bool = True
    ) -> list[Draft]:
        """See `Method.propose`; without `capture` of a graph where it meets a new shape."""
        # Few rows first: a long prompt must not keep the others waiting.
        contexts = sorted((r.context for r in requests), key=lambda c: c.pending_rows)
        self._write(contexts, _FORWARD_ROWS)
        drafts: dict[int, Draft] = {}
        ready: list[tuple[int, Request[DFlashContext]]] = []
        for index, request in enumerate(requests):
            reason = self._why_not(request.context)
            if reason:
                drafts[index] = Draft(reason=reason)
            else:
                ready.append((index, request))
        if ready:
            indices, chosen = zip(*ready, strict=True)
            drafts.update(zip(indices, self.draft(wanted_of(chosen), capture), strict=True))
        return [drafts[index] for index in range(len(requests))]

    def _why_not(self, context: DFlashContext) -> str:
        """Why no block can run now; empty: it can, and its pages are reserved."""
        start, size = len(context.ids) - 1, self._info.block_size
        if start + size > self._max_length:
            return REASON_CAPACITY
        if context.pending:
            return REASON_PAGES if self._lacks_pages(context) else REASON_CATCHING_UP
        if context.end != start:
            return REASON_ROWS_MISSING
        try:
            context.table.reserve(start - context.origin + size)
        except OutOfPages:
            return REASON_PAGES
        return ""

    def draft(self, wanted: Sequence[Wanted], capture: bool = True) -> list[Draft]:
        """Proposals of all blocks from one forward; their pages are reserved."""
        if self._stepper is not None:
            found = self._stepper.run(wanted, self._confidences, capture)
            return [Draft(own.ids, own.confidences) for own in found]
        return self._draft_on_host(wanted)

    def _draft_on_host(self, wanted: Sequence[Wanted]) -> list[Draft]:
        """The same with the draws made on the host."""
        return draft_on_host(self._model, wanted, self._confidences)

    def close(self, context: DFlashContext) -> None:
        self._unwritten.pop(context, None)
        context.pending.clear()
        context.table.free()

    def stats(self) -> PoolStats:
        return self._model.pool.stats()

    def check_integrity(self) -> None:
        self._model.pool.check_integrity()

    def warm_up(self, stopped: Callable[[], bool] = never) -> None:
        """Packs, plans, compiles and allocates what the first session would wait for, and
        measures."""
        info = self._info
        if self._stepper is not None and self._warm_sessions:
            shapes = self._stepper.shapes(self._warm_sessions, info.max_draft_tokens)
            writes = sorted({*CAPTURED_ROWS, *prompt_rows(_FORWARD_ROWS)})
            first_runs(self, self._filled, shapes, writes, stopped)
            if not stopped():
                self._model.capture_writes()
        if stopped():
            return
        costs = measure(
            self, self._filled, tokens=info.max_draft_tokens, max_length=self._max_length
        )
        self._info = replace(info, costs=costs)

    def _filled(self, sessions: int, length: int) -> list[DFlashContext]:
        """Contexts of zeros."""
        rows = np.zeros((length - 1, self._row_width), dtype=np.uint16)
        contexts = [self.open([0] * length, Sampling(temperature=0.0)) for _ in range(sessions)]
        try:
            for context in contexts:
                self.update(context, length, (), [RowBlock(0, rows)])
            while self._catch_up():
                pass
        except BaseException:
            for context in contexts:
                self.close(context)
            raise
        return contexts


def wanted_of(requests: Sequence[Request[DFlashContext]]) -> list[Wanted]:
    return [
        Wanted(Block(c.table, c.ids[-1], len(c.ids) - 1, c.origin), c.sampling, request.k)
        for request in requests
        for c in [request.context]
    ]
