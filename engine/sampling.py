"""Choosing tokens: draw, filters and match, all position by position in fp32.

The draw is argmax(logits / T + noise) over the tokens that the filters keep, the noise keyed by
(seed, choice, index, token). Filters act on the scaled logits: min-p, then top-k, then top-p over
what is left. Logits that tie with the last one kept are kept too, so the result does not depend on
a sort.

Each filter keeps the tokens above some logit. So the row is drawn unfiltered, and the token drawn
is tested: if it is kept, it is also the argmax over the kept ones. If not, nothing at or below its
logit is kept either; that is masked and the row drawn again. No row is ever sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.api import Sampling

_UINT64 = 1 << 64

GumbelArgmax = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of logits and how to choose from it.

    index  position of the token being drawn
    given  the draft token that this row takes for granted: the row before must draw it, or this
           one does not matter; None: there is no such row
    """

    sampling: Sampling
    index: int
    given: int | None = None


def signed64(value: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    value %= _UINT64
    return value - _UINT64 if value >= _UINT64 // 2 else value


def filters(sampling: Sampling) -> bool:
    """Whether some tokens cannot be drawn. At T = 0 the highest logit passes every filter."""
    s = sampling
    return s.temperature > 0 and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)


class Filter:
    """min-p, top-k and top-p of one row of logits [vocab], as a test of single logits.

    Sums run over one row whatever the batch, so that a row's result does not depend on its mates.
    """

    def __init__(self, logits: Tensor, sampling: Sampling) -> None:
        self._logits, self._sampling = logits, sampling
        self._best = float(logits.max())
        self._weights: Tensor | None = None
        self._target = 0.0

    def keeps(self, logit: float) -> bool:
        """Whether a token of the row with this logit can be drawn."""
        s = self._sampling
        if not logit < self._best:  # also where a broken model gives NaN: the draw must end
            return True
        if s.min_p > 0 and math.exp((logit - self._best) / s.temperature) < s.min_p:
            return False
        if s.top_k == 0 and s.top_p >= 1.0:
            return True
        above = self._logits > logit
        if 0 < s.top_k <= int(above.count_nonzero()):
            return False
        return s.top_p >= 1.0 or self._mass(above) < self._target

    def _mass(self, above: Tensor) -> float:
        """Weight of the tokens above; together, they have not reached `top_p` if the next is kept.

        Weights are exp((logit - best) / T), zero for what min-p and top-k remove; `_target` is the
        share of their sum that is wanted.
        """
        if self._weights is None:
            s = self._sampling
            weights = ((self._logits - self._best) / s.temperature).exp_()
            if s.min_p > 0:
                weights.masked_fill_(weights < s.min_p, 0.0)
            if 0 < s.top_k < len(weights):
                lowest = self._logits.topk(s.top_k).values[-1]
                weights.masked_fill_(self._logits < lowest, 0.0)
            self._weights = weights
            self._target = s.top_p * float(weights.sum())
        return float((self._weights * above).sum())


def draw(
    logits: Tensor, draws: Sequence[Draw], margins: bool, gumbel_argmax: GumbelArgmax
) -> tuple[list[int], list[float]]:
    """Token of every row of logits fp32 [rows, vocab]; margins (highest filtered logit minus the
    second) when asked. Tokens of rows that do not matter are anything.
    """
    tokens = _drawn(logits, draws, gumbel_argmax)
    matters = True
    for row, wanted in enumerate(draws):
        matters = wanted.given is None or (matters and tokens[row - 1] == wanted.given)
        if matters and filters(wanted.sampling):
            tokens[row] = _kept(logits[row], wanted, tokens[row], gumbel_argmax)
    return tokens, margins_of(logits, draws) if margins else []


def _drawn(logits: Tensor, draws: Sequence[Draw], gumbel_argmax: GumbelArgmax) -> list[int]:
    drawn: list[int] = gumbel_argmax(
        logits,
        torch.tensor([d.sampling.temperature for d in draws], dtype=torch.float32),
        torch.tensor([signed64(d.sampling.seed) for d in draws], dtype=torch.int64),
        torch.tensor([d.sampling.choice for d in draws], dtype=torch.int64),
        torch.tensor([d.index for d in draws], dtype=torch.int64),
    ).tolist()
    return drawn


def _kept(logits: Tensor, wanted: Draw, token: int, gumbel_argmax: GumbelArgmax) -> int:
    """The draw among the tokens that pass; `token` is the draw among all."""
    kept, left = Filter(logits, wanted.sampling), logits
    while not kept.keeps(float(logits[token])):
        left = left.masked_fill(logits <= logits[token], -math.inf)
        token = _drawn(left[None], [wanted], gumbel_argmax)[0]
    return token


def margins_of(logits: Tensor, draws: Sequence[Draw]) -> list[float]:
    """Highest filtered logit minus the second, by row; inf where the second cannot be drawn."""
    gaps = []
    for row, (first, second) in enumerate(logits.topk(2, dim=-1).values.tolist()):
        s = draws[row].sampling
        alone = filters(s) and not Filter(logits[row], s).keeps(second)
        gaps.append(math.inf if alone else first - second)
    return gaps


def accept(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many leading draft tokens equal what the target drew itself."""
    for count, draft in enumerate(drafts):
        if draft != drawn[count]:
            return count
    return len(drafts)
