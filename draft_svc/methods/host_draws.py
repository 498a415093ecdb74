"""Proposals of a block draft whose tokens are drawn on the host, where no stepper does it all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_svc.methods.base import Draft
from engine.block_call import Wanted
from engine.kernels.cpu import ops
from engine.models.dflash import DFlashModel, own_chances
from engine.sampling import Draw, draw


def draft_on_host(model: DFlashModel, wanted: Sequence[Wanted], confident: bool) -> list[Draft]:
    """One forward over the blocks, whose pages are reserved; each slot drawn by itself."""
    widest = max(own.k for own in wanted)
    logits = model.propose_logits([own.block for own in wanted], widest)
    asked = torch.cat([logits[i, : own.k] for i, own in enumerate(wanted)])
    draws = [
        Draw(own.sampling, own.block.start + slot) for own in wanted for slot in range(1, own.k + 1)
    ]
    tokens, _ = draw(asked, draws, False, ops.gumbel_argmax)
    confidences = probabilities(asked, draws, tokens) if confident else []
    drafts, first = [], 0
    for own in wanted:
        last = first + own.k
        drafts.append(Draft(tuple(tokens[first:last]), tuple(confidences[first:last])))
        first = last
    return drafts


def probabilities(logits: Tensor, draws: Sequence[Draw], tokens: Sequence[int]) -> list[float]:
    """The draft's own probability of each token at its temperature, filters left out."""
    temperatures = torch.tensor([d.sampling.temperature for d in draws], device=logits.device)
    chosen = torch.tensor(tokens, device=logits.device)
    chances: list[float] = own_chances(logits, chosen, temperatures).tolist()
    return chances
