"""DeepSeek-V2 and V3 over packed ragged rows: latent attention, dense layers and experts.

Layers that predict further tokens (MTP) are not read.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.kv.latent import LatentCache
from engine.models.config import ModelConfig
from engine.models.experts import Experts
from engine.models.layers import Kernels, Mlp, Rows, norm_weight
from engine.models.llama import load_head
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
            self.mlp = Experts(weights, f"{prefix}.mlp", hidden, c.experts, kernels, c.mlp_bias)
        else:
            inner = c.intermediate_size
            self.mlp = Mlp(weights, f"{prefix}.mlp", hidden, inner, kernels, c.mlp_bias)
        self.norm = norm_weight(weights, f"{prefix}.input_layernorm.weight", hidden)
        self.mlp_norm = norm_weight(weights, f"{prefix}.post_attention_layernorm.weight", hidden)


class DeepseekModel:
    """Weights and the forward. The caller owns pages, slots and the attention plan."""

    # Products by head run in torch, whose kernels vary with the number of rows.
    rows_independent = False

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
        self.cos, self.sin = rope_tables(c.rope, c.latent.rope, max_length + padding, max_length)

    @property
    def uncapturable(self) -> str:
        """Why a step cannot be captured in a CUDA graph; empty where it can."""
        if self.config.experts is None:
            return ""
        return "which experts run is decided on the host"

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
        eps, hidden = self.config.rms_eps, self.config.hidden_size
        cos, sin = self.cos[rows.positions], self.sin[rows.positions]
        residual = self.embedding[rows.ids].float()
        x = self.kernels.rms_norm(residual, self.layers[0].norm, eps)
        for index, layer in enumerate(self.layers):
            queries, latent = layer.attention.project(x, cos, sin)
            cache.write(index, latent, rows.slots)
            attended = layer.attention.output(backend.run(rows.plan, index, queries))
            x = layer.mlp(self.kernels.add_rms_norm(attended, residual, layer.mlp_norm, eps))
            following = self.layers[index + 1].norm if index + 1 < len(self.layers) else self.norm
            x = self.kernels.add_rms_norm(x, residual, following, eps)
            if tap_rows is not None and index in taps:
                column = taps.index(index) * hidden
                tap_rows[:, column : column + hidden] = residual
        return None if draw_rows is None else self.head(x[draw_rows])
