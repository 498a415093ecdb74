"""The product of two tiles, as every kernel of weights has it."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.dependent import INTERPRETED

# The interpreter multiplies bf16 as if it were integers.
WIDEN_DOTS = bool(INTERPRETED)


@triton.jit
def dot(a, w, acc, WIDEN: tl.constexpr):
    """acc [rows, n] + a [rows, k] times w [k, n], in fp32; WIDEN is WIDEN_DOTS."""
    if WIDEN:
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    return tl.dot(a, w, acc, input_precision="ieee")


@triton.jit
def plus(acc, other):
    """acc + other behind a product, spelled so that the compiler cannot let the product begin with
    `other`: it does so where the depth is one step, and rounds otherwise than with several."""
    return tl.fma(acc, 1.0, other)
