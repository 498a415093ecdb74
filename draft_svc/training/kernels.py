"""The fused operators of training, defined in plain torch; on a GPU the Triton versions run.

Shapes: T rows, D width, V vocabulary, `heads` = (query heads, KV heads, head width). The residual
stream is fp32; everything else is in the compute dtype unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Heads = tuple[int, int, int]
STATS = ("lse_q", "lse_p", "log_q_label", "tv", "kl", "sign", "hit_label", "hit_target")


@dataclass(frozen=True, slots=True)
class LossMix:
    """Weights of cross-entropy on the label, KL(target || draft) and total variation."""

    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0


@dataclass(frozen=True, slots=True)
class Ops:
    """One way to run every operator."""

    add_rms_norm: Callable[..., Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    rope_: Callable[..., None]
    decode_attention: Callable[..., Tensor] | None
    choose: Callable[..., Tensor]
    loss_stats: Callable[[Tensor, Tensor, Tensor], Tensor]
    loss_grad_: Callable[..., None]


def add_rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """residual fp32 [T, D] += delta in place; returns its RMSNorm in `dtype`."""
    if delta is not None:
        residual += delta
    scale = (residual.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (residual * scale * weight).to(dtype)


def silu_mul(both: Tensor) -> Tensor:
    """both [T, 2 I] = gate, up -> silu(gate) * up [T, I]."""
    gate, up = both.float().chunk(2, -1)
    return (F.silu(gate) * up).to(both.dtype)


def rope_(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cache: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Rotates the queries and keys of qkv [T, (hq + 2 hk) * hd] in place (half-split layout).

    norms: per-head RMSNorm weights of queries and keys, applied before the rotation. cache: K and V
    [T, hk, length, hd]; row i is written at [i, :, positions[i]].
    """
    hq, hk, hd = heads
    both = qkv[:, : (hq + hk) * hd].view(-1, hq + hk, hd)
    x = both.float()
    if norms is not None:
        x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        x = torch.cat((x[:, :hq] * norms[0], x[:, hq:] * norms[1]), 1)
    c, s = cos[positions][:, None], sin[positions][:, None]
    a, b = x.chunk(2, -1)
    both.copy_(torch.cat((a * c - b * s, b * c + a * s), -1))
    if cache is not None:
        rows = torch.arange(qkv.shape[0], device=qkv.device)
        cache[0][rows, :, positions] = both[:, hq:]
        cache[1][rows, :, positions] = qkv[:, (hq + hk) * hd :].view(-1, hk, hd)


def seeded_gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise fp32 [T, V] keyed by (seed of the row, position), so that a row's draw does not
    depend on the rows beside it."""
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    bits = [np.random.Philox(key=seed, counter=position) for seed, position in pairs]
    uniform = np.stack([np.random.Generator(b).random(vocab, dtype=np.float32) for b in bits])
    noise = -np.log(-np.log(uniform.clip(1e-30)))
    return torch.from_numpy(noise).to(seeds.device)


def choose(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Token of every row of fp32 logits [T, V]: argmax, or a draw where temperature [T] > 0."""
    sampled = temperature > 0
    if bool(sampled.any()):
        warm = logits[sampled] / temperature[sampled, None]
        logits = logits.clone()
        logits[sampled] = warm + seeded_gumbel(seeds[sampled], positions[sampled], logits.shape[1])
    return logits.argmax(-1)


def loss_stats(zq: Tensor, zp: Tensor, labels: Tensor) -> Tensor:
    """Draft and target logits [T, V], labels [T] -> fp32 [T, 8] in the order of `STATS`.

    tv = half the L1 distance, so 1 - tv is the acceptance of sampled proposals; sign is the sum of
    q * sign(q - p), which the gradient of tv needs.
    """
    q, p = zq.float(), zp.float()
    lse_q, lse_p = q.logsumexp(-1), p.logsumexp(-1)
    log_q, log_p = q - lse_q[:, None], p - lse_p[:, None]
    pe, qe = log_p.exp(), log_q.exp()
    best = q.argmax(-1)
    columns = (
        lse_q,
        lse_p,
        log_q.gather(1, labels[:, None])[:, 0],
        0.5 * (pe - qe).abs().sum(-1),
        (pe * (log_p - log_q)).sum(-1),
        (qe * (qe - pe).sign()).sum(-1),
        (best == labels).float(),
        (best == p.argmax(-1)).float(),
    )
    return torch.stack(columns, 1)


def loss_grad_(
    zq: Tensor, zp: Tensor, labels: Tensor, stats: Tensor, weights: Tensor, mix: LossMix
) -> None:
    """Overwrites zq with d(sum of weights * loss)/d zq."""
    qe = (zq.float() - stats[:, :1]).exp()
    pe = (zp.float() - stats[:, 1:2]).exp()
    grad = (mix.ce + mix.kl) * qe - mix.kl * pe
    grad += 0.5 * mix.tv * qe * ((qe - pe).sign() - stats[:, 5:6])
    grad[torch.arange(len(labels), device=labels.device), labels] -= mix.ce
    zq.copy_(grad * weights[:, None])


TORCH = Ops(add_rms_norm, silu_mul, rope_, None, choose, loss_stats, loss_grad_)


def ops_for(device: torch.device, head_dim: int) -> Ops:
    """Triton on a GPU, torch elsewhere."""
    if device.type != "cuda":
        return TORCH
    from draft_svc.training import triton_kernels as t
    from draft_svc.training import triton_loss as loss

    powers = head_dim & (head_dim - 1) == 0 and head_dim >= 16
    attention = t.decode_attention if powers else None
    own = t.add_rms_norm, t.silu_mul, t.rope_, attention, t.choose
    return Ops(*own, loss.loss_stats, loss.loss_grad_)


def matmul_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] @ weight [V, D].T with an fp32 result: 16-bit logits have too many ties."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight).float()
