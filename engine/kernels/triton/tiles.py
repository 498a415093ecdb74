"""How a product is cut into programs, chosen by the shape of the weight.

A program makes rows x n outputs and walks the whole depth in steps of k, so a row's sums are made
in the same order whatever its batch. More rows are more programs, or larger ones where those give
the same bits (`wide.py` tells). `python -m tests.load.bench_kernels --sweep` and `--wide` try the
alternatives.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from engine.kernels.triton.dependent import INTERPRETED, dependent_launch_available

ROWS = 16  # the smallest tile of the tensor cores

# Deeper inputs are normed by a kernel of their own: with more to read and more programs to read it,
# the fp32 stream would cost a program as much as its weights.
FUSED_NORM_DEPTH = 2048


@dataclass(frozen=True, slots=True)
class Tile:
    """Columns and depth of a block, warps of a program, blocks of weights under way, rows, and how
    many programs a product must make of it at least: with fewer, smaller tiles are done earlier.
    `whole`: a block is fetched by one command (TMA), where the device has that, in place of one for
    every 16 bytes, which two warps are hardly quick enough to give."""

    n: int
    k: int
    warps: int
    stages: int
    rows: int = ROWS
    fewest: int = 1
    whole: bool = False


# Tiles of more rows, the largest first; () where there are none.
Wide = tuple[Tile, ...]


_FP32 = Tile(n=16, k=32, warps=4, stages=2)
# Small weights: small tiles, so that there are programs for every multiprocessor, and nearly all of
# a program's weights under way at once, since one trip to memory takes as long as all the rest.
_SHALLOW = Tile(n=16, k=128, warps=2, stages=6)  # behind a norm
_SLIM = Tile(n=8, k=64, warps=2, stages=6)
_HEAD = Tile(n=64, k=128, warps=2, stages=4)  # few steps of the depth, many columns
# Large weights: many programs, each with enough under way to keep the memory busy.
_LARGE = Tile(n=32, k=128, warps=2, stages=6)
_PAIRED = replace(_LARGE, stages=4)  # of two halves: no more, so that two programs fit in each
_NARROW = Tile(n=32, k=256, warps=2, stages=6, whole=True)  # hardly one program a multiprocessor
_FEW_COLUMNS, _SMALL_COLUMNS = 2048, 4096


def tile_of(n: int, k: int, dtype: torch.dtype, normed: bool = False, gated: bool = False) -> Tile:
    """The tile of a weight [n, k] for few rows; `normed`: behind a norm, which the product does;
    `gated`: there are two halves of so many."""
    if dtype == torch.float32:
        return _FP32
    shallow = k <= FUSED_NORM_DEPTH
    if n < _FEW_COLUMNS or (shallow and n <= _SMALL_COLUMNS):
        return _SHALLOW if normed else _SLIM
    if shallow:
        return _HEAD
    if n <= _SMALL_COLUMNS:
        return _NARROW
    return _PAIRED if gated else _LARGE


def half_tile(n: int, k: int, dtype: torch.dtype) -> Tile:
    """The same for a program that makes the columns of two halves."""
    tile = tile_of(n, k, dtype, True)
    return replace(tile, n=min(tile.n, 32) // 2)


# What more rows may be given, the largest first. A product of a large weight takes as long as its
# weights do up to 64 rows, if each of them is fetched once: by a tile that holds all the rows, with
# about as many programs as there are multiprocessors, or several for each.
WIDE: Wide = (
    Tile(n=256, k=64, warps=8, stages=4, rows=128, fewest=128, whole=True),
    Tile(n=128, k=64, warps=4, stages=4, rows=64, fewest=192),
    Tile(n=64, k=64, warps=4, stages=4, rows=64, fewest=256),
    Tile(n=64, k=128, warps=4, stages=6, rows=64, fewest=96, whole=True),
    Tile(n=32, k=256, warps=4, stages=4, rows=64, fewest=112, whole=True),
    Tile(n=64, k=128, warps=4, stages=3, rows=64, fewest=32),
    Tile(n=64, k=128, warps=2, stages=3, rows=32, fewest=192, whole=True),
    Tile(n=64, k=256, warps=4, stages=4, rows=32, fewest=96, whole=True),
    Tile(n=32, k=256, warps=4, stages=6, rows=32, fewest=112, whole=True),
)


@functools.lru_cache(4096)
def wide_tile(wide: Wide, rows: int, n: int, gated: bool, weight: torch.dtype) -> Tile | None:
    """Of `wide` the tile for [rows, n], none of which may be half empty; None: those of few rows
    are better, as always for an fp32 weight (a router's), of which `wide` says nothing. A gated
    product has two sums for each output, so half the columns."""
    for tile in wide if rows > ROWS and weight != torch.float32 else ():
        columns = tile.n // (1 + gated)
        programs = -(-rows // tile.rows) * -(-n // columns)
        if rows > tile.rows // 2 and programs >= tile.fewest:
            return replace(tile, n=columns)
    return None


_LINE_BYTES = 16  # what the rows of a described weight begin at multiples of


def described(weight: torch.Tensor) -> bool:
    """Whether blocks of the weight [n, k] can be fetched whole."""
    aligned = not (weight.data_ptr() | weight.stride(0) * weight.itemsize) % _LINE_BYTES
    # With fp32 the order of a sum is another one then.
    return aligned and weight.itemsize == 2 and (INTERPRETED.value or dependent_launch_available())


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
    stage = tile.k * (tile.rows * x.itemsize + tile.n * (1 + gated) * weight.itemsize + 4)
    # Triton keeps one block less than there are stages, and a little for its own use.
    stages = (_shared_bytes() - 4096) // stage + 1
    return replace(tile, stages=max(2, min(tile.stages, stages)))
