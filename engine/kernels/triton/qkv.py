"""A layer from its residual stream to the attention: norm, projection, rotation, cache, in one
kernel. For projections behind a shallow norm and without a norm of each head; a program makes the
same columns of both halves of a head, which the rotation turns into each other.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton import gemm
from engine.kernels.triton.dependent import fetch, fetched_lines, flags, wait
from engine.kernels.triton.dot import WIDEN_DOTS, plus
from engine.kernels.triton.gemm import Norm
from engine.kernels.triton.product import row_scales, sums
from engine.kernels.triton.store import put, qkv_store, turn
from engine.kernels.triton.tiles import (
    FUSED_NORM_DEPTH,
    ROWS,
    Tile,
    Wide,
    fitted,
    half_tile,
    wide_tile,
)


@triton.jit(do_not_specialize=["rows"])
def _norm_qkv_store(
    x, norm, scales, weight, bias, cos, sin, positions, slots, cache_k, cache_v, q_out, rows,
    x_stride, eps, K: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
    BIAS: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDEN: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    BLOCKS: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) // BLOCKS
    c = tl.program_id(1) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    n = head * D + c
    kept_m, kept_n = m < rows, c < HALF
    if PDL:
        column = head * D + tl.minimum(c, HALF - 1)
        fetch(weight, column, K, LINES)
        fetch(weight, column + HALF, K, LINES)
    inside = kept_m[:, None] & kept_n[None, :]
    slot = tl.load(slots + m, mask=kept_m, other=-1).to(tl.int64)[:, None]
    position = tl.load(positions + m, mask=kept_m, other=0).to(tl.int64)
    at = position[:, None] * HALF + c[None, :]
    co = tl.load(cos + at, mask=inside, other=0.0)
    si = tl.load(sin + at, mask=inside, other=0.0)
    wait(PDL)
    k = tl.arange(0, BLOCK_K)
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    a, b, squares = sums(
        x_at, weight, w_at, HALF * K, norm, kept_m, kept_n, weight, 0, K, True, False, True, ROWS,
        BLOCK_N, BLOCK_K, WIDEN, False,
    )  # fmt: skip
    scale = row_scales(squares, scales, m, rows, eps, K, False)
    a = a * scale[:, None]
    b = b * scale[:, None]
    if BIAS:
        a = plus(a, tl.load(bias + n, mask=kept_n, other=0.0).to(tl.float32)[None, :])
        b = plus(b, tl.load(bias + HALF + n, mask=kept_n, other=0.0).to(tl.float32)[None, :])
    # Rounded as on the way through memory, which more rows take.
    a = a.to(q_out.dtype.element_ty).to(tl.float32)
    b = b.to(q_out.dtype.element_ty).to(tl.float32)
    if head < HQ + HK:
        a, b = turn(a, b, co, si)
    if head < HQ:
        row = m.to(tl.int64)[:, None] * HQ + head
        put(q_out + row * D + c[None, :], a, b, inside, D, False)
    else:
        inside = inside & (slot >= 0)
        if head < HQ + HK:
            put(cache_k + (slot * HK + head - HQ) * D + c[None, :], a, b, inside, D, FP8)
        else:
            put(cache_v + (slot * HK + head - HQ - HK) * D + c[None, :], a, b, inside, D, FP8)


def norm_qkv_store(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    slots: Tensor,
    wide: Wide = (),
) -> Tensor:
    """`gemm.norm_linear` of residual fp32 [rows, k], then `store.qkv_store` of that; the queries
    [rows, heads, dim] have the weight's dtype."""
    rest = norms, eps, cos, sin, positions, cache_k, cache_v, slots
    (rows, k), n = residual.shape, weight.shape[0]
    if norms is not None or k > FUSED_NORM_DEPTH:
        qkv = gemm.norm_linear(residual, norm_weight, eps, weight, bias, wide=wide)
        return qkv_store(qkv, *rest)
    kv_heads, dim = cache_k.shape[-2:]
    heads = n // dim - 2 * kv_heads
    assert residual.stride(1) == 1 and weight.is_contiguous()
    assert cache_k.is_contiguous() and cache_v.is_contiguous()
    q = torch.empty(rows, heads, dim, dtype=weight.dtype, device=residual.device)
    if not rows:
        return q
    scales = torch.empty(rows, dtype=torch.float32, device=residual.device)
    many = wide_tile(wide, rows, n, False, weight.dtype)
    tile = fitted(half_tile(n, k, weight.dtype), residual.dtype, weight.dtype, True)
    programs = 1 if many else (heads + 2 * kv_heads) * triton.cdiv(dim // 2, tile.n)
    _norm_qkv_store[(triton.cdiv(rows, ROWS), programs)](
        residual, norm_weight, scales, weight, weight if bias is None else bias, cos, sin,
        positions, slots, cache_k, cache_v, q, rows, residual.stride(0), eps, k, heads, kv_heads,
        dim, bias is not None, cache_k.dtype == torch.float8_e4m3fn, ROWS, tile.n, tile.k,
        WIDEN_DOTS, fetched_lines(n, k), num_warps=tile.warps, num_stages=tile.stages,
        **flags(rows),
    )  # fmt: skip
    if many is None:
        return q
    # The first program has made the scales, in the order of few rows.
    return _many(residual, Norm(norm_weight, scales, eps, True), weight, bias, many, rest)


def _many(
    residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, tile: Tile, rest: Any
) -> Tensor:
    form = residual.shape[0], weight.shape[0]
    qkv = torch.empty(form, dtype=weight.dtype, device=residual.device)
    gemm.launch(residual, weight, bias, qkv, tile, norm)
    return qkv_store(qkv, *rest)
