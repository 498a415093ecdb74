"""Mixtures of experts as DeepSeek-V2 and V3 have them: a router, experts, and one for every row."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.latent_config import ExpertsConfig
from engine.models.layers import Kernels, Mlp
from engine.weights import Weights

# A short step may hold guesses: there an expert runs all rows, so that its number of rows, and with
# some kernels the bits, do not depend on where the guesses were sent.
_SHORT_ROWS = 64


def route(c: ExpertsConfig, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp32 logits [rows, count] -> weights and ids of the chosen experts, each [rows, chosen].
    `bias` [count] takes part in the choice only."""
    scores = logits.sigmoid() if c.scoring == "sigmoid" else logits.softmax(-1)
    judged = scores if bias is None else scores + bias
    if c.kept_groups < c.groups:
        grouped = judged.view(judged.shape[0], c.groups, -1)
        best = grouped.topk(2 if c.scoring == "sigmoid" else 1, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(c.kept_groups, dim=-1).indices, True)
        judged = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = judged.topk(c.chosen, dim=-1).indices
    weights = scores.gather(1, chosen)
    if c.normed:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * c.factor, chosen


class Experts:
    """The MLP of a layer that has experts."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        hidden: int,
        c: ExpertsConfig,
        kernels: Kernels,
        bias: bool = False,
    ) -> None:
        self._c = c
        # The choice is made in fp32: half a bit of a score may send a row elsewhere.
        exact = torch.float32
        gate = weights.take(f"{prefix}.gate.weight", c.count, hidden, dtype=exact)
        self._gate = kernels.pack(gate)
        self._bias: Tensor | None = None
        if c.scoring == "sigmoid":
            name = f"{prefix}.gate.e_score_correction_bias"
            self._bias = weights.take(name, c.count, dtype=exact)
        self._experts = [
            Mlp(weights, f"{prefix}.experts.{index}", hidden, c.inner, kernels)
            for index in range(c.count)
        ]
        shared = f"{prefix}.shared_experts"
        self._shared = Mlp(weights, shared, hidden, c.inner * c.shared, kernels, bias)

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = route(self._c, self._gate(x), self._bias)
        out = self._shared(x)
        whole = x.shape[0] <= _SHORT_ROWS and not self._gate.rows_independent
        for index in sorted(set(chosen.flatten().tolist())):
            share = torch.where(chosen == index, weights, 0.0).sum(-1, keepdim=True)
            expert = self._experts[index]
            if whole:
                out += expert(x) * share
            else:
                rows = share[:, 0].nonzero()[:, 0]
                out.index_add_(0, rows, expert(x[rows]) * share[rows])
        return out
