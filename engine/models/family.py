"""From a target's description to its cache and its model, whatever its family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.geometry import Geometry
from engine.attention.request import Latent
from engine.device import kv_dtype
from engine.kv.cache import CacheGeometry, KVCache, KVGeometry, PagedCache
from engine.kv.latent import LatentCache, LatentGeometry
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.models.deepseek import DeepseekModel
from engine.models.latent_config import LatentConfig
from engine.models.layers import Kernels, Rows
from engine.models.llama import LlamaModel
from engine.weights import Weights


class Attending(Protocol):
    """What decides the KV of a model, target or draft."""

    @property
    def layer_count(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def latent(self) -> LatentConfig | None: ...


class Model(Protocol):
    """What the runner needs of a family. `cache` is of the kind that `build_cache` made for it."""

    config: ModelConfig
    kernels: Kernels
    embedding: Tensor
    head: Linear
    norm: Tensor

    @property
    def rows_independent(self) -> bool: ...

    def forward(
        self,
        rows: Rows,
        cache: Any,
        backend: AttentionBackend,
        draw_rows: Tensor | None,
        taps: Sequence[int] = (),
        tap_rows: Tensor | None = None,
    ) -> Tensor | None: ...

    def logits_of(self, outputs: Tensor) -> Tensor: ...


def latent_of(config: Attending) -> Latent | None:
    """The attention's dimensions for the resolver, where it is latent."""
    c = config.latent
    return None if c is None else Latent(c.rank, c.rope, c.nope, softmax_factor=c.softmax_factor)


def cache_geometry(config: Attending, resolved: Geometry) -> CacheGeometry:
    """The layout that the resolver found, in the engine's own terms."""
    layers, page_tokens = config.layer_count, resolved.page_tokens
    if config.latent is not None:
        rank, rope = config.latent.rank, config.latent.rope
        return LatentGeometry(layers, rank, rope, page_tokens, resolved.dtype)
    dtype = kv_dtype(resolved.dtype)
    return KVGeometry(layers, config.kv_heads, config.head_dim, page_tokens, dtype)


def build_cache(
    geometry: CacheGeometry, page_count: int, device: torch.device | str = "cpu"
) -> PagedCache:
    if isinstance(geometry, LatentGeometry):
        return LatentCache(geometry, page_count, device)
    assert isinstance(geometry, KVGeometry)
    return KVCache(geometry, page_count, device)


def build_model(
    config: ModelConfig, weights: Weights, kernels: Kernels, max_length: int, padding: int = 0
) -> Model:
    """Raises CheckpointError."""
    if config.latent is not None:
        return DeepseekModel(config, weights, kernels, max_length, padding)
    return LlamaModel(config, weights, kernels, max_length, padding)
