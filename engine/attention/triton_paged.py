"""What our Triton backends share: a step's words on the device, cut into items, and the memory for
partial results.

A row's bits depend on its own position, keys and mode only; `kernels/paged.py` says how.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import DeviceAttention, LayerMode, Span
from engine.attention.kernels.combine import _combine
from engine.attention.kernels.part_times import FEW_ROWS
from engine.attention.kernels.schedule import HEADER, Schedule, Tiles
from engine.kernels.triton.dependent import flags
from engine.kv.cache import PagedCache

_WORKSPACE_BYTES = 256 << 20
# Programs of a multiprocessor that combine tiles of prompts and blocks: about what it holds.
_COMBINING = 16
_INTERPRETED_PROCESSORS = 3  # few, so that small tests see every kind of schedule


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Words of one step on the device, and what its launches depend on besides. `rows` folded rows
    are in a tile. So many as `tiles` are combined at once, none where it is 0, by programs of
    `combined` folded rows; `whole` and `finish` as in `paged._attend`."""

    words: Tensor
    table_at: int
    items_at: int
    pages_per_span: int
    programs: int
    rows: int
    tiles: int
    combined: int
    whole: bool
    finish: int
    sums: Tensor
    parts: Tensor
    arrived: Tensor


def padded(width: int) -> int:
    """A width as the kernels hold it: a power of 2 that a product takes."""
    return max(16, 1 << (width - 1).bit_length())


class TritonPaged(DeviceAttention):
    """What our kernels share: how a step is cut into items, its words, and the memory for partial
    results. `_launch` runs a kernel over the items, then `_combine` where there are parts."""

    rows_independent = True

    def __init__(
        self,
        cache: PagedCache,
        query_heads: int,
        modes: Sequence[LayerMode],
        tiles: Tiles,
        processors: int = 0,
    ) -> None:
        """`processors`: multiprocessors to plan for, those of the device where it is 0."""
        super().__init__(cache, query_heads, modes)
        self.tiles = tiles
        self._block = padded(cache.geometry.value_width)
        if not processors:
            processors = _INTERPRETED_PROCESSORS
            if cache.device.type == "cuda":
                found = torch.cuda.get_device_properties(cache.device)
                processors = found.multi_processor_count
        self._processors = processors
        kv_heads = cache.geometry.kv_heads
        slot_bytes = 4 * kv_heads * tiles.rows * (self._block + 2)
        programs = -(-tiles.programs * processors // kv_heads)
        slots = _WORKSPACE_BYTES // slot_bytes
        self._schedule = Schedule(tiles, query_heads // kv_heads, programs, slots)
        empty = torch.empty(0, device=cache.device)
        self._workspace = empty, empty, empty.int()

    def words(self, spans: int, rows: int, pages_per_span: int) -> int:
        keys = pages_per_span * self.cache.geometry.page_tokens
        return self._schedule.words(spans, rows, keys, pages_per_span)

    def fill(
        self,
        words: NDArray[np.int32],
        spans: Sequence[Span],
        span_capacity: int,
        pages_per_span: int,
    ) -> None:
        page = self.cache.geometry.page_tokens
        self._schedule.fill(words, spans, span_capacity, pages_per_span, page)

    def view(
        self, words: Tensor, span_capacity: int, pages_per_span: int, width: int
    ) -> TritonPlan:
        schedule = self._schedule
        keys = pages_per_span * self.cache.geometry.page_tokens
        records = schedule.records(len(words), span_capacity, pages_per_span)
        partial = min(records, schedule.slots) if keys > self.tiles.keys else 0
        folded, rows = width * schedule.group, self._rows(width)
        tiles = span_capacity * schedule.tiles_of(width)
        combined = self._combined_rows(rows, tiles, width)
        if not width:  # most programs would find nothing to do, and starting them takes time
            held = _COMBINING * self._processors * combined
            tiles = min(records, -(-held // (rows * self.cache.geometry.kv_heads)))
        few = partial and 0 < folded <= FEW_ROWS
        sums, parted, arrived = self._partial_results(partial)
        return TritonPlan(
            words=words,
            table_at=HEADER,
            items_at=HEADER + span_capacity * pages_per_span,
            pages_per_span=pages_per_span,
            programs=max(1, min(records, schedule.programs)),
            rows=rows,
            tiles=tiles if partial else 0,
            combined=combined,
            whole=schedule.whole(span_capacity, width, keys, records),
            finish=max(4, 1 << (folded - 1).bit_length()) if few else 0,
            sums=sums,
            parts=parted,
            arrived=arrived,
        )

    def _rows(self, width: int) -> int:
        """Folded rows of a tile of a step whose spans have up to `width` rows, 0 for any number.
        Where a span is one tile in any case the words are the same for all that hold it."""
        return self.tiles.rows

    def _partial_results(self, slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for partial results, shared by the steps of this backend: they run one after the
        other. A plan holds on to what it was made with."""
        rows = slots * self.cache.geometry.kv_heads * self.tiles.rows
        if rows * 2 > self._workspace[0].numel():
            device = self.cache.device
            sums = torch.empty(rows * 2, dtype=torch.float32, device=device)
            parts = torch.empty(rows * self._block, dtype=torch.float32, device=device)
            counters = 2 * slots * self.cache.geometry.kv_heads
            arrived = torch.zeros(counters, dtype=torch.int32, device=device)
            self._workspace = sums, parts, arrived
        return self._workspace

    def run(self, plan: TritonPlan, layer: int, q: Tensor) -> Tensor:
        return self._launch(plan, layer, q, None)

    def run_with_lse(self, plan: TritonPlan, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Also the natural log-sum-exp of every row's scaled scores, fp32 [rows, query_heads]; -inf
        (and zeros as output) where a row sees no key."""
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return self._launch(plan, layer, q, lse), lse

    @abstractmethod
    def _launch(self, plan: TritonPlan, layer: int, q: Tensor, lse: Tensor | None) -> Tensor:
        """The output; `lse` is filled where it is given."""

    def _combine(
        self, plan: TritonPlan, out: Tensor, logs: Tensor, window: int, fixed: dict[str, Any]
    ) -> None:
        """Adds up the partial results of the items, where there are any."""
        if plan.tiles:
            programs = max(1, min(plan.tiles, self._schedule.programs))
            kv_heads = self.cache.geometry.kv_heads
            _combine[(kv_heads, plan.rows // plan.combined, programs)](
                out, logs, plan.sums, plan.parts, plan.words, len(plan.words), window,
                R=plan.combined, num_warps=4, **flags(len(out)), **fixed,
            )  # fmt: skip

    def _combined_rows(self, tile: int, tiles: int, width: int) -> int:
        """Of a tile's folded rows those of one combining program: fewer where there are few tiles.
        It is compiled for them, so that steps of no fixed form all have the same: few, since
        prompts of many tiles have nothing to combine."""
        rows, heads = tile, self.cache.geometry.kv_heads
        while rows > 4 and (not width or tiles * heads * (tile // rows) < 4 * self._processors):
            rows //= 4
        return rows
