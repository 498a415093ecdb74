"""Which keys a row sees, in one place for every backend, and the plain reference made of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.base import LayerMode, Span
from engine.kv.cache import PagedCache


def longest(spans: Sequence[Span]) -> int:
    """Most keys that any span has."""
    return max((span.start + span.row_count for span in spans), default=0)


def key_range(mode: LayerMode, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Keys [low, high) of every row of the packed batch, in row order (int64, CPU)."""
    low, high = [], []
    for span in spans:
        end = span.start + span.row_count
        position = torch.arange(span.start, end, dtype=torch.int64)
        window = mode.window
        reach = end if window is None else window
        low.append((position - reach + 1).clamp_min(0))
        if mode.causal:
            high.append(position + 1)
        else:
            high.append((position + reach).clamp_max(end))
    if not low:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    return torch.cat(low), torch.cat(high)


def gather(cache: PagedCache, layer: int, span: Span, length: int) -> tuple[Tensor, Tensor]:
    """K and V of the first `length` positions of a span, [length, kv_heads, head_dim]."""
    count = -(-length // cache.geometry.page_tokens)
    pages = torch.tensor(span.table.pages[:count], dtype=torch.int64, device=cache.device)
    k, v = cache.gather(layer, pages)
    return k[:length], v[:length]


def attention_ref(
    cache: PagedCache,
    layer: int,
    mode: LayerMode,
    spans: Sequence[Span],
    q: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Attention in fp64, row by row from the definition: slow, for tests and checks only. `scale`
    is 1/sqrt(head_dim) unless given.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = q.shape[1] // cache.geometry.kv_heads
    low, high = key_range(mode, spans)
    out = torch.empty((*q.shape[:2], cache.geometry.value_width), dtype=torch.float64)
    for span in spans:
        k, v = gather(cache, layer, span, span.start + span.row_count)
        k, v = (x.to(q.device).double().repeat_interleave(group, dim=1) for x in (k, v))
        for row in range(span.first_row, span.first_row + span.row_count):
            keys = slice(int(low[row]), int(high[row]))
            scores = torch.einsum("hd,khd->hk", q[row].double(), k[keys]) * scale
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[keys])
    return out
