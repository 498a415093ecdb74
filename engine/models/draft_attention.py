"""The attention of a block draft's layers: heads with keys and values of their own, or latent.

A context vector c enters a layer as what is cached only: keys and values, or W_dkv c normed and its
key turned. All layers' share of c is one product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from engine.kv.cache import KVCache, PagedCache
from engine.kv.latent import LatentCache
from engine.linear import Linear
from engine.models.dflash_config import DFlashConfig
from engine.models.layers import HeadNorms, Kernels, QkvShape, RopeTables, Rows
from engine.models.mla import LatentProjections, take_down, write_latent
from engine.models.rope import rope_tables
from engine.weights import Weights


class DraftAttention(ABC):
    """Weights of all layers, and where their KV goes. In a layer: `enter`, the backend, `found`,
    then `out`."""

    out: list[Linear]

    @abstractmethod
    def enter(
        self, layer: int, residual: Tensor, delta: Tensor | None, norm: Tensor, rows: Rows
    ) -> Tensor:
        """Adds `delta` to the stream and projects the norm of that: writes keys and values at the
        rows' slots. The queries for the backend."""

    @abstractmethod
    def found(self, layer: int, attended: Tensor) -> Tensor:
        """What the backend returned -> the input of `out` [rows, heads * value width]."""

    @abstractmethod
    def write_context(self, context: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Writes context vectors [n, hidden] in every layer, int64 positions and flat slots [n]."""


def draft_attention(
    c: DFlashConfig, draft: Weights, kernels: Kernels, cache: PagedCache
) -> DraftAttention:
    """Raises CheckpointError."""
    if c.latent is not None:
        assert isinstance(cache, LatentCache)
        return LatentDraftAttention(c, draft, kernels, cache)
    assert isinstance(cache, KVCache)
    return HeadDraftAttention(c, draft, kernels, cache)


def _tables(c: DFlashConfig, width: int, draft: Weights) -> RopeTables:
    cos, sin = rope_tables(c.rope, width, c.max_positions)
    return RopeTables(cos.to(draft.device), sin.to(draft.device))


class HeadDraftAttention(DraftAttention):
    """Grouped-query attention with norms of queries and keys."""

    def __init__(self, c: DFlashConfig, draft: Weights, kernels: Kernels, cache: KVCache) -> None:
        self._kernels, self._cache, self._eps = kernels, cache, c.rms_eps
        self._shape = QkvShape(c.heads, c.kv_heads, c.head_dim)
        self._rope = _tables(c, c.head_dim, draft)
        self._into: list[Linear] = []
        self.out = []
        self._norms: list[HeadNorms] = []
        context: list[Tensor] = []
        d, q, kv = c.hidden_size, self._shape.query, self._shape.kv
        for index in range(c.layer_count):
            prefix = f"layers.{index}.self_attn"
            w_q = draft.take(f"{prefix}.q_proj.weight", q, d)
            both = [draft.take(f"{prefix}.{name}_proj.weight", kv, d) for name in ("k", "v")]
            context.append(torch.cat(both))
            self._into.append(kernels.pack(torch.cat((w_q, context[-1]))))
            self.out.append(kernels.pack(draft.take(f"{prefix}.o_proj.weight", d, q)))
            self._norms.append(
                (
                    draft.take(f"{prefix}.q_norm.weight", c.head_dim).float(),
                    draft.take(f"{prefix}.k_norm.weight", c.head_dim).float(),
                )
            )
        self._context = kernels.pack(torch.cat(context))
        self._k_norms = torch.stack([k_norm for _, k_norm in self._norms])

    def enter(
        self, layer: int, residual: Tensor, delta: Tensor | None, norm: Tensor, rows: Rows
    ) -> Tensor:
        pages = self._cache.k[layer], self._cache.v[layer]
        return self._kernels.norm_qkv_store(
            residual, delta, norm, self._eps, self._into[layer], self._shape, self._norms[layer],
            self._rope, rows, pages,
        )  # fmt: skip

    def found(self, layer: int, attended: Tensor) -> Tensor:
        return attended.flatten(1)

    def write_context(self, context: Tensor, positions: Tensor, slots: Tensor) -> None:
        shape = (self._shape.kv_heads, self._shape.head_dim)
        self._kernels.store_context(
            self._context(context), shape, self._k_norms, self._eps, self._rope, positions, slots,
            self._cache.data,
        )  # fmt: skip


class LatentDraftAttention(DraftAttention):
    """Latent attention, as in `mla.py`; each layer has latent KV of its own."""

    def __init__(
        self, c: DFlashConfig, draft: Weights, kernels: Kernels, cache: LatentCache
    ) -> None:
        latent = c.latent
        assert latent is not None
        self._kernels, self._cache, self._eps = kernels, cache, c.rms_eps
        self._width = latent.width
        self._rope = _tables(c, latent.rope, draft)
        prefixes = [f"layers.{index}.self_attn" for index in range(c.layer_count)]
        self._layers = [
            LatentProjections(draft, prefix, latent, c.heads, c.hidden_size, kernels)
            for prefix in prefixes
        ]
        self.out = [layer.out for layer in self._layers]
        downs = [take_down(draft, prefix, latent, c.hidden_size)[0] for prefix in prefixes]
        self._context = kernels.pack(torch.cat(downs))
        self._norms = torch.stack([layer.kv_norm for layer in self._layers])

    def enter(
        self, layer: int, residual: Tensor, delta: Tensor | None, norm: Tensor, rows: Rows
    ) -> Tensor:
        own = self._layers[layer]
        projected = self._kernels.norm_linear(residual, delta, norm, self._eps, own.down)
        return own.store(projected, self._rope, rows, self._cache, layer)

    def found(self, layer: int, attended: Tensor) -> Tensor:
        return self._layers[layer].values(attended)

    def write_context(self, context: Tensor, positions: Tensor, slots: Tensor) -> None:
        down = self._context(context).view(len(slots), -1, self._width)
        write_latent(self._kernels, down, self._norms, self._rope, positions, slots, self._cache)
