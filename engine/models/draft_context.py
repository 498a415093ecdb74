"""Where the context K/V of a block draft lives, and the rows on their way there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import SettingRefused
from engine.kv.cache import CacheGeometry, PagedCache
from engine.kv.groups import PagedGroups
from engine.kv.pool import PagePool, PageTable
from engine.models.family import build_cache
from engine.step_words import StepWords


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


class RowUpload:
    """Rows of several writes and where they go, in one copy from page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self._words = StepWords(device)

    def __call__(
        self, writes: Sequence[ContextRows], positions: Sequence[int], slots: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """On the device: rows [n, row_width] as they came, int32 positions and slots [n]. They are
        overwritten by the next call."""
        count, width, dtype = len(slots), writes[0].rows.shape[1], writes[0].rows.dtype
        values, words = count * width, self._words
        words.layout(rows=-(-values * dtype.itemsize // 4), positions=count, slots=count)
        words.host("positions")[:] = positions
        words.host("slots")[:] = slots
        torch.cat(
            [write.rows for write in writes],
            out=torch.from_numpy(words.host("rows")).view(dtype)[:values].view(count, width),
        )
        words.upload()
        rows = words.device("rows").view(dtype)[:values].view(count, width)
        return rows, words.device("positions"), words.device("slots")
