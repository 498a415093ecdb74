"""The counter-based Gumbel noise of `engine.noise`, inside a kernel."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(group, index, choice, seed):
    """Four 32-bit words for each counter (group, index, choice, 0) under the key `seed`.

    group uint32 [n]; index, choice, seed are 64-bit scalars, the first two count modulo 2**32.
    """
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = group
    c1 = tl.zeros_like(group) + index.to(tl.uint32)
    c2 = tl.zeros_like(group) + choice.to(tl.uint32)
    c3 = tl.zeros_like(group)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low0 = c0 * 0xD2511F53
        low1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel(word):
    """Gumbel noise fp32 of a random word."""
    uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))
