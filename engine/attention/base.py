"""The interface every attention backend implements: `plan` once a step, `run` once a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.mode import LayerMode as LayerMode
from engine.kv.cache import PagedCache
from engine.kv.pool import PageTable, TableView


@dataclass(slots=True)  # frozen it takes three times as long to make, for every session and step
class Span:
    """One session's rows in the packed batch: rows [first_row, first_row+row_count) at positions
    start .. start+row_count-1.

    Keys [0, start+row_count) of `table` must be written when the layer runs, as far as rows see
    them that count.
    """

    table: PageTable | TableView
    start: int
    first_row: int
    row_count: int

    def pages(self, page_tokens: int) -> list[int]:
        """Of all keys. A short block's padding may stand behind what the table holds: its own first
        page stands in for keys that only such rows see. Another session's might hold what is no
        number, which no weight of zero takes out of a sum."""
        count = -(-(self.start + self.row_count) // page_tokens)
        held = self.table.pages[:count]
        return held if len(held) == count else held + held[:1] * (count - len(held))


class AttentionBackend(ABC):
    """Attention over paged KV. A backend belongs to one model and one cache.

    `plan` does all host work of a step from lengths only; `run` does none. `rows_independent` says
    whether a row's output is the same bits whatever rows are beside it and however the span is cut.
    `uncapturable` says why `run` may not be captured in a CUDA graph, "" where it may.
    """

    name: ClassVar[str]
    rows_independent: bool
    uncapturable: str = "its metadata is made anew for every step"
    cache: PagedCache

    def __init__(self, cache: PagedCache, query_heads: int, modes: Sequence[LayerMode]) -> None:
        self.cache, self.query_heads, self.modes = cache, query_heads, tuple(modes)

    @abstractmethod
    def plan(self, spans: Sequence[Span]) -> Any:
        """Metadata of one step."""

    @abstractmethod
    def run(self, plan: Any, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [rows, query_heads, head_dim] -> [rows, query_heads, head_dim], softmax scale
        1/sqrt(head_dim).

        Over latent KV: q [rows, query_heads, rank + rope] -> [rows, query_heads, rank], with the
        scale that the backend was made with.
        """


class DeviceAttention(AttentionBackend):
    """A backend whose metadata of a step is int32 words at a fixed place on the device.

    The same words can be filled again for another step and copied over, so `run` on a `view` of
    them may be captured: what it launches depends on the capacities alone.
    """

    uncapturable = ""

    @abstractmethod
    def words(self, spans: int, rows: int, pages_per_span: int) -> int:
        """Words that any step of at most that many spans, rows and pages needs."""

    @abstractmethod
    def fill(
        self,
        words: NDArray[np.int32],
        spans: Sequence[Span],
        span_capacity: int,
        pages_per_span: int,
    ) -> None:
        """Writes a step into host words [words(...)]; pure host work from lengths and pages."""

    @abstractmethod
    def view(self, words: torch.Tensor, span_capacity: int, pages_per_span: int, width: int) -> Any:
        """The plan made of device words (int32, as many as were filled). `width` > 0: no span
        has more rows; 0: any."""

    def capacity(self, spans: Sequence[Span]) -> tuple[int, int]:
        """Words and pages a span that just these spans need."""
        page = self.cache.geometry.page_tokens
        pages = max((-(-(span.start + span.row_count) // page) for span in spans), default=0)
        pages = max(pages, 1)
        return self.words(len(spans), sum(span.row_count for span in spans), pages), pages

    def plan(self, spans: Sequence[Span]) -> Any:
        device = self.cache.device
        count, pages = self.capacity(spans)
        # The caching allocator keeps pinned memory back until copies out of it are done.
        words = torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.fill(words.numpy(), spans, len(spans), pages)
        return self.view(words.to(device, non_blocking=True), len(spans), pages, 0)
