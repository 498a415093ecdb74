"""Mixtures of experts as DeepSeek-V2 and V3 have them: a router, experts, and one for every row."""

from __future__ import annotations

from abc import ABC, abstractmethod

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


class Experts(ABC):
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
        self._c, self._kernels = c, kernels
        # The choice is made in fp32: half a bit of a score may send a row elsewhere.
        exact = torch.float32
        gate = weights.take(f"{prefix}.gate.weight", c.count, hidden, dtype=exact)
        self._gate = kernels.pack(gate)
        self._bias: Tensor | None = None
        if c.scoring == "sigmoid":
            name = f"{prefix}.gate.e_score_correction_bias"
            self._bias = weights.take(name, c.count, dtype=exact)
        shared = f"{prefix}.shared_experts"
        self._shared = Mlp(weights, shared, hidden, c.inner * c.shared, kernels, bias)

    @abstractmethod
    def add(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float
    ) -> Tensor | None:
        """residual fp32 [rows, hidden] += delta, then the MLP of its norm; or the delta of that."""


class HostExperts(Experts):
    """The host reads which experts run: they are products like any other."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        hidden: int,
        c: ExpertsConfig,
        kernels: Kernels,
        bias: bool = False,
    ) -> None:
        super().__init__(weights, prefix, hidden, c, kernels, bias)
        self._experts = [
            Mlp(weights, f"{prefix}.experts.{index}", hidden, c.inner, kernels)
            for index in range(c.count)
        ]

    def add(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float
    ) -> Tensor | None:
        x = self._kernels.norm(residual, delta, norm, eps)
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


class DeviceExperts(Experts):
    """All on the device, in a fixed sequence of launches: `engine/kernels/triton/experts.py`."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        hidden: int,
        c: ExpertsConfig,
        kernels: Kernels,
        bias: bool = False,
    ) -> None:
        super().__init__(weights, prefix, hidden, c, kernels, bias)
        # One by one into their places: twice the memory of all of them may not be there.
        for index in range(c.count):
            own, inner = f"{prefix}.experts.{index}", c.inner
            gate = weights.take(f"{own}.gate_proj.weight", inner, hidden)
            if not index:
                self._gate_up = gate.new_empty(c.count, 2 * inner, hidden)
                self._down = gate.new_empty(c.count, hidden, inner)
            self._gate_up[index, :inner] = gate
            self._gate_up[index, inner:] = weights.take(f"{own}.up_proj.weight", inner, hidden)
            self._down[index] = weights.take(f"{own}.down_proj.weight", hidden, inner)

    def add(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float
    ) -> Tensor | None:
        from engine.kernels.triton import experts as routed  # Triton is not everywhere
        from engine.kernels.triton.router import route as choose

        c, run = self._c, self._kernels
        logits = run.norm_linear(residual, delta, norm, eps, self._gate)
        weights, chosen = choose(
            logits, self._bias, c.chosen, c.groups, c.kept_groups, c.scoring == "sigmoid",
            c.normed, c.factor,
        )  # fmt: skip
        groups = routed.group(chosen, c.count)
        inner = routed.gate_up(run.norm(residual, None, norm, eps), groups, self._gate_up, c.chosen)
        found = routed.down(inner, groups, self._down)
        shared = run.norm_gated(residual, None, norm, eps, self._shared.gate_up)
        run.linear_add(shared, self._shared.down, residual)
        routed.add_weighted(found, weights, residual)
        return None


def experts_for(kernels: Kernels) -> type[HostExperts | DeviceExperts]:
    return DeviceExperts if kernels.mode == "triton" else HostExperts
