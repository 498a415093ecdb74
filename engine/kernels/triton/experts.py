"""Routed experts on the device: rows grouped by expert, the experts' products, and their sum.

Nothing is read by the host and every shape follows from the number of rows, so a step with experts
may be captured. Rows are grouped by expert in tiles of 16; a row's bits depend on no other row.
`engine.models.experts` has the same in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dot import WIDEN_DOTS, dot
from engine.kernels.triton.tiles import ROWS, Tile, fitted

_FP32 = Tile(n=16, k=32, warps=4, stages=2)
_TILE = Tile(n=32, k=128, warps=4, stages=4)
_PAIRS = 64  # pairs, and tiles, that the grouping program takes at once


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs of a row and one of its experts, pair = row * top + place, grouped by expert.

    order  pairs, those of an expert together, int32 [pairs]
    tiles  expert, first place in `order` and number of pairs (at most 16; 0: nothing to do) of each
           tile, int32 [tiles, 4]; how many there are follows from rows, top and experts
    """

    order: Tensor
    tiles: Tensor


@triton.jit(do_not_specialize=["pairs", "tile_count"])
def _group(
    chosen, order, tiles, pairs, tile_count,
    COUNT_BLOCK: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One program. chosen int32 [pairs]; COUNT_BLOCK experts at most."""
    e = tl.arange(0, COUNT_BLOCK)
    b = tl.arange(0, B)
    counts = tl.zeros([COUNT_BLOCK], tl.int32)
    for start in range(0, pairs, B):
        own = tl.load(chosen + start + b, mask=start + b < pairs, other=-1)
        counts += tl.sum((own[:, None] == e[None, :]).to(tl.int32), 0)
    first = tl.cumsum(counts, 0) - counts
    needed = (counts + ROWS - 1) // ROWS
    last_tile = tl.cumsum(needed, 0)
    first_tile = last_tile - needed

    place = first
    for start in range(0, pairs, B):
        own = tl.load(chosen + start + b, mask=start + b < pairs, other=-1)
        other = tl.load(chosen + start + b, mask=start + b < pairs, other=-1)
        mine = own[:, None] == e[None, :]
        earlier = (own[:, None] == other[None, :]) & (b[None, :] < b[:, None])
        at = tl.sum(tl.where(mine, place[None, :], 0), 1) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(order + at, start + b, mask=start + b < pairs)
        place += tl.sum(mine.to(tl.int32), 0)

    for start in range(0, tile_count, B):
        t = start + b
        held = (t[:, None] >= first_tile[None, :]) & (t[:, None] < last_tile[None, :])
        within = (t[:, None] - first_tile[None, :]) * ROWS
        size = tl.minimum(counts[None, :] - within, ROWS)
        kept = t < tile_count
        tl.store(tiles + t * 4, tl.sum(tl.where(held, e[None, :], 0), 1), mask=kept)
        begin = tl.sum(tl.where(held, first[None, :] + within, 0), 1)
        tl.store(tiles + t * 4 + 1, begin, mask=kept)
        tl.store(tiles + t * 4 + 2, tl.sum(tl.where(held, size, 0), 1), mask=kept)


def tile_limit(rows: int, top: int, count: int) -> int:
    """Most tiles that so many rows with `top` of `count` experts each can need."""
    pairs = rows * top
    return (pairs + (ROWS - 1) * min(pairs, count)) // ROWS


def group(chosen: Tensor, count: int) -> Groups:
    """chosen int32 [rows, top], ids below `count`, none twice in a row."""
    rows, top = chosen.shape
    limit = tile_limit(rows, top, count)
    order = torch.empty(rows * top, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(limit, 4, dtype=torch.int32, device=chosen.device)
    if rows:
        block = triton.next_power_of_2(count)
        _group[(1,)](chosen, order, tiles, rows * top, limit, block, ROWS, _PAIRS, num_warps=8)
    return Groups(order, tiles)


@triton.jit
def _product(
    x, order, tiles, weight, out, x_stride,
    TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, N / BLOCK_N). The pair's row of x is pair // TOP; weight [experts, N, K], GATED:
    [experts, 2 * N, K]; out [pairs, N]."""
    tile = tiles + tl.program_id(0) * 4
    expert = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1)
    size = tl.load(tile + 2)
    if size > 0:
        m = tl.arange(0, ROWS)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        kept_m, kept_n = m < size, n < N
        pair = tl.load(order + first + m, mask=kept_m, other=0).to(tl.int64)
        x_at = x + (pair // TOP)[:, None] * x_stride + k[None, :]
        own = weight + expert * (2 * N if GATED else N) * K
        w_at = own + n.to(tl.int64)[:, None] * K + k[None, :]
        acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
        up = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            inside = (start + k < K)[None, :]
            a = tl.load(x_at + start, mask=kept_m[:, None] & inside, other=0.0)
            a = a.to(weight.dtype.element_ty)
            w = tl.load(w_at + start, mask=kept_n[:, None] & inside, other=0.0)
            acc = dot(a, tl.trans(w), acc, WIDEN)
            if GATED:
                w = tl.load(w_at + N * K + start, mask=kept_n[:, None] & inside, other=0.0)
                up = dot(a, tl.trans(w), up, WIDEN)
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        place = out + pair[:, None] * N + n[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=kept_m[:, None] & kept_n[None, :])


def _launch(x: Tensor, groups: Groups, weight: Tensor, out: Tensor, top: int, gated: bool) -> None:
    n, k = out.shape[1], weight.shape[2]
    assert x.shape[1] == k and weight.shape[1] == n * (1 + gated) and weight.is_contiguous()
    assert x.stride(1) == 1 and out.is_contiguous()
    tile = fitted(_FP32 if weight.dtype == torch.float32 else _TILE, x.dtype, weight.dtype, gated)
    _product[(len(groups.tiles), triton.cdiv(n, tile.n))](
        x, groups.order, groups.tiles, weight, out, x.stride(0), top, n, k, gated, ROWS, tile.n,
        tile.k, WIDEN_DOTS, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def gate_up(x: Tensor, groups: Groups, weight: Tensor, top: int) -> Tensor:
    """silu(gate) * up of every pair, [pairs, inner] in the weight's dtype; x [rows, k], weight
    [experts, 2 * inner, k]: gate rows, then up rows."""
    pairs, inner = len(groups.order), weight.shape[1] // 2
    out = torch.empty(pairs, inner, dtype=weight.dtype, device=x.device)
    if pairs:
        _launch(x, groups, weight, out, top, gated=True)
    return out


def down(x: Tensor, groups: Groups, weight: Tensor) -> Tensor:
    """fp32 [pairs, n] of x [pairs, k] and weight [experts, n, k]."""
    out = torch.empty(len(x), weight.shape[1], dtype=torch.float32, device=x.device)
    if len(x):
        _launch(x, groups, weight, out, 1, gated=False)
    return out


@triton.jit
def _add_weighted(
    found, weights, residual, TOP: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows, N / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.load(residual + row * N + n, mask=n < N, other=0.0)
    for j in range(TOP):
        share = tl.load(weights + row * TOP + j)
        acc += share * tl.load(found + (row * TOP + j) * N + n, mask=n < N, other=0.0)
    tl.store(residual + row * N + n, acc, mask=n < N)


def add_weighted(found: Tensor, weights: Tensor, residual: Tensor) -> None:
    """residual fp32 [rows, n] += the rows' pairs, found fp32 [rows * top, n], by their weights fp32
    [rows, top], in place and in their order."""
    rows, n = residual.shape
    if rows:
        block = min(triton.next_power_of_2(n), 1024)
        grid = (rows, triton.cdiv(n, block))
        _add_weighted[grid](found, weights, residual, weights.shape[1], n, block, num_warps=4)
