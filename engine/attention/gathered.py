"""Keys of a step gathered into one packed row of tokens, for kernels that know no pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.attention.base import Span
from engine.kv.cache import KVCache


@dataclass(frozen=True, slots=True)
class Packed:
    """`slots` [keys]: flat cache slots of all spans' keys, one span after the other. Prefix sums of
    rows and keys, int32 [spans + 1]; the longest of both. Spans without rows are left out."""

    slots: Tensor
    row_ends: Tensor
    key_ends: Tensor
    most_rows: int
    most_keys: int
    rows: int


def gathered(cache: KVCache, spans: Sequence[Span]) -> Packed:
    """Spans in order of their rows, which must follow one another from row 0."""
    spans = [span for span in spans if span.row_count]
    page, device = cache.geometry.page_tokens, cache.k[0].device
    rows = [span.row_count for span in spans]
    keys = [span.start + span.row_count for span in spans]
    firsts = list(accumulate(rows, initial=0))
    assert [span.first_row for span in spans] == firsts[:-1], "rows of the spans have gaps"
    slots = [
        (torch.tensor(span.pages(page)).unsqueeze(1) * page + torch.arange(page))
        .flatten()[:n]
        .to(torch.int64)
        for span, n in zip(spans, keys, strict=True)
    ]
    ends = torch.tensor([firsts, list(accumulate(keys, initial=0))], dtype=torch.int32)
    ends = ends.to(device, non_blocking=True)
    packed = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
    return Packed(
        packed.to(device), ends[0], ends[1], max(rows, default=0), max(keys, default=0), firsts[-1]
    )


def keys_of(
    cache: KVCache, layer: int, packed: Packed, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V [keys, kv_heads, head_dim] in the queries' dtype."""
    shape = (-1, cache.geometry.kv_heads, cache.geometry.head_dim)
    k, v = (data[layer].view(shape)[packed.slots].to(dtype) for data in (cache.k, cache.v))
    return k, v
