"""The parts of a target's layer, whatever its family, behind two functions: `qkv` (of the normed
stream: queries, keys and values of all heads, not yet turned) and `mlp`.

Latent attention and experts are described in `engine/models/{mla,experts}.py`. Here the keys and
values of every head are made, so that one attention serves all families.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_svc.training.kernels import Heads, Ops
from engine.models.config import ModelConfig
from engine.models.experts import route
from engine.models.latent_config import ExpertsConfig, LatentConfig
from engine.models.mla import half_split, take_down
from engine.models.rope import rope_tables
from engine.weights import Weights

# [rows, hidden] -> [rows, anything], both in the compute dtype
Product = Callable[[Tensor], Tensor]
_EPS = 1e-6  # of the norms inside latent attention


@dataclass(frozen=True, slots=True)
class TargetLayer:
    """`norms` are those of queries and keys; `window` 0 is none."""

    norm: Tensor
    qkv: Product
    norms: tuple[Tensor, Tensor] | None
    out: Product
    mlp_norm: Tensor
    mlp: Product
    window: int


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def attention_heads(c: ModelConfig) -> Heads:
    """Of the attention that runs here: latent heads are as wide as their wider side."""
    if c.latent is None:
        return c.heads, c.kv_heads, c.head_dim
    widest = max(c.latent.nope + c.latent.rope, c.latent.value)
    return c.heads, c.heads, widest + widest % 2


def rotation(c: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head width / 2]. What does not turn in a latent head turns by 0."""
    if c.latent is None:
        return rope_tables(c.rope, c.head_dim, c.max_positions, c.default_length)
    cos, sin = rope_tables(c.rope, c.latent.rope, c.max_positions, c.default_length)
    still = attention_heads(c)[2] // 2 - cos.shape[1]
    return F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))


def dense_attention(weights: Weights, prefix: str, c: ModelConfig) -> tuple[Product, Product]:
    """`qkv` and `out`. Raises CheckpointError."""
    d, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    parts = {f"{prefix}.{n}_proj": rows for n, rows in (("q", q), ("k", kv), ("v", kv))}
    out = _stacked(weights, {f"{prefix}.o_proj": d}, q, c.out_bias)
    return _stacked(weights, parts, d, c.qkv_bias), out


def _stacked(weights: Weights, parts: dict[str, int], columns: int, bias: bool) -> Linear:
    take = weights.take
    weight = torch.cat([take(f"{n}.weight", rows, columns) for n, rows in parts.items()])
    if not bias:
        return Linear(weight)
    return Linear(weight, torch.cat([take(f"{n}.bias", rows) for n, rows in parts.items()]))


