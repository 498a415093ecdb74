"""Which tiles of many rows give the same bits as those of few, on this very device.

A tensor core adds a product's depth up in its own order. Tiles of 64 rows and more use other
instructions of it than those of 16, so that this is found out, not assumed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from engine.compiling import compile_first
from engine.kernels.triton.gemm import linear, linear_add, norm_gate_up
from engine.kernels.triton.tiles import WIDE, Tile, Wide

_ROWS, _DEPTH, _EPS = 200, 576, 1e-5  # rows that fill no tile


def equal_tiles(dtype: torch.dtype) -> Wide:
    """Of `WIDE`; none without a GPU, or for fp32, which its cores do not multiply. Tried once for
    each device."""
    if dtype == torch.float32 or not torch.cuda.is_available():
        return ()
    return _tried(dtype, torch.cuda.current_device())


@functools.cache
def _tried(dtype: torch.dtype, device: int) -> Wide:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    x, scale = normal(_ROWS, _DEPTH) * 8, normal(_DEPTH)
    # As many columns as make all programs that a tile is chosen from on.
    weight = (normal(1 << 15, _DEPTH) * _DEPTH**-0.5).to(dtype)

    def tried() -> Wide:
        return tuple(tile for tile in WIDE if _same(tile, x.to(dtype), weight, scale))

    compile_first("cuda", tried)
    return tried()


def _same(tile: Tile, x: Tensor, weight: Tensor, scale: Tensor) -> bool:
    pairs = [
        [linear(x, weight, None, torch.float32, wide=w) for w in ((), (tile,))],
        [norm_gate_up(x.float(), scale, _EPS, weight, wide=w) for w in ((), (tile,))],
    ]
    # A depth of one step, added to what is there: the compiler sees no loop.
    short, once = x[:, : tile.k], weight[:, : tile.k].contiguous()
    few, many = (torch.ones(_ROWS, len(once), device=x.device) for _ in range(2))
    linear_add(short, once, None, few)
    linear_add(short, once, None, many, wide=(tile,))
    return all(torch.equal(few, many) for few, many in [*pairs, (few, many)])
