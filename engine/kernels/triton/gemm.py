"""Products with a weight [n, k], and what stands before and behind them, in one kernel; see
`product.py`. Many rows are given larger tiles (`wide`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.triton.dependent import fetched_lines, flags
from engine.kernels.triton.dot import WIDEN_DOTS
from engine.kernels.triton.norm import rms_norm
from engine.kernels.triton.product import _gemm
from engine.kernels.triton.tiles import (
    FUSED_NORM_DEPTH,
    Tile,
    Wide,
    described,
    fitted,
    tile_of,
    wide_tile,
)


class Norm(NamedTuple):
    """Weight fp32 [k] and eps of an RMSNorm; scales fp32 [rows], to be made or there already."""

    weight: Tensor
    scales: Tensor
    eps: float
    scaled: bool


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    norm: Norm | None = None,
    index: Tensor | None = None,
    gated: bool = False,
    add: bool = False,
    columns: int = 0,
) -> None:
    """out [rows, n] = (with `add`: +=) x [rows, k] times weight [n, k], [2n, k] when `gated`.

    x and out may have a stride between rows; inside a row they are contiguous, like the weight.
    `columns` > 0: only the first tiles that hold so many.
    """
    rows, n = out.shape
    k = weight.shape[1]
    assert x.shape[1] == k and weight.shape[0] == n * (1 + gated) and weight.is_contiguous()
    assert x.stride(1) == 1 and out.stride(1) == 1
    if not rows:
        return
    norm_weight, scales, eps, scaled = norm or (x, x, 0.0, False)
    tile = fitted(tile, x.dtype, weight.dtype, gated)
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(columns or n, tile.n))
    whole = tile.whole and described(weight)
    blocks = TensorDescriptor.from_tensor(weight, [tile.n, tile.k]) if whole else weight
    _gemm[grid](
        x, x if index is None else index, norm_weight, scales, weight, blocks,
        weight if bias is None else bias, out, rows, x.stride(0), out.stride(0), eps, n, k,
        norm is not None, scaled, gated, add, bias is not None, index is not None, tile.rows,
        tile.n, tile.k, WIDEN_DOTS, whole, fetched_lines(*weight.shape), num_warps=tile.warps,
        num_stages=tile.stages, **flags(rows),
    )  # fmt: skip


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    wide: Wide,
    norm: tuple[Tensor, float] | None = None,
    index: Tensor | None = None,
    gated: bool = False,
    add: bool = False,
) -> None:
    """`launch` with the tile that fits; `norm` is weight and eps."""
    rows, n = out.shape
    narrow = tile_of(n, weight.shape[1], weight.dtype, norm is not None, gated)
    tile = wide_tile(wide, rows, n, gated, weight.dtype)
    full: Norm | None = None
    if norm is not None:
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        full = Norm(norm[0], scales, norm[1], False)
        if tile is not None:
            launch(x, weight, bias, out, narrow, full, index, gated, add, columns=narrow.n)
            full = full._replace(scaled=True)
    launch(x, weight, bias, out, tile or narrow, full, index, gated, add)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    index: Tensor | None = None,
    wide: Wide = (),
) -> Tensor:
    """x [rows, k] (of the rows that `index` names, when given) times weight [n, k] plus bias [n].

    x is rounded to the weight's dtype, sums are fp32, the result has x's dtype by default. `wide`
    are tiles that many rows may be given, here and below.
    """
    rows = (x if index is None else index).shape[0]
    out = torch.empty(rows, weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    _run(x, weight, bias, out, wide, index=index)
    return out


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    index: Tensor | None = None,
    wide: Wide = (),
) -> None:
    """residual fp32 [rows, n] += x times weight, in place; `index` as in `linear`."""
    _run(x, weight, bias, residual, wide, index=index, add=True)


def _normed(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, index: Tensor | None
) -> tuple[Tensor, tuple[Tensor, float] | None, Tensor | None]:
    """Input, norm and index of a product behind a norm: by the depth, the norm is left to it."""
    if residual.shape[1] <= FUSED_NORM_DEPTH:
        return residual, (norm_weight, eps), index
    return rms_norm(residual, norm_weight, eps, weight.dtype, index), None, None


def norm_linear(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    index: Tensor | None = None,
    wide: Wide = (),
) -> Tensor:
    """RMSNorm of residual fp32 [rows, k] (norm_weight fp32 [k]) times weight [n, k] plus bias.

    `index` as in `linear`; the result has the weight's dtype by default.
    """
    rows, n = (residual if index is None else index).shape[0], weight.shape[0]
    out = torch.empty(rows, n, dtype=out_dtype or weight.dtype, device=residual.device)
    x, norm, index = _normed(residual, norm_weight, eps, weight, index)
    _run(x, weight, bias, out, wide, norm, index)
    return out


def norm_gate_up(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    wide: Wide = (),
) -> Tensor:
    """silu(gate) * up [rows, i] of the normed rows; weight [2i, k]: gate rows, then up rows."""
    inner = weight.shape[0] // 2
    out = torch.empty(residual.shape[0], inner, dtype=weight.dtype, device=residual.device)
    x, norm, _ = _normed(residual, norm_weight, eps, weight, None)
    _run(x, weight, bias, out, wide, norm, gated=True)
    return out


def head(
    residual: Tensor,
    index: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    wide: Wide = (),
) -> Tensor:
    """fp32 logits [r, vocab] of the rows that `index` (int32 or int64 [r]; None: all) names."""
    return norm_linear(residual, norm_weight, eps, weight, None, torch.float32, index, wide)
