"""Why one backend cannot run layers of one mode: every reason, not only the first.

The words are vLLM's, so that an operator finds them again; what failed stands in parentheses.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.attention.capabilities import Backend, GraphLevel, Kind
from engine.attention.devices import DeviceProfile, covered
from engine.attention.graphs import impossible
from engine.attention.mode import LayerMode
from engine.attention.quirks import Quirk, quirks_for
from engine.attention.request import Request, dtype_name

_KIND_WORDS = {
    Kind.MHA: "non-MLA",
    Kind.MLA: "MLA",
    Kind.SPARSE_MLA: "sparse MLA",
    Kind.DSV4: "DeepSeek-V4 attention",
}


def level_of(
    backend: Backend, request: Request, device: DeviceProfile, mode: LayerMode
) -> GraphLevel:
    return backend.graph_level(
        device,
        causal=mode.causal,
        dcp=request.dcp,
        windowed=mode.window is not None,
        query_tokens=request.query_tokens,
    )


def warnings_of(
    backend: Backend, request: Request, device: DeviceProfile, mode: LayerMode
) -> list[str]:
    """Known trouble that does not forbid the choice."""
    return [
        f"{backend.name}: {quirk.text} ({quirk.reference})"
        for quirk in _quirks(backend, request, device, mode)
        if not quirk.denies
    ]


def reasons_of(
    backend: Backend, request: Request, device: DeviceProfile, mode: LayerMode
) -> list[str]:
    """Empty when the backend can run the layers; KV geometry is compared elsewhere."""
    return [
        *_shape(backend, request, device),
        *_kv(backend, request, device),
        *_modes(backend, request, mode),
        *_dcp(backend, request, mode),
        *_environment(backend, request, device, mode),
    ]


def _shape(backend: Backend, request: Request, device: DeviceProfile) -> Iterator[str]:
    shape = request.shape
    heads = backend.head_rule(device)
    if heads is not None and not heads.fits(shape.head_size):
        yield f"head_size not supported ({shape.head_size}; accepted: {heads})"
    if shape.heads % shape.kv_heads:
        yield f"{shape.heads} query heads are no multiple of {shape.kv_heads} KV heads"
    latent = shape.latent
    if latent is not None and backend.qk_nope and latent.nope not in backend.qk_nope:
        nopes = "/".join(map(str, backend.qk_nope))
        yield f"qk_nope_head_dim not supported ({latent.nope}; accepted: {nopes})"
    if latent is not None and backend.index_topk and latent.index_topk != backend.index_topk:
        topk, accepted = latent.index_topk, backend.index_topk
        yield f"index_topk not supported ({topk}; accepted: {accepted})"
    if shape.kind not in backend.kinds:
        yield f"{_KIND_WORDS[shape.kind]} not supported"
    if dtype_name(shape.dtype) not in backend.dtypes:
        yield f"dtype not supported ({shape.dtype}; accepted: {', '.join(backend.dtypes)})"
    if shape.sinks and not covered(backend.sinks, device):
        yield "attention sinks not supported"


def _kv(backend: Backend, request: Request, device: DeviceProfile) -> Iterator[str]:
    dtype = dtype_name(request.kv_dtype)
    if backend.kv_rule(dtype, device) is None:
        accepted = ", ".join(backend.kv_accepted(device)) or "none here"
        yield f"kv_cache_dtype not supported ({request.kv_dtype}; accepted: {accepted})"
    page = request.page_tokens
    if page is not None and not backend.takes_page(page, device):
        yield f"block_size not supported ({page}; accepted: {backend.page_rule(device)})"


def _modes(backend: Backend, request: Request, mode: LayerMode) -> Iterator[str]:
    if mode.causal and not backend.causal:
        yield "causal attention not supported"
    if not mode.causal and not backend.non_causal:
        yield "non-causal attention not supported"
    elif not mode.causal and mode.window is None and not backend.non_causal_full:
        yield "non-causal attention without a window not supported"
    dtype = dtype_name(request.kv_dtype)
    if not mode.causal and dtype in backend.non_causal_kv_refused:
        yield f"non-causal attention with kv_cache_dtype {dtype} not supported"
    if mode.window is not None and mode.window < 1:
        yield f"window {mode.window} is below 1"
    if mode.window is not None and not backend.window:
        yield f"sliding window not supported ({mode.window})"


def _dcp(backend: Backend, request: Request, mode: LayerMode) -> Iterator[str]:
    if request.dcp == 1:
        return
    if request.engine == "native":
        yield f"decode context parallelism not implemented by the native engine ({request.dcp})"
    if not request.sharded:
        # Every rank holds all of this model's KV; some backends still refuse to start.
        if not mode.causal and backend.non_causal and not backend.dcp_group_non_causal:
            yield "non-causal with decode context parallelism not supported"
        return
    block = request.role == "draft" and request.query_tokens > 1
    if mode.causal and not backend.dcp_causal:
        yield "decode context parallelism not supported"
    elif mode.causal and block and not backend.dcp_draft_block:
        yield "causal draft blocks with decode context parallelism not supported"
    elif not mode.causal and not backend.dcp_non_causal:
        yield "non-causal with decode context parallelism not supported"
    dtype = dtype_name(request.kv_dtype)
    if backend.dcp_kv and dtype not in (*backend.dcp_kv, "fp8"):
        accepted = ", ".join(backend.dcp_kv)
        yield f"decode context parallelism needs kv_cache_dtype {accepted} ({request.kv_dtype})"
    if mode.window is not None:
        yield "sliding window with decode context parallelism not supported"
    yield from _dcp_heads(request)


def _dcp_heads(request: Request) -> Iterator[str]:
    """A rank must hold the KV heads of all query heads that it gathers: same rule for both roles.

    Bounds of vLLM's `verify_with_parallel_config`.
    """
    shape = request.shape
    if shape.kind is not Kind.MHA or shape.heads % shape.kv_heads:
        return
    tp, kv, group = request.tp or request.dcp, shape.kv_heads, shape.heads // shape.kv_heads
    if tp <= kv:
        yield f"decode context parallelism needs tp above the KV heads (tp={tp}, {kv} KV heads)"
    elif request.dcp > tp // kv:
        yield f"dcp={request.dcp} is above tp / KV heads ({tp} / {kv})"
    elif group % request.dcp:
        yield f"{group} query heads per KV head are no multiple of dcp={request.dcp}"


def _environment(
    backend: Backend, request: Request, device: DeviceProfile, mode: LayerMode
) -> Iterator[str]:
    if not covered(backend.on, device):
        accepted = ", ".join(map(str, backend.on))
        yield f"compute capability not supported ({device.name}; accepted: {accepted})"
    for quirk in _quirks(backend, request, device, mode):
        if quirk.denies:
            yield f"denied: {quirk.text} ({quirk.reference})"
    if request.engine == "native" and not backend.implemented:
        yield "not implemented by the native engine"
    yield from device.why_unavailable(backend.name)
    if request.adaptive_verification and not request.shape.confidence_head:
        yield "adaptive verification needs a confidence head, the checkpoint has none"
    if request.graph_mode != "auto":
        level = level_of(backend, request, device, mode)
        why = impossible(request.graph_mode, request, device, level)
        if why:
            yield f"CUDA-graph mode {request.graph_mode} not possible: {why}"


def _quirks(
    backend: Backend, request: Request, device: DeviceProfile, mode: LayerMode
) -> list[Quirk]:
    return quirks_for(
        backend.name,
        request.engine,
        device,
        mode,
        dcp=request.dcp,
        block=request.query_tokens > 1,
        draft=request.role == "draft",
    )
