"""Llama, Mistral, Qwen2 and Qwen3 over packed ragged rows: any mix of prompt chunks and verify
blocks in one forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.errors import CheckpointError
from engine.kv.cache import KVCache
from engine.linear import Linear, pack_linear
from engine.models.config import ModelConfig
from engine.models.layers import Kernels, Mlp, Rows, head_norm, norm_weight, projection
from engine.models.rope import rope_tables
from engine.weights import Weights

_HEAD = "lm_head.weight"
_REDUNDANT = ("rotary_emb.inv_freq",)  # older checkpoints store what the config already says


class LlamaLayer:
    """Packed weights of one decoder layer."""

    def __init__(self, index: int, c: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        prefix = f"model.layers.{index}"
        query, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        widths = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        parts = {f"{prefix}.self_attn.{name}": rows for name, rows in widths.items()}
        self.qkv = projection(weights, kernels.mode, parts, c.hidden_size, c.qkv_bias)
        out = {f"{prefix}.self_attn.o_proj": c.hidden_size}
        self.out = projection(weights, kernels.mode, out, query, c.out_bias)
        self.q_norm = self.k_norm = None
        if c.head_norms:
            self.q_norm, self.k_norm = (
                norm_weight(weights, f"{prefix}.self_attn.{name}.weight", c.head_dim)
                for name in ("q_norm", "k_norm")
            )
        self.mlp = Mlp(
            weights, f"{prefix}.mlp", c.hidden_size, c.intermediate_size, kernels, c.mlp_bias
        )
        self.norm = norm_weight(weights, f"{prefix}.input_layernorm.weight", c.hidden_size)
        self.mlp_norm = norm_weight(
            weights, f"{prefix}.post_attention_layernorm.weight", c.hidden_size
        )


class LlamaModel:
    """Weights and the forward. The caller owns pages, slots and the attention plan."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        max_length: int,
        padding: int = 0,
    ) -> None:
        """`max_length` bounds sessions; up to `padding` rows of a step may stand behind it."""
        c = self.config = config
        self.kernels = kernels
        embedding = weights.take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        self.embedding = embedding
        self.head = load_head(config, weights, kernels, embedding)
        self.layers = [LlamaLayer(i, c, weights, kernels) for i in range(c.layer_count)]
        self.norm = norm_weight(weights, "model.norm.weight", c.hidden_size)
        weights.finish(_REDUNDANT)
        self.cos, self.sin = rope_tables(c.rope, c.head_dim, max_length + padding, max_length)

    @property
    def rows_independent(self) -> bool:
        return self.head.rows_independent and self.layers[0].qkv.rows_independent

    def forward(
        self,
        rows: Rows,
        cache: KVCache,
        backend: AttentionBackend,
        draw_rows: Tensor | None,
        taps: Sequence[int] = (),
        tap_rows: Tensor | None = None,
    ) -> Tensor | None:
        """Runs the rows and writes their KV. Returns fp32 logits [len(draw_rows), vocabulary] or
        None.

        `tap_rows` [rows, len(taps) * hidden] gets the residual stream after each tap layer, before
        any final norm.
        """
        eps, hidden = self.config.rms_eps, self.config.hidden_size
        residual = self.embedding[rows.ids].float()
        x = self.kernels.rms_norm(residual, self.layers[0].norm, eps)
        for index, layer in enumerate(self.layers):
            attended = self._attend(index, layer, x, rows, cache, backend)
            x = self.kernels.add_rms_norm(layer.out(attended), residual, layer.mlp_norm, eps)
            x = layer.mlp(x)
            following = self.layers[index + 1].norm if index + 1 < len(self.layers) else self.norm
            x = self.kernels.add_rms_norm(x, residual, following, eps)
            if tap_rows is not None and index in taps:
                column = taps.index(index) * hidden
                tap_rows[:, column : column + hidden] = residual
        return None if draw_rows is None else self.head(x[draw_rows])

    def _attend(
        self,
        index: int,
        layer: LlamaLayer,
        x: Tensor,
        rows: Rows,
        cache: KVCache,
        backend: AttentionBackend,
    ) -> Tensor:
        c = self.config
        query, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        qkv = layer.qkv(x)
        q = qkv[:, :query]
        k, v = qkv[:, query : query + kv], qkv[:, query + kv :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = head_norm(self.kernels, q, layer.q_norm, c.rms_eps)
            k = head_norm(self.kernels, k, layer.k_norm, c.rms_eps)
        self.kernels.rope_kv_write(
            q, k, v, self.cos, self.sin, rows.positions, cache.k[index], cache.v[index], rows.slots
        )
        return backend.run(rows.plan, index, q.view(-1, c.heads, c.head_dim)).flatten(1)


def load_head(
    config: ModelConfig, weights: Weights, kernels: Kernels, embedding: Tensor, rows: int = 0
) -> Linear:
    """The output head, tied or its own; `rows` > 0 keeps only the first rows (a trimmed head for
    drafting). A tied checkpoint may hold a copy of the embedding under the head's name.
    """
    full = embedding
    if not config.tied_head or _HEAD in weights:
        full = weights.take(_HEAD, config.vocab_size, config.hidden_size)
        if config.tied_head and not torch.equal(full, embedding):
            raise CheckpointError(
                f"tensor {_HEAD} differs from the embedding; accepted with tie_word_embeddings: "
                "an equal copy, or none"
            )
    return pack_linear(full[:rows] if rows else full, kernels.mode)
