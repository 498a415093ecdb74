"""Blocks of a draft on a GPU: one copy in, one launch sequence or CUDA graph, one copy out.

A graph stands for `batch` blocks of which `count` slots propose; the blocks beyond the call's own
write into the scratch page and are not read. A backend whose metadata has no fixed form is planned
anew every time and never captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.api import Proposed, Sampling
from engine.attention.base import DeviceAttention, Span
from engine.batch import slots_of
from engine.device_draw import DeviceDrawer
from engine.draw_rows import DrawRows, DrawWords, draw_words
from engine.graphs import StepGraphs, up_to
from engine.models.dflash import Block, DFlashModel, SlotDraws
from engine.models.layers import Rows
from engine.sampling import filters
from engine.step_words import StepWords

# Shapes of the graphs: a call takes the smallest that holds it.
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_COUNTS = (1, 2, 4)
# Calls of more rows are not met before there are sessions.
_MOST_ROWS = 512


@dataclass(frozen=True, slots=True)
class Wanted:
    """`k` tokens behind the anchor of a block."""

    block: Block
    sampling: Sampling
    k: int


@dataclass(frozen=True, slots=True)
class _Drawn:
    """int32 [1 or 2, batch, count]: tokens, and the bits of their chances. The plan owns memory
    that a graph works in, so it lives as long."""

    values: Tensor
    plan: Any


class CallShape(NamedTuple):
    """`slots` of each of `blocks` propose, some of them with filters where it is `filtered`.
    `captured`: by a graph, where one can hold it."""

    blocks: int
    slots: int
    filtered: bool
    captured: bool = True


class BlockStepper:
    """Proposes for the blocks of many sessions with a draft that runs Triton's kernels."""

    def __init__(self, model: DFlashModel) -> None:
        self._model, self._device = model, model.device
        longest = min(model.config.max_positions, model.memory.longest)
        self._pages = -(-longest // model.pool.page_tokens)
        self._drawer = DeviceDrawer(model.kernels, self._device)
        self._graphs: StepGraphs[_Drawn] = StepGraphs("block", model.captures)
        self._shapes: dict[tuple[int, int], StepWords] = {}
        self._loose = StepWords(self._device)
        self.fixed = isinstance(model.backend, DeviceAttention)

    @property
    def once_ns(self) -> int:
        """Nanoseconds so far that captures of graphs took."""
        return self._graphs.spent_ns

    def shapes(self, sessions: int, tokens: int) -> list[CallShape]:
        """All that calls for up to `sessions` sessions and `tokens` tokens are run in, and greedy
        ones of more sessions that are not captured, since other kernels are compiled for many rows.
        The largest come first: the others find the memory that it took."""
        counts = sorted({self._count(k) for k in range(1, tokens + 1)}, reverse=True)
        few = up_to(_BATCHES, sessions)
        many = up_to(_BATCHES, _MOST_ROWS // self._model.config.block_size)
        found = [CallShape(b, counts[0], False, False) for b in reversed(many) if b > few[-1]]
        return found + [
            CallShape(b, c, f) for b in reversed(few) for f in (False, True) for c in counts
        ]

    @torch.inference_mode()
    def run(self, wanted: Sequence[Wanted], chances: bool, capture: bool = True) -> list[Proposed]:
        """The tokens of each block, with their chances where they are asked for or the draft gives
        them anyway. The tables keep their lengths; without `capture` no graph is captured. Raises
        OutOfPages."""
        found: list[Proposed] = []
        for first in range(0, len(wanted), _BATCHES[-1]):
            found += self._run(wanted[first : first + _BATCHES[-1]], chances, capture)
        return found

    def _run(self, wanted: Sequence[Wanted], chances: bool, capture: bool) -> list[Proposed]:
        self._model.reserve([own.block for own in wanted])
        batch, count = self._shape(wanted)
        filtered = any(filters(own.sampling) for own in wanted)
        words = self._words_of(batch, count)
        spans = self._fill(words, wanted, batch, count)
        loose = None if self.fixed else self._model.backend.plan(spans)
        words.upload()

        def body() -> _Drawn:
            plan = loose
            if isinstance(self._model.backend, DeviceAttention):
                size = self._model.config.block_size
                attention = words.device("attention")
                plan = self._model.backend.view(attention, batch, self._pages, size)
            states, anchors = self._states(words, plan, batch, count)
            how = DrawRows.of(words.device("draws"), batch * self._draws_of(count), filtered)
            found = self._model.draw_slots(states, anchors, how, self._drawer, chances)
            return _Drawn(_packed(found), plan)

        drawn = self._graphs.run((batch, count, filtered, chances), body, capture)
        return _proposals(drawn.values.cpu(), wanted)

    def _states(self, words: StepWords, plan: Any, batch: int, count: int) -> tuple[Tensor, Tensor]:
        """Final states [batch, count, hidden] of the slots that propose; anchors int64 [batch]."""
        model, first = self._model, self._model.first_slot
        ids = words.device("ids").view(batch, -1)
        rows = Rows(ids.flatten(), words.device("positions"), words.device("slots"), plan)
        states = model.run_blocks(rows).view(*ids.shape, -1)[:, first : first + count]
        return states, ids[:, 0].to(torch.int64)

    # -- the words of a call ---------------------------------------------------------------------

    def _shape(self, wanted: Sequence[Wanted]) -> tuple[int, int]:
        count = self._count(max(own.k for own in wanted))
        if not self.fixed:
            return len(wanted), count
        return next(size for size in _BATCHES if size >= len(wanted)), count

    def _count(self, k: int) -> int:
        """Slots that propose where that many tokens are wanted."""
        most = self._model.max_draft_tokens
        return min(next((c for c in _COUNTS if c >= k), most), most)

    def _words_of(self, batch: int, count: int) -> StepWords:
        if not self.fixed:
            self._lay_out(self._loose, batch, count)
            return self._loose
        words = self._shapes.get((batch, count))
        if words is None:
            words = self._shapes[batch, count] = StepWords(self._device)
            self._lay_out(words, batch, count)
        return words

    def _lay_out(self, words: StepWords, batch: int, count: int) -> None:
        rows, attention = batch * self._model.config.block_size, 0
        if isinstance(self._model.backend, DeviceAttention):
            attention = self._model.backend.words(batch, rows, self._pages)
        words.layout(
            ids=rows,
            positions=rows,
            slots=rows,
            draws=draw_words(batch * self._draws_of(count)),
            attention=attention,
        )

    def _draws_of(self, count: int) -> int:
        """Rows of draws for each block."""
        return 1 if self._model.slot_by_slot else count

    def _fill(
        self, words: StepWords, wanted: Sequence[Wanted], batch: int, count: int
    ) -> list[Span]:
        config, page = self._model.config, self._model.pool.page_tokens
        size = config.block_size
        ids, positions, slots = (
            words.host(name).reshape(batch, size) for name in ("ids", "positions", "slots")
        )
        ids.fill(config.mask_token_id)
        positions.fill(0)
        slots.fill(self._model.memory.scratch_slot)
        spans: list[Span] = []
        each = self._draws_of(count)
        draws = DrawWords(words.host("draws"), batch * each)
        draws.clear()
        for row, own in enumerate(wanted):
            block, first = own.block, own.block.start - own.block.origin
            ids[row, 0] = block.anchor
            positions[row] = range(block.start, block.start + size)
            slots[row] = slots_of(block.table.pages, page, first, size)
            spans.append(Span(block.table, first, row * size, size))
            draws.write(row * each, min(own.k, each), own.sampling, block.start + 1)
        if isinstance(self._model.backend, DeviceAttention):
            self._model.backend.fill(words.host("attention"), spans, batch, self._pages)
        return spans


def _packed(drawn: SlotDraws) -> Tensor:
    parts = [drawn.tokens.int()]
    if drawn.chances is not None:
        parts.append(drawn.chances.view(torch.int32))
    return torch.stack(parts)


def _proposals(values: Tensor, wanted: Sequence[Wanted]) -> list[Proposed]:
    values = values[:, : len(wanted)]
    ids = values[0].tolist()
    chances = values[1].view(torch.float32).tolist() if len(values) > 1 else [[]] * len(wanted)
    return [
        Proposed(tuple(tokens[: own.k]), tuple(sure[: own.k]))
        for own, tokens, sure in zip(wanted, ids, chances, strict=True)
    ]
