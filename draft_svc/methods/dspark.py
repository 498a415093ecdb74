"""DSpark: a DFlash block whose tokens are drawn from left to right, each corrected by the one
before it.

Context, pages and the forward are those of DFlash. The walk is made for all sessions together, slot
by slot, with the target's noise at the index of the token being drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draft_svc.methods.base import Draft
from draft_svc.methods.dflash import DFlashMethod
from draft_svc.methods.host_draws import probabilities
from engine.block_call import Wanted
from engine.kernels.cpu import ops
from engine.models.draft_loading import LoadedDraft
from engine.models.dspark import DSparkModel, Proposals
from engine.sampling import Draw, draw


class DSparkMethod(DFlashMethod):
    """A loaded DSpark draft. `confidences` asks for the draft's own probabilities where the
    checkpoint has no confidence head; what the head says costs nothing and is always sent.
    """

    name = "dspark"

    def __init__(
        self,
        loaded: LoadedDraft,
        *,
        max_draft_tokens: int,
        max_length: int | None,
        tokenizer_hash: str,
        confidences: bool = True,
        warm_sessions: int = 0,
    ) -> None:
        super().__init__(
            loaded,
            max_draft_tokens=max_draft_tokens,
            max_length=max_length,
            tokenizer_hash=tokenizer_hash,
            confidences=confidences,
            warm_sessions=warm_sessions,
        )
        assert isinstance(loaded.model, DSparkModel)
        self._dspark, markov = loaded.model, loaded.model.config.markov
        assert markov is not None
        name = f"{loaded.name} ({markov.kind} Markov head, rank {markov.rank})"
        self._info = replace(self._info, name=name)

    def _draft_on_host(self, wanted: Sequence[Wanted]) -> list[Draft]:
        drawn: list[list[Draw]] = []

        def draw_slot(slot: int, logits: Tensor) -> Tensor:
            drawn.append([Draw(own.sampling, own.block.start + 1 + slot) for own in wanted])
            tokens, _ = draw(logits, drawn[-1], False, ops.gumbel_argmax)
            return torch.tensor(tokens, device=logits.device)

        widest = max(own.k for own in wanted)
        found = self._dspark.propose([own.block for own in wanted], draw_slot, widest)
        tokens, confidences = found.tokens.tolist(), self._sure(found, drawn)
        return [
            Draft(tuple(ids[: own.k]), tuple(sure[: own.k]))
            for own, ids, sure in zip(wanted, tokens, confidences, strict=True)
        ]

    def _sure(self, found: Proposals, drawn: Sequence[Sequence[Draw]]) -> list[list[float]]:
        """One list for each block; empty lists where nothing is to be said."""
        if found.confidence is not None:
            said: list[list[float]] = found.confidence.tolist()
            return said
        if not self._confidences:
            return [[] for _ in found.tokens]
        return [
            probabilities(logits, [slot[row] for slot in drawn], tokens)
            for row, (logits, tokens) in enumerate(
                zip(found.logits, found.tokens.tolist(), strict=True)
            )
        ]
