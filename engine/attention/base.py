"""The interface every attention backend implements: `plan` once a step, `run` once a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from engine.attention.mode import LayerMode as LayerMode
from engine.kv.cache import KVCache
from engine.kv.pool import PageTable, TableView


@dataclass(frozen=True, slots=True)
class Span:
    """One session's rows in the packed batch: rows [first_row, first_row+row_count) at positions
    start .. start+row_count-1.

    Keys [0, start+row_count) of `table` must be written when the layer runs.
    """

    table: PageTable | TableView
    start: int
    first_row: int
    row_count: int


class AttentionBackend(ABC):
    """Attention over paged KV. A backend belongs to one model and one cache.

    `plan` does all host work of a step from lengths only; `run` does none. `rows_independent` says
    whether a row's output is the same bits whatever rows are beside it and however the span is cut.
    """

    name: ClassVar[str]
    rows_independent: bool

    def __init__(self, cache: KVCache, query_heads: int, modes: Sequence[LayerMode]) -> None:
        self.cache, self.query_heads, self.modes = cache, query_heads, tuple(modes)

    @abstractmethod
    def plan(self, spans: Sequence[Span]) -> Any:
        """Metadata of one step."""

    @abstractmethod
    def run(self, plan: Any, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [rows, query_heads, head_dim] -> [rows, query_heads, head_dim], softmax scale
        1/sqrt(head_dim)."""
