"""The attention of a service of this engine: resolved from its own settings, then built."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from engine.attention.base import AttentionBackend
from engine.attention.capabilities import Kind
from engine.attention.cpu_attn import CpuAttention
from engine.attention.devices import DeviceProfile
from engine.attention.mode import LayerMode
from engine.attention.outcome import kv_group
from engine.attention.request import AttentionShape, KVGroup, Latent, Request
from engine.attention.resolution import Resolution
from engine.attention.resolve import resolve
from engine.attention.torch_sdpa import TorchMla, TorchSdpa
from engine.errors import BackendUnavailable
from engine.kernels.cpu import ops
from engine.kv.cache import KVCache, PagedCache
from engine.kv.latent import LatentCache

log = logging.getLogger(__name__)
_TRITON = ("TRITON_ATTN", "TRITON_MLA")


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
        unavailable += [(name, "no GPU, and TRITON_INTERPRET=1 is not set") for name in _TRITON]
    elif importlib.util.find_spec("triton") is None:
        unavailable += [(name, "the package triton is not installed") for name in _TRITON]
    return DeviceProfile("cpu", simulated=False, unavailable=tuple(unavailable))


def cuda_device(index: int | None = None) -> DeviceProfile:
    """The GPU with that index, the current one for None. BackendUnavailable without one."""
    if not torch.cuda.is_available():
        raise BackendUnavailable("no CUDA device is available to torch")
    major, minor = torch.cuda.get_device_capability(index)
    needed = (
        *((name, "triton", "triton") for name in _TRITON),
        ("FLASHINFER", "flashinfer", "flashinfer-python"),
    )
    unavailable = [
        (name, f"the package {package} is not installed")
        for name, module, package in needed
        if importlib.util.find_spec(module) is None
    ]
    if not torch.backends.cuda.is_flash_attention_available():
        unavailable.append(("FLASH_ATTN", "this build of torch has no FlashAttention kernel"))
    return DeviceProfile(
        f"sm{major}{minor}", (major, minor), simulated=False, unavailable=tuple(unavailable)
    )


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
    device: torch.device | str = "cpu",
    dtype: str = "",
    target: Resolution | None = None,
    group: KVGroup | None = None,
    uncapturable: str = "",
) -> Resolution:
    """Resolves before any weight is read. Raises AttentionRefused with every candidate's reasons.

    `target` is that of the target whose page tables a draft shares; `group` None takes the kind of
    KV group that the two models' attention allows. `dtype` is that of the
    activations, and what `kv_dtype` auto becomes: without it fp32 on the CPU and bf16 on a GPU.
    `native` matters on the CPU only. `uncapturable`: why no CUDA graph can hold the model's steps.
    With `latent` attention `head_dim` is what is cached.
    """
    where = torch.device(device)
    on_gpu = where.type == "cuda"
    shape = AttentionShape(
        name="",
        kind=Kind.MLA if latent else Kind.MHA,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_dim,
        modes=tuple(modes),
        dtype=dtype or ("bfloat16" if on_gpu else "float32"),
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
        uncapturable=uncapturable,
        engine="native",
    )
    if target is not None:
        kind = group or kv_group(request, target.request, colocated=True)
        # Pages are the target's, so is their size.
        request = replace(request, kv_group=kind, page_tokens=target.geometry.page_tokens)
    return resolve(request, cuda_device(where.index) if on_gpu else cpu_device(native), target)


def make_backend(resolution: Resolution, cache: PagedCache, bucket: int = 0) -> AttentionBackend:
    """Builds what was resolved over a cache of that geometry; BackendUnavailable where the memory
    allocated disagrees with it. `bucket` is the KV bucket of the torch backends, 0 for none.
    """
    resolution.geometry.check_allocated(cache.page_count, cache.allocated_bytes)
    for line in resolution.lines():
        log.info("%s", line)
    if isinstance(cache, LatentCache):
        return _LATENT_BUILDERS[resolution.chosen](resolution, cache, bucket)
    assert isinstance(cache, KVCache)
    return _BUILDERS[resolution.chosen](resolution, cache, bucket)


def _cpu(found: Resolution, cache: KVCache, _bucket: int) -> AttentionBackend:
    return CpuAttention(cache, found.request.shape.heads, found.request.shape.modes)


def _sdpa(found: Resolution, cache: KVCache, bucket: int) -> AttentionBackend:
    return TorchSdpa(cache, found.request.shape.heads, found.request.shape.modes, bucket)


# What needs a package, or takes long to import, is imported when it is chosen.
def _triton(found: Resolution, cache: KVCache, _bucket: int) -> AttentionBackend:
    from engine.attention.triton_attn import TritonAttention

    shape = found.request.shape
    return TritonAttention(cache, shape.heads, shape.modes, _dtype(shape))


def _flashinfer(found: Resolution, cache: KVCache, _bucket: int) -> AttentionBackend:
    from engine.attention.flashinfer_attn import FlashInferAttention

    shape = found.request.shape
    return FlashInferAttention(cache, shape.heads, shape.modes, _dtype(shape))


def _flash(found: Resolution, cache: KVCache, _bucket: int) -> AttentionBackend:
    from engine.attention.flash_attn import FlashAttention

    return FlashAttention(cache, found.request.shape.heads, found.request.shape.modes)


def _flex(found: Resolution, cache: KVCache, _bucket: int) -> AttentionBackend:
    from engine.attention.flex_attn import FlexAttention

    return FlexAttention(cache, found.request.shape.heads, found.request.shape.modes)


def _dtype(shape: AttentionShape) -> torch.dtype:
    """The activations'."""
    known = (torch.float32, torch.float16, torch.bfloat16)
    return next(dtype for dtype in known if str(dtype) == f"torch.{shape.dtype}")


_BUILDERS: dict[str, Callable[[Resolution, KVCache, int], AttentionBackend]] = {
    "CPU_ATTN": _cpu,
    "TORCH_SDPA": _sdpa,
    "TRITON_ATTN": _triton,
    "FLASHINFER": _flashinfer,
    "FLASH_ATTN": _flash,
    "FLEX_ATTENTION": _flex,
}


def _torch_mla(found: Resolution, cache: LatentCache, bucket: int) -> AttentionBackend:
    shape = found.request.shape
    assert shape.latent is not None
    return TorchMla(cache, shape.heads, shape.modes, bucket, shape.latent.scale)


def _triton_mla(found: Resolution, cache: LatentCache, _bucket: int) -> AttentionBackend:
    from engine.attention.triton_mla import TritonMla

    shape = found.request.shape
    assert shape.latent is not None
    return TritonMla(cache, shape.heads, shape.modes, shape.latent.scale, _dtype(shape))


_LATENT_BUILDERS: dict[str, Callable[[Resolution, LatentCache, int], AttentionBackend]] = {
    "TORCH_MLA": _torch_mla,
    "TRITON_MLA": _triton_mla,
}
