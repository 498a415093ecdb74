"""Parts that target and drafters share: the operators of a forward, projections, the gated MLP.

The residual stream is fp32. A layer's output reaches it through a `delta`: what a kernel has not
added yet, or None where it has. So the addition can be fused with the norm that follows (C) or with
the product that comes before (Triton), and a model's forward is the same text for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.cpu import ops, reference
from engine.linear import Linear, Mode, pack_linear
from engine.weights import Weights


@dataclass(frozen=True, slots=True)
class Rows:
    """The packed rows of one forward: ids, positions and flat KV slots, each an integer tensor
    [rows], and the attention plan. `kernels` are better ones for these rows than the model's own,
    where there are any.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    plan: Any
    kernels: Kernels | None = None


@dataclass(frozen=True, slots=True)
class QkvShape:
    """A fused projection [rows, (heads + 2 * kv_heads) * head_dim]: queries, keys, values."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class RopeTables:
    """cos and sin fp32 [positions, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


# Norm weights [head_dim] of a layer's queries and keys.
HeadNorms = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Kernels:
    """One way to run every operator, made of the small ones; `triton_kernels` fuses more."""

    mode: Mode
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    rope_kv_write: Callable[..., None]
    gumbel_argmax: Callable[..., Tensor]
    # (logits, DrawRows, out=): draw and filters in one, nothing read by the host.
    draw: Callable[..., Tensor] | None = None

    def loose(self, rows: int) -> Kernels | None:
        """Better ones for a step of so many rows whose bits may depend on each other, if any."""
        return None

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return pack_linear(weight, self.mode, bias)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows of the table [vocab, hidden] as the residual stream, fp32 [rows, hidden]."""
        return table[ids].float()

    def norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds `delta` to the residual stream in place; the norm of that."""
        if delta is None:
            return self.rms_norm(residual, weight, eps)
        return self.add_rms_norm(delta, residual, weight, eps)

    def norm_linear(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, linear: Linear
    ) -> Tensor:
        return linear(self.norm(residual, delta, weight, eps))

    def norm_qkv_store(
        self,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        linear: Linear,
        shape: QkvShape,
        norms: HeadNorms | None,
        rope: RopeTables,
        rows: Rows,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """`norm_linear`, then `store` of that."""
        qkv = self.norm_linear(residual, delta, weight, eps, linear)
        return self.store(qkv, shape, norms, eps, rope, rows, cache)

    def norm_gated(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, gate_up: Linear
    ) -> Tensor:
        """silu(gate(x)) * up(x) of the normed stream; gate and up are one product."""
        return self.silu_mul(gate_up(self.norm(residual, delta, weight, eps)))

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor | None:
        """residual += linear(x), or the delta that is to be added."""
        return linear(x)

    def lookup_add(self, table: Tensor, ids: Tensor, linear: Linear, into: Tensor) -> None:
        """into fp32 [rows, out_features] += linear(table[ids]), in place; table [any, in_features],
        ids int64 [rows]."""
        into += linear(table[ids].float())

    def head(
        self,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        linear: Linear,
        rows: Tensor | None,
    ) -> Tensor:
        """fp32 logits of the rows named (None: all); adds `delta` like `norm`."""
        x = self.norm(residual, delta, weight, eps)
        return linear(x if rows is None else x[rows])

    def store(
        self,
        qkv: Tensor,
        shape: QkvShape,
        norms: HeadNorms | None,
        eps: float,
        rope: RopeTables,
        rows: Rows,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Norms and rotates queries and keys, writes keys and values at the rows' slots; the
        queries [rows, heads, head_dim].
        """
        q = qkv[:, : shape.query]
        k, v = qkv[:, shape.query : shape.query + shape.kv], qkv[:, shape.query + shape.kv :]
        if norms is not None:
            q, k = head_norm(self, q, norms[0], eps), head_norm(self, k, norms[1], eps)
        self.rope_kv_write(q, k, v, rope.cos, rope.sin, rows.positions, *cache, rows.slots)
        return q.view(-1, shape.heads, shape.head_dim)

    def store_context(
        self,
        kv: Tensor,
        kv_shape: tuple[int, int],
        norms: Tensor,
        eps: float,
        rope: RopeTables,
        positions: Tensor,
        slots: Tensor,
        cache: Tensor,
    ) -> None:
        """Keys (normed, rotated) and values of every layer, out of one product [rows, layers * 2 *
        kv_heads * head_dim]; `norms` [layers, head_dim], `cache` [layers, 2, pages, ...].
        """
        width = kv_shape[0] * kv_shape[1]
        for layer, weight in enumerate(norms):
            first = 2 * layer * width
            k, v = kv[:, first : first + width], kv[:, first + width : first + 2 * width]
            k = head_norm(self, k, weight, eps)
            caches = cache[layer, 0], cache[layer, 1]
            self.rope_kv_write(None, k, v, rope.cos, rope.sin, positions, *caches, slots)


NATIVE = Kernels(
    "native",
    ops.rms_norm,
    ops.add_rms_norm,
    ops.silu_mul,
    ops.rope_kv_write,
    ops.gumbel_argmax,
)
TORCH = Kernels(
    "torch",
    reference.rms_norm_ref,
    reference.add_rms_norm_ref,
    reference.silu_mul_ref,
    reference.rope_kv_write_ref,
    reference.gumbel_argmax_ref,
)


def head_norm(kernels: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of each head of x [rows, heads * head_dim]; weight [head_dim]."""
    heads = x.reshape(-1, weight.shape[0])
    return kernels.rms_norm(heads, weight, eps).view(x.shape[0], -1)


def projection(
    weights: Weights, kernels: Kernels, parts: dict[str, int], columns: int, bias: bool = False
) -> Linear:
    """One product for projections of the same input: their rows one below the other. `parts` maps
    a projection's name to its rows.
    """
    stacked = torch.cat([weights.take(f"{n}.weight", rows, columns) for n, rows in parts.items()])
    offsets = None
    if bias:
        offsets = torch.cat([weights.take(f"{n}.bias", rows) for n, rows in parts.items()])
    return kernels.pack(stacked, offsets)


def norm_weight(weights: Weights, name: str, width: int) -> Tensor:
    return weights.take(name, width).float()


class Mlp:
    """down(silu(gate(x)) * up(x)) with gate and up as one product."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        hidden: int,
        inner: int,
        kernels: Kernels,
        bias: bool = False,
    ) -> None:
        both = {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}
        self.gate_up = projection(weights, kernels, both, hidden, bias)
        self.down = projection(weights, kernels, {f"{prefix}.down_proj": hidden}, inner, bias)
        self._silu_mul = kernels.silu_mul

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._silu_mul(self.gate_up(x)))
