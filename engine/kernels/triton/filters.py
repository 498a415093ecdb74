"""min-p, top-k and top-p of one row, and the draw above a bound: parts of `draw`.

min-p and top-k are lower bounds on a logit. top-p is tested on the token drawn: the weight of the
tokens above it must not have reached its share.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.noise import gumbel, philox


@triton.jit
def load_logits(at, c, V):
    """fp32; -inf behind the vocabulary and where a broken model gives NaN."""
    x = tl.load(at + c, mask=c < V, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def lowest_best(best, best_id):
    """The highest value and, of the lanes that have it, the lowest id."""
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), 0)


@triton.jit
def best_of_four(at, c, V, t, seed, choice, index, bar, above):
    """The best of the tokens c .. c + 3 of each lane (c int32, multiples of 4): value, id, and the
    highest logit. Values of logits below `bar`, or not above `above`, are -inf.
    """
    best = tl.full(c.shape, float("-inf"), tl.float32)
    highest = best
    best_id = c
    w0, w1, w2, w3 = philox((c // 4).to(tl.uint32), index, choice, seed)
    for lane in tl.static_range(4):
        word = w0
        if lane == 1:
            word = w1
        elif lane == 2:
            word = w2
        elif lane == 3:
            word = w3
        x = load_logits(at, c + lane, V)
        highest = tl.maximum(highest, x)
        value = x
        if t > 0:
            value = tl.div_rn(x, t) + gumbel(word)
        value = tl.where((x >= bar) & (x > above), value, float("-inf"))
        best_id = tl.where(value > best, c + lane, best_id)
        best = tl.where(value > best, value, best)
    return best, best_id, highest


@triton.jit
def _mass(at, V, best, t, bar, above, BLOCK: tl.constexpr):
    """Sum of exp((logit - best) / T) over logits that are at least `bar` and above `above`."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = load_logits(at, start + tl.arange(0, BLOCK), V)
        weight = tl.exp(tl.div_rn(x - best, t))
        total += tl.where((x >= bar) & (x > above), weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _kth_largest(at, V, k, BLOCK: tl.constexpr):
    """The k-th largest logit of a row, 1 <= k <= V: four counts of 256 digits, no sort."""
    prefix = tl.zeros([1], tl.uint32)
    wanted = k
    digits = tl.arange(0, 256)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for start in range(0, V, BLOCK):
            c = start + tl.arange(0, BLOCK)
            x = load_logits(at, c, V)
            x = tl.where(x == 0, 0.0, x)  # -0 and 0 tie
            bits = x.to(tl.uint32, bitcast=True)
            # Unsigned integers in the order of the floats.
            key = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
            same = ((key >> shift) >> 8) == prefix
            own = ((key >> shift) & 255).to(tl.int32)
            counts += tl.histogram(own, 256, mask=same & (c < V))
        reached = tl.cumsum(counts, 0, reverse=True)
        digit = tl.max(tl.where(reached >= wanted, digits, 0), 0)
        wanted -= tl.sum(tl.where(digits == digit + 1, reached, 0), 0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    bits = tl.where(prefix >> 31 != 0, prefix ^ 0x80000000, prefix ^ 0xFFFFFFFF)
    return tl.max(bits.to(tl.float32, bitcast=True), 0)


@triton.jit
def _kept(at, V, x, best, t, bar, top_p, target, BLOCK: tl.constexpr):
    """1 where a token with logit x passes, else 0; the highest always passes, and so does NaN."""
    kept = (x >= bar).to(tl.int32)
    if (kept == 1) & (top_p < 1.0):
        kept = (_mass(at, V, best, t, bar, x, BLOCK) < target).to(tl.int32)
    return tl.where(x < best, kept, 1)


@triton.jit
def _drawn_above(at, V, t, seed, choice, index, bar, above, BLOCK: tl.constexpr):
    """The draw among logits of at least `bar` and above `above`; there is one."""
    best = tl.full([BLOCK // 4], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK // 4], tl.int32)
    for start in range(0, V, BLOCK):
        c = start + 4 * tl.arange(0, BLOCK // 4)
        value, id, _ = best_of_four(at, c, V, t, seed, choice, index, bar, above)
        best_id = tl.where(value > best, id, best_id)
        best = tl.where(value > best, value, best)
    _, token = lowest_best(best, best_id)
    return token


@triton.jit
def filtered(
    at, V, token, best, t, seed, choice, index, min_p, top_k, top_p, BLOCK: tl.constexpr
):  # fmt: skip
    """The draw among the tokens that pass, from `token`, the draw among all; T > 0."""
    bar = tl.minimum(best, float("-inf"))
    if (top_k > 0) & (top_k < V):
        bar = _kth_largest(at, V, top_k, BLOCK)
    if min_p > 0:
        bar = tl.minimum(tl.maximum(bar, best + t * tl.log(min_p)), best)
    target = top_p
    if top_p < 1.0:
        target = top_p * _mass(at, V, best, t, bar, float("-inf"), BLOCK)
    x = tl.load(at + token).to(tl.float32)
    kept = _kept(at, V, x, best, t, bar, top_p, target, BLOCK)
    while kept == 0:
        token = _drawn_above(at, V, t, seed, choice, index, bar, x, BLOCK)
        x = tl.load(at + token).to(tl.float32)
        kept = _kept(at, V, x, best, t, bar, top_p, target, BLOCK)
    return token
