"""Triton kernels of the loss; `kernels.py` defines them in torch. Rows are int64 offsets."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _loss_stats(zq, zp, labels, stats, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mq = tl.full([BLOCK], -1e30, tl.float32)
    mp = tl.full([BLOCK], -1e30, tl.float32)
    lq = tl.zeros([BLOCK], tl.float32)
    lp = tl.zeros([BLOCK], tl.float32)
    iq = tl.zeros([BLOCK], tl.int32)
    ip = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        q = tl.load(zq + row * V + c, mask=c < V, other=-1e30).to(tl.float32)
        p = tl.load(zp + row * V + c, mask=c < V, other=-1e30).to(tl.float32)
        iq = tl.where(q > mq, c, iq)
        ip = tl.where(p > mp, c, ip)
        nq = tl.maximum(mq, q)
        np = tl.maximum(mp, p)
        lq = lq * tl.exp(mq - nq) + tl.exp(q - nq)
        lp = lp * tl.exp(mp - np) + tl.exp(p - np)
        mq = nq
        mp = np
    top_q = tl.max(mq, 0)
    top_p = tl.max(mp, 0)
    lse_q = top_q + tl.log(tl.sum(lq * tl.exp(mq - top_q), 0))
    lse_p = top_p + tl.log(tl.sum(lp * tl.exp(mp - top_p), 0))
    best_q = tl.min(tl.where(mq == top_q, iq, V), 0)
    best_p = tl.min(tl.where(mp == top_p, ip, V), 0)
    tv = tl.zeros([BLOCK], tl.float32)
    kl = tl.zeros([BLOCK], tl.float32)
    sign = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        q = tl.load(zq + row * V + c, mask=c < V, other=-1e30).to(tl.float32) - lse_q
        p = tl.load(zp + row * V + c, mask=c < V, other=-1e30).to(tl.float32) - lse_p
        pe = tl.exp(p)
        qe = tl.exp(q)
        tv += tl.abs(pe - qe)
        kl += tl.where(c < V, pe * (p - q), 0.0)
        sign += tl.where(qe > pe, qe, tl.where(qe < pe, -qe, 0.0))
    label = tl.load(labels + row)
    z_label = tl.load(zq + row * V + label).to(tl.float32)
    out = stats + row * 8
    tl.store(out, lse_q)
    tl.store(out + 1, lse_p)
    tl.store(out + 2, z_label - lse_q)
    tl.store(out + 3, 0.5 * tl.sum(tv, 0))
    tl.store(out + 4, tl.sum(kl, 0))
    tl.store(out + 5, tl.sum(sign, 0))
    tl.store(out + 6, (best_q == label).to(tl.float32))
    tl.store(out + 7, (best_q == best_p).to(tl.float32))


def loss_stats(zq: Tensor, zp: Tensor, labels: Tensor) -> Tensor:
    rows, v = zq.shape
    stats = torch.empty(rows, 8, device=zq.device)
    _loss_stats[(rows,)](zq, zp, labels, stats, v, 2048, num_warps=8)
    return stats


@triton.jit
def _loss_grad(zq, zp, labels, stats, weights, V, ce, kl, tv, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lse_q = tl.load(stats + row * 8)
    lse_p = tl.load(stats + row * 8 + 1)
    sign = tl.load(stats + row * 8 + 5)
    w = tl.load(weights + row)
    label = tl.load(labels + row)
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        q = tl.load(zq + row * V + c, mask=c < V, other=-1e30).to(tl.float32)
        p = tl.load(zp + row * V + c, mask=c < V, other=-1e30).to(tl.float32)
        qe = tl.exp(q - lse_q)
        pe = tl.exp(p - lse_p)
        side = tl.where(qe > pe, 1.0, tl.where(qe < pe, -1.0, 0.0))
        g = (ce + kl) * qe - kl * pe + 0.5 * tv * qe * (side - sign)
        g = g - tl.where(c == label, ce, 0.0)
        tl.store(zq + row * V + c, (g * w).to(zq.dtype.element_ty), mask=c < V)


def loss_grad_(
    zq: Tensor, zp: Tensor, labels: Tensor, stats: Tensor, weights: Tensor, mix: Any
) -> None:
    rows, v = zq.shape
    _loss_grad[(rows,)](
        zq, zp, labels, stats, weights, v, float(mix.ce), float(mix.kl), float(mix.tv), 2048,
        num_warps=8,
    )  # fmt: skip
