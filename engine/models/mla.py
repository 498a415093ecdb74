"""Multi-head latent attention (arXiv 2405.04434) with absorbed weights.

The cache holds n = RMSNorm(W_dkv x) and one turned key r for all heads. Head h has the keys
[W_uk[h] n ; r] and the values W_uv[h] n, which are never made: its query q is taken into the latent
space, q W_uk[h], attends there, and W_uv[h] is applied to what comes back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.cpu.reference import rotate_ref
from engine.kv.latent import LatentCache
from engine.linear import Linear
from engine.models.latent_config import LatentConfig
from engine.models.layers import Kernels, RopeTables, Rows, norm_weight
from engine.weights import Weights

# The norms inside the attention have their own: transformers takes no other from a config.
_EPS = 1e-6


class Absorbed:
    """A product of its own for each head on both sides of the attention, and the queries' turn."""

    def __init__(self, into: Tensor, out: Tensor) -> None:
        """`into` [heads, nope, rank], `out` [heads, rank, value]."""
        # Activations are fp32 on the CPU; a GPU keeps the weights as they are.
        self.into, self.out = (
            (weight.float() if weight.is_cpu else weight).contiguous() for weight in (into, out)
        )

    def queries(self, heads: Tensor, rope: RopeTables, positions: Tensor) -> Tensor:
        """[rows, heads, nope + rope] -> in the latent space [rows, heads, rank + rope]."""
        nope = self.into.shape[1]
        turned = rotate_ref(heads[..., nope:], rope.cos[positions], rope.sin[positions])
        inside = _by_head(heads[..., :nope], self.into)
        return torch.cat((inside, turned.to(inside.dtype)), dim=-1)

    def values(self, attended: Tensor) -> Tensor:
        """[rows, heads, rank] -> [rows, heads * value]."""
        return _by_head(attended, self.out).flatten(1)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, heads, inner] times weight [heads, inner, outer] -> [rows, heads, outer]."""
    by_head = x.transpose(0, 1).to(weight.dtype)
    return torch.bmm(by_head, weight).transpose(0, 1).to(x.dtype)


class DeviceAbsorbed(Absorbed):
    """The same by Triton's kernels, rows independent of one another."""

    def __init__(self, into: Tensor, out: Tensor) -> None:
        self.into, self.out = into.contiguous(), out.contiguous()

    def queries(self, heads: Tensor, rope: RopeTables, positions: Tensor) -> Tensor:
        from engine.attention.kernels.latent_heads import latent_queries

        return latent_queries(heads, self.into, rope.cos, rope.sin, positions)

    def values(self, attended: Tensor) -> Tensor:
        from engine.attention.kernels.latent_heads import head_values

        return head_values(attended, self.out)


def half_split(weight: Tensor, rope: int) -> Tensor:
    """Rows whose last `rope` turn in neighbouring pairs -> the same with pairs rope / 2 apart."""
    kept, turned = weight[:-rope], weight[-rope:]
    return torch.cat((kept, turned[0::2], turned[1::2]))


