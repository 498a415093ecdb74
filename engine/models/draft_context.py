"""Where the context K/V of a block draft lives, and the rows on their way there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import SettingRefused
from engine.graphs import StepGraphs
from engine.kv.cache import CacheGeometry, PagedCache
from engine.kv.groups import PagedGroups
from engine.kv.pool import PagePool, PageTable
from engine.models.family import build_cache
from engine.step_words import StepWords

# Rows that graphs take in.
CAPTURED_ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Rows [n, row_width] of positions [start, start + n), any float dtype: the target's taps;
    `projected`: [n, hidden], with the draft's `fc` and norm applied."""

    table: PageTable
    start: int
    rows: Tensor
    origin: int = 0
    projected: bool = False


@dataclass(frozen=True, slots=True)
class ContextMemory:
    """`cache` is one of the groups under the tables of `pages`. `scratch_slot` is the first of a
    page that belongs to no table, `longest` bounds the positions of a table."""

    pages: PagedGroups
    cache: PagedCache
    scratch_slot: int
    longest: int

    @classmethod
    def own(cls, geometry: CacheGeometry, page_count: int, device: torch.device) -> ContextMemory:
        """Pages of the draft alone, and a scratch page. Raises SettingRefused."""
        pool, slots = PagePool(page_count, geometry.page_tokens), page_count * geometry.page_tokens
        try:
            cache = build_cache(geometry, page_count + 1, device)
        except (MemoryError, torch.OutOfMemoryError):
            accepted = f"what {device} has memory for"
            raise SettingRefused("kv_pages", page_count, accepted) from None
        return cls(PagedGroups(pool, {"draft": cache}), cache, slots, slots)


class RowShape(NamedTuple):
    """`rows` of `width` values; `projected` as in `ContextRows`."""

    rows: int
    width: int
    dtype: torch.dtype
    projected: bool


# (rows [n, width], int32 positions [n] and flat slots [n], `projected`)
WriteRows = Callable[[Tensor, Tensor, Tensor, bool], None]


class ContextWriter:
    """Takes rows to a device in one copy from page-locked memory, and has them written there.

    Few rows are padded to a size whose graph was captured before: launched, they would take the
    host longer than the device. More, and all where nothing was captured, are launched."""

    def __init__(
        self, write: WriteRows, scratch_slot: int, device: torch.device, captures: bool
    ) -> None:
        """Padding is written to `scratch_slot`."""
        self._write, self._scratch_slot, self._device = write, scratch_slot, device
        self._graphs: StepGraphs[None] = StepGraphs("context", captures)
        self._fixed: dict[RowShape, StepWords] = {}
        self._loose = StepWords(device)

    @torch.inference_mode()
    def capture(self, width: int, dtype: torch.dtype, projected: bool) -> None:
        """Captures the graphs for rows of that kind, unless there are to be none; those that find
        no memory are left out."""
        for size in reversed(CAPTURED_ROWS if self._graphs.enabled else ()):
            shape = RowShape(size, width, dtype, projected)
            words = self._fixed[shape] = StepWords(self._device)
            _lay_out(words, shape)
            words.host("slots").fill(self._scratch_slot)
            words.upload()
            self._graphs.run(shape, partial(self._body, words, shape))

    def __call__(
        self, writes: Sequence[ContextRows], positions: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Writes rows that are alike, [n, width] in all, at positions and slots [n]. Does not wait
        for the device."""
        count, first = len(slots), writes[0]
        kind = first.rows.shape[1], first.rows.dtype, first.projected
        size = next((size for size in CAPTURED_ROWS if size >= count), count)
        shape = RowShape(size, *kind)
        words = self._fixed.get(shape)
        if words is None:
            words, shape = self._loose, RowShape(count, *kind)
        _lay_out(words, shape)
        words.host("positions")[:count] = positions
        own = words.host("slots")
        own[:count], own[count:] = slots, self._scratch_slot
        rows = _rows_of(torch.from_numpy(words.host("rows")), shape)
        torch.cat([write.rows for write in writes], out=rows[:count])
        words.upload()
        body = partial(self._body, words, shape)
        if words is self._loose:
            body()
        else:
            self._graphs.run(shape, body, capture=False)

    def _body(self, words: StepWords, shape: RowShape) -> None:
        rows = _rows_of(words.device("rows"), shape)
        self._write(rows, words.device("positions"), words.device("slots"), shape.projected)


def _lay_out(words: StepWords, shape: RowShape) -> None:
    count, width, dtype, _ = shape
    values = -(-count * width * dtype.itemsize // 4)
    words.layout(rows=values, positions=count, slots=count)


def _rows_of(words: Tensor, shape: RowShape) -> Tensor:
    """The rows that the int32 words are."""
    count, width, dtype, _ = shape
    return words.view(dtype)[: count * width].view(count, width)
