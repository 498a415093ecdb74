"""The small operators in plain torch: references of the C kernels, and what runs without them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.noise import gumbel


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * weight


def add_rms_norm_ref(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual += x
    return rms_norm_ref(residual, weight, eps)


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotate_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of x [rows, heads, dim] with cos, sin [rows, dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def rope_kv_write_ref(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    slots: Tensor,
) -> None:
    """Rotates q in place and stores rotated k and plain v. Shapes as in `ops.rope_kv_write`."""
    kv_heads, dim = cache_k.shape[-2:]
    c, s = cos[positions], sin[positions]
    if q is not None:
        q.copy_(rotate_ref(q.reshape(q.shape[0], -1, dim), c, s).flatten(1))
    rotated = rotate_ref(k.reshape(-1, kv_heads, dim), c, s)
    values = v.reshape(-1, kv_heads, dim)
    cache_k.view(-1, kv_heads, dim).index_copy_(0, slots.long(), rotated.to(cache_k.dtype))
    cache_v.view(-1, kv_heads, dim).index_copy_(0, slots.long(), values.to(cache_v.dtype))


def gumbel_argmax_ref(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, choices: Tensor, indices: Tensor
) -> Tensor:
    values = logits.float().clone()
    settings = zip(
        temperatures.tolist(), seeds.tolist(), choices.tolist(), indices.tolist(), strict=True
    )
    for row, (temperature, seed, choice, index) in enumerate(settings):
        if temperature > 0:
            noise = gumbel(seed, choice, index, logits.shape[1]).to(values.device)
            values[row] = values[row] / temperature + noise
    return values.argmax(-1)
