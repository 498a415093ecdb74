"""The small operators of the engine: C kernels where they can be had, else the torch references.

Activations are fp32. A kernel runs when the library is there and every tensor is fp32 on the CPU;
other tensors take the reference. Calls go through ctypes, which releases the interpreter lock while
a kernel runs.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from engine.kernels.cpu.build import load_library
from engine.kernels.cpu.reference import (
    add_rms_norm_ref,
    gumbel_argmax_ref,
    rms_norm_ref,
    rope_kv_write_ref,
    silu_mul_ref,
)

__all__ = [
    "add_rms_norm",
    "add_rms_norm_ref",
    "available",
    "gumbel_argmax",
    "gumbel_argmax_ref",
    "library",
    "rms_norm",
    "rms_norm_ref",
    "rope_kv_write",
    "rope_kv_write_ref",
    "silu_mul",
    "silu_mul_ref",
    "unavailable_reason",
]

GUMBEL_SEGMENT = 4096

_P, _L, _F, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, list[Any]] = {
    "sw_gemm_bf16": [_P, _P, _P, _L, _L, _L, _I],
    "sw_gemm_f32": [_P, _P, _P, _L, _L, _L, _I],
    "sw_rms_norm": [_P, _P, _P, _L, _L, _F, _I],
    "sw_add_rms_norm": [_P, _P, _P, _P, _L, _L, _F, _I],
    "sw_silu_mul": [_P, _P, _L, _L, _I],
    "sw_rope_kv_write": [_P, _L, _P, _L, _P, _L, *[_P] * 6, _I, _L, _L, _L, _L, _I],
    "sw_attention": [_P, _L, _P, _P, _I, _P, _P, _P, _L, *[_P] * 3, *[_L] * 4, _F, _P, _L, _I],
    "sw_gumbel_argmax": [_P, _L, _L, *[_P] * 7, _I],
    "sw_gumbel_noise": [_L, _L, _L, _L, _P],
}


@functools.cache
def _bound() -> ctypes.CDLL | None:
    found = load_library()
    if isinstance(found, str):
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


def library() -> ctypes.CDLL:
    """The bound library; call only when `available()`."""
    found = _bound()
    if found is None:
        raise RuntimeError(f"native CPU kernels are not available: {unavailable_reason()}")
    return found


def available() -> bool:
    """True when the C kernels are there. The first call may compile them (a few seconds)."""
    return _bound() is not None


def unavailable_reason() -> str:
    """Why `available()` is False; empty when it is True."""
    found = load_library()
    return found if isinstance(found, str) else ""


def _native(*tensors: Tensor) -> ctypes.CDLL | None:
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_cpu:
            return None
    return _bound()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension of x [..., n]."""
    lib = _native(x, weight)
    if lib is None:
        return rms_norm_ref(x, weight, eps)
    x, weight = x.contiguous(), weight.contiguous()
    n = x.shape[-1]
    y = torch.empty_like(x)
    threads = torch.get_num_threads()
    rows = x.numel() // n
    lib.sw_rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, n, eps, threads)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns the norm of the new residual. `residual` is contiguous."""
    lib = _native(x, residual, weight)
    if lib is None or not residual.is_contiguous():
        return add_rms_norm_ref(x, residual, weight, eps)
    x, weight = x.contiguous(), weight.contiguous()
    n = x.shape[-1]
    y = torch.empty_like(x)
    pointers = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), y.data_ptr())
    lib.sw_add_rms_norm(*pointers, x.numel() // n, n, eps, torch.get_num_threads())
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [rows, 2n], gate first."""
    lib = _native(gate_up)
    if lib is None:
        return silu_mul_ref(gate_up)
    gate_up = gate_up.contiguous()
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((rows, n))
    lib.sw_silu_mul(gate_up.data_ptr(), y.data_ptr(), rows, n, torch.get_num_threads())
    return y


def rope_kv_write(
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
    """Rotates q in place, stores rotated k and plain v at `slots`.

    q [rows, query_heads * dim] or None, k and v [rows, kv_heads * dim]: slices of a fused
    projection are welcome, only the last stride must be 1. cos, sin [positions, dim / 2];
    positions, slots int64 [rows]; cache_k, cache_v [pages, page_tokens, kv_heads, dim], fp32 or
    bf16. Half-split (neox) rotation.
    """
    kv_heads, dim = cache_k.shape[-2:]
    lib = _native(k, v, cos, sin) if q is None else _native(q, k, v, cos, sin)
    usable = cache_k.dtype in (torch.float32, torch.bfloat16) and dim <= 1024
    if lib is None or not usable or k.stride(1) != 1 or v.stride(1) != 1:
        return rope_kv_write_ref(q, k, v, cos, sin, positions, cache_k, cache_v, slots)
    query = (None, 0) if q is None else (q.data_ptr(), q.stride(0))
    lib.sw_rope_kv_write(
        *query, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), cos.data_ptr(),
        sin.data_ptr(), positions.data_ptr(), slots.data_ptr(), cache_k.data_ptr(),
        cache_v.data_ptr(), cache_k.dtype == torch.bfloat16, k.shape[0],
        0 if q is None else q.shape[1] // dim, kv_heads, dim, torch.get_num_threads(),
    )  # fmt: skip


def gumbel_argmax(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    choices: Tensor,
    indices: Tensor,
    margins: Tensor | None = None,
) -> Tensor:
    """Ids [rows] (int64) of argmax(logits / T + noise); plain argmax at T = 0, ties to lowest id.

    temperatures fp32 [rows]; seeds (64 bits), choices, indices int64 [rows]. `margins` fp32
    [rows], when given, gets the highest logit minus the second highest, noise left out.
    """
    lib = _native(logits, temperatures)
    if lib is None:
        if margins is not None:
            top = logits.float().topk(2, dim=-1).values
            margins.copy_(top[:, 0] - top[:, 1])
        return gumbel_argmax_ref(logits, temperatures, seeds, choices, indices)
    logits = logits.contiguous()
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.int64)
    scratch = torch.empty((rows, -(-vocab // GUMBEL_SEGMENT), 4), dtype=torch.float32)
    lib.sw_gumbel_argmax(
        logits.data_ptr(), rows, vocab, temperatures.data_ptr(), seeds.data_ptr(),
        choices.data_ptr(), indices.data_ptr(), ids.data_ptr(),
        None if margins is None else margins.data_ptr(), scratch.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return ids
