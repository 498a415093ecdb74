"""One session of an autoregressive draft, and what brings it up to its committed ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_svc.gain import Average
from draft_svc.methods.base import REASON_CAPACITY, REASON_PAGES
from engine.api import Engine, Item, Sampling
from engine.errors import OutOfPages
from engine.kv.pool import PageTable

# A session fewer tokens behind than this catches up in its next proposal, not before: rounds
# without one then cost next to nothing.
_LAZY_TOKENS = 16
# A forward that catches up keeps the proposals of other sessions waiting no longer than this, but
# takes some tokens in any case.
_PIECE_S = 0.03
_LEAST_TOKENS = 32


@dataclass(slots=True, eq=False)
class DraftModelContext:
    """Committed `ids`, and the ids whose KV `table` holds: `run` agrees with `ids` as far as both
    go, and may go further, into what was proposed last.
    """

    ids: list[int]
    sampling: Sampling
    table: PageTable
    opened_length: int
    run: list[int] = field(default_factory=list)

    @property
    def lag(self) -> int:
        """Ids before the anchor that were not run."""
        return max(len(self.ids) - 1 - len(self.run), 0)

    def rewind(self, length: int) -> None:
        """Forgets the KV from position `length` on."""
        del self.run[length:]
        self.table.truncate(min(self.table.length, len(self.run)))


class CatchUp:
    """Runs committed ids, in chunks of at most `chunk_tokens`, and publishes their pages under
    `root`."""

    def __init__(
        self,
        engine: Engine,
        root: bytes,
        chunk_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._root, self._chunk_tokens = engine, root, chunk_tokens
        self._clock, self._token_s = clock, Average()
        self._behind: dict[DraftModelContext, None] = {}

    def note(self, context: DraftModelContext) -> None:
        """Puts it in the queue where it lags enough."""
        if context.lag > _LAZY_TOKENS:
            self.add(context)

    def add(self, context: DraftModelContext) -> None:
        self._behind[context] = None

    def remove(self, context: DraftModelContext) -> None:
        self._behind.pop(context, None)

    def work(self) -> bool:
        """One chunk for the sessions that are behind, first come, first served."""
        room, share = self._piece_tokens(), []
        for context in list(self._behind):
            count = min(context.lag, room)
            # Without pages, or past the limit, it stays behind until it is asked to propose.
            if count == 0 or self.reserve(context, len(context.ids)):
                del self._behind[context]
                continue
            share.append((context, count))
            room -= count
            if room == 0:
                break
        for context, count in share:
            if context.lag == count:
                del self._behind[context]
        self._run_ids(share)
        return bool(self._behind)

    def _piece_tokens(self) -> int:
        """Tokens of one piece: few on a slow model, `chunk_tokens` at most."""
        fast = int(_PIECE_S / self._token_s.value) if self._token_s.value else self._chunk_tokens
        return min(max(fast, _LEAST_TOKENS), self._chunk_tokens)

    def _run_ids(self, share: Sequence[tuple[DraftModelContext, int]]) -> None:
        """Runs the next `count` ids of each context in one forward."""
        parts = [(c, c.ids[len(c.run) : len(c.run) + count]) for c, count in share]
        items = [
            Item(c.table, ids, len(c.run), 0, c.sampling, exact=False) for c, ids in parts if ids
        ]
        began = self.worked_s()
        if items:
            self._engine.step(items)
            count = sum(len(item.ids) for item in items)
            self._token_s.add((self.worked_s() - began) / count)
        for context, ids in parts:
            context.run += ids
            self.publish(context)

    def reserve(self, context: DraftModelContext, length: int) -> str:
        """Makes room for `length` positions; why not, or empty."""
        if length > self._engine.info.max_length:
            return REASON_CAPACITY
        try:
            context.table.reserve(length)
        except OutOfPages:
            return REASON_PAGES
        return ""

    def publish(self, context: DraftModelContext) -> None:
        """Lets other sessions begin with what is committed; the anchor's page may be written
        again.
        """
        end = min(len(context.run), len(context.ids) - 1)
        context.table.publish(self._root, context.ids, end)

    def worked_s(self) -> float:
        """The clock without what was spent once, so that differences are what steps cost."""
        return self._clock() - self._engine.once_ns / 1e9
