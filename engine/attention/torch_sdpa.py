"""TORCH_SDPA and TORCH_MLA: torch's scaled_dot_product_attention over gathered pages. Any device,
any layer mode.

The query heads of one KV head are folded into rows, so keys and values are never expanded. Torch
picks kernels by shape, so a row may depend on the rows beside it; `bucket` rounds the number of
keys up to fixed edges (the rest is masked), which keeps the shapes, and so the bits, of a fixed
block width stable between two edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, LayerMode, Span
from engine.attention.mask import key_range
from engine.kv.cache import PagedCache


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """One span: its rows, its pages, and per mode the keys seen, bool [1, rows * group, keys]."""

    rows: slice
    pages: Tensor
    keys: int
    masks: dict[LayerMode, Tensor]


class TorchSdpa(AttentionBackend):
    name: ClassVar[str] = "TORCH_SDPA"
    rows_independent = False

    def __init__(
        self,
        cache: PagedCache,
        query_heads: int,
        modes: Sequence[LayerMode],
        bucket: int = 0,
        scale: float | None = None,
    ) -> None:
        super().__init__(cache, query_heads, modes)
        self.bucket, self.scale = bucket, scale
        self._group = query_heads // cache.geometry.kv_heads

    def plan(self, spans: Sequence[Span]) -> list[SpanPlan]:
        return [self._plan_span(span) for span in spans if span.row_count]

    def _plan_span(self, span: Span) -> SpanPlan:
        page_tokens, device = self.cache.geometry.page_tokens, self.cache.device
        end = span.start + span.row_count
        keys = -(-end // self.bucket) * self.bucket if self.bucket else end
        held = span.pages(page_tokens)
        # A bucket may reach past the pages held: page 0 stands in for them, and the mask hides it.
        pages = held + [0] * (-(-keys // page_tokens) - len(held))
        position = torch.arange(keys)
        masks: dict[LayerMode, Tensor] = {}
        for mode in set(self.modes):
            low, high = key_range(mode, [span])
            seen = (position >= low[:, None]) & (position < high[:, None])
            masks[mode] = seen.repeat_interleave(self._group, dim=0)[None].to(device)
        rows = slice(span.first_row, span.first_row + span.row_count)
        return SpanPlan(rows, torch.tensor(pages, device=device), keys, masks)

    def run(self, plan: list[SpanPlan], layer: int, q: Tensor) -> Tensor:
        out = q.new_empty((*q.shape[:2], self.cache.geometry.value_width))
        for span in plan:
            out[span.rows] = self._run_span(span, layer, q[span.rows])
        return out

    def _run_span(self, span: SpanPlan, layer: int, q: Tensor) -> Tensor:
        rows, _, dim = q.shape
        kv_heads = self.cache.geometry.kv_heads
        k, v = (
            found[: span.keys].transpose(0, 1).to(q.dtype)
            for found in self.cache.gather(layer, span.pages)
        )
        # [rows, kv_heads, group, dim] -> [kv_heads, rows * group, dim]
        folded = q.reshape(rows, kv_heads, self._group, dim).transpose(0, 1).flatten(1, 2)
        mask = span.masks[self.modes[layer]]
        out = torch.nn.functional.scaled_dot_product_attention(
            folded[None], k[None], v[None], attn_mask=mask[None], scale=self.scale
        )[0]
        unfolded = out.view(kv_heads, rows, self._group, v.shape[2]).transpose(0, 1)
        return unfolded.reshape(rows, self.query_heads, v.shape[2])


class TorchMla(TorchSdpa):
    """The same over latent KV: one key for all heads, whose beginning is the value."""

    name: ClassVar[str] = "TORCH_MLA"
