"""An engine with next to no work of its own: what is left is the services', and how fast they are.

The token after `x` is `x + 1`, as of `free_model`, without the native engine's work on the host.
Rows are zeros.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from engine.api import Item, ItemResult, ModelInfo, WarmUp, nothing
from engine.attention.report import AttentionReport, Candidate
from engine.kv.pool import PagePool, PageTable, PoolStats
from tests.load.free_model import HIDDEN, LAYERS, MAX_LENGTH, PAGE_TOKENS
from tests.load.stamps import Stamps
from tests.service.toy_engine import VOCAB

_BLOCK, _CHUNK = 64, 4096


class BareEngine:
    """Implements `engine.api.Engine`. Counts as `FreeEngine` does."""

    rows_independent = True
    once_ns = 0

    def __init__(self, sessions: int, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s
        self._pool = PagePool((sessions + 2) * MAX_LENGTH // PAGE_TOKENS + 1, PAGE_TOKENS)
        self.info = ModelInfo(
            "bare", "bare", "bare", VOCAB, HIDDEN, LAYERS, MAX_LENGTH, (VOCAB,), "cpu", "bfloat16"
        )
        self.attention = AttentionReport(
            "", "auto", "NONE", (Candidate("NONE"),), "bfloat16", 1, PAGE_TOKENS
        )
        self.steps = self.items = self.step_ns = self.gap_ns = 0
        self.stamps = Stamps()
        self._ended = time.perf_counter_ns()

    def allocate(self, length: int) -> PageTable:
        return self._pool.allocate(length)

    def block_limit(self, start: int, exact: bool) -> int:
        return _BLOCK

    def chunk_limit(self, start: int, exact: bool) -> int:
        return _CHUNK

    def stats(self) -> PoolStats:
        return self._pool.stats()

    def admit_thread(self) -> bool:
        return True  # a pause holds no more of the host than a GPU does

    def warm_up(self, wanted: WarmUp) -> int:
        return 0

    def check_integrity(self) -> None:
        self._pool.check_integrity()

    def step(
        self, items: Sequence[Item], launched: Callable[[], None] = nothing
    ) -> list[ItemResult]:
        self.stamps.begin()
        self.gap_ns += time.perf_counter_ns() - self._ended
        began = time.thread_time_ns()
        launched()
        if self._pause_s:
            time.sleep(self._pause_s)
        self._pool.take_copies()
        found = [_drawn(item) for item in items]
        self.step_ns += time.thread_time_ns() - began
        self.steps += 1
        self.items += len(items)
        self.stamps.end()
        self._ended = time.perf_counter_ns()
        return found


def _drawn(item: Item) -> ItemResult:
    """Draws behind the last `draws` ids, as far as each was drawn too."""
    ids, table = item.ids, item.table
    table.truncate(item.start)
    table.reserve(item.start + len(ids))
    tokens: list[int] = []
    first = len(ids) - item.draws
    for at in range(first, len(ids)):
        if tokens and ids[at] != tokens[-1]:
            break
        tokens.append((ids[at] + 1) % VOCAB)
    accepted = max(0, len(tokens) - 1)
    table.length = item.start + len(ids) - (item.draws - 1 - accepted if item.draws else 0)
    rows = None
    if item.taps:
        count = accepted + 1 if item.draws > 1 else len(ids)
        found = np.zeros((count, len(item.taps) * HIDDEN), np.uint16)
        rows = lambda: found  # noqa: E731
    return ItemResult(tuple(tokens), accepted, rows, (), len(ids))
