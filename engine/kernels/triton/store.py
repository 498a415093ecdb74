"""What stands between a projection of queries, keys and values and the attention over pages: norm
of each head, half-split rotation, and the write to the cache. One program a row and head.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dependent import flags, wait


@triton.jit
def turn(a, b, co, si):
    """The rotation, rounded alike in every kernel: no compiler contracts what is spelled out."""
    return tl.fma(a, co, -(b * si)), tl.fma(b, co, a * si)


@triton.jit
def _factors(norm, cos, sin, position, c, inside, D: tl.constexpr, NORM: tl.constexpr):
    """Norm weights of a head's two halves and its rotation: what `_finish` takes."""
    half = D // 2
    co = tl.load(cos + position * half + c, mask=inside, other=0.0)
    si = tl.load(sin + position * half + c, mask=inside, other=0.0)
    first, second = co, si
    if NORM:
        first = tl.load(norm + c, mask=inside, other=0.0)
        second = tl.load(norm + half + c, mask=inside, other=0.0)
    return first, second, co, si


@triton.jit
def _finish(a, b, factors, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotation of one head given as its two halves."""
    if NORM:
        mean = (tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D
        scale = 1.0 / tl.sqrt_rn(mean + eps)
        a = a * scale * factors[0]
        b = b * scale * factors[1]
    return turn(a, b, factors[2], factors[3])


@triton.jit
def put(to, a, b, inside, D: tl.constexpr, FP8: tl.constexpr):
    """Two halves of a head, the first at `to`."""
    if FP8:
        a = tl.where(a > 448.0, 448.0, tl.where(a < -448.0, -448.0, a))
        b = tl.where(b > 448.0, 448.0, tl.where(b < -448.0, -448.0, b))
    tl.store(to, a.to(to.dtype.element_ty), mask=inside)
    tl.store(to + D // 2, b.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _qkv_store(
    qkv, q_norm, k_norm, cos, sin, positions, slots, cache_k, cache_v, q_out, stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    c = tl.arange(0, HALF)
    inside = c < D // 2
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    norm = q_norm if head < HQ else k_norm
    factors = _factors(norm, cos, sin, position, c, inside, D, NORM)
    wait(PDL)
    source = qkv + row * stride + head * D + c
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)
    if head < HQ:
        a, b = _finish(a, b, factors, eps, D, NORM)
        put(q_out + (row * HQ + head) * D + c, a, b, inside, D, False)
    elif slot >= 0:
        if head < HQ + HK:
            a, b = _finish(a, b, factors, eps, D, NORM)
            put(cache_k + (slot * HK + head - HQ) * D + c, a, b, inside, D, FP8)
        else:
            put(cache_v + (slot * HK + head - HQ - HK) * D + c, a, b, inside, D, FP8)


def qkv_store(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    slots: Tensor,
) -> Tensor:
    """Queries [rows, heads, dim] of qkv [rows, (heads + 2 kv_heads) * dim], normed (`norms`: query
    and key weights fp32 [dim]) and rotated; keys likewise and values to the cache.

    cos, sin fp32 [positions, dim / 2]; positions, slots int32 or int64 [rows], a negative slot
    writes nothing; cache_k, cache_v contiguous [pages, page_tokens, kv_heads, dim], fp32, bf16 or
    fp8 (e4m3, clamped).
    """
    kv_heads, dim = cache_k.shape[-2:]
    rows, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    assert qkv.stride(1) == 1 and cache_k.is_contiguous() and cache_v.is_contiguous()
    q = torch.empty(rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if not rows:
        return q
    q_norm, k_norm = norms if norms is not None else (cos, cos)
    _qkv_store[(rows, heads + 2 * kv_heads)](
        qkv, q_norm, k_norm, cos, sin, positions, slots, cache_k, cache_v, q, qkv.stride(0), eps,
        heads, kv_heads, dim, triton.next_power_of_2(dim // 2), norms is not None,
        cache_k.dtype == torch.float8_e4m3fn, num_warps=1, **flags(rows),
    )  # fmt: skip
    return q


@triton.jit
def _context_store(
    kv, k_norms, cos, sin, positions, slots, cache, stride, plane, eps,
    HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Positions and slots may be chosen on the device, so they are read behind the wait too.
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    which = head // HK  # 2 * layer, plus 1 for values
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    c = tl.arange(0, HALF)
    inside = c < D // 2
    norm = k_norms + which // 2 * D
    factors = _factors(norm, cos, sin, position, c, inside, D, NORM)
    source = kv + row * stride + head * D + c
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)
    if which % 2 == 0:
        a, b = _finish(a, b, factors, eps, D, NORM)
    if slot >= 0:
        place = cache + which.to(tl.int64) * plane + (slot * HK + head % HK) * D
        put(place + c, a, b, inside, D, FP8)


def context_store(
    kv: Tensor,
    k_norms: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> None:
    """Writes the context of every layer: kv [rows, layers * 2 * kv_heads * dim], layer by layer
    keys (normed by k_norms fp32 [layers, dim], rotated), then values.

    cache contiguous [layers, 2, pages, page_tokens, kv_heads, dim]; the rest as in `qkv_store`.
    """
    rows, (kv_heads, dim) = kv.shape[0], cache.shape[-2:]
    assert kv.stride(1) == 1 and cache.is_contiguous()
    if not rows:
        return
    _context_store[(rows, cache.shape[0] * 2 * kv_heads)](
        kv, cos if k_norms is None else k_norms, cos, sin, positions, slots, cache, kv.stride(0),
        cache.stride(1), eps, kv_heads, dim, triton.next_power_of_2(dim // 2),
        k_norms is not None, cache.dtype == torch.float8_e4m3fn, num_warps=1, **flags(rows),
    )  # fmt: skip
