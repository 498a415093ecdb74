"""The attention of a service of this engine: resolved from its own settings, then built."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from engine.attention.base import AttentionBackend
from engine.attention.capabilities import Kind
from engine.attention.cpu_attn import CpuAttention
from engine.attention.devices import DeviceProfile
from engine.attention.mode import LayerMode
from engine.attention.request import AttentionShape, Latent, Request, dtype_name
from engine.attention.resolution import Resolution
from engine.attention.resolve import resolve
from engine.attention.torch_sdpa import TorchMla, TorchSdpa
from engine.kernels.cpu import ops
from engine.kv.cache import KVCache, PagedCache
from engine.kv.latent import LatentCache

log = logging.getLogger(__name__)
_TRITON_MLA = "TRITON_MLA"


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What the settings of one service say; the words of `Request`."""

    backend: str | None = None
    kv_dtype: str = "auto"
    page_tokens: int = 16
    cuda_graph_mode: str = "auto"


def cpu_device(native: bool) -> DeviceProfile:
    """This machine's CPU. `native`: whether the service may use the C kernels."""
    missing = ""
    if not native:
        missing = "native kernels are switched off for this service"
    elif not ops.available():
        missing = ops.unavailable_reason()
    unavailable = [(CpuAttention.name, missing)] if missing else []
    if os.environ.get("TRITON_INTERPRET") != "1":
        unavailable.append((_TRITON_MLA, "runs on a CPU only with TRITON_INTERPRET=1"))
    return DeviceProfile("cpu", simulated=False, unavailable=tuple(unavailable))


def resolve_attention(
    options: AttentionOptions,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    modes: Sequence[LayerMode],
    native: bool,
    latent: Latent | None = None,
    role: Literal["target", "draft"] = "target",
    method: str = "",
    query_tokens: int = 1,
) -> Resolution:
    """Resolves before any weight is read. Raises AttentionRefused with every candidate's reasons.

    With `latent` attention `head_dim` is what is cached. Activations are fp32 on the CPU, so that
    is what `kv_dtype` auto becomes.
    """
    shape = AttentionShape(
        name="",
        kind=Kind.MLA if latent else Kind.MHA,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_dim,
        modes=tuple(modes),
        dtype="float32",
        latent=latent,
    )
    request = Request(
        shape=shape,
        role=role,
        method=method,
        backend=options.backend or None,
        kv_dtype=options.kv_dtype,
        page_tokens=options.page_tokens,
        query_tokens=query_tokens,
        graph_mode=options.cuda_graph_mode,
        engine="native",
    )
    return resolve(request, cpu_device(native))


def make_backend(resolution: Resolution, cache: PagedCache, bucket: int = 0) -> AttentionBackend:
    """Builds what was resolved over a cache of that geometry; BackendUnavailable where the memory
    allocated disagrees with it. `bucket` is the KV bucket of the torch backends, 0 for none.
    """
    resolution.geometry.check_allocated(cache.page_count, cache.allocated_bytes)
    for line in resolution.lines():
        log.info("%s", line)
    shape = resolution.request.shape
    if shape.latent is not None:
        scale = shape.latent.scale
        if resolution.chosen == TorchMla.name:
            return TorchMla(cache, shape.heads, shape.modes, bucket, scale)
        assert resolution.chosen == _TRITON_MLA and isinstance(cache, LatentCache)
        from engine.attention.triton_mla import TritonMla

        dtype = getattr(torch, dtype_name(shape.dtype))
        return TritonMla(cache, shape.heads, shape.modes, scale, dtype)
    if resolution.chosen == CpuAttention.name:
        assert isinstance(cache, KVCache)
        return CpuAttention(cache, shape.heads, shape.modes)
    assert resolution.chosen == TorchSdpa.name, resolution.chosen
    return TorchSdpa(cache, shape.heads, shape.modes, bucket)
