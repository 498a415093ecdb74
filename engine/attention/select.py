"""The attention of a service of this engine: resolved from its own settings, then built."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.attention.base import AttentionBackend
from engine.attention.capabilities import Kind
from engine.attention.cpu_attn import CpuAttention
from engine.attention.devices import DeviceProfile
from engine.attention.mode import LayerMode
from engine.attention.outcome import kv_group
from engine.attention.request import AttentionShape, KVGroup, Request
from engine.attention.resolution import Resolution
from engine.attention.resolve import resolve
from engine.attention.torch_sdpa import TorchSdpa
from engine.kernels.cpu import ops
from engine.kv.cache import KVCache

log = logging.getLogger(__name__)


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
    unavailable = ((CpuAttention.name, missing),) if missing else ()
    return DeviceProfile("cpu", simulated=False, unavailable=unavailable)


def resolve_attention(
    options: AttentionOptions,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    modes: Sequence[LayerMode],
    native: bool,
    role: Literal["target", "draft"] = "target",
    method: str = "",
    query_tokens: int = 1,
    target: Resolution | None = None,
    group: KVGroup | None = None,
) -> Resolution:
    """Resolves before any weight is read. Raises AttentionRefused with every candidate's reasons.

    `target` is that of the target whose page tables a draft shares; `group` None takes the kind of
    KV group that the two models' attention allows. Activations are fp32 on the CPU, so that is what
    `kv_dtype` auto becomes.
    """
    shape = AttentionShape(
        name="",
        kind=Kind.MHA,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_dim,
        modes=tuple(modes),
        dtype="float32",
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
    if target is not None:
        kind = group or kv_group(request, target.request, colocated=True)
        # Pages are the target's, so is their size.
        request = replace(request, kv_group=kind, page_tokens=target.geometry.page_tokens)
    return resolve(request, cpu_device(native), target)


def make_backend(resolution: Resolution, cache: KVCache, bucket: int = 0) -> AttentionBackend:
    """Builds what was resolved over a cache of that geometry; BackendUnavailable where the memory
    allocated disagrees with it. `bucket` is the KV bucket of TORCH_SDPA, 0 for none.
    """
    tensors = (*cache.k, *cache.v)
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    resolution.geometry.check_allocated(cache.page_count, allocated)
    for line in resolution.lines():
        log.info("%s", line)
    shape = resolution.request.shape
    if resolution.chosen == CpuAttention.name:
        return CpuAttention(cache, shape.heads, shape.modes)
    assert resolution.chosen == TorchSdpa.name, resolution.chosen
    return TorchSdpa(cache, shape.heads, shape.modes, bucket)
