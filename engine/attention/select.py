"""Chooses the attention backend of one service before a step runs; every refusal is explained."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend, LayerMode
from engine.attention.cpu_attn import CpuAttention
from engine.attention.report import AttentionReport, Candidate
from engine.attention.torch_sdpa import TorchSdpa
from engine.errors import BackendUnavailable
from engine.kernels.cpu import ops
from engine.kv.cache import KVCache

# In order of preference.
NAMES = (CpuAttention.name, TorchSdpa.name)


def _common_reasons(cache: KVCache, query_heads: int, modes: Sequence[LayerMode]) -> list[str]:
    shape, reasons = cache.geometry, []
    if query_heads % shape.kv_heads:
        reasons.append(f"{query_heads} query heads are no multiple of {shape.kv_heads} KV heads")
    if len(modes) != shape.layers:
        reasons.append(f"{len(modes)} layer modes for {shape.layers} layers")
    bad = sorted({mode.window for mode in modes if mode.window is not None and mode.window < 1})
    if bad:
        reasons.append(f"window {bad[0]} is below 1")
    return reasons


def _cpu_reasons(cache: KVCache, native: bool) -> list[str]:
    shape, reasons = cache.geometry, []
    if not native:
        reasons.append("native kernels are switched off for this service")
    elif not ops.available():
        reasons.append(ops.unavailable_reason())
    if cache.k[0].device.type != "cpu":
        reasons.append(f"KV on {cache.k[0].device.type}, accepted: cpu")
    if shape.dtype not in (torch.float32, torch.bfloat16):
        reasons.append(f"kv dtype {_dtype(shape.dtype)}, accepted: float32, bfloat16")
    if shape.head_dim % 8 or shape.head_dim > 1024:
        reasons.append(f"head_dim {shape.head_dim}, accepted: multiples of 8 up to 1024")
    return reasons


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refusal(role: str, candidates: Sequence[Candidate]) -> str:
    listed = ", ".join(f"{c.name}: [{', '.join(c.reasons) or 'valid'}]" for c in candidates)
    return f"{role}: {{{listed}}}"


def candidates_for(
    cache: KVCache, query_heads: int, modes: Sequence[LayerMode], native: bool
) -> tuple[Candidate, ...]:
    """Every backend with the reasons why it cannot run this cache and these modes."""
    common = _common_reasons(cache, query_heads, modes)
    reasons = {NAMES[0]: _cpu_reasons(cache, native), NAMES[1]: []}
    return tuple(Candidate(name, tuple(common + reasons[name])) for name in NAMES)


def make_backend(
    requested: str | None,
    cache: KVCache,
    query_heads: int,
    modes: Sequence[LayerMode],
    native: bool,
    bucket: int = 0,
) -> tuple[AttentionBackend, AttentionReport]:
    """The backend and the report on how it was chosen.

    `requested` None or "" takes the first valid one. A name is never replaced: BackendUnavailable
    lists every candidate. `bucket` is the KV bucket of TORCH_SDPA, 0 for none.
    """
    candidates = candidates_for(cache, query_heads, modes, native)
    if requested and requested not in NAMES:
        known = f"unknown attention backend {requested!r}, accepted: {', '.join(NAMES)}"
        raise BackendUnavailable(_refusal(known, candidates))
    valid = [c.name for c in candidates if not c.reasons and requested in (None, "", c.name)]
    if not valid:
        wanted = f"attention backend {requested!r} cannot run" if requested else "no valid backend"
        raise BackendUnavailable(_refusal(wanted, candidates))
    backend: AttentionBackend
    if valid[0] == CpuAttention.name:
        backend = CpuAttention(cache, query_heads, modes)
    else:
        backend = TorchSdpa(cache, query_heads, modes, bucket)
    report = AttentionReport(
        requested=requested or "",
        policy="as requested" if requested else "first valid",
        chosen=backend.name,
        candidates=candidates,
        kv_dtype=_dtype(cache.geometry.dtype),
        kv_bytes_per_token=cache.geometry.bytes_per_token,
        page_tokens=cache.geometry.page_tokens,
    )
    return backend, report
