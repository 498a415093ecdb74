"""Products by head around latent attention, in Triton: queries into the latent space, with their
turn, and what came back out of it. A row's bits depend on no other row.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dot import WIDEN_DOTS, dot

_ROWS = 16


@triton.jit
def _turn(x, out, position, cos, sin, real, HALF: tl.constexpr, BLOCK_R: tl.constexpr):
    """Rotates rows of 2 * HALF values, pairs HALF apart."""
    r = tl.arange(0, BLOCK_R)
    keep = real[:, None] & (r[None, :] < HALF)
    at = position[:, None] * HALF + r[None, :]
    c = tl.load(cos + at, mask=keep, other=0.0)
    s = tl.load(sin + at, mask=keep, other=0.0)
    first = tl.load(x[:, None] + r[None, :], mask=keep, other=0.0).to(tl.float32)
    second = tl.load(x[:, None] + HALF + r[None, :], mask=keep, other=0.0).to(tl.float32)
    to = out[:, None] + r[None, :]
    tl.store(to, first * c - second * s, mask=keep)
    tl.store(to + HALF, second * c + first * s, mask=keep)


@triton.jit(do_not_specialize=["rows"])
def _by_head(
    x, weight, out, cos, sin, positions, rows, x_row, x_head, out_row, out_head,
    INNER: tl.constexpr, OUTER: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (rows / ROWS, OUTER / BLOCK_N, heads). x [rows, heads, INNER + 2 * HALF] and out [rows,
    heads, OUTER + 2 * HALF], rows and heads *_row and *_head apart; weight [heads, INNER, OUTER].
    With HALF the values behind INNER are turned and go behind OUTER."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    real = m < rows
    x_at = x + m.to(tl.int64) * x_row + head * x_head
    out_at = out + m.to(tl.int64) * out_row + head * out_head
    w_at = weight + head.to(tl.int64) * INNER * OUTER + k[:, None] * OUTER + n[None, :]
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        inside = start + k < INNER
        a = tl.load(
            x_at[:, None] + start + k[None, :], mask=real[:, None] & inside[None, :], other=0.0
        )
        w = tl.load(w_at + start * OUTER, mask=inside[:, None] & (n < OUTER)[None, :], other=0.0)
        a = a.to(weight.dtype.element_ty)
        acc = dot(a, w, acc, WIDEN)
    keep = real[:, None] & (n < OUTER)[None, :]
    tl.store(out_at[:, None] + n[None, :], acc.to(out.dtype.element_ty), mask=keep)
    if HALF:  # noqa: SIM102
        if tl.program_id(1) == 0:
            position = tl.load(positions + m, mask=real, other=0).to(tl.int64)
            _turn(x_at + INNER, out_at + OUTER, position, cos, sin, real, HALF, BLOCK_R)


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, turn: tuple[Tensor, Tensor, Tensor] | None, half: int
) -> None:
    rows, heads, _ = x.shape
    _, inner, outer = weight.shape
    assert x.stride(2) == 1 and weight.is_contiguous()
    if not rows:
        return
    wide = weight.dtype == torch.float32
    block_n = min(triton.next_power_of_2(max(outer, 16)), 32 if wide else 64)
    block_k = min(triton.next_power_of_2(max(inner, 16)), 32 if wide else 128)
    cos, sin, positions = turn or (out, out, out)
    _by_head[(triton.cdiv(rows, _ROWS), triton.cdiv(outer, block_n), heads)](
        x, weight, out, cos, sin, positions, rows, x.stride(0), x.stride(1), out.stride(0),
        out.stride(1), inner, outer, half, triton.next_power_of_2(max(half, 1)), _ROWS, block_n,
        block_k, WIDEN_DOTS, num_warps=4, num_stages=2,
    )  # fmt: skip


def latent_queries(
    heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
) -> Tensor:
    """Queries [rows, heads, rank + rope] in the weight's dtype, of heads [rows, heads, nope +
    rope]: the first part times weight [heads, nope, rank], the second turned.

    cos, sin fp32 [positions, rope / 2], contiguous; integer positions [rows].
    """
    rows, count, width = heads.shape
    half = cos.shape[1]
    assert width == weight.shape[1] + 2 * half
    shape = (rows, count, weight.shape[2] + 2 * half)
    out = torch.empty(shape, dtype=weight.dtype, device=heads.device)
    _launch(heads, weight, out, (cos, sin, positions), half)
    return out


def head_values(attended: Tensor, weight: Tensor) -> Tensor:
    """[rows, heads * value] in the weight's dtype: attended [rows, heads, rank] times weight
    [heads, rank, value]."""
    rows, count, _ = attended.shape
    shape = (rows, count, weight.shape[2])
    out = torch.empty(shape, dtype=weight.dtype, device=attended.device)
    _launch(attended, weight, out, None, 0)
    return out.flatten(1)