def take_down(
    weights: Weights, prefix: str, c: LatentConfig, hidden: int, bias: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Weight [width, hidden] and bias of the product that makes what is cached, turning pairs half
    a width apart."""
    name = f"{prefix}.kv_a_proj_with_mqa"
    weight = weights.take(f"{name}.weight", c.width, hidden)
    offset = weights.take(f"{name}.bias", c.width) if bias else None
    if c.interleaved:
        weight = half_split(weight, c.rope)
        offset = None if offset is None else half_split(offset, c.rope)
    return weight, offset


class LatentProjections:
    """Everything of an attention layer but the attention itself: `down` of the normed stream, then
    `store`; attention; `values`, then `out`."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        c: LatentConfig,
        heads: int,
        hidden: int,
        kernels: Kernels,
        bias: bool = False,
    ) -> None:
        self.c, self.heads, self._kernels = c, heads, kernels
        query_width = c.nope + c.rope
        first = "q_proj" if c.q_rank is None else "q_a_proj"
        rows = heads * query_width if c.q_rank is None else c.q_rank
        down, offset = take_down(weights, prefix, c, hidden, bias)
        query = weights.take(f"{prefix}.{first}.weight", rows, hidden)
        if c.q_rank is None:
            query = self._half_split_heads(query)
        offsets = None
        if offset is not None:
            named = c.q_rank is not None  # q_proj itself has none
            own = weights.take(f"{prefix}.q_a_proj.bias", rows) if named else query.new_zeros(rows)
            offsets = torch.cat((own, offset))
        # One product for all that is made of the same rows.
        self.down = kernels.pack(torch.cat((query, down)), offsets)
        self._query_rows = rows
        self._up: Linear | None = None
        if c.q_rank is not None:
            self._q_norm = norm_weight(weights, f"{prefix}.q_a_layernorm.weight", c.q_rank)
            up = weights.take(f"{prefix}.q_b_proj.weight", heads * query_width, c.q_rank)
            self._up = kernels.pack(self._half_split_heads(up))
        self.kv_norm = norm_weight(weights, f"{prefix}.kv_a_layernorm.weight", c.rank)
        both = weights.take(f"{prefix}.kv_b_proj.weight", heads * (c.nope + c.value), c.rank)
        per_head = both.view(heads, c.nope + c.value, c.rank)
        kind = DeviceAbsorbed if kernels.mode == "triton" else Absorbed
        self._absorbed = kind(per_head[:, : c.nope], per_head[:, c.nope :].transpose(1, 2))
        out = weights.take(f"{prefix}.o_proj.weight", hidden, heads * c.value)
        out_bias = weights.take(f"{prefix}.o_proj.bias", hidden) if bias else None
        self.out = kernels.pack(out, out_bias)

    def _half_split_heads(self, weight: Tensor) -> Tensor:
        if not self.c.interleaved:
            return weight
        heads = weight.view(self.heads, -1, weight.shape[1])
        return torch.cat([half_split(head, self.c.rope) for head in heads])

    def store(
        self, down: Tensor, rope: RopeTables, rows: Rows, cache: LatentCache, layer: int
    ) -> Tensor:
        """Takes what `down` gave for the rows: writes what is cached of them, and returns their
        queries in the latent space [rows, heads, width]."""
        own, norms = down[:, None, self._query_rows :], self.kv_norm[None]
        write_latent(self._kernels, own, norms, rope, rows.positions, rows.slots, cache, layer)
        q = down[:, : self._query_rows]
        if self._up is not None:
            q = self._up(self._kernels.rms_norm(q.contiguous(), self._q_norm, _EPS))
        heads = q.view(-1, self.heads, self.c.nope + self.c.rope)
        return self._absorbed.queries(heads, rope, rows.positions)

    def values(self, attended: Tensor) -> Tensor:
        """What the heads found, [rows, heads, rank] -> the input of `out` [rows, heads * value]."""
        return self._absorbed.values(attended)


def write_latent(
    kernels: Kernels,
    down: Tensor,
    norms: Tensor,
    rope: RopeTables,
    positions: Tensor,
    slots: Tensor,
    cache: LatentCache,
    first: int = 0,
) -> None:
    """Caches, in the layers from `first` on, what their W_dkv gave for rows [rows, layers, width],
    at integer positions and flat slots [rows]; `norms` fp32 [layers, rank]."""
    if kernels.mode == "triton":
        from engine.attention.kernels.latent_store import store_latent

        store_latent(down, norms, _EPS, (rope.cos, rope.sin), positions, slots, cache, first)
        return
    cos, sin = rope.cos[positions], rope.sin[positions]
    rank = norms.shape[1]
    for layer, norm in enumerate(norms):
        normed = kernels.rms_norm(down[:, layer, :rank].contiguous(), norm, _EPS)
        turned = rotate_ref(down[:, layer, None, rank:], cos, sin)[:, 0]
        cache.write(first + layer, torch.cat((normed, turned), dim=-1), slots)
