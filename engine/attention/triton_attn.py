"""TRITON_ATTN: our Triton kernels over the paged cache; on the CPU under TRITON_INTERPRET=1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.base import LayerMode
from engine.attention.few_rows import FEW, equal_few_rows
from engine.attention.kernels import paged
from engine.attention.kernels.schedule import Tiles, tiles_for
from engine.attention.triton_paged import TritonPaged, TritonPlan, padded
from engine.kernels.triton.dependent import flags
from engine.kv.cache import KVCache

_HALF = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class TritonAttention(TritonPaged):
    name: ClassVar[str] = "TRITON_ATTN"
    cache: KVCache

    def __init__(
        self,
        cache: KVCache,
        query_heads: int,
        modes: Sequence[LayerMode],
        dtype: torch.dtype | None = None,
        tiles: Tiles | None = None,
        processors: int = 0,
        few_rows: int = 0,
    ) -> None:
        """`dtype` is that of the queries, the cache's where it is None and not 8 bits wide.
        `tiles`, `processors` (multiprocessors of the device) and `few_rows` (folded rows of a tile
        of spans that have no more) replace what fits the model."""
        shape = cache.geometry
        stored = shape.dtype if shape.dtype not in _FP8 else torch.bfloat16
        self.dtype = dtype or stored
        self._half = self.dtype in _HALF and shape.dtype in (self.dtype, *_FP8)
        # The interpreter cannot multiply bf16.
        self._ieee = not self._half or cache.device.type == "cpu"
        group = query_heads // shape.kv_heads
        tiles = tiles or tiles_for(group, padded(shape.head_dim), self._half)
        super().__init__(cache, query_heads, modes, tiles, processors)
        self._few_rows = few_rows or tiles.rows
        if not few_rows and cache.device.type == "cuda":
            kinds = tuple(dict.fromkeys(modes))
            self._few_rows = equal_few_rows(
                type(self), shape, query_heads, self.dtype, kinds, tiles, cache.device
            )

    def _rows(self, width: int) -> int:
        few = self._few_rows
        return few if 0 < width * self._schedule.group <= few else self.tiles.rows

    def _launch(self, plan: TritonPlan, layer: int, q: Tensor, lse: Tensor | None) -> Tensor:
        assert q.dtype == self.dtype, f"{q.dtype} queries, built for {self.dtype}"
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        shape, tiles, mode = self.cache.geometry, self.tiles, self.modes[layer]
        k, v = self.cache.k[layer], self.cache.v[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        logs = out if lse is None else lse
        fixed = {
            "HEADS": self.query_heads, "KV_HEADS": shape.kv_heads, "D": shape.head_dim,
            "BLOCK_D": self._block, "M": plan.rows, "N": tiles.keys, "CHUNK": tiles.chunk,
            "CAUSAL": mode.causal, "LSE": lse is not None,
            # No multiply-add but those spelled out: the variants of a kernel must round alike.
            "enable_fp_fusion": False,
        }  # fmt: skip
        paged._attend[(shape.kv_heads, plan.programs)](
            q, k, v, out, logs, plan.sums, plan.parts, plan.arrived, plan.words, plan.items_at,
            plan.table_at, plan.pages_per_span, q.stride(0),
            shape.head_dim**-0.5 * math.log2(math.e), mode.window or 0,
            STRIDE_PAGE=k.stride(0), STRIDE_TOKEN=k.stride(1), PAGE=shape.page_tokens,
            WHOLE=plan.whole, WINDOWED=bool(mode.window), HALF=self._half, IEEE=self._ieee,
            FINISH=plan.finish, num_warps=tiles.warps, num_stages=tiles.stages,
            maxnreg=tiles.registers if plan.rows == FEW else None, **flags(len(q)), **fixed,
        )  # fmt: skip
        if not plan.finish:
            self._combine(plan, out, logs, mode.window or 0, fixed)
        return out
