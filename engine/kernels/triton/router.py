"""The choice of experts on the device; `engine.models.experts.route` is the same in torch."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _first_best(judged):
    """The lowest index of the largest value."""
    return tl.argmax(judged, 0, tie_break_left=True)


@triton.jit
def _route(
    logits, bias, weights, chosen, factor,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, TOP_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, KEPT: tl.constexpr, SIGMOID: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Grid (rows). logits fp32 [rows, COUNT]; weights fp32 and chosen int32 [rows, TOP]."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < COUNT
    x = tl.load(logits + row * COUNT + e, mask=inside, other=float("-inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
        judged = score + tl.load(bias + e, mask=inside, other=0.0)
    else:
        score = tl.exp(x - tl.max(x, 0))
        score = score / tl.sum(score, 0)
        judged = score
    judged = tl.where(inside, judged, float("-inf"))
    if KEPT < GROUPS:
        group = e // (COUNT // GROUPS)
        g = tl.arange(0, GROUP_BLOCK)
        value = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        for one in range(GROUPS):
            own = tl.where(group == one, judged, float("-inf"))
            best = tl.max(own, 0)
            if SIGMOID:
                best += tl.max(tl.where(e == _first_best(own), float("-inf"), own), 0)
            value = tl.where(g == one, best, value)
        kept = tl.zeros([BLOCK], tl.int32)
        for _ in range(KEPT):
            taken = _first_best(value)
            kept = tl.where(group == taken, 1, kept)
            value = tl.where(g == taken, float("-inf"), value)
        judged = tl.where(kept > 0, judged, float("-inf"))
    t = tl.arange(0, TOP_BLOCK)
    found = tl.zeros([TOP_BLOCK], tl.float32)
    ids = tl.zeros([TOP_BLOCK], tl.int32)
    total = 0.0
    for j in range(TOP):
        i = tl.minimum(
            _first_best(judged), COUNT - 1
        )  # whatever the logits are, an expert there is
        weight = tl.sum(tl.where(e == i, score, 0.0), 0)
        total += weight
        found = tl.where(t == j, weight, found)
        ids = tl.where(t == j, i, ids)
        judged = tl.where(e == i, float("-inf"), judged)
    if NORMED:
        found = found / (total + 1e-20)
    tl.store(weights + row * TOP + t, found * factor, mask=t < TOP)
    tl.store(chosen + row * TOP + t, ids, mask=t < TOP)


def route(
    logits: Tensor,
    bias: Tensor | None,
    top: int,
    groups: int,
    kept_groups: int,
    sigmoid: bool,
    normed: bool,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Weights fp32 and ids int32 [rows, top] of the experts of each row, the best first.

    logits fp32 [rows, count]; the rest as in `ExpertsConfig`. Ties go to the lowest id.
    """
    rows, count = logits.shape
    weights = torch.empty(rows, top, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, top, dtype=torch.int32, device=logits.device)
    if rows:
        power = triton.next_power_of_2
        _route[(rows,)](
            logits, logits if bias is None else bias, weights, chosen, factor, count,
            power(count), top, power(top), groups, power(groups), kept_groups, sigmoid, normed,
            num_warps=4,
        )  # fmt: skip
    return weights, chosen
