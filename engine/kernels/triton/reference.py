"""What the operators compute, in plain torch on any device: fp32, or fp64 from fp64 inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.api import Sampling
from engine.draw_rows import DrawRows
from engine.kernels.cpu.reference import gumbel_argmax_ref, rms_norm_ref, rotate_ref, silu_mul_ref
from engine.sampling import Draw
from engine.sampling import draw as draw_on_host

_FP8_LARGEST = 448.0


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x and weight of any float dtypes; the result has x's."""
    return torch.nn.functional.linear(x, weight.to(x), None if bias is None else bias.to(x))


def norm_linear_ref(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return linear_ref(rms_norm_ref(residual, norm_weight.to(residual), eps), weight, bias)


def norm_gate_up_ref(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return silu_mul_ref(norm_linear_ref(residual, norm_weight, eps, weight, bias))


def put_ref(cache: Tensor, value: Tensor, slots: Tensor) -> None:
    """cache [pages, page_tokens, kv_heads, dim] gets value [rows, kv_heads, dim]."""
    kept = slots >= 0
    if cache.dtype == torch.float8_e4m3fn:
        value = value.clamp(-_FP8_LARGEST, _FP8_LARGEST)
    flat = cache.view(-1, *cache.shape[2:])
    flat[slots[kept].long()] = value[kept].to(cache.dtype)


def _turned(
    x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor
) -> Tensor:
    if norm is not None:
        x = rms_norm_ref(x, norm.to(x), eps)
    return rotate_ref(x, cos[positions.long()].to(x), sin[positions.long()].to(x))


def qkv_store_ref(
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
    kv_heads, dim = cache_k.shape[-2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    each = qkv.reshape(qkv.shape[0], -1, dim)
    q, k, v = each[:, :heads], each[:, heads : heads + kv_heads], each[:, heads + kv_heads :]
    q_norm, k_norm = norms if norms is not None else (None, None)
    put_ref(cache_k, _turned(k, k_norm, eps, cos, sin, positions), slots)
    put_ref(cache_v, v, slots)
    return _turned(q, q_norm, eps, cos, sin, positions)


def context_store_ref(
    kv: Tensor,
    k_norms: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> None:
    planes = kv.view(kv.shape[0], cache.shape[0], 2, *cache.shape[-2:])
    for layer in range(cache.shape[0]):
        norm = None if k_norms is None else k_norms[layer]
        k = _turned(planes[:, layer, 0], norm, eps, cos, sin, positions)
        put_ref(cache[layer, 0], k, slots)
        put_ref(cache[layer, 1], planes[:, layer, 1], slots)


def draw_ref(logits: Tensor, rows: DrawRows, vocab: int | None = None, shift: int = 0) -> list[int]:
    """Row by row on the host; what `engine.sampling` says."""
    draws = []
    for row in range(logits.shape[0]):
        sampling = Sampling(
            temperature=float(rows.temperature[row]),
            seed=int(rows.seed[row]),
            choice=int(rows.choice[row]),
            min_p=0.0 if rows.min_p is None else float(rows.min_p[row]),
            top_k=0 if rows.top_k is None else int(rows.top_k[row]),
            top_p=1.0 if rows.top_p is None else float(rows.top_p[row]),
        )
        draws.append(Draw(sampling, int(rows.index[row]) + shift))
    return draw_on_host(logits[:, :vocab].cpu(), draws, False, gumbel_argmax_ref)[0]


def accept_ref(
    drawn: list[int], given: list[int], first: list[int], count: list[int], width: int
) -> list[list[int]]:
    found = []
    for start, rows in zip(first, count, strict=True):
        accepted = 0
        while accepted < rows - 1 and drawn[start + accepted] == given[start + accepted + 1]:
            accepted += 1
        emitted = drawn[start : start + min(rows, accepted + 1)]
        found.append([accepted, *emitted, *[-1] * (width - len(emitted))])
    return found
