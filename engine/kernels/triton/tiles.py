"""How a product is cut into programs, chosen by the shape of the weight and never by the rows.

A program makes ROWS x n outputs and walks the whole depth in steps of k, so a row's sums are made
in the same order whatever its batch. More rows are more programs. `python -m
tests.load.bench_kernels --sweep` tries the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROWS = 16  # the smallest tile of the tensor cores

# Deeper inputs are normed by a kernel of their own: with more to read and more programs to read it,
# the fp32 stream would cost a program as much as its weights.
FUSED_NORM_DEPTH = 2048


@dataclass(frozen=True, slots=True)
class Tile:
    """Columns and depth of a block, warps of a program, blocks of weights under way."""

    n: int
    k: int
    warps: int
    stages: int


_FP32 = Tile(n=16, k=32, warps=4, stages=2)
# Few columns: small tiles, so that there are programs for every multiprocessor.
_NARROW = Tile(n=16, k=64, warps=4, stages=4)
_DEEP = Tile(n=16, k=128, warps=4, stages=4)
_WIDE = Tile(n=32, k=128, warps=4, stages=4)
_LARGE = Tile(n=32, k=256, warps=4, stages=4)


def tile_of(n: int, k: int, dtype: torch.dtype) -> Tile:
    """The tile of a weight [n, k]."""
    if dtype == torch.float32:
        return _FP32
    if k >= FUSED_NORM_DEPTH:
        return _LARGE if n >= FUSED_NORM_DEPTH else _DEEP
    if n > 8192:
        return _WIDE
    return _NARROW if k % 128 else _DEEP
