"""Triton kernels of the frozen target; `triton_loss.py` has those of the loss, `kernels.py` defines
them in torch.

Rows are int64 offsets, sums are fp32. Head width must be a power of two for `decode_attention`.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rms_norm(
    residual, delta, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    x = tl.load(residual + row * D + cols, mask=mask, other=0.0)
    if ADD:
        x += tl.load(delta + row * D + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual + row * D + cols, x, mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    w = tl.load(weight + cols, mask=mask, other=0.0)
    tl.store(out + row * D + cols, (x * scale * w).to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    rows, d = residual.shape
    out = torch.empty(rows, d, dtype=dtype, device=residual.device)
    add = delta is not None
    block = triton.next_power_of_2(d)
    _add_rms_norm[(rows,)](residual, delta if add else residual, weight, out, eps, d, block, add)
    return out


@triton.jit
def _silu_mul(both, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < inner
    gate = tl.load(both + row * 2 * inner + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * inner + inner + cols, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inner + cols, value.to(out.dtype.element_ty), mask=mask)


def silu_mul(both: Tensor) -> Tensor:
    rows, inner = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, inner, dtype=both.dtype, device=both.device)
    _silu_mul[(rows, triton.cdiv(inner, 2048))](both, out, inner, 2048)
    return out


@triton.jit
def _rope(
    qkv, positions, cos, sin, q_norm, k_norm, k_cache, v_cache, eps, max_length, width,
    HQ: tl.constexpr, HK: tl.constexpr, HD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    c = tl.arange(0, HALF)[None, :]
    half = HD // 2
    mask = (h < HQ + HK) & (c < half)
    base = qkv + row * width + h * HD + c
    a = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(base + half, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HD
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        column = c < half
        qa = tl.load(q_norm + c, mask=column, other=0.0)
        qb = tl.load(q_norm + half + c, mask=column, other=0.0)
        ka = tl.load(k_norm + c, mask=column, other=0.0)
        kb = tl.load(k_norm + half + c, mask=column, other=0.0)
        a = a * scale * tl.where(h < HQ, qa, ka)
        b = b * scale * tl.where(h < HQ, qb, kb)
    co = tl.load(cos + position * half + c, mask=c < half, other=0.0)
    si = tl.load(sin + position * half + c, mask=c < half, other=0.0)
    ra = (a * co - b * si).to(qkv.dtype.element_ty)
    rb = (b * co + a * si).to(qkv.dtype.element_ty)
    tl.store(base, ra, mask=mask)
    tl.store(base + half, rb, mask=mask)
    if STORE:
        keys = mask & (h >= HQ)
        place = ((row * HK + (h - HQ)) * max_length + position) * HD + c
        tl.store(k_cache + place, ra, mask=keys)
        tl.store(k_cache + place + half, rb, mask=keys)
        values = (h < HK) & (c < half)
        source = qkv + row * width + (HQ + HK + h) * HD + c
        target = ((row * HK + h) * max_length + position) * HD + c
        tl.store(v_cache + target, tl.load(source, mask=values, other=0.0), mask=values)
        low = tl.load(source + half, mask=values, other=0.0)
        tl.store(v_cache + target + half, low, mask=values)


def rope_(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int, int],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cache: tuple[Tensor, Tensor] | None = None,
) -> None:
    hq, hk, hd = heads
    q_norm, k_norm = norms if norms else (cos, cos)
    k_cache, v_cache = cache if cache else (qkv, qkv)
    max_length = k_cache.shape[2] if cache else 0
    _rope[(qkv.shape[0],)](
        qkv, positions, cos, sin, q_norm, k_norm, k_cache, v_cache, eps, max_length, qkv.shape[1],
        hq, hk, hd, triton.next_power_of_2(hq + hk), triton.next_power_of_2(hd // 2),
        norms is not None, cache is not None,
    )  # fmt: skip


@triton.jit
def _decode_attention(
    qkv, k_cache, v_cache, positions, out, scale, max_length, width, window,
    HQ: tl.constexpr, HK: tl.constexpr, HD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group = HQ // HK
    length = tl.load(positions + slot).to(tl.int32) + 1
    g = tl.arange(0, ROWS)
    d = tl.arange(0, HD)
    place = (head * group + g[:, None]) * HD + d[None, :]
    q = tl.load(qkv + slot * width + place, mask=g[:, None] < group, other=0.0)
    base = (slot * HK + head) * max_length * HD
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HD], tl.float32)
    first = tl.maximum(length - window, 0)
    for start in range(first // BLOCK * BLOCK, length, BLOCK):
        n = start + tl.arange(0, BLOCK)
        inside = (n < length) & (n >= first)
        k = tl.load(k_cache + base + n[None, :] * HD + d[:, None], mask=inside[None, :], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * scale
        s = tl.where(inside[None, :], s, -1e30)
        new = tl.maximum(best, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        keep = tl.exp(best - new)
        total = total * keep + tl.sum(p, 1)
        v = tl.load(v_cache + base + n[:, None] * HD + d[None, :], mask=inside[:, None], other=0.0)
        acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        best = new
    acc = acc / total[:, None]
    row = out + slot * HQ * HD + place
    tl.store(row, acc.to(out.dtype.element_ty), mask=g[:, None] < group)


def decode_attention(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    heads: tuple[int, int, int],
    window: int = 0,
) -> Tensor:
    """One token per slot against keys [0, positions] (the last `window` of them; 0: all)."""
    hq, hk, hd = heads
    slots = qkv.shape[0]
    out = torch.empty(slots, hq * hd, dtype=qkv.dtype, device=qkv.device)
    rows = max(16, triton.next_power_of_2(hq // hk))
    _decode_attention[(slots, hk)](
        qkv, k_cache, v_cache, positions, out, hd**-0.5, k_cache.shape[2], qkv.shape[1],
        window or k_cache.shape[2],
        hq, hk, hd, rows, 64, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _choose(logits, temperature, seeds, positions, out, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row).to(tl.int32)
    best = tl.full([BLOCK], -1e30, tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * V + c, mask=c < V, other=-1e30)
        if t > 0:
            u = tl.rand(seed, position * V + c)
            x = x / t - tl.log(-tl.log(u))
        better = (x > best) & (c < V)
        where = tl.where(better, c, where)
        best = tl.where(better, x, best)
    top = tl.max(best, 0)
    tl.store(out + row, tl.min(tl.where(best == top, where, V), 0).to(tl.int64))


def choose(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    rows, v = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _choose[(rows,)](logits, temperature, seeds, positions, out, v, 2048, num_warps=8)
    return out
