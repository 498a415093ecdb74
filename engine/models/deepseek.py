"""DeepSeek-V2 and V3 over packed ragged rows: latent attention, dense layers and experts.

Layers that predict further tokens (MTP) are not read.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.kv.latent import LatentCache
from engine.models.config import ModelConfig
from engine.models.experts import Experts, experts_for
from engine.models.layers import Kernels, Mlp, RopeTables, Rows, norm_weight
from engine.models.llama import Taps, load_head
from engine.models.mla import LatentProjections
from engine.models.rope import rope_tables
from engine.weights import Weights

_REDUNDANT = ("rotary_emb.inv_freq",)  # older checkpoints store what the config already says


class DeepseekLayer:
    """Packed weights of one decoder layer."""

    def __init__(self, index: int, c: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        assert c.latent is not None
        prefix, hidden = f"model.layers.{index}", c.hidden_size
        self.attention = LatentProjections(
            weights, f"{prefix}.self_attn", c.latent, c.heads, hidden, kernels, c.qkv_bias
        )
        self.mlp: Mlp | Experts
        if c.experts is not None and index >= c.experts.first_layer:
            kind = experts_for(kernels)
            self.mlp = kind(weights, f"{prefix}.mlp", hidden, c.experts, kernels, c.mlp_bias)
        else:
            inner = c.intermediate_size
            self.mlp = Mlp(weights, f"{prefix}.mlp", hidden, inner, kernels, c.mlp_bias)
        self.norm = norm_weight(weights, f"{prefix}.input_layernorm.weight", hidden)
        self.mlp_norm = norm_weight(weights, f"{prefix}.post_attention_layernorm.weight", hidden)


class DeepseekModel:
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
        assert c.latent is not None
        self.kernels = kernels
        self.embedding = weights.take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        self.head = load_head(config, weights, kernels, self.embedding)
        self.layers = [DeepseekLayer(i, c, weights, kernels) for i in range(c.layer_count)]
        self.norm = norm_weight(weights, "model.norm.weight", c.hidden_size)
        behind = range(c.layer_count, c.layer_count + c.unread_layers)
        weights.finish(_REDUNDANT, tuple(f"model.layers.{index}." for index in behind))
        cos, sin = rope_tables(c.rope, c.latent.rope, max_length + padding, max_length)
        self.rope = RopeTables(cos.to(weights.device), sin.to(weights.device))

    @property
    def rows_independent(self) -> bool:
        """Products by head are Triton's, or torch's, which vary with the number of rows."""
        return self.kernels.mode == "triton"

    def forward(
        self,
        rows: Rows,
        cache: LatentCache,
        backend: AttentionBackend,
        draw_rows: Tensor | None,
        taps: Sequence[int] = (),
        tap_rows: Tensor | None = None,
    ) -> Tensor | None:
        """As `LlamaModel.forward`: runs the rows and writes their KV."""
        run, eps = rows.kernels or self.kernels, self.config.rms_eps
        residual = run.embed(rows.ids, self.embedding)
        tapped = Taps(taps, tap_rows, residual)
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            down = run.norm_linear(residual, delta, layer.norm, eps, attention.down)
            tapped.take(index - 1)
            queries = attention.store(down, self.rope, rows, cache, index)
            found = attention.values(backend.run(rows.plan, index, queries))
            delta = run.linear_add(found, attention.out, residual)
            delta = self._mlp(layer, run, residual, delta)
        logits = None
        if draw_rows is not None:
            logits = run.head(residual, delta, self.norm, eps, self.head, draw_rows)
        elif delta is not None:
            residual += delta
        tapped.take(len(self.layers) - 1)
        return logits

    def _mlp(
        self, layer: DeepseekLayer, run: Kernels, residual: Tensor, delta: Tensor | None
    ) -> Tensor | None:
        eps, weight = self.config.rms_eps, layer.mlp_norm
        if isinstance(layer.mlp, Experts):
            return layer.mlp.add(residual, delta, weight, eps)
        inner = run.norm_gated(residual, delta, weight, eps, layer.mlp.gate_up)
        return run.linear_add(inner, layer.mlp.down, residual)

    def logits_of(self, outputs: Tensor) -> Tensor:
        """fp32 logits of outputs of the last layer, fp32 [rows, hidden]."""
        return self.kernels.head(outputs, None, self.norm, self.config.rms_eps, self.head, None)
