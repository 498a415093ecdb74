"""The kernel of the products with a weight [n, k], and of what stands before and behind them.

A program owns a tile of rows and walks the depth in fixed steps; sums are fp32. The norm needs
no pass of its own: its weight multiplies the inputs, its scale the finished sums. Tiles of 16 rows
read the weights again for every tile, so many rows are given larger ones (`wide`), as far as they
give the same bits. The sum of squares would not, its order being the compiler's: it is left to the
kernel of 16 rows, which passes the scales on.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.dependent import fetch, wait
from engine.kernels.triton.dot import dot, plus


@triton.jit
def sums(
    x_at, weight, w_at, second, norm, kept_m, kept_n, blocks, first,
    K: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, TWO: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rows at x_at [ROWS, BLOCK_K] times those of the weight at w_at [BLOCK_N, BLOCK_K], over the
    whole depth; with TWO also times those `second` numbers behind. Last the squares of the rows,
    still to be added up. BLOCKS: the weight's row `first` and those after it come through the
    descriptor `blocks`, whole blocks at a time."""
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
        if BLOCKS:
            w = blocks.load([first, start])
        else:
            w = tl.load(w_at + start, mask=mask_w, other=0.0, eviction_policy="evict_first")
        acc = dot(a, tl.trans(w), acc, WIDEN)
        if TWO:
            if BLOCKS:
                w = blocks.load([first + second // K, start])
            else:
                w = tl.load(
                    w_at + second + start, mask=mask_w, other=0.0, eviction_policy="evict_first"
                )
            other = dot(a, tl.trans(w), other, WIDEN)
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
    x, index, norm, scales, weight, blocks, bias, out, rows, x_stride, out_stride, eps,
    N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, INDEX: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """NORM: the scales of the rows are made and stored; with SCALED they are there already.
    `blocks` describes the weight where BLOCKS says so, and is anything else."""
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
        x_at, weight, w_at, N * K, norm, kept_m, kept_n, blocks, tl.program_id(1) * BLOCK_N, K,
        NORM, SCALED, GATED, ROWS, BLOCK_N, BLOCK_K, WIDEN, BLOCKS,
    )  # fmt: skip
    if NORM:
        scale = row_scales(squares, scales, m, rows, eps, K, SCALED)
        acc = acc * scale[:, None]
        up = up * scale[:, None]
    if BIAS:
        acc = plus(acc, tl.load(bias + n, mask=kept_n, other=0.0).to(tl.float32)[None, :])
    if GATED:
        if BIAS:
            up = plus(up, tl.load(bias + N + n, mask=kept_n, other=0.0).to(tl.float32)[None, :])
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if ADD:
        acc = plus(acc, before)
    tl.store(place, acc.to(out.dtype.element_ty), mask=kept)
