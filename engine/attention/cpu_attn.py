"""CPU_ATTN: paged attention in C. A row's bits depend on its own position and keys only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, LayerMode, Span
from engine.attention.mask import key_range, longest
from engine.kernels.cpu import ops
from engine.kv.cache import KVCache

MAX_VECTORS = 16  # query vectors of one tile, as in attention.c
TILES_PER_THREAD = 4


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Host tensors of one step; `ranges` holds the keys [low, high) of every row, once per mode."""

    rows: int
    spans: Tensor
    tiles: Tensor
    pages: Tensor
    ranges: dict[LayerMode, tuple[Tensor, Tensor]]
    scratch: Tensor
    width: int
    threads: int


class CpuAttention(AttentionBackend):
    name: ClassVar[str] = "CPU_ATTN"
    rows_independent = True
    cache: KVCache

    def __init__(self, cache: KVCache, query_heads: int, modes: Sequence[LayerMode]) -> None:
        super().__init__(cache, query_heads, modes)
        self._kernel = ops.library().sw_attention
        self._keys = [tensor.data_ptr() for tensor in cache.k]
        self._values = [tensor.data_ptr() for tensor in cache.v]
        self._bf16 = cache.geometry.dtype == torch.bfloat16

    def plan(self, spans: Sequence[Span]) -> CpuPlan:
        page_tokens, kv_heads = self.cache.geometry.page_tokens, self.cache.geometry.kv_heads
        group, threads = self.query_heads // kv_heads, torch.get_num_threads()
        vectors = sum(span.row_count for span in spans) * group
        # Few vectors: small tiles, so that every thread has work. Tiles do not change any result.
        size = max(1, min(MAX_VECTORS, vectors * kv_heads // (TILES_PER_THREAD * threads)))
        described: list[list[int]] = []
        tiles: list[list[int]] = []
        pages: list[int] = []
        for index, span in enumerate(spans):
            end = span.start + span.row_count
            described.append([span.first_row, span.row_count, end, len(pages)])
            pages += span.pages(page_tokens)
            count = span.row_count * group
            tiles += [[index, at, min(size, count - at)] for at in range(0, count, size)]
        # Rounded up so that the scratch keeps whole blocks of 8 keys, 64 bytes apart.
        width = -(-longest(spans) // 64) * 64 + 16
        return CpuPlan(
            rows=vectors // group,
            spans=torch.tensor(described, dtype=torch.int64),
            tiles=torch.tensor(tiles, dtype=torch.int64),
            pages=torch.tensor(pages, dtype=torch.int32),
            ranges={mode: key_range(mode, spans) for mode in set(self.modes)},
            scratch=torch.empty(threads * width * (MAX_VECTORS + 2)),
            width=width,
            threads=threads,
        )

    def run(self, plan: CpuPlan, layer: int, q: Tensor) -> Tensor:
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        shape, dim = self.cache.geometry, q.shape[2]
        low, high = plan.ranges[self.modes[layer]]
        out = torch.empty((plan.rows, self.query_heads, dim))
        self._kernel(
            q.data_ptr(), q.stride(0), self._keys[layer], self._values[layer], self._bf16,
            out.data_ptr(), plan.spans.data_ptr(), plan.tiles.data_ptr(), plan.tiles.shape[0],
            low.data_ptr(), high.data_ptr(), plan.pages.data_ptr(), self.query_heads,
            shape.kv_heads, dim, shape.page_tokens, dim**-0.5, plan.scratch.data_ptr(), plan.width,
            plan.threads,
        )  # fmt: skip
        return out
