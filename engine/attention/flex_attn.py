"""FLEX_ATTENTION: torch's flex_attention over gathered keys; compiled on a GPU, plain on the CPU.

All spans are one sequence of rows and one of keys, and the mask says who sees whom. Both are
padded to few sizes, so that few kernels are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from engine.attention.base import AttentionBackend, LayerMode, Span
from engine.attention.gathered import Packed, gathered, keys_of
from engine.attention.mask import key_range
from engine.kv.cache import KVCache

_ROWS, _KEYS = 128, 1024  # multiples that sizes are padded to


@dataclass(frozen=True, slots=True)
class FlexPlan:
    packed: Packed
    masks: dict[LayerMode, BlockMask]
    rows: int
    keys: int


class FlexAttention(AttentionBackend):
    name: ClassVar[str] = "FLEX_ATTENTION"
    cache: KVCache
    rows_independent = False
    uncapturable = "its block mask is made anew for every step"

    def __init__(self, cache: KVCache, query_heads: int, modes: Sequence[LayerMode]) -> None:
        super().__init__(cache, query_heads, modes)
        self._device = cache.k[0].device
        self._attend: Callable[..., Tensor] = flex_attention
        if self._device.type == "cuda":
            self._attend = torch.compile(flex_attention, dynamic=True)

    def plan(self, spans: Sequence[Span]) -> FlexPlan:
        spans = [span for span in spans if span.row_count]
        packed = gathered(self.cache, spans)
        rows = -(-max(packed.rows, 1) // _ROWS) * _ROWS
        keys = -(-max(len(packed.slots), 1) // _KEYS) * _KEYS
        masks = {mode: self._mask(mode, spans, rows, keys) for mode in set(self.modes)}
        return FlexPlan(packed, masks, rows, keys)

    def _mask(self, mode: LayerMode, spans: Sequence[Span], rows: int, keys: int) -> BlockMask:
        low, high = key_range(mode, spans)
        counts = torch.tensor([span.row_count for span in spans], dtype=torch.int64)
        ends = torch.tensor([span.start + span.row_count for span in spans], dtype=torch.int64)
        first = (ends.cumsum(0) - ends).repeat_interleave(counts)
        # Rows that only pad see no key.
        bounds = torch.zeros(2, rows, dtype=torch.int64)
        bounds[0, : len(low)], bounds[1, : len(high)] = first + low, first + high
        begin, end = bounds.to(self._device)

        def seen(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            inside: Tensor = (key >= begin[row]) & (key < end[row])
            return inside

        made: BlockMask = create_block_mask(seen, None, None, rows, keys, device=self._device)
        return made

    def run(self, plan: FlexPlan, layer: int, q: Tensor) -> Tensor:
        """Rows behind the last span come back as zeros."""
        packed, pad = plan.packed, torch.nn.functional.pad
        k, v = keys_of(self.cache, layer, packed, q.dtype)
        k, v = (pad(x, (0, 0, 0, 0, 0, plan.keys - len(x))).transpose(0, 1)[None] for x in (k, v))
        query = pad(q[: packed.rows], (0, 0, 0, 0, 0, plan.rows - packed.rows)).transpose(0, 1)[
            None
        ]
        found = self._attend(
            query, k, v, block_mask=plan.masks[self.modes[layer]], enable_gqa=True
        )[0].transpose(0, 1)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        out[: packed.rows] = found[: packed.rows]
        return out
