"""The small operators in plain torch: what the C kernels are compared with, and what runs where there are none."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


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
        q.copy_(rotate_ref(q.unflatten(-1, (-1, dim)), c, s).flatten(1))
    rotated = rotate_ref(k.unflatten(-1, (kv_heads, dim)), c, s)
    values = v.unflatten(-1, (kv_heads, dim))
    cache_k.view(-1, kv_heads, dim).index_copy_(0, slots, rotated.to(cache_k.dtype))
    cache_v.view(-1, kv_heads, dim).index_copy_(0, slots, values.to(cache_v.dtype))


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of constant * x, x < 2**32 in int64: by halves, since the product needs 64 unsigned bits."""
    low, high = (x & 0xFFFF) * constant, (x >> 16) * constant
    total = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (total >> 32)) & _MASK, total & _MASK


def philox_ref(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbel_noise_ref(vocab: int, seed: int, choice: int, index: int) -> Tensor:
    """Noise [vocab] of one draw: counter (token // 4, index, choice, 0), one word a token."""
    block = torch.arange((vocab + 3) // 4, dtype=torch.int64)
    full = [torch.full_like(block, value & _MASK) for value in (index, choice, 0)]
    words = torch.stack(philox_ref((block, *full), seed), dim=1).flatten()[:vocab]
    u = ((words >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def gumbel_argmax_ref(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, choices: Tensor, indices: Tensor
) -> Tensor:
    values = logits.float().clone()
    settings = zip(
        temperatures.tolist(), seeds.tolist(), choices.tolist(), indices.tolist(), strict=True
    )
    for row, (temperature, seed, choice, index) in enumerate(settings):
        if temperature > 0:
            noise = gumbel_noise_ref(logits.shape[1], seed, choice, index).to(values.device)
            values[row] = values[row] / temperature + noise
    return values.argmax(-1)
