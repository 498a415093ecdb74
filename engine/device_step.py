"""Steps on a GPU: one copy in, one launch sequence or CUDA graph, one copy out.

A step in which every item draws from all its rows (plain decoding, verify blocks) is run in a fixed
shape, `batch` spans of `width` rows, and so by a graph; the rows and spans beyond the step's own
write nothing and are not read. Steps with prompt chunks are launched as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.api import Item
from engine.attention.base import AttentionBackend, DeviceAttention, Span
from engine.batch import Packed, Placed, pack, slots_of
from engine.choose import Chosen, choose, draws_of, matched, plain
from engine.device_draw import DRAW_WORDS, DeviceDrawer, DrawFields, write_draws
from engine.graphs import StepGraphs
from engine.kv.cache import PagedCache
from engine.models.family import Model
from engine.models.layers import Rows
from engine.step_words import StepWords
from engine.stepper import Ran

# Shapes of the graphs: a step takes the smallest that holds it.
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_WIDTHS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Device memory of one shape: logits fp32 [rows, vocab], tokens int64 [rows] (None: the host
    draws), tap rows."""

    logits: Tensor
    tokens: Tensor | None
    tap_rows: Tensor | None


class DeviceStepper:
    """Runs items on a GPU (or under Triton's interpreter)."""

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        backend: AttentionBackend,
        max_length: int,
        scratch_slot: int,
        graphs: bool,
    ) -> None:
        self._model, self._cache, self._backend = model, cache, backend
        self._device, self._scratch_slot = cache.device, scratch_slot
        self._pages = -(-max_length // cache.geometry.page_tokens)
        self._graphs: StepGraphs[_Outputs] = StepGraphs("step", graphs)
        self._shapes: dict[tuple[int, int], StepWords] = {}
        self._words = StepWords(self._device)
        self._drawer = DeviceDrawer(model.kernels, self._device)

    def run(
        self, items: Sequence[Item], minimum: int, taps: tuple[int, ...], tap_dtype: torch.dtype
    ) -> Ran:
        shape = self._shape(items, tap_dtype) if not minimum else None
        if shape is not None:
            return self._run_blocks(items, shape, taps)
        packed = pack(items, self._cache.geometry.page_tokens, minimum, self._scratch_slot)
        logits, tap_rows = self.forward(packed, taps, tap_dtype)
        chosen = [Chosen()] * len(items)
        if logits is not None:
            chosen = choose(logits, items, self._drawer)
        if tap_dtype is torch.bfloat16:  # else somebody still computes with them
            tap_rows = self._export(tap_rows)
        return Ran(packed.placed, chosen, tap_rows)

    def forward(
        self, packed: Packed, taps: tuple[int, ...], tap_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        count, draws = len(packed.ids), len(packed.draw_rows)
        words = self._words
        words.layout(ids=count, positions=count, slots=count, draw_rows=draws)
        words.host("ids")[:] = packed.ids
        words.host("positions")[:] = packed.positions
        words.host("slots")[:] = packed.slots
        words.host("draw_rows")[:] = packed.draw_rows
        plan = self._backend.plan(packed.spans)
        words.upload()
        wanted = words.device("draw_rows") if draws else None
        return self._launch(words, plan, wanted, taps, tap_dtype)

    def _launch(
        self,
        words: StepWords,
        plan: object,
        wanted: Tensor | None,
        taps: tuple[int, ...],
        tap_dtype: torch.dtype,
    ) -> tuple[Tensor | None, Tensor | None]:
        ids = words.device("ids")
        rows = Rows(ids, words.device("positions"), words.device("slots"), plan)
        width = len(taps) * self._model.config.hidden_size
        tap_rows = None
        if taps:
            tap_rows = torch.empty(len(ids), width, dtype=tap_dtype, device=self._device)
        logits = self._model.forward(rows, self._cache, self._backend, wanted, taps, tap_rows)
        return logits, tap_rows

    def _export(self, tap_rows: Tensor | None) -> Tensor | None:
        """A bf16 copy on the CPU. Page-locked, so it goes at the full rate of the link."""
        if tap_rows is None:
            return None
        out = torch.empty(
            tap_rows.shape, dtype=torch.bfloat16, pin_memory=self._device.type == "cuda"
        )
        out.copy_(tap_rows, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return out

    # -- steps of a fixed shape ------------------------------------------------------------------

    def _shape(self, items: Sequence[Item], tap_dtype: torch.dtype) -> tuple[int, int] | None:
        """(batch, width) of the smallest shape that holds these items; None: there is none."""
        if not isinstance(self._backend, DeviceAttention) or tap_dtype is not torch.bfloat16:
            return None
        if any(item.draws != len(item.ids) for item in items):
            return None
        widest = max(len(item.ids) for item in items)
        if len(items) > _BATCHES[-1] or widest > _WIDTHS[-1]:
            return None
        batch = next(size for size in _BATCHES if size >= len(items))
        return batch, next(size for size in _WIDTHS if size >= widest)

    def _run_blocks(
        self, items: Sequence[Item], shape: tuple[int, int], taps: tuple[int, ...]
    ) -> Ran:
        batch, width = shape
        words = self._words_of(shape)
        placed = self._fill(words, items, batch, width)
        words.upload()

        def body() -> _Outputs:
            assert isinstance(self._backend, DeviceAttention)
            plan = self._backend.view(words.device("attention"), batch, self._pages, width)
            every = words.device("draw_rows")
            logits, tap_rows = self._launch(words, plan, every, taps, torch.bfloat16)
            assert logits is not None
            tokens = None
            if self._drawer.fused:
                tokens = self._drawer.draw(logits, DrawFields.of(words.device("draws")))
            return _Outputs(logits, tokens, tap_rows)

        outputs = self._graphs.run((batch, width, taps), body)
        tap_rows = outputs.tap_rows
        if tap_rows is not None:
            tap_rows = tap_rows[: len(items) * width]
        return Ran(placed, self._chosen(items, outputs, width), self._export(tap_rows))

    def _words_of(self, shape: tuple[int, int]) -> StepWords:
        words = self._shapes.get(shape)
        if words is None:
            assert isinstance(self._backend, DeviceAttention)
            batch, width = shape
            rows = batch * width
            words = self._shapes[shape] = StepWords(self._device)
            words.layout(
                ids=rows,
                positions=rows,
                slots=rows,
                draw_rows=rows,
                draws=DRAW_WORDS * rows,
                attention=self._backend.words(batch, rows, self._pages),
            )
            words.host("draw_rows")[:] = range(rows)
        return words

    def _fill(
        self, words: StepWords, items: Sequence[Item], batch: int, width: int
    ) -> list[Placed]:
        page_tokens = self._cache.geometry.page_tokens
        ids, positions, slots = (words.host(name) for name in ("ids", "positions", "slots"))
        ids.fill(0)
        positions.fill(0)
        slots.fill(self._scratch_slot)
        spans, placed, draws = [], [], []
        for index, item in enumerate(items):
            first, count = index * width, len(item.ids)
            ids[first : first + count] = item.ids
            positions[first : first + count] = range(item.start, item.start + count)
            slots[first : first + count] = slots_of(
                item.table.pages, page_tokens, item.start, count
            )
            spans.append(Span(item.table, item.start, first, count))
            placed.append(Placed(item, first, width))
            draws += [(first + row, draw) for row, draw in enumerate(draws_of(item))]
        write_draws(words.host("draws"), batch * width, draws)
        assert isinstance(self._backend, DeviceAttention)
        self._backend.fill(words.host("attention"), spans, batch, self._pages)
        return placed

    def _chosen(self, items: Sequence[Item], outputs: _Outputs, width: int) -> list[Chosen]:
        if outputs.tokens is not None and all(plain(item) for item in items):
            drawn = outputs.tokens[: len(items) * width].tolist()
            return [
                matched(item, drawn[index * width : index * width + len(item.ids)])
                for index, item in enumerate(items)
            ]
        rows = [
            index * width + row for index, item in enumerate(items) for row in range(item.draws)
        ]
        return choose(outputs.logits[rows], items, self._drawer)
