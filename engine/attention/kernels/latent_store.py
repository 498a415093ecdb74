"""Norm, rotation and write of latent KV in one Triton kernel; `LatentProjections.latent` and
`LatentCache.write` define it."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kv.latent import LatentCache


@triton.jit
def _store_latent(
    down, weight, cos, sin, positions, slots, values, scales, rope,
    stride_down, stride_values, stride_scales, stride_rope, eps,
    RANK: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (rows). down [rows, RANK + 2 * HALF] with rows stride_down apart; weight fp32 [RANK];
    cos, sin fp32 [positions, HALF]. Cache parts have their tokens stride_* elements apart. Rows
    whose slot is negative are left out.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        d = tl.arange(0, BLOCK_D)
        x = tl.load(down + row * stride_down + d, mask=d < RANK, other=0.0).to(tl.float32)
        x = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / RANK + eps))
        x = x * tl.load(weight + d, mask=d < RANK, other=0.0)
        if PACKED:
            largest = tl.max(tl.abs(tl.reshape(x, (BLOCK_D // 128, 128))), 1)
            power = tl.ceil(tl.log2(tl.maximum(largest, 1e-12) / 448.0))
            g = tl.arange(0, BLOCK_D // 128)
            tl.store(scales + slot * stride_scales + g, tl.exp2(power), mask=g * 128 < RANK)
            wide = tl.broadcast_to(tl.exp2(-power)[:, None], (BLOCK_D // 128, 128))
            x = x * tl.reshape(wide, (BLOCK_D,))
            x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        tl.store(values + slot * stride_values + d, x.to(values.dtype.element_ty), mask=d < RANK)

        r = tl.arange(0, BLOCK_R)
        position = tl.load(positions + row).to(tl.int64)
        c = tl.load(cos + position * HALF + r, mask=r < HALF, other=0.0)
        s = tl.load(sin + position * HALF + r, mask=r < HALF, other=0.0)
        at = down + row * stride_down + RANK + r
        first = tl.load(at, mask=r < HALF, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=r < HALF, other=0.0).to(tl.float32)
        to = rope + slot * stride_rope + r
        kind = rope.dtype.element_ty
        tl.store(to, (first * c - second * s).to(kind), mask=r < HALF)
        tl.store(to + HALF, (second * c + first * s).to(kind), mask=r < HALF)


def store_latent(
    down: Tensor,
    weight: Tensor,
    eps: float,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    cache: LatentCache,
    layer: int,
) -> None:
    """down [rows, rank + rope] as the projection gave it; weight fp32 [rank]; `tables` cos and sin
    fp32 [positions, rope / 2], contiguous; integer positions and flat slots [rows].
    """
    rank, rope = cache.geometry.rank, cache.geometry.rope
    values, scales, turned = cache.parts(layer)
    block = triton.next_power_of_2(rank)
    _store_latent[(down.shape[0],)](
        down, weight, *tables, positions, slots, values, scales, turned,
        down.stride(0), values.stride(1), scales.stride(1), turned.stride(1), eps,
        RANK=rank, HALF=rope // 2, BLOCK_D=max(128, block),
        BLOCK_R=triton.next_power_of_2(rope // 2), PACKED=cache.quantised, num_warps=4,
    )  # fmt: skip
