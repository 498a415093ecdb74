"""The left-to-right pass of DSpark without a host between the slots."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.triton.draw import DrawRows, draw
from engine.kernels.triton.gemm import linear_add


def walk(base: Tensor, w1: Tensor, w2: Tensor, anchors: Tensor, rows: DrawRows) -> Tensor:
    """Tokens int64 [blocks, slots]: slot s draws from base_s + w2 w1[token before], the token
    before slot 0 being the anchor.

    base fp32 [blocks, slots, head rows] becomes the corrected logits; w1 [vocab, rank]; w2 [head
    rows, rank]; anchors int [blocks]. `rows` is about slot 0; slot s draws at index + s.
    """
    blocks, slots, _ = base.shape
    tokens = torch.empty(slots, blocks, dtype=torch.int64, device=base.device)
    before = anchors
    for slot in range(slots):
        logits = base[:, slot]
        linear_add(w1, w2, None, logits, before)
        before = draw(logits, rows, shift=slot, out=tokens[slot])
    return tokens.T