@dataclass(frozen=True, slots=True)
class LatentQkv:
    """`down` makes queries (or the latent values that `query` makes them of) and what the engine
    would cache, of which `up` makes keys and values of every head."""

    down: Linear
    q_norm: Tensor | None
    query: Linear | None
    kv_norm: Tensor
    up: Linear
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        rank, cached = self.kv_norm.shape[0], self.up.weight.shape[1]
        made = self.down(x)
        first, latent, turning = (
            made[:, :-cached],
            made[:, -cached:][:, :rank],
            made[:, rank - cached :],
        )
        if self.query is not None and self.q_norm is not None:
            first = self.query(self._norm(first, self.q_norm))
        both = self.up(torch.cat((self._norm(latent, self.kv_norm), turning), -1))
        return torch.cat((first, both), -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.add_rms_norm(x.float().contiguous(), None, weight, _EPS, x.dtype)


def latent_attention(
    weights: Weights, prefix: str, c: ModelConfig, ops: Ops
) -> tuple[Product, Product]:
    """`qkv` and `out`, for heads as wide as `attention_heads` says. Raises CheckpointError."""
    latent, take, d = c.latent, weights.take, c.hidden_size
    assert latent is not None
    first = latent.q_rank or d
    name = "q_proj" if latent.q_rank is None else "q_b_proj"
    query = take(f"{prefix}.{name}.weight", c.heads * (latent.nope + latent.rope), first)
    query = _queries(query, latent, c)
    down, offset = take_down(weights, prefix, latent, d, c.qkv_bias)
    q_norm = None
    if latent.q_rank is not None:
        q_norm = take(f"{prefix}.q_a_layernorm.weight", latent.q_rank).float()
        into = take(f"{prefix}.q_a_proj.weight", latent.q_rank, d)
    else:
        into = query
    if offset is not None:
        own = into.new_zeros(len(into))  # q_proj itself has none
        if latent.q_rank is not None:
            own = take(f"{prefix}.q_a_proj.bias", latent.q_rank)
        offset = torch.cat((own, offset))
    qkv = LatentQkv(
        down=Linear(torch.cat((into, down)), offset),
        q_norm=q_norm,
        query=None if latent.q_rank is None else Linear(query),
        kv_norm=take(f"{prefix}.kv_a_layernorm.weight", latent.rank).float(),
        up=Linear(_keys_and_values(weights, prefix, latent, c)),
        ops=ops,
    )
    return qkv, _out(weights, prefix, latent, c)


def _places(latent: LatentConfig, width: int) -> list[int]:
    """Where the values of a head, first those that stay and then those that turn, stand in a head
    of `width` whose pairs are half a width apart: what turns comes first in both halves."""
    half, turning = width // 2, latent.rope // 2
    free = [*range(turning, half), *range(half + turning, width)]
    return [*free[: latent.nope], *range(turning), *range(half, half + turning)]


def _queries(weight: Tensor, latent: LatentConfig, c: ModelConfig) -> Tensor:
    wide, width = latent.nope + latent.rope, attention_heads(c)[2]
    heads = weight.view(c.heads, wide, -1)
    if latent.interleaved:
        heads = torch.stack([half_split(head, latent.rope) for head in heads])
    placed = weight.new_zeros(c.heads, width, weight.shape[1])
    placed[:, _places(latent, width)] = heads
    # The attention itself scales by the width of a head.
    return placed.flatten(0, 1) * (latent.softmax_factor * math.sqrt(width / wide))


def _keys_and_values(weights: Weights, prefix: str, latent: LatentConfig, c: ModelConfig) -> Tensor:
    """[2 * heads * width, rank + rope]: every head's key takes the turning values as they are."""
    heads, _, width = attention_heads(c)
    rows = heads * (latent.nope + latent.value)
    both = weights.take(f"{prefix}.kv_b_proj.weight", rows, latent.rank)
    per_head = both.view(heads, latent.nope + latent.value, latent.rank)
    found = both.new_zeros(2, heads, width, latent.width)
    places = _places(latent, width)
    found[0, :, places[: latent.nope], : latent.rank] = per_head[:, : latent.nope]
    found[0, :, places[latent.nope :], latent.rank :] = torch.eye(latent.rope).to(both)
    found[1, :, : latent.value, : latent.rank] = per_head[:, latent.nope :]
    return found.view(-1, latent.width)


def _out(weights: Weights, prefix: str, latent: LatentConfig, c: ModelConfig) -> Linear:
    heads, _, width = attention_heads(c)
    name, d = f"{prefix}.o_proj", c.hidden_size
    weight = weights.take(f"{name}.weight", d, heads * latent.value).view(d, heads, -1)
    wide = F.pad(weight, (0, width - latent.value)).flatten(1)
    return Linear(wide, weights.take(f"{name}.bias", d) if c.qkv_bias else None)


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Linear
    down: Linear
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x)))


def dense_mlp(
    weights: Weights, prefix: str, c: ModelConfig, ops: Ops, inner: int, bias: bool
) -> Mlp:
    d = c.hidden_size
    both = {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}
    down = _stacked(weights, {f"{prefix}.down_proj": d}, inner, bias)
    return Mlp(_stacked(weights, both, d, bias), down, ops)


@dataclass(frozen=True, slots=True)
class Experts:
    """The choice is made in fp32, as in the engine; `bias` takes part in it only."""

    config: ExpertsConfig
    gate: Tensor
    bias: Tensor | None
    experts: tuple[Mlp, ...]
    shared: Mlp

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = route(self.config, F.linear(x.float(), self.gate), self.bias)
        out = self.shared(x).float()
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]).float() * weights[rows, place, None])
        return out.to(x.dtype)


def experts(weights: Weights, prefix: str, c: ModelConfig, ops: Ops) -> Experts:
    """Raises CheckpointError."""
    e, exact = c.experts, torch.float32
    assert e is not None
    bias = None
    if e.scoring == "sigmoid":
        name = f"{prefix}.gate.e_score_correction_bias"
        bias = weights.take(name, e.count, dtype=exact)
    return Experts(
        config=e,
        gate=weights.take(f"{prefix}.gate.weight", e.count, c.hidden_size, dtype=exact),
        bias=bias,
        experts=tuple(
            dense_mlp(weights, f"{prefix}.experts.{i}", c, ops, e.inner, False)
            for i in range(e.count)
        ),
        shared=dense_mlp(
            weights, f"{prefix}.shared_experts", c, ops, e.inner * e.shared, c.mlp_bias
        ),
    )
