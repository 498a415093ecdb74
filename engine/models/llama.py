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
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.models.layers import (
    HeadNorms,
    Kernels,
    Mlp,
    QkvShape,
    RopeTables,
    Rows,
    norm_weight,
    projection,
)
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
        self.qkv = projection(weights, kernels, parts, c.hidden_size, c.qkv_bias)
        out = {f"{prefix}.self_attn.o_proj": c.hidden_size}
        self.out = projection(weights, kernels, out, query, c.out_bias)
        self.head_norms: HeadNorms | None = None
        if c.head_norms:
            q_norm, k_norm = (
                norm_weight(weights, f"{prefix}.self_attn.{name}.weight", c.head_dim)
                for name in ("q_norm", "k_norm")
            )
            self.head_norms = q_norm, k_norm
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
        cos, sin = rope_tables(c.rope, c.head_dim, max_length + padding, max_length)
        self.rope = RopeTables(cos.to(weights.device), sin.to(weights.device))
        self._qkv = QkvShape(c.heads, c.kv_heads, c.head_dim)

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
        run, eps = rows.kernels or self.kernels, self.config.rms_eps
        residual = run.embed(rows.ids, self.embedding)
        tapped = Taps(taps, tap_rows, residual)
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            q = run.norm_qkv_store(
                residual, delta, layer.norm, eps, layer.qkv, self._qkv, layer.head_norms,
                self.rope, rows, (cache.k[index], cache.v[index]),
            )  # fmt: skip
            tapped.take(index - 1)
            attended = backend.run(rows.plan, index, q).flatten(1)
            delta = run.linear_add(attended, layer.out, residual)
            inner = run.norm_gated(residual, delta, layer.mlp_norm, eps, layer.mlp.gate_up)
            delta = run.linear_add(inner, layer.mlp.down, residual)
        logits = None
        if draw_rows is not None:
            logits = run.head(residual, delta, self.norm, eps, self.head, draw_rows)
        elif delta is not None:
            residual += delta
        tapped.take(len(self.layers) - 1)
        return logits

    def logits_of(self, outputs: Tensor) -> Tensor:
        """fp32 logits of outputs of the last layer, fp32 [rows, hidden]."""
        return self.kernels.head(outputs, None, self.norm, self.config.rms_eps, self.head, None)


class Taps:
    """Copies the residual stream after the layers asked for, side by side."""

    def __init__(self, taps: Sequence[int], to: Tensor | None, residual: Tensor) -> None:
        self._column = {} if to is None else {tap: i for i, tap in enumerate(taps)}
        self._to, self._residual = to, residual

    def take(self, layer: int) -> None:
        """The stream holds the output of `layer` now."""
        if self._to is not None and layer in self._column:
            hidden = self._residual.shape[1]
            first = self._column[layer] * hidden
            self._to[:, first : first + hidden] = self._residual


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
    return kernels.pack(full[:rows] if rows else full)
