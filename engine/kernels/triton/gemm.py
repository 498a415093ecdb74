"""Products with a weight [n, k], and what stands before and behind them, in one kernel.

A program owns a tile of rows and walks the depth in fixed steps; sums are fp32. The norm needs
no pass of its own: its weight multiplies the inputs, its scale the finished sums. Tiles of 16 rows
read the weights again for every tile, so many rows are given larger ones (`wide`), as far as they
give the same bits. The sum of squares would not, its order being the compiler's: it is left to the
kernel of 16 rows, which passes the scales on.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dependent import fetch, fetched_lines, flags, wait
from engine.kernels.triton.norm import rms_norm
from engine.kernels.triton.tiles import FUSED_NORM_DEPTH, Tile, Wide, fitted, tile_of, wide_tile


class Norm(NamedTuple):
    """Weight fp32 [k] and eps of an RMSNorm; scales fp32 [rows], to be made or there already."""

    weight: Tensor
    scales: Tensor
    eps: float
    scaled: bool


# The interpreter multiplies bf16 as if it were integers.
WIDEN_DOTS = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _dot(a, w, acc, WIDEN: tl.constexpr):
    """acc [rows, n] + a [rows, k] times w [n, k], in fp32."""
    if WIDEN:
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    return tl.dot(a, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def sums(
    x_at, weight, w_at, second, norm, kept_m, kept_n,
    K: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, TWO: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Rows at x_at [ROWS, BLOCK_K] times those of the weight at w_at [BLOCK_N, BLOCK_K], over the
    whole depth; with TWO also times those `second` numbers behind. Last the squares of the rows,
    still to be added up."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    other = tl.zeros([ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        mask_x, mask_w = kept_m[:, None], kept_n[:, None]
        if K % BLOCK_K:
            inside = (start + k < K)[None, :]
            mask_x, mask_w = mask_x & inside, mask_w & inside
        a = tl.load(x_at + start, mask=mask_x, other=0.0)
        if NORM:
            inside_k = start + k < K
            weights = tl.load(norm + start + k, mask=inside_k, other=0.0)
            if not SCALED:
                squares += a * a
            a = a * weights[None, :]
        a = a.to(weight.dtype.element_ty)
        w = tl.load(w_at + start, mask=mask_w, other=0.0, eviction_policy="evict_first")
        acc = _dot(a, w, acc, WIDEN)
        if TWO:
            w = tl.load(
                w_at + second + start, mask=mask_w, other=0.0, eviction_policy="evict_first"
            )
            other = _dot(a, w, other, WIDEN)
    return acc, other, squares


@triton.jit
def row_scales(squares, scales, m, rows, eps, K: tl.constexpr, SCALED: tl.constexpr):
    """Those of the norm: out of the squares, for others to load, or loaded."""
    if SCALED:
        scale = tl.load(scales + m, mask=m < rows, other=0.0)
    else:
        scale = 1.0 / tl.sqrt_rn(tl.sum(squares, 1) / K + eps)
        tl.store(scales + m, scale, mask=m < tl.where(tl.program_id(1) == 0, rows, 0))
    return scale


@triton.jit(do_not_specialize=["rows"])
def _gemm(
    x, index, norm, scales, weight, bias, out, rows, x_stride, out_stride, eps,
    N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, INDEX: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """NORM: the scales of the rows are made and stored; with SCALED they are there already."""
    # Tiles of rows are neighbours, so that those of the same weights run together.
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    kept_m, kept_n = m < rows, n < N
    if PDL:
        column = tl.minimum(n, N - 1)
        fetch(weight, column, K, LINES)
        if GATED:
            fetch(weight, column + N, K, LINES)
    wait(PDL)
    source = m.to(tl.int64)
    if INDEX:
        source = tl.load(index + m, mask=kept_m, other=0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x + source[:, None] * x_stride + k[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    place = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    kept = kept_m[:, None] & kept_n[None, :]
    if ADD:
        before = tl.load(place, mask=kept, other=0.0)
    acc, up, squares = sums(
        x_at, weight, w_at, N * K, norm, kept_m, kept_n, K, NORM, SCALED, GATED, ROWS, BLOCK_N,
        BLOCK_K, WIDEN,
    )  # fmt: skip
    if NORM:
        scale = row_scales(squares, scales, m, rows, eps, K, SCALED)
        acc = acc * scale[:, None]
        up = up * scale[:, None]
    if BIAS:
        acc += tl.load(bias + n, mask=kept_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up += tl.load(bias + N + n, mask=kept_n, other=0.0).to(tl.float32)[None, :]
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if ADD:
        acc = before + acc
    tl.store(place, acc.to(out.dtype.element_ty), mask=kept)


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
    _gemm[grid](
        x, x if index is None else index, norm_weight, scales, weight,
        weight if bias is None else bias, out, rows, x.stride(0), out.stride(0), eps, n, k,
        norm is not None, scaled, gated, add, bias is not None, index is not None, tile.rows,
        tile.n, tile.k, WIDEN_DOTS, fetched_lines(k), num_warps=tile.warps, num_stages=tile.stages,
        **flags(),
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
    narrow = tile_of(n, weight.shape[1], weight.dtype, norm is not None)
    tile = wide_tile(wide, rows, n, gated)
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
