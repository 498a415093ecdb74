"""The words of steps of one fixed shape: `batch` spans of `width` rows, for a CUDA graph.

The rows and spans beyond a step's own write nothing that counts and are not read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.api import Item
from engine.attention.base import DeviceAttention, Span
from engine.batch import Placed, slots_of
from engine.draw_rows import DRAW_WORDS, DrawRows, DrawWords
from engine.step_words import StepWords


class BlockWords:
    """Words and drawn tokens of one shape, on the host and on the device."""

    def __init__(
        self,
        backend: DeviceAttention,
        batch: int,
        width: int,
        pages_per_span: int,
        scratch_slot: int,
    ) -> None:
        device = backend.cache.device
        self._backend, self._batch, self.width = backend, batch, width
        self._pages, self._scratch_slot = pages_per_span, scratch_slot
        self.rows = rows = batch * width
        self._words = words = StepWords(device)
        words.layout(
            ids=rows,
            positions=rows,
            slots=rows,
            draw_rows=rows,
            draws=DRAW_WORDS * rows,
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
        """Writes a step and sends it to the device. The step before must be over."""
        width, page_tokens = self.width, self._backend.cache.geometry.page_tokens
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans, placed = [], []
        self._draws.clear()
        for item in items:
            first, count, start = len(ids), len(item.ids), item.start
            ids += item.ids
            positions += range(start, start + count)
            slots += slots_of(item.table.pages, page_tokens, start, count)
            if short := width - count:
                ids += [0] * short
                positions += [0] * short
                slots += [self._scratch_slot] * short
            spans.append(Span(item.table, start, first, count))
            placed.append(Placed(item, first, width))
            self._draws.write(first, count, item.sampling, start + 1)
        used = len(ids)
        self._ids[:used], self._positions[:used], self._slots[:used] = ids, positions, slots
        self._ids[used:], self._positions[used:] = 0, 0
        self._slots[used:] = self._scratch_slot
        self._backend.fill(self._attention, spans, self._batch, self._pages)
        self._words.upload()
        return placed

    def device(self, name: str) -> Tensor:
        """ids, positions, slots or draw_rows: int32 [rows]."""
        return self._words.device(name)

    def plan(self) -> object:
        """The attention's plan of whatever was filled last."""
        words = self._words.device("attention")
        return self._backend.view(words, self._batch, self._pages, self.width)

    def draws(self, filtered: bool) -> DrawRows:
        return DrawRows.of(self._words.device("draws"), filtered)

    def drawn(self, count: int) -> list[int]:
        """Tokens of the first rows, once the step is over."""
        tokens: list[int] = self._drawn[:count].tolist()
        return tokens
