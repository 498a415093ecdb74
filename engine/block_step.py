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

from engine.api import Proposed
from engine.attention.base import DeviceAttention, Span
from engine.block_call import CallWords, Wanted
from engine.device_draw import DeviceDrawer
from engine.graphs import StepGraphs, up_to
from engine.models.dflash import DFlashModel
from engine.models.layers import Rows
from engine.sampling import filters
from engine.step_words import StepWords

# Shapes of the graphs: a call takes the smallest that holds it.
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_COUNTS = (1, 2, 4)
# Calls of more rows are not met before there are sessions.
_MOST_ROWS = 512


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The plan owns memory that a graph works in, so it lives as long."""

    chances: bool
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
        self._calls: dict[tuple[int, int], CallWords] = {}
        self._over: Any = None
        if self._device.type == "cuda":
            self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
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
        call = self._call_of(batch, count)
        spans = call.fill(wanted)

        def body() -> _Drawn:
            # The copies are the graph's too: called one by one they take the host longer.
            with torch.inference_mode():
                call.words.copy()
                plan = self._plan(call, spans)
                states, anchors = self._states(call.words, plan, batch, count)
                how = call.draws(filtered)
                found = self._model.draw_slots(states, anchors, how, self._drawer, chances)
                call.keep(found)
                return _Drawn(found.chances is not None, plan)

        drawn = self._graphs.run((batch, count, filtered, chances), body, capture)
        if self._over is not None:
            self._over.record()
            self._over.synchronize()
        self._model.over()
        return call.proposals(wanted, drawn.chances)

    def _plan(self, call: CallWords, spans: Sequence[Span]) -> Any:
        backend, size = self._model.backend, self._model.config.block_size
        if isinstance(backend, DeviceAttention):
            return backend.view(call.words.device("attention"), call.batch, self._pages, size)
        return backend.plan(spans)

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

    def _call_of(self, batch: int, count: int) -> CallWords:
        call = self._calls.get((batch, count))
        if call is None:
            call = self._calls[batch, count] = CallWords(self._model, batch, count, self._pages)
        return call
