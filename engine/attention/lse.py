"""Joins attention over parts of the keys, as the ranks of decode context parallelism do."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor


def combine(outs: Tensor, lses: Tensor, base: Literal["e", "2"] = "e") -> Tensor:
    """outs [parts, rows, heads, dim] and lses [parts, rows, heads] -> [rows, heads, dim], fp32.

    `lses` are log-sum-exps of the scores over each part, in the backend's own base: a part counts
    as exp(lse - logsumexp of all). A part without keys has -inf; NaN and +inf, which kernels return
    for such parts, count as that. A row without any key gives zeros.
    """
    scaled = lses.float() * (math.log(2.0) if base == "2" else 1.0)
    scaled = torch.where(torch.isfinite(scaled), scaled, -math.inf)
    total = torch.logsumexp(scaled, dim=0)
    weights = torch.exp(scaled - torch.where(torch.isfinite(total), total, 0.0))
    weighted = outs.float() * weights[..., None]
    return torch.where(weights[..., None] > 0, weighted, 0.0).sum(0)
