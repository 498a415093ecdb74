"""How a product is cut into programs, chosen by the shape of the weight and never by the rows.

A program makes ROWS x n outputs and walks the whole depth in steps of k, so a row's sums are made
in the same order whatever its batch. More rows are more programs. `python -m
tests.load.bench_kernels --sweep` tries the alternatives.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

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
# Small weights: small tiles, so that there are programs for every multiprocessor, and nearly all of
# a program's weights under way at once, since one trip to memory takes as long as all the rest.
_SHALLOW = Tile(n=16, k=128, warps=4, stages=5)
_DEEP = Tile(n=16, k=256, warps=4, stages=6)
# Large weights: many programs, each with enough under way to keep the memory busy.
_MANY = Tile(n=32, k=128, warps=4, stages=4)
_LARGE = Tile(n=32, k=256, warps=4, stages=4)
_SMALL_COLUMNS, _SHALLOW_DEPTH = 4096, 1024


def tile_of(n: int, k: int, dtype: torch.dtype) -> Tile:
    """The tile of a weight [n, k]."""
    if dtype == torch.float32:
        return _FP32
    if k <= FUSED_NORM_DEPTH:
        if n > _SMALL_COLUMNS:
            return _MANY
        return _SHALLOW if k <= _SHALLOW_DEPTH else _DEEP
    return _LARGE if n >= FUSED_NORM_DEPTH else _DEEP


_DEFAULT_SHARED_BYTES = 96 << 10  # what every GPU since compute capability 8.0 has


@functools.cache
def _shared_bytes() -> int:
    """Shared memory that one program may have."""
    if not torch.cuda.is_available():
        return _DEFAULT_SHARED_BYTES
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(getattr(found, "shared_memory_per_block_optin", _DEFAULT_SHARED_BYTES))


@functools.cache
def fitted(tile: Tile, x: torch.dtype, weight: torch.dtype, gated: bool) -> Tile:
    """The tile with no more stages than fit the device; they change no bits."""
    stage = tile.k * (ROWS * x.itemsize + tile.n * (1 + gated) * weight.itemsize + 4)
    # Triton keeps one block less than there are stages, and a little for its own use.
    stages = (_shared_bytes() - 4096) // stage + 1
    return replace(tile, stages=max(2, min(tile.stages, stages)))
