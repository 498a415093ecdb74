"""TRITON_MLA: our Triton kernel over paged latent KV, plain or in the fp8 layout; on the CPU under
TRITON_INTERPRET=1.

A row's bits depend on its own position, keys and mode only; `kernels/paged.py` says how.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.base import LayerMode
from engine.attention.kernels.latent import _attend_latent
from engine.attention.kernels.schedule import Tiles
from engine.attention.triton_paged import TritonPaged, TritonPlan, padded
from engine.kv.latent import LatentCache

_HALF = (torch.float16, torch.bfloat16)
# Capabilities with shared memory for queries and several units of 576 values.
_LARGE_SHARED = ((8, 0), (9, 0), (10, 0), (10, 3))


def latent_tiles(heads: int, half: bool, device: torch.device) -> Tiles:
    """Fixed by the model and the dtype; only `stages`, which change no bit, by the device."""
    if not half:
        return Tiles(16, 16, 16, 8, 1)
    stages = 1
    if device.type == "cuda":
        # The page ids take up one of three: a unit is on its way while another is worked on.
        stages = 3 if torch.cuda.get_device_capability(device) in _LARGE_SHARED else 1
    return Tiles(32 if heads >= 16 else 16, 32, 16, 8, stages)


class TritonMla(TritonPaged):
    name: ClassVar[str] = "TRITON_MLA"
    cache: LatentCache

    def __init__(
        self,
        cache: LatentCache,
        query_heads: int,
        modes: Sequence[LayerMode],
        scale: float,
        dtype: torch.dtype | None = None,
        tiles: Tiles | None = None,
        processors: int = 0,
    ) -> None:
        """`scale` multiplies the scores. `dtype` is that of the products and the output: that of a
        plain cache unless given, and bf16 over the fp8 layout."""
        stored = torch.bfloat16 if cache.quantised else cache.data.dtype
        self.dtype = dtype or stored
        half = self.dtype in _HALF
        # The interpreter cannot multiply bf16.
        self._ieee = not half or cache.device.type == "cpu"
        self._scale = scale * math.log2(math.e)
        tiles = tiles or latent_tiles(query_heads, half, cache.device)
        super().__init__(cache, query_heads, modes, tiles, processors)

    def _launch(self, plan: TritonPlan, layer: int, q: Tensor, lse: Tensor | None) -> Tensor:
        shape, tiles, mode = self.cache.geometry, self.tiles, self.modes[layer]
        q = q.to(self.dtype)
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        values, scales, rope = self.cache.parts(layer)
        out = q.new_empty((*q.shape[:2], shape.rank))
        logs = out if lse is None else lse
        window = mode.window or 0
        fixed = {
            "HEADS": self.query_heads, "BLOCK_D": self._block, "M": tiles.rows, "N": tiles.keys,
            "CHUNK": tiles.chunk, "CAUSAL": mode.causal, "LSE": lse is not None,
            "enable_fp_fusion": False,  # as in TRITON_ATTN: the variants must round alike
        }  # fmt: skip
        _attend_latent[(1, plan.programs)](
            q, values, scales, rope, out, logs, plan.sums, plan.parts, plan.words, plan.items_at,
            plan.table_at, plan.pages_per_span, q.stride(0),
            values.stride(0), values.stride(1), scales.stride(0), scales.stride(1),
            rope.stride(0), rope.stride(1), self._scale, window,
            RANK=shape.rank, ROPE=shape.rope, BLOCK_R=padded(shape.rope), PAGE=shape.page_tokens,
            WHOLE=plan.whole, PACKED=self.cache.quantised, IEEE=self._ieee,
            num_warps=tiles.warps, num_stages=tiles.stages, **fixed,
        )  # fmt: skip
        self._combine(plan, out, logs, window, fixed | {"KV_HEADS": 1, "D": shape.rank})
        return out
