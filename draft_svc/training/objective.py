"""The loss over sampled slots: the head runs in chunks, and its gradient is made in place.

Logits of a chunk exist once in the compute dtype and are overwritten by their gradient; nothing of
size [slots, V] is kept for a backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_svc.training.draft import DraftNet
from draft_svc.training.kernels import STATS, LossMix

_CHUNK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class LossOptions:
    """`mix` holds until `late_from` (share of the run), then `late_mix`. weighting: "decay" is
    exp(-(k - 1) / decay); "dpace" (arXiv 2605.18810) weighs slot k by how much it adds to the
    expected length, with prefix probabilities smoothed by alpha."""

    mix: LossMix = field(default_factory=LossMix)
    late_mix: LossMix = field(default_factory=lambda: LossMix(ce=0.1, tv=0.9))
    late_from: float = 1.0
    weighting: str = "decay"
    decay: float = 4.0
    alpha: float = 0.5
    confidence: float = 1.0

    def at(self, progress: float) -> LossMix:
        return self.late_mix if progress >= self.late_from else self.mix


@dataclass(slots=True)
class Slots:
    """What the slots of one batch must give: N blocks of K proposals.

    labels [N, K] and `previous` [N, K] (the token before each, the anchor first) are ids; valid
    [N, K] is false beyond the end of a document; states [N, K, D] are the target's final states
    that predict the labels.
    """

    labels: Tensor
    previous: Tensor
    valid: Tensor
    states: Tensor


def gather_slots(
    ids: Tensor, lengths: Tensor, anchors: Tensor, blocks: Tensor, states: Tensor, proposals: int
) -> Slots:
    """ids [B, L], states [B * L, D], anchors [B, A], blocks [N] (indices into B * A)."""
    longest = ids.shape[1]
    rows = blocks // anchors.shape[1]
    start = anchors.flatten()[blocks]
    steps = torch.arange(proposals, device=ids.device)
    before = start[:, None] + steps
    valid = before + 1 < lengths[rows][:, None]
    before = before.clamp(max=longest - 1)
    after = (before + 1).clamp(max=longest - 1)
    flat = rows[:, None] * longest
    tokens = ids.flatten()
    return Slots(tokens[flat + after], tokens[flat + before], valid, states[flat + before])


class Head:
    """Draft logits and their gradients for one draft: [state ; W1[previous]] times [head ; W2]."""

    def __init__(self, draft: DraftNet, states: Tensor, slots: Slots) -> None:
        """states: the draft's final states of the proposing slots [N * K, D], with a graph."""
        self.draft = draft
        self._states = states
        self.inputs = states.detach()
        self._weight = draft.net.head
        self._w2: Tensor | None = None
        self.markov_rows: Tensor | None = None
        if draft.spec.rank:
            w1, self._w2 = draft.markov()
            self.markov_rows = F.embedding(slots.previous.flatten(), w1.to(draft.dtype))
            rows = self.markov_rows.detach()
            self.inputs = torch.cat((self.inputs, rows), -1)
            self._weight = torch.cat((self._weight, self._w2.detach().to(draft.dtype)), -1)
            self._w2_grad = torch.zeros_like(self._w2)
        self._grads: list[Tensor] = []
        self.stats: list[Tensor] = []

    def logits(self, first: int, last: int) -> Tensor:
        return F.linear(self.inputs[first:last], self._weight)

    def back(self, grad: Tensor, first: int, last: int) -> None:
        """grad [rows, V] of the logits of rows first .. last."""
        self._grads.append(grad @ self._weight)
        if self._w2 is not None:
            d = self._states.shape[1]
            self._w2_grad += (grad.t() @ self.inputs[first:last, d:]).float()

    def finish(self, slots: Slots, weights: Tensor, confidence: float) -> Tensor:
        """Runs the backward pass of the whole draft; returns the confidence loss (0 without)."""
        grads = torch.cat(self._grads)
        d = self._states.shape[1]
        outputs: list[Tensor] = [self._states]
        seeds: list[Tensor] = [grads[:, :d].contiguous()]
        if self.markov_rows is not None and self._w2 is not None:
            outputs += [self.markov_rows, self._w2]
            seeds += [grads[:, d:].contiguous(), self._w2_grad]
        loss = grads.new_zeros((), dtype=torch.float32)
        if self.draft.spec.confidence and self.markov_rows is not None:
            overlap = 1 - torch.cat(self.stats)[:, STATS.index("tv")]
            logit = self.draft.confidence_logit(self._states.detach(), self.markov_rows.detach())
            each = F.binary_cross_entropy_with_logits(logit, overlap, reduction="none")
            loss = (each * slots.valid.flatten()).sum() / slots.valid.sum()
            outputs.append(loss * confidence)
            seeds.append(torch.ones_like(loss))
        torch.autograd.backward(outputs, seeds)
        return loss.detach()


