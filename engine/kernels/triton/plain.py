"""The products by torch's own matrix product, for many rows where a row's bits may depend on the
batch: cuBLAS is faster than the larger tiles of `gemm`, and sums as it likes.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.triton.dependent import flags, wait
from engine.kernels.triton.norm import rms_norm


@triton.jit
def _silu_mul(both, out, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * N + n, value.to(out.dtype.element_ty), mask=n < N)


def silu_mul(both: Tensor) -> Tensor:
    """silu(gate) * up [rows, n] of both [rows, 2n], contiguous: gate, then up."""
    rows, n = both.shape[0], both.shape[1] // 2
    assert both.is_contiguous()
    out = torch.empty(rows, n, dtype=both.dtype, device=both.device)
    if rows:
        grid = (rows, triton.cdiv(n, 1024))
        _silu_mul[grid](both, out, n, 1024, num_warps=4, **flags(rows))
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `gemm.linear`; the result has the weight's dtype."""
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    residual += linear(x, weight, bias)


def norm_linear(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return linear(rms_norm(residual, norm_weight, eps, weight.dtype), weight, bias)


def norm_gate_up(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return silu_mul(norm_linear(residual, norm_weight, eps, weight, bias))


def head(
    residual: Tensor, index: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor
) -> Tensor:
    """Like `gemm.head`: on a GPU the logits are never rounded to 16 bits."""
    x = rms_norm(residual, norm_weight, eps, weight.dtype, index)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x, weight).to(torch.float32)
