"""Parts that target and drafters share: the choice of kernels, projections, the gated MLP."""

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
class Kernels:
    """One way to run every operator: C kernels, or plain torch throughout."""

    mode: Mode
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    rope_kv_write: Callable[..., None]
    gumbel_argmax: Callable[..., Tensor]


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


@dataclass(frozen=True, slots=True)
class Rows:
    """The packed rows of one forward: ids, positions and flat KV slots, each int64 [rows], and the
    attention plan.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    plan: Any


def head_norm(kernels: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of each head of x [rows, heads * head_dim]; weight [head_dim]."""
    heads = x.reshape(-1, weight.shape[0])
    return kernels.rms_norm(heads, weight, eps).view(x.shape[0], -1)


def projection(
    weights: Weights, mode: Mode, parts: dict[str, int], columns: int, bias: bool = False
) -> Linear:
    """One product for projections of the same input: their rows one below the other. `parts` maps
    a projection's name to its rows.
    """
    stacked = torch.cat([weights.take(f"{n}.weight", rows, columns) for n, rows in parts.items()])
    offsets = None
    if bias:
        offsets = torch.cat([weights.take(f"{n}.bias", rows) for n, rows in parts.items()])
    return pack_linear(stacked, mode, offsets)


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
        self.gate_up = projection(weights, kernels.mode, both, hidden, bias)
        down = {f"{prefix}.down_proj": hidden}
        self.down = projection(weights, kernels.mode, down, inner, bias)
        self._silu_mul = kernels.silu_mul

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._silu_mul(self.gate_up(x)))
