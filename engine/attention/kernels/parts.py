"""Partial results of attention: how two are added up, stored, kept for later and read again. Who
adds up which is in `combine.py`, see also `paged.py`.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _merge(m, z, acc, m2, z2, acc2):
    """Softmax state of two parts: maximum [R], sum [R], weighted values [R, D], in base 2.

    The fused multiply-adds are spelled out, so that no compiler contracts them differently.
    """
    new = tl.maximum(m, m2)
    at = tl.where(new == float("-inf"), 0.0, new)
    a = tl.exp2(m - at)
    b = tl.exp2(m2 - at)
    wide = tl.broadcast_to(a[:, None], acc.shape)
    return new, tl.fma(z, a, z2 * b), tl.fma(acc, wide, acc2 * b[:, None])


@triton.jit
def _nothing(R: tl.constexpr, BLOCK_D: tl.constexpr):
    """The state of no keys."""
    return (
        tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32),
        tl.zeros([R, BLOCK_D], tl.float32),
    )  # fmt: skip


@triton.jit
def _keys(start, rows, window, first, last, CAUSAL: tl.constexpr):
    """Keys [low, high) that rows first .. last of a span see together; see LayerMode."""
    end = start + rows
    full = window == 0
    low = tl.where(full, 0, tl.maximum(start + first - window + 1, 0))
    if CAUSAL:
        high = start + last + 1
    else:
        high = tl.where(full, end, tl.minimum(start + last + window, end))
    return low, high


@triton.jit
def _store(out, lse, m, z, acc, place, keep, D: tl.constexpr, LSE: tl.constexpr):
    """Rows of the output at `place` (row * heads + head), and their natural log-sum-exp."""
    total = tl.where(z == 0.0, 1.0, z)
    d = tl.arange(0, acc.shape[1])
    at = place[:, None].to(tl.int64) * D + d[None, :]
    value = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at, value, mask=keep[:, None] & (d[None, :] < D))
    if LSE:
        value = tl.where(z == 0.0, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
        tl.store(lse + place, value, mask=keep)


@triton.jit
def _part(sums, parts, place, keep, BLOCK_D: tl.constexpr):
    """A partial result; where it is not kept, that of no keys. Never out of the L1 cache, which
    knows nothing of what other programs wrote."""
    d = tl.arange(0, BLOCK_D)
    m = tl.load(sums + place * 2, mask=keep, other=float("-inf"), cache_modifier=".cg")
    z = tl.load(sums + place * 2 + 1, mask=keep, other=0.0, cache_modifier=".cg")
    acc = tl.load(
        parts + place[:, None] * BLOCK_D + d[None, :], mask=keep[:, None], other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    return m, z, acc


@triton.jit
def _merge_four(
    m, z, acc, m0, z0, acc0, m1, z1, acc1, m2, z2, acc2, m3, z3, acc3, FOLD: tl.constexpr
):  # fmt: skip
    """The state with four more parts, every FOLD (1, 2 or 4) of which are first added up."""
    tl.static_assert(4 % FOLD == 0)
    if FOLD > 1:
        m0, z0, acc0 = _merge(m0, z0, acc0, m1, z1, acc1)
        if FOLD == 2:
            m2, z2, acc2 = _merge(m2, z2, acc2, m3, z3, acc3)
        else:
            m0, z0, acc0 = _merge(m0, z0, acc0, m2, z2, acc2)
            m0, z0, acc0 = _merge(m0, z0, acc0, m3, z3, acc3)
    m, z, acc = _merge(m, z, acc, m0, z0, acc0)
    if FOLD == 1:
        m, z, acc = _merge(m, z, acc, m1, z1, acc1)
    if FOLD < 4:
        m, z, acc = _merge(m, z, acc, m2, z2, acc2)
    if FOLD == 1:
        m, z, acc = _merge(m, z, acc, m3, z3, acc3)
    return m, z, acc


@triton.jit
def _merge_parts(
    m, z, acc, sums, parts, place, step, slot, first, stop, row, rows,
    BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The state with AT_ONCE (4 or 8) more parts, `step` apart from `place`: numbers slot, slot + 1
    and on, empty in front of `first` and from `stop` on; every FOLD of them are first added up.
    All loads are in flight together."""
    here = row < tl.where((slot >= first) & (slot < stop), rows, 0)
    m0, z0, acc0 = _part(sums, parts, place, here, BLOCK_D)
    here = row < tl.where((slot + 1 >= first) & (slot + 1 < stop), rows, 0)
    m1, z1, acc1 = _part(sums, parts, place + step, here, BLOCK_D)
    here = row < tl.where((slot + 2 >= first) & (slot + 2 < stop), rows, 0)
    m2, z2, acc2 = _part(sums, parts, place + 2 * step, here, BLOCK_D)
    here = row < tl.where((slot + 3 >= first) & (slot + 3 < stop), rows, 0)
    m3, z3, acc3 = _part(sums, parts, place + 3 * step, here, BLOCK_D)
    if AT_ONCE == 8:
        here = row < tl.where((slot + 4 >= first) & (slot + 4 < stop), rows, 0)
        m4, z4, acc4 = _part(sums, parts, place + 4 * step, here, BLOCK_D)
        here = row < tl.where((slot + 5 >= first) & (slot + 5 < stop), rows, 0)
        m5, z5, acc5 = _part(sums, parts, place + 5 * step, here, BLOCK_D)
        here = row < tl.where((slot + 6 >= first) & (slot + 6 < stop), rows, 0)
        m6, z6, acc6 = _part(sums, parts, place + 6 * step, here, BLOCK_D)
        here = row < tl.where((slot + 7 >= first) & (slot + 7 < stop), rows, 0)
        m7, z7, acc7 = _part(sums, parts, place + 7 * step, here, BLOCK_D)
    m, z, acc = _merge_four(m, z, acc, m0, z0, acc0, m1, z1, acc1, m2, z2, acc2, m3, z3, acc3, FOLD)
    if AT_ONCE == 8:
        m, z, acc = _merge_four(
            m, z, acc, m4, z4, acc4, m5, z5, acc5, m6, z6, acc6, m7, z7, acc7, FOLD
        )
    return m, z, acc


@triton.jit
def _keep_part(sums, parts, place, keep, m, z, acc, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tl.store(sums + place * 2, m, mask=keep)
    tl.store(sums + place * 2 + 1, z, mask=keep)
    tl.store(parts + place[:, None] * BLOCK_D + d[None, :], acc, mask=keep[:, None])
