"""From settings to a native engine: the checkpoint, the pages, the attention backend."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.api import Drafter, ModelInfo, never
from engine.attention.select import AttentionOptions, make_backend, resolve_attention
from engine.colocated import Group, Target, describe
from engine.config import EngineConfig
from engine.default_model import resolve_model
from engine.device import (
    activation_dtype,
    chunk_of,
    device_name,
    kernel_mode,
    numerics_fingerprint,
    resolve_device,
    use_device,
    weight_dtype,
)
from engine.device_step import DeviceStepper
from engine.errors import SettingRefused
from engine.kv.cache import CacheGeometry, PagedCache
from engine.linear import Mode
from engine.models import draft_dialects
from engine.models.config import ModelConfig, from_hf
from engine.models.family import build_cache, build_model, cache_geometry, latent_of
from engine.models.kernel_sets import kernels_for
from engine.projecting import Projecting
from engine.runner import NativeEngine
from engine.tokenizer import check_vocabulary, read_document
from engine.weights import Weights, fingerprint, read_json

log = logging.getLogger(__name__)


@torch.inference_mode()
def load_engine(
    config: EngineConfig,
    drafter: Drafter | None = None,
    stopped: Callable[[], bool] = never,
    projected: Path | None = None,
) -> NativeEngine:
    """Loads the model, allocates pages, chooses the attention backend, checks row independence.
    A `drafter` is asked for its KV groups before the pages exist, and attached to the engine; it
    is warmed up, unless that is `stopped`. `projected` is the checkpoint of a draft whose `fc` and
    norm rows may go through.

    Raises SettingRefused, CheckpointError or BackendUnavailable.
    """
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    source = resolve_model(config.model)
    raw = read_json(source.directory / "config.json")
    model_config = from_hf(raw)
    device = resolve_device(config.device)
    use_device(device)
    mode = kernel_mode(config.kernels, device)
    document = read_document(source.directory)
    check_vocabulary(document, model_config.vocab_size)
    attention = resolve_attention(
        AttentionOptions(
            config.attention_backend, config.kv_dtype, config.page_tokens, config.cuda_graph_mode
        ),
        heads=model_config.heads,
        kv_heads=model_config.kv_heads,
        head_dim=model_config.head_dim,
        modes=model_config.modes,
        native=mode == "native",
        latent=latent_of(model_config),
        role=config.role,
        method="draft_model" if config.role == "draft" else "",
        query_tokens=config.exact_width if config.role == "target" else 1,
        device=device,
        dtype=activation_dtype(mode, config.dtype),
        uncapturable=_uncapturable(model_config, mode),
    )
    # Nothing after this sees "auto".
    config = replace(config, kv_dtype=attention.geometry.dtype)
    name = fingerprint(source.directory)
    groups = describe(drafter, Target(source.directory, name, model_config, attention, device))
    cache, beside = allocate_caches(
        config, cache_geometry(model_config, attention.geometry), groups, device
    )
    limit = session_length(config, model_config, (cache.page_count - 1) * config.page_tokens)
    backend, report = make_backend(attention, cache, config.kv_bucket), attention.report()
    weights = Weights(source.directory, weight_dtype(config.dtype), device)
    kernels = kernels_for(mode, weight_dtype(config.dtype))
    # Padding rows of a short block may stand past the limit.
    model = build_model(model_config, weights, kernels, limit, padding=config.exact_width)
    special = json.loads(document)["special"]
    info = ModelInfo(
        name=source.name,
        fingerprint=name,
        numerics=numerics_fingerprint(
            config, mode, device, report.chosen, limit if model_config.rope.kind == "dynamic" else 0
        ),
        vocab_size=model_config.vocab_size,
        hidden_size=model_config.hidden_size,
        layer_count=model_config.layer_count,
        max_length=limit,
        eos_token_ids=tuple(special["eos_token_ids"]) or model_config.eos_token_ids,
        device=device_name(device),
        dtype=str(weight_dtype(config.dtype)).removeprefix("torch."),
        prefill_chunk=chunk_of(config, device),
    )
    stepper: DeviceStepper | None = None
    if device.type == "cuda" or mode == "triton":
        graphs = attention.graphs.decode == "FULL"
        scratch_slot = (cache.page_count - 1) * config.page_tokens
        stepper = DeviceStepper(model, cache, backend, limit, scratch_slot, graphs)
    projecting: Projecting | None = None
    if projected is not None:
        described = draft_dialects.Target(model_config, raw.get("architectures") or ())
        projecting = Projecting(projected, described, kernels, weights.dtype, device)
    engine = NativeEngine(config, model, cache, backend, report, info, beside, stepper, projecting)
    if drafter is not None:
        engine.attach(drafter, groups)
        drafter.warm_up(stopped)
    return engine


def _uncapturable(model: ModelConfig, mode: Mode) -> str:
    """Why no CUDA graph can hold a step of this model; "" where one can."""
    if model.experts is None or mode == "triton":
        return ""
    return f"kernels {mode!r} choose the experts that run on the host"


def session_length(config: EngineConfig, model: ModelConfig, held: int) -> int:
    """Longest session in tokens, of which the pages hold `held`. Raises SettingRefused for a length
    that cannot be.
    """
    if config.max_length is None:
        if held < model.default_length:
            text = "the pages hold %d tokens: sessions end there, where the model goes on to %d"
            log.warning(text, held, model.default_length)
        return min(model.default_length, held)
    limits = ((model.max_positions, "the model's own limit"), (held, "what the KV pages hold"))
    most, reason = min(limits)
    if config.max_length > most:
        raise SettingRefused("max_length", config.max_length, f"2 to {most}, {reason}")
    return config.max_length


def allocate_caches(
    config: EngineConfig,
    geometry: CacheGeometry,
    groups: Sequence[Group] = (),
    device: torch.device | str = "cpu",
) -> tuple[PagedCache, dict[str, PagedCache]]:
    """The pages that the settings ask for and a scratch page, of the target's group and of those
    beside it, which share the memory allowed. Raises SettingRefused."""
    bytes_per_token = geometry.bytes_per_token + sum(g.geometry.bytes_per_token for g in groups)
    page_bytes = bytes_per_token * geometry.page_tokens
    field = "kv_memory_mb" if config.kv_pages is None else "kv_pages"
    count = config.kv_pages or config.kv_memory_mb * 2**20 // page_bytes
    if count < 1:
        accepted = f"{-(-page_bytes // 2**20)} or more: one page has {page_bytes} bytes"
        raise SettingRefused(field, getattr(config, field), accepted)
    try:
        beside = {g.name: build_cache(g.geometry, count + 1, device) for g in groups}
        return build_cache(geometry, count + 1, device), beside
    except (MemoryError, torch.OutOfMemoryError):
        accepted = f"what this machine has memory for: one page has {page_bytes} bytes"
        raise SettingRefused(field, getattr(config, field), accepted) from None
