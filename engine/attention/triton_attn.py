"""TRITON_ATTN: our Triton kernels over the paged cache; on the CPU under TRITON_INTERPRET=1.

A row's bits depend on its own position, keys and mode only; `kernels/paged.py` says how.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import DeviceAttention, LayerMode, Span
from engine.attention.kernels import paged
from engine.attention.kernels.schedule import HEADER, Schedule, Tiles, tiles_for
from engine.kv.cache import KVCache

_HALF = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_WORKSPACE_BYTES = 256 << 20
_INTERPRETED_PROCESSORS = 3  # few, so that small tests see every kind of schedule


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Words of one step on the device, and what its launches depend on besides. `tiles` bounds the
    tiles to combine, 0 where there can be none; `whole` as in `paged._attend`."""

    words: Tensor
    table_at: int
    items_at: int
    pages_per_span: int
    programs: int
    tiles: int
    whole: bool
    sums: Tensor
    parts: Tensor


class TritonAttention(DeviceAttention):
    name: ClassVar[str] = "TRITON_ATTN"
    rows_independent = True

    def __init__(
        self,
        cache: KVCache,
        query_heads: int,
        modes: Sequence[LayerMode],
        dtype: torch.dtype | None = None,
        tiles: Tiles | None = None,
        processors: int = 0,
    ) -> None:
        """`dtype` is that of the queries, the cache's where it is None and not 8 bits wide.
        `tiles` and `processors` (multiprocessors of the device) replace what fits the model."""
        super().__init__(cache, query_heads, modes)
        shape, device = cache.geometry, cache.k[0].device
        stored = shape.dtype if shape.dtype not in _FP8 else torch.bfloat16
        self.dtype = dtype or stored
        self._half = self.dtype in _HALF and shape.dtype in (self.dtype, *_FP8)
        # The interpreter cannot multiply bf16.
        self._ieee = not self._half or device.type == "cpu"
        self._block = max(16, triton.next_power_of_2(shape.head_dim))
        group = query_heads // shape.kv_heads
        self.tiles = tiles or tiles_for(group, self._block, self._half)
        if not processors:
            processors = _INTERPRETED_PROCESSORS
            if device.type == "cuda":
                processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._processors = processors
        slot_bytes = 4 * shape.kv_heads * self.tiles.rows * (self._block + 2)
        programs = -(-8 * processors // shape.kv_heads)
        self._schedule = Schedule(self.tiles, group, programs, _WORKSPACE_BYTES // slot_bytes)
        self._workspace = torch.empty(0, device=device), torch.empty(0, device=device)

    def words(self, spans: int, rows: int, pages_per_span: int) -> int:
        keys = pages_per_span * self.cache.geometry.page_tokens
        return self._schedule.words(spans, rows, keys, pages_per_span)

    def fill(
        self,
        words: NDArray[np.int32],
        spans: Sequence[Span],
        span_capacity: int,
        pages_per_span: int,
    ) -> None:
        page = self.cache.geometry.page_tokens
        self._schedule.fill(words, spans, span_capacity, pages_per_span, page)

    def view(
        self, words: Tensor, span_capacity: int, pages_per_span: int, width: int
    ) -> TritonPlan:
        schedule = self._schedule
        keys = pages_per_span * self.cache.geometry.page_tokens
        records = schedule.records(len(words), span_capacity, pages_per_span)
        tiles = span_capacity * schedule.tiles_of(width) if width else records
        parts = min(records, schedule.slots) if keys > self.tiles.keys else 0
        sums, parted = self._partial_results(parts)
        return TritonPlan(
            words=words,
            table_at=HEADER,
            items_at=HEADER + span_capacity * pages_per_span,
            pages_per_span=pages_per_span,
            programs=max(1, min(records, schedule.programs)),
            tiles=tiles if parts else 0,
            whole=schedule.whole(span_capacity, width, keys, records),
            sums=sums,
            parts=parted,
        )

    def _partial_results(self, slots: int) -> tuple[Tensor, Tensor]:
        """Memory for partial results, shared by the steps of this backend: they run one after the
        other. A plan holds on to what it was made with."""
        rows = slots * self.cache.geometry.kv_heads * self.tiles.rows
        if rows * 2 > self._workspace[0].numel():
            device = self.cache.k[0].device
            sums = torch.empty(rows * 2, dtype=torch.float32, device=device)
            parts = torch.empty(rows * self._block, dtype=torch.float32, device=device)
            self._workspace = sums, parts
        return self._workspace

    def run(self, plan: TritonPlan, layer: int, q: Tensor) -> Tensor:
        return self._launch(plan, layer, q, None)

    def run_with_lse(self, plan: TritonPlan, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Also the natural log-sum-exp of every row's scaled scores, fp32 [rows, query_heads]; -inf
        (and zeros as output) where a row sees no key."""
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return self._launch(plan, layer, q, lse), lse

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
            "BLOCK_D": self._block, "M": tiles.rows, "N": tiles.keys, "CHUNK": tiles.chunk,
            "CAUSAL": mode.causal, "LSE": lse is not None,
            # No multiply-add but those spelled out: the variants of a kernel must round alike.
            "enable_fp_fusion": False,
        }  # fmt: skip
        paged._attend[(shape.kv_heads, plan.programs)](
            q, k, v, out, logs, plan.sums, plan.parts, plan.words, plan.items_at, plan.table_at,
            plan.pages_per_span, q.stride(0), k.stride(0), k.stride(1),
            shape.head_dim**-0.5 * math.log2(math.e), mode.window or 0,
            PAGE=shape.page_tokens, WHOLE=plan.whole, HALF=self._half, IEEE=self._ieee,
            num_warps=tiles.warps, num_stages=tiles.stages, **fixed,
        )  # fmt: skip
        if plan.tiles:
            rows = self._combined_rows(plan)
            programs = max(1, min(plan.tiles, self._schedule.programs))
            paged._combine[(shape.kv_heads, tiles.rows // rows, programs)](
                out, logs, plan.sums, plan.parts, plan.words, len(plan.words), mode.window or 0,
                R=rows, num_warps=4, **fixed,
            )  # fmt: skip
        return out

    def _combined_rows(self, plan: TritonPlan) -> int:
        """Folded rows of one combining program: fewer where there are few tiles."""
        rows, heads = self.tiles.rows, self.cache.geometry.kv_heads
        while rows > 4 and plan.tiles * heads * (self.tiles.rows // rows) < 4 * self._processors:
            rows //= 4
        return rows
