"""Norm, rotation and write of latent KV, of several layers at once, in one Triton kernel;
`mla.write_latent` has the definition in torch."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kv.latent import LatentCache


@triton.jit
def _store_latent(
    down, weight, cos, sin, positions, slots, values, scales, rope,
    stride_down, stride_values, stride_scales, stride_rope,
    layer_down, layer_values, layer_scales, layer_rope, eps,
    RANK: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (rows, layers). down [rows, layers, RANK + 2 * HALF] with rows stride_down, layers
    layer_down apart; weight fp32 [layers, RANK]; cos, sin fp32 [positions, HALF]. Cache parts have
    their tokens stride_*, their layers layer_* elements apart. Rows whose slot is negative are left
    out.
    """
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    down += layer * layer_down
    weight += layer * RANK
    values += layer * layer_values
    scales += layer * layer_scales
    rope += layer * layer_rope
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
    weights: Tensor,
    eps: float,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    cache: LatentCache,
    first: int,
) -> None:
    """Layers from `first` on: down [rows, layers, rank + rope] as the projections gave it; weights
    fp32 [layers, rank]; `tables` cos and sin fp32 [positions, rope / 2], contiguous; integer
    positions and flat slots [rows].
    """
    rank, rope = cache.geometry.rank, cache.geometry.rope
    rows, layers, width = down.shape
    assert width == rank + rope and down.stride(2) == 1 and weights.is_contiguous()
    if not rows:
        return
    parts = cache.parts(slice(first, first + layers))
    values, scales, turned = parts
    _store_latent[(rows, layers)](
        down, weights, *tables, positions, slots, values, scales, turned,
        down.stride(0), *(part.stride(-2) for part in parts),
        down.stride(1), *(part.stride(0) for part in parts), eps,
        RANK=rank, HALF=rope // 2, BLOCK_D=max(128, triton.next_power_of_2(rank)),
        BLOCK_R=triton.next_power_of_2(rope // 2), PACKED=cache.quantised, num_warps=4,
    )  # fmt: skip
