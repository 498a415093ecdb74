"""The frozen target for training: one dense forward that yields taps and final states.

The engine serves ragged pages on the CPU; training needs large padded batches and static caches on
a GPU. Sizes and options come from the engine's `ModelConfig` and from which tensors exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_svc.training.kernels import matmul_fp32, ops_for
from engine.models.config import ModelConfig, from_hf
from engine.models.rope import rope_tables
from engine.weights import Weights, read_json

Attend = Callable[[int, Tensor], Tensor]
_REDUNDANT = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class TargetLayer:
    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int


class StaticCache:
    """K and V [layers, slots, kv_heads, max_length, head_dim]."""

    def __init__(self, net: TargetNet, slots: int, max_length: int) -> None:
        c = net.config
        shape = (c.layer_count, slots, c.kv_heads, max_length, c.head_dim)
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
        self.ops = ops_for(device, c.head_dim)
        self.heads = (c.heads, c.kv_heads, c.head_dim)
        shape = (c.vocab_size, c.hidden_size)
        self.embedding = self._take(weights, "model.embed_tokens.weight", *shape)
        self.head = self.embedding
        if not c.tied_head:
            self.head = self._take(weights, "lm_head.weight", *shape)
        self.layers = [self._layer(weights, i) for i in range(c.layer_count)]
        self.norm = self._take(weights, "model.norm.weight", c.hidden_size).float()
        weights.finish(_REDUNDANT if not c.tied_head else (*_REDUNDANT, "lm_head.weight"))
        tables = rope_tables(c.rope, c.head_dim, c.max_positions, c.default_length)
        self.cos, self.sin = (table.to(device) for table in tables)

    def _take(self, weights: Weights, name: str, *shape: int) -> Tensor:
        return weights.take(name, *shape).to(self.device, self.dtype)

    def _layer(self, weights: Weights, index: int) -> TargetLayer:
        c, prefix = self.config, f"model.layers.{index}"
        d, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
        inner = c.intermediate_size
        both = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        qkv = {f"self_attn.{n}_proj": rows for n, rows in (("q", q), ("k", kv), ("v", kv))}

        def take(name: str, *shape: int) -> Tensor:
            return self._take(weights, f"{prefix}.{name}", *shape)

        def matrix(parts: dict[str, int], columns: int) -> Tensor:
            return torch.cat([take(f"{n}.weight", rows, columns) for n, rows in parts.items()])

        def bias(parts: dict[str, int], there: bool) -> Tensor | None:
            if not there:
                return None
            return torch.cat([take(f"{n}.bias", rows) for n, rows in parts.items()])

        def head_norm(name: str) -> Tensor:
            return take(f"self_attn.{name}_norm.weight", c.head_dim).float()

        out, down = {"self_attn.o_proj": d}, {"mlp.down_proj": d}
        return TargetLayer(
            norm=take("input_layernorm.weight", d).float(),
            qkv=matrix(qkv, d),
            qkv_bias=bias(qkv, c.qkv_bias),
            norms=(head_norm("q"), head_norm("k")) if c.head_norms else None,
            out=matrix(out, q),
            out_bias=bias(out, c.out_bias),
            mlp_norm=take("post_attention_layernorm.weight", d).float(),
            gate_up=matrix(both, d),
            gate_up_bias=bias(both, c.mlp_bias),
            down=matrix(down, inner),
            down_bias=bias(down, c.mlp_bias),
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
            qkv = F.linear(x, layer.qkv, layer.qkv_bias)
            out = F.linear(attend(index, qkv), layer.out, layer.out_bias)
            x = ops.add_rms_norm(residual, out, layer.mlp_norm, c.rms_eps, self.dtype)
            inner = ops.silu_mul(F.linear(x, layer.gate_up, layer.gate_up_bias))
            out = F.linear(inner, layer.down, layer.down_bias)
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
    return TargetNet(config, Weights(directory, dtype), device, dtype)
