"""The products by torch's own matrix product, for many rows where a row's bits may depend on the
batch: cuBLAS reads the weights once where `gemm` reads them once per 16 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.triton.norm import rms_norm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `gemm.linear`; the result has the weight's dtype."""
    return F.linear(x.to(weight.dtype), weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    residual += linear(x, weight, bias)


def norm_linear(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return linear(rms_norm(residual, norm_weight, eps, weight.dtype), weight, bias)


def norm_gate_up(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    gate, up = norm_linear(residual, norm_weight, eps, weight, bias).chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def head(
    residual: Tensor, index: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor
) -> Tensor:
    """Like `gemm.head`, the logits rounded to the weight's dtype on the way."""
    return F.linear(rms_norm(residual, norm_weight, eps, weight.dtype, index), weight).to(
        torch.float32
    )
