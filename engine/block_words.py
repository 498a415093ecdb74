"""The words of steps of one fixed shape: `batch` spans of `width` rows, for a CUDA graph.

The rows and spans beyond a step's own write nothing that counts and are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.api import Item
from engine.attention.base import DeviceAttention, Span
from engine.batch import Placed, slots_of
from engine.choose import Chosen, matched
from engine.draw_rows import DrawRows, DrawWords, draw_words
from engine.step_words import StepWords

# Blocks from which on their places are found all at once.
_MANY = 4


class Blocks(NamedTuple):
    """Spans of a step, and rows of each."""

    batch: int
    width: int


class BlockWords:
    """Words and drawn tokens of one shape, on the host and on the device."""

    def __init__(
        self,
        backend: DeviceAttention,
        shape: Blocks,
        pages_per_span: int,
        scratch_slot: int,
    ) -> None:
        device, (batch, width) = backend.cache.device, shape
        self._backend, self.shape, self._batch, self._width = backend, shape, batch, width
        # Rows of the last step that are its own or stand between those.
        self.used = 0
        self._page_tokens = backend.cache.geometry.page_tokens
        self._pages, self._scratch_slot = pages_per_span, scratch_slot
        self.rows = rows = batch * width
        self._words = words = StepWords(device)
        words.layout(
            ids=rows,
            positions=rows,
            slots=rows,
            draw_rows=rows,
            draws=draw_words(rows),
            attention=backend.words(batch, rows, pages_per_span),
        )
        words.host("draw_rows")[:] = range(rows)
        # Looked up once: at one session they are a good part of what a step costs the host.
        self._ids, self._positions, self._slots, self._attention = (
            words.host(name) for name in ("ids", "positions", "slots", "attention")
        )
        self._draws = DrawWords(words.host("draws"), rows)
        # The kernel that draws writes into the host's memory itself: there is nothing to copy.
        self.tokens = torch.zeros(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._drawn = self.tokens.numpy()

    def fill(self, items: Sequence[Item]) -> list[Placed]:
        """Writes a step, which begins with `send`. The step before must be over."""
        width, first = self._width, 0
        ids: list[int] = []
        spans, placed, blocks = [], [], []
        for item in items:
            own = item.ids
            count = len(own)
            ids += own
            if count < width:
                ids += [0] * (width - count)
            spans.append(Span(item.table, item.start, first, count))
            placed.append(Placed(item, first, width))
            blocks.append(item.sampling)
            first += width
        self.used = first
        self._ids[:first], self._ids[first:] = ids, 0
        if len(items) >= _MANY and width <= self._page_tokens:
            self._place_many(spans)
        else:
            self._place(spans)
        self._draws.write_blocks(blocks, width, self._positions)
        self._backend.fill(self._attention, spans, self._batch, self._pages)
        return placed

    def send(self) -> None:
        self._words.copy()

    def _place(self, spans: Sequence[Span]) -> None:
        """Positions and slots of all rows."""
        self._positions.fill(0)
        self._slots.fill(self._scratch_slot)
        for span in spans:
            start, count = span.start, span.row_count
            rows = slice(span.first_row, span.first_row + count)
            self._positions[rows] = range(start, start + count)
            self._slots[rows] = slots_of(span.table.pages, self._page_tokens, start, count)

    def _place_many(self, spans: Sequence[Span]) -> None:
        """What `_place` writes, in a fifth of the time: no block is in more than two pages."""
        size = self._page_tokens
        where = [
            (
                start := span.start,
                count := span.row_count,
                span.table.pages[start // size],
                span.table.pages[(start + count - 1) // size],
            )
            for span in spans
        ]
        start, count, page, last = np.array(where, dtype=np.int32).T[:, :, None]
        row, used = np.arange(self._width, dtype=np.int32), len(spans) * self._width
        own, offset = row < count, start % size + row
        slots = np.where(offset < size, page, last - 1) * size + offset
        self._positions[:used] = np.where(own, start + row, 0).ravel()
        self._slots[:used] = np.where(own, slots, self._scratch_slot).ravel()
        self._positions[used:], self._slots[used:] = 0, self._scratch_slot

    def device(self, name: str) -> Tensor:
        """ids, positions or slots: int32 [rows]."""
        return self._words.device(name)

    def wanted(self) -> Tensor:
        """Rows whose logits are made, int32 [rows]: all."""
        return self._words.device("draw_rows")

    def plan(self) -> object:
        """The attention's plan of whatever was filled last."""
        words = self._words.device("attention")
        return self._backend.view(words, self._batch, self._pages, self._width)

    def draws(self, filtered: bool) -> DrawRows:
        return DrawRows.of(self._words.device("draws"), self.rows, filtered)

    def matched(self, items: Sequence[Item]) -> list[Chosen]:
        """What `plain` items get of `tokens`, once the step is over."""
        drawn, width = self._drawn[: self.used].tolist(), self._width
        return [
            matched(item, drawn[at * width : at * width + item.draws])
            for at, item in enumerate(items)
        ]

    def logits_of(self, items: Sequence[Item], logits: Tensor) -> Tensor:
        """The items' own of logits [rows, vocabulary], item after item."""
        width = self._width
        return logits[
            [at * width + row for at, own in enumerate(items) for row in range(own.draws)]
        ]
