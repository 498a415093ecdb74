"""Choosing tokens: filters, draw and match, all position by position in fp32.

The draw is argmax(filtered logits / T + noise), the noise keyed by (seed, choice, index, token).
Filters act on the scaled logits, top-k first, then top-p over what is left; logits that tie with
the last one kept are kept too, so the result does not depend on a sort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.api import Sampling

_NUCLEUS = 1024  # candidates looked at before a full sort
_UINT64 = 1 << 64

GumbelArgmax = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of logits and how to choose from it; `index` is the position of the token being
    drawn.
    """

    sampling: Sampling
    index: int


def signed64(value: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    value %= _UINT64
    return value - _UINT64 if value >= _UINT64 // 2 else value


def filter_row(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [vocab] with what top-k and top-p remove set to -inf."""
    top_k, top_p = sampling.top_k, sampling.top_p
    threshold = -math.inf
    if 0 < top_k < logits.numel():
        threshold = logits.topk(top_k).values[-1].item()
    if top_p < 1.0:
        kept = logits[logits >= threshold]
        threshold = max(threshold, _nucleus(kept, sampling.temperature, top_p))
    return logits.masked_fill(logits < threshold, -math.inf)


def _nucleus(logits: Tensor, temperature: float, top_p: float) -> float:
    """Lowest logit of the smallest set whose probability reaches `top_p`."""
    total = (logits / temperature).logsumexp(0)
    for size in (min(_NUCLEUS, logits.numel()), logits.numel()):
        top = logits.topk(size).values
        reached = (top / temperature - total).exp().cumsum(0) >= top_p
        if bool(reached[-1]):
            return float(top[int(reached.to(torch.uint8).argmax())])
    return float(top[-1])


def draw(
    logits: Tensor, draws: Sequence[Draw], margins: bool, gumbel_argmax: GumbelArgmax
) -> tuple[list[int], list[float]]:
    """Token of every row of logits fp32 [rows, vocab]; margins (highest filtered logit minus the
    second) when asked.
    """
    for row, wanted in enumerate(draws):
        s = wanted.sampling
        if s.temperature > 0 and (s.top_k > 0 or s.top_p < 1.0):
            logits[row] = filter_row(logits[row], s)
    tokens = gumbel_argmax(
        logits,
        torch.tensor([d.sampling.temperature for d in draws], dtype=torch.float32),
        torch.tensor([signed64(d.sampling.seed) for d in draws], dtype=torch.int64),
        torch.tensor([d.sampling.choice for d in draws], dtype=torch.int64),
        torch.tensor([d.index for d in draws], dtype=torch.int64),
    )
    gaps: list[float] = []
    if margins:
        top = logits.topk(2, dim=-1).values
        gaps = (top[:, 0] - top[:, 1]).tolist()
    return tokens.tolist(), gaps


def accept(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many leading draft tokens equal what the target drew itself."""
    for count, draft in enumerate(drafts):
        if draft != drawn[count]:
            return count
    return len(drafts)
