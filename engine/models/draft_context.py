"""Where the context K/V of a block draft lives, and the rows on their way there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.errors import SettingRefused
from engine.graphs import StepGraphs
from engine.kv.cache import CacheGeometry, PagedCache
from engine.kv.groups import PagedGroups
from engine.kv.pool import PagePool, PageTable
from engine.models.family import build_cache
from engine.step_words import StepWords

# bf16 as uint16.
Bits = np.ndarray[Any, np.dtype[np.uint16]]

# Rows that graphs take in.
CAPTURED_ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Rows [n, row_width] of positions [start, start + n), the target's taps: of any float dtype,
    or bf16 as the wire has it. `projected`: [n, hidden], with the draft's `fc` and norm applied."""

    table: PageTable
    start: int
    rows: Tensor | Bits
    origin: int = 0
    projected: bool = False

    def tensor(self) -> Tensor:
        if isinstance(self.rows, Tensor):
            return self.rows
        writable = self.rows if self.rows.flags.writeable else self.rows.copy()
        return torch.from_numpy(writable).view(torch.bfloat16)


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
    projected: bool


# (rows [n, width], int32 positions [n] and flat slots [n], `projected`)
WriteRows = Callable[[Tensor, Tensor, Tensor, bool], None]


class ContextWriter:
    """Takes rows to a device in one copy from page-locked memory, and has them written there.

    Few rows as the wire has them are padded to a size whose graph was captured before: launched,
    they would take the host longer than the device. Others, and all where nothing was captured, are
    launched."""

    def __init__(
        self, write: WriteRows, scratch_slot: int, device: torch.device, captures: bool
    ) -> None:
        """Padding is written to `scratch_slot`."""
        self._write, self._scratch_slot, self._device = write, scratch_slot, device
        self._graphs: StepGraphs[None] = StepGraphs("context", captures)
        self._fixed: dict[RowShape, _FixedRows] = {}
        self._loose = StepWords(device)
        # Whether a graph may still read what was laid out for it.
        self._reading = False

    def capture(self, width: int, projected: bool) -> None:
        """Captures the graphs for rows of that kind, unless there are to be none; those that find
        no memory are left out."""
        for size in reversed(CAPTURED_ROWS if self._graphs.enabled else ()):
            shape = RowShape(size, width, projected)
            fixed = self._fixed[shape] = _FixedRows(self._device, shape)
            fixed.fill((), (), (), self._scratch_slot)
            self._play(shape, fixed, True)
        self._wait()

    def over(self) -> None:
        """Everything launched so far is over."""
        self._reading = False

    def __call__(
        self, writes: Sequence[ContextRows], positions: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Writes rows that are alike, [n, width] in all, at positions and slots [n]. Does not wait
        for the device, unless it is still at the last ones."""
        first = writes[0]
        size = next((size for size in CAPTURED_ROWS if size >= len(slots)), 0)
        shape = RowShape(size, first.rows.shape[1], first.projected)
        arrays = [write.rows for write in writes if isinstance(write.rows, np.ndarray)]
        fixed = self._fixed.get(shape)
        if fixed is None or len(arrays) < len(writes):
            self._launch(writes, positions, slots)
            return
        self._wait()
        fixed.fill(arrays, positions, slots, self._scratch_slot)
        self._play(shape, fixed, False)

    def _wait(self) -> None:
        if self._reading and self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._reading = False

    def _play(self, shape: RowShape, fixed: _FixedRows, capture: bool) -> None:
        def body() -> None:
            with torch.inference_mode():
                fixed.words.copy()
                self._write(*_views(fixed.words, shape.width, torch.bfloat16), shape.projected)

        self._reading = True  # also where a launch fails halfway
        self._graphs.run(shape, body, capture)

    @torch.inference_mode()
    def _launch(
        self, writes: Sequence[ContextRows], positions: Sequence[int], slots: Sequence[int]
    ) -> None:
        given = [write.tensor() for write in writes]
        width, dtype, words = given[0].shape[1], given[0].dtype, self._loose
        _lay_out(words, len(slots), width, dtype)
        words.host("positions")[:], words.host("slots")[:] = positions, slots
        rows = torch.from_numpy(words.host("rows")).view(dtype)[: len(slots) * width]
        torch.cat(given, out=rows.view(len(slots), width))
        words.upload()
        self._write(*_views(words, width, dtype), writes[0].projected)


class _FixedRows:
    """The words of one shape, in the host's memory as arrays."""

    def __init__(self, device: torch.device, shape: RowShape) -> None:
        self.words = words = StepWords(device)
        _lay_out(words, shape.rows, shape.width, torch.bfloat16)
        bits = words.host("rows").view(np.uint16)[: shape.rows * shape.width]
        self._rows = bits.reshape(shape.rows, shape.width)
        self._positions, self._slots = words.host("positions"), words.host("slots")

    def fill(
        self,
        arrays: Sequence[Bits],
        positions: Sequence[int],
        slots: Sequence[int],
        scratch_slot: int,
    ) -> None:
        """Padding keeps what it held, which is harmless in a scratch slot."""
        at, count = 0, len(slots)
        for rows in arrays:
            self._rows[at : at + len(rows)] = rows
            at += len(rows)
        self._positions[:count] = positions
        self._slots[:count], self._slots[count:] = slots, scratch_slot


def _lay_out(words: StepWords, count: int, width: int, dtype: torch.dtype) -> None:
    words.layout(rows=-(-count * width * dtype.itemsize // 4), positions=count, slots=count)


def _views(words: StepWords, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, positions and slots on the device."""
    positions, rows = words.device("positions"), words.device("rows").view(dtype)
    count = len(positions)
    return rows[: count * width].view(count, width), positions, words.device("slots")
