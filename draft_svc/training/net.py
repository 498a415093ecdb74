"""The frozen target for training: one dense forward that yields taps and final states.

The engine serves ragged pages on the CPU; training needs large padded batches and static caches on
a GPU. Sizes and options come from the engine's `ModelConfig` and from which tensors exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_svc.training.kernels import matmul_fp32, ops_for
from draft_svc.training.layers import (
    Product,
    TargetLayer,
    attention_heads,
    dense_attention,
    dense_mlp,
    experts,
    latent_attention,
    rotation,
)
from engine.models.config import ModelConfig, from_hf
from engine.weights import Weights, read_json

Attend = Callable[[int, Tensor], Tensor]
_REDUNDANT = ("rotary_emb.inv_freq",)


class StaticCache:
    """K and V [layers, slots, kv_heads, max_length, head_dim]."""

    def __init__(self, net: TargetNet, slots: int, max_length: int) -> None:
        _, heads, width = net.heads
        shape = (net.config.layer_count, slots, heads, max_length, width)
        self.k = torch.zeros(shape, dtype=net.dtype, device=net.device)
        self.v = torch.zeros(shape, dtype=net.dtype, device=net.device)
        self.max_length = max_length


class TargetNet:
    """Weights in the compute dtype, and the forward; no gradients anywhere."""

    def __init__(
        self, config: ModelConfig, weights: Weights, device: torch.device, dtype: torch.dtype
    ) -> None:
        c = self.config = config
        self.device, self.dtype = device, dtype
        self.heads = attention_heads(c)
        # What experts run is decided on the host: no graph of a decode step can hold that.
        self.ops = ops_for(device, self.heads[2] if c.experts is None else 0)
        shape = (c.vocab_size, c.hidden_size)
        self.embedding = weights.take("model.embed_tokens.weight", *shape)
        self.head = self.embedding
        if not c.tied_head:
            self.head = weights.take("lm_head.weight", *shape)
        self.layers = [self._layer(weights, i) for i in range(c.layer_count)]
        self.norm = weights.take("model.norm.weight", c.hidden_size).float()
        behind = range(c.layer_count, c.layer_count + c.unread_layers)
        weights.finish(
            _REDUNDANT if not c.tied_head else (*_REDUNDANT, "lm_head.weight"),
            tuple(f"model.layers.{index}." for index in behind),
        )
        self.cos, self.sin = (table.to(device) for table in rotation(c))

    def _layer(self, weights: Weights, index: int) -> TargetLayer:
        c, prefix, ops = self.config, f"model.layers.{index}", self.ops
        attention = f"{prefix}.self_attn"

        def norm(name: str, width: int) -> Tensor:
            return weights.take(f"{prefix}.{name}.weight", width).float()

        if c.latent is not None:
            qkv, out = latent_attention(weights, attention, c, ops)
        else:
            qkv, out = dense_attention(weights, attention, c)
        head_norms = [norm(f"self_attn.{n}_norm", c.head_dim) for n in "qk" if c.head_norms]
        mlp: Product
        if c.experts is not None and index >= c.experts.first_layer:
            mlp = experts(weights, f"{prefix}.mlp", c, ops)
        else:
            mlp = dense_mlp(weights, f"{prefix}.mlp", c, ops, c.intermediate_size, c.mlp_bias)
        return TargetLayer(
            norm=norm("input_layernorm", c.hidden_size),
            qkv=qkv,
            norms=(head_norms[0], head_norms[1]) if head_norms else None,
            out=out,
            mlp_norm=norm("post_attention_layernorm", c.hidden_size),
            mlp=mlp,
            window=c.modes[index].window or 0,
        )

    def forward(
        self, ids: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """ids int64 [T] -> final-norm states [T, D] and the tap rows [T, len(taps) * D] (or None),
        both in the compute dtype. `attend(layer, qkv)` rotates, stores and attends.
        """
        c, ops = self.config, self.ops
        rows: Tensor | None = None
        if taps:
            rows = ids.new_empty(len(ids), len(taps), c.hidden_size, dtype=self.dtype)
        residual = self.embedding[ids].float()
        x = ops.add_rms_norm(residual, None, self.layers[0].norm, c.rms_eps, self.dtype)
        for index, layer in enumerate(self.layers):
            out = layer.out(attend(index, layer.qkv(x)))
            x = ops.add_rms_norm(residual, out, layer.mlp_norm, c.rms_eps, self.dtype)
            out = layer.mlp(x)
            last = index + 1 == len(self.layers)
            norm = self.norm if last else self.layers[index + 1].norm
            x = ops.add_rms_norm(residual, out, norm, c.rms_eps, self.dtype)
            if rows is not None and index in taps:
                rows[:, taps.index(index)] = residual
        return x, None if rows is None else rows.flatten(1)

    def logits(self, states: Tensor) -> Tensor:
        """fp32 [T, V]."""
        return matmul_fp32(states, self.head)

    def _rotate(
        self, index: int, qkv: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor] | None = None
    ) -> None:
        norms, eps = self.layers[index].norms, self.config.rms_eps
        self.ops.rope_(qkv, positions, self.cos, self.sin, self.heads, norms, eps, cache)

    def _split(self, qkv: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [batch * L, ...] -> q, k, v [batch, heads, L, head_dim] (views)."""
        hq, hk, hd = self.heads
        x = qkv.view(batch, -1, hq + 2 * hk, hd).transpose(1, 2)
        return x[:, :hq], x[:, hq : hq + hk], x[:, hq + hk :]

    def causal(
        self,
        batch: int,
        length: int,
        cache: StaticCache | None = None,
        slots: Tensor | None = None,
    ) -> Attend:
        """Right-padded documents [batch, length] from position 0; K/V may be kept in `slots`."""
        positions = torch.arange(length, device=self.device).repeat(batch)

        def attend(index: int, qkv: Tensor) -> Tensor:
            self._rotate(index, qkv, positions)
            q, k, v = self._split(qkv, batch)
            if cache is not None:
                cache.k[index, slots, :, :length] = k
                cache.v[index, slots, :, :length] = v
            window = self.layers[index].window
            if 0 < window < length:
                steps = torch.arange(length, device=self.device)
                gap = steps[:, None] - steps
                mask = (gap >= 0) & (gap < window)
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            else:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.transpose(1, 2).reshape(batch * length, -1)

        return attend

    def cached(self, cache: StaticCache, positions: Tensor, limit: int) -> Attend:
        """positions int64 [P, W]: row p is slot p's next W tokens; keys beyond `limit` are not
        read. K/V of the rows are written first, so a row sees itself and all before it.
        """
        batch, width = positions.shape
        hq, hk, hd = self.heads
        keys = torch.arange(limit, device=self.device)
        group = hq // hk
        gap = positions[..., None] - keys  # [P, W, limit]

        def mask_of(window: int) -> Tensor:
            seen = (gap >= 0) & (gap < (window or limit))
            return seen[:, None, None].expand(-1, 1, group, -1, -1).reshape(batch, 1, -1, limit)

        masks = {window: mask_of(window) for window in {layer.window for layer in self.layers}}
        rows = torch.arange(batch, device=self.device)[:, None]
        flat = positions.flatten()

        def attend(index: int, qkv: Tensor) -> Tensor:
            self._rotate(index, qkv, flat)
            q, k, v = self._split(qkv, batch)
            cache.k[index][rows, :, positions] = k.transpose(1, 2)
            cache.v[index][rows, :, positions] = v.transpose(1, 2)
            folded = q.reshape(batch, hk, group * width, hd)
            ks, vs = cache.k[index, :batch, :, :limit], cache.v[index, :batch, :, :limit]
            mask = masks[self.layers[index].window]
            y = F.scaled_dot_product_attention(folded, ks, vs, attn_mask=mask)
            y = y.view(batch, hq, width, hd).transpose(1, 2)
            return y.reshape(batch * width, -1)

        return attend

    def decode(self, cache: StaticCache, positions: Tensor) -> Attend:
        """One token for every slot at positions [slots]; needs no host value (CUDA graphs)."""
        run = self.ops.decode_attention
        assert run is not None

        def attend(index: int, qkv: Tensor) -> Tensor:
            k, v = cache.k[index], cache.v[index]
            self._rotate(index, qkv, positions, (k, v))
            return run(qkv, k, v, positions, self.heads, self.layers[index].window)

        return attend


def load_target(directory: Path, device: torch.device, dtype: torch.dtype) -> TargetNet:
    """Loads a Hugging Face directory of a family that the engine runs. Raises CheckpointError."""
    config = from_hf(read_json(directory / "config.json"))
    return TargetNet(config, Weights(directory, dtype, device), device, dtype)