def slot_weights(
    options: LossOptions, slots: Slots, stats: Tensor, blocks: slice, total: Tensor
) -> Tensor:
    """Weights [rows] of the blocks' slots; `total` makes them a mean over the whole step."""
    valid = slots.valid[blocks]
    count = valid.shape[1]
    if options.weighting == "decay":
        steps = torch.arange(count, device=valid.device)
        return (valid * torch.exp(-steps / options.decay) / total).flatten()
    q = stats[:, STATS.index("log_q_label")].view(-1, count).exp()
    smooth = options.alpha + (1 - options.alpha) * q
    prefix = smooth.cumprod(1) * valid
    return (prefix.flip(1).cumsum(1).flip(1) * valid / total).flatten()


def decay_total(options: LossOptions, slots: Slots) -> Tensor:
    if options.weighting != "decay":
        return slots.valid.any(1).sum().float()
    steps = torch.arange(slots.valid.shape[1], device=slots.valid.device)
    return (slots.valid * torch.exp(-steps / options.decay)).sum()


@torch.no_grad()
def measures(stats: Tensor, slots: Slots, mix: LossMix) -> dict[str, Tensor]:
    """Loss and teacher-forced acceptance (a hint only: the gate runs the real loop)."""
    valid = slots.valid
    columns = dict(zip(STATS, stats.view(*valid.shape, len(STATS)).unbind(-1), strict=True))
    hits = columns["hit_label"] * valid
    each = -mix.ce * columns["log_q_label"] + mix.kl * columns["kl"] + mix.tv * columns["tv"]
    count = valid.sum()
    return {
        "loss": (each * valid).sum() / count,
        "ce": -(columns["log_q_label"] * valid).sum() / count,
        "tv": (columns["tv"] * valid).sum() / count,
        "tau": 1 + hits.cumprod(1).sum(1).mean(),
        "first": hits[:, 0].mean(),
    }


def run_heads(
    heads: list[Head], slots: Slots, target_head: Tensor, mix: LossMix, options: LossOptions
) -> list[dict[str, Tensor]]:
    """Loss and backward pass of every draft; the target's logits of a chunk serve all of them.
    Gradients are left in the parameters. Returns the measures of each."""
    blocks, count = slots.labels.shape
    each = max(1, _CHUNK_ROWS // count)
    total = decay_total(options, slots)
    states, labels = slots.states.flatten(0, 1), slots.labels.flatten()
    ops = heads[0].draft.net.ops
    for begin in range(0, blocks, each):
        part = slice(begin, min(begin + each, blocks))
        first, last = part.start * count, part.stop * count
        target = F.linear(states[first:last], target_head)
        for head in heads:
            logits = head.logits(first, last)
            stats = ops.loss_stats(logits, target, labels[first:last])
            weights = slot_weights(options, slots, stats, part, total)
            ops.loss_grad_(logits, target, labels[first:last], stats, weights, mix)
            head.back(logits, first, last)
            head.stats.append(stats)
    found = []
    for head in heads:
        confidence = head.finish(slots, slots.valid, options.confidence)
        found.append(measures(torch.cat(head.stats), slots, mix) | {"confidence": confidence})
    return found
