"""FLASH_ATTN: the FlashAttention kernel that torch has built in, over gathered keys. CUDA only.

The kernel chooses its splits by the batch, so a row's bits may depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, Span
from engine.attention.gathered import Packed, gathered, keys_of
from engine.kv.cache import KVCache


class FlashAttention(AttentionBackend):
    name: ClassVar[str] = "FLASH_ATTN"
    cache: KVCache
    rows_independent = False
    uncapturable = "its keys are gathered anew, in other shapes, for every step"

    def plan(self, spans: Sequence[Span]) -> Packed:
        return gathered(self.cache, spans)

    def run(self, plan: Packed, layer: int, q: Tensor) -> Tensor:
        """Rows behind the last span come back as zeros."""
        mode = self.modes[layer]
        k, v = keys_of(self.cache, layer, plan, q.dtype)
        # Windows count the neighbours on each side, -1 all of them; a causal mask and a window are
        # both aligned to the last key of a span.
        left = -1 if mode.window is None else mode.window - 1
        right = 0 if mode.causal else left
        found: Tensor = torch.ops.aten._flash_attention_forward(
            q[: plan.rows].contiguous(), k, v, plan.row_ends, plan.key_ends, plan.most_rows,
            plan.most_keys, 0.0, mode.causal, False, scale=q.shape[2] ** -0.5,
            window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip
        if plan.rows == len(q):
            return found
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        out[: plan.rows] = found
        return out
