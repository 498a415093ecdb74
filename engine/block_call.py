"""The words of proposals of one shape, and what comes back: `batch` blocks of which `count` slots
propose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.api import Proposed, Sampling
from engine.attention.base import DeviceAttention, Span
from engine.batch import slots_of
from engine.draw_rows import DrawRows, DrawWords, draw_words
from engine.models.dflash import Block, DFlashModel, SlotDraws
from engine.step_words import StepWords


@dataclass(frozen=True, slots=True)
class Wanted:
    """`k` tokens behind the anchor of a block."""

    block: Block
    sampling: Sampling
    k: int


class CallWords:
    """On the host and on the device. Where the attention reads words, a graph may work in them."""

    def __init__(self, model: DFlashModel, batch: int, count: int, pages: int) -> None:
        """`pages` of a context at most. A draft that draws slot by slot has draws of its first one
        only."""
        self.batch, self._count, self._pages = batch, count, pages
        self._model, self._each = model, 1 if model.slot_by_slot else count
        device, size = model.device, model.config.block_size
        rows, attention = batch * size, 0
        if isinstance(model.backend, DeviceAttention):
            attention = model.backend.words(batch, rows, pages)
        self.words = words = StepWords(device)
        words.layout(
            ids=rows,
            positions=rows,
            slots=rows,
            draws=draw_words(batch * self._each),
            attention=attention,
        )
        self._ids, self._positions, self._slots = (
            words.host(name).reshape(batch, size) for name in ("ids", "positions", "slots")
        )
        self._attention = words.host("attention")
        self._draws = DrawWords(words.host("draws"), batch * self._each)
        self._ids.fill(model.config.mask_token_id)
        pinned = device.type == "cuda"
        # Tokens, and the bits of their chances.
        self._drawn = torch.zeros(2, batch, count, dtype=torch.int32, pin_memory=pinned)
        self._tokens = self._drawn[0].numpy()
        self._chances = self._drawn[1].view(torch.float32).numpy()

    def fill(self, wanted: Sequence[Wanted]) -> list[Span]:
        """Writes a call, at most `batch` blocks. The call before must be over."""
        page, size = self._model.pool.page_tokens, self._ids.shape[1]
        spans: list[Span] = []
        self._draws.clear()
        for row, own in enumerate(wanted):
            block, first = own.block, own.block.start - own.block.origin
            self._ids[row, 0] = block.anchor
            self._positions[row] = range(block.start, block.start + size)
            self._slots[row] = slots_of(block.table.pages, page, first, size)
            spans.append(Span(block.table, first, row * size, size))
            at, count = row * self._each, min(own.k, self._each)
            self._draws.write(at, count, own.sampling, block.start + 1)
        rest = slice(len(wanted), None)
        self._positions[rest], self._slots[rest] = 0, self._model.memory.scratch_slot
        if isinstance(self._model.backend, DeviceAttention):
            self._model.backend.fill(self._attention, spans, self.batch, self._pages)
        return spans

    def draws(self, filtered: bool) -> DrawRows:
        return DrawRows.of(self.words.device("draws"), self.batch * self._each, filtered)

    def keep(self, drawn: SlotDraws) -> None:
        """Copies what was drawn to the host's memory, behind everything launched so far."""
        parts = [drawn.tokens.int()]
        if drawn.chances is not None:
            parts.append(drawn.chances.view(torch.int32))
        self._drawn[: len(parts)].copy_(torch.stack(parts), non_blocking=True)

    def proposals(self, wanted: Sequence[Wanted], chances: bool) -> list[Proposed]:
        """What was kept, once the call is over."""
        ids = self._tokens[: len(wanted)].tolist()
        sure = self._chances[: len(wanted)].tolist() if chances else [[]] * len(wanted)
        return [
            Proposed(tuple(tokens[: own.k]), tuple(own_sure[: own.k]))
            for own, tokens, own_sure in zip(wanted, ids, sure, strict=True)
        ]
