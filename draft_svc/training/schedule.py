"""How long drafts are trained, how fast, and by which optimisers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draft_svc.training.batches import BatchOptions
from draft_svc.training.draft import DraftNet
from draft_svc.training.objective import LossOptions


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """`steps` > 0 makes the schedule follow steps; otherwise it follows `minutes` of training.
    `stop_after_minutes` ends this call early (0: never); a later call goes on where it stopped.
    """

    minutes: float = 10.0
    steps: int = 0
    stop_after_minutes: float = 0.0
    lr: float = 1.5e-3
    final_lr: float = 0.05
    warmup: float = 0.02
    weight_decay: float = 0.0
    clip: float = 1.0
    optimizer: str = "adamw"
    seed: int = 0
    gate_minutes: float = 2.0
    checkpoint_minutes: float = 4.0
    batches: BatchOptions = field(default_factory=BatchOptions)
    loss: LossOptions = field(default_factory=LossOptions)


def schedule(progress: float, options: TrainOptions) -> float:
    """Factor of the learning rate: linear warm-up, cosine down to `final_lr`."""
    if progress < options.warmup:
        return max(progress / options.warmup, 0.01)
    done = min((progress - options.warmup) / (1 - options.warmup), 1.0)
    return options.final_lr + (1 - options.final_lr) * 0.5 * (1 + math.cos(math.pi * done))


def optimizers(draft: DraftNet, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """AdamW for everything; with "muon", Muon for the matrices of the body and AdamW for the
    rest. Muon's step is scaled to AdamW's size, so one learning rate serves both."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in draft.p.items():
        body = name.startswith(("layers.", "fc.")) and parameter.dim() == 2
        (matrices if body and options.optimizer == "muon" else rest).append(parameter)
    fused = draft.device.type == "cuda"
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest, options.lr, betas=(0.9, 0.98), weight_decay=options.weight_decay, fused=fused
        )
    ]
    if matrices:
        found.append(
            torch.optim.Muon(
                matrices,
                options.lr,
                weight_decay=options.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return found
