"""Parts that target and drafters share: the choice of kernels, RoPE tables, the gated MLP."""

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


def rope_tables(theta: float, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim / 2] of the half-split rotation."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    return angles.cos(), angles.sin()


def fused(weights: Weights, mode: Mode, parts: dict[str, int], columns: int) -> Linear:
    """One product for several projections of the same input: their rows one below the other."""
    stacked = torch.cat([weights.take(name, rows, columns) for name, rows in parts.items()])
    return pack_linear(stacked, mode)


def norm_weight(weights: Weights, name: str, width: int) -> Tensor:
    return weights.take(name, width).float()


class Mlp:
    """down(silu(gate(x)) * up(x)) with gate and up as one product."""

    def __init__(
        self, weights: Weights, prefix: str, hidden: int, inner: int, kernels: Kernels
    ) -> None:
        both = {f"{prefix}.gate_proj.weight": inner, f"{prefix}.up_proj.weight": inner}
        self.gate_up = fused(weights, kernels.mode, both, hidden)
        down = weights.take(f"{prefix}.down_proj.weight", hidden, inner)
        self.down = pack_linear(down, kernels.mode)
        self._silu_mul = kernels.silu_mul

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._silu_mul(self.gate_up(x)))
