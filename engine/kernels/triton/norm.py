"""RMSNorm of rows, and the lookup of the embedding."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dependent import flags, wait


@triton.jit
def _rms_norm(x, index, weight, out, stride, eps, K: tl.constexpr, BLOCK: tl.constexpr,
              INDEX: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < K
    w = tl.load(weight + cols, mask=inside, other=0.0)
    wait(PDL)
    source = row
    if INDEX:
        source = tl.load(index + row).to(tl.int64)
    value = tl.load(x + source * stride + cols, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / K + eps)
    tl.store(out + row * K + cols, (value * scale * w).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype, index: Tensor | None = None
) -> Tensor:
    """Norm of the rows of x [rows, k], of those that `index` names when given; weight fp32 [k]."""
    rows, k = (x if index is None else index).shape[0], x.shape[1]
    out = torch.empty(rows, k, dtype=out_dtype, device=x.device)
    if not rows:
        return out
    block = triton.next_power_of_2(k)
    _rms_norm[(rows,)](
        x, x if index is None else index, weight, out, x.stride(0), eps, k, block,
        index is not None, num_warps=min(max(block // 512, 1), 8), **flags(rows),
    )  # fmt: skip
    return out


@triton.jit
def _embed(ids, table, out, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ids + row).to(tl.int64)
    value = tl.load(table + source * K + cols, mask=cols < K, other=0.0)
    tl.store(out + row * K + cols, value.to(tl.float32), mask=cols < K)


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of the table [vocab, k] as fp32 [rows, k]. ids int32 or int64 [rows]."""
    rows, k = ids.shape[0], table.shape[1]
    out = torch.empty(rows, k, dtype=torch.float32, device=table.device)
    if rows:
        _embed[(rows, triton.cdiv(k, 1024))](ids, table, out, k, 1024, num_warps=4, **flags(rows))
    return out
