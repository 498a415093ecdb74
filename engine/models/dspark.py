"""DSpark (arXiv 2607.05147): a DFlash block, then a left-to-right pass that corrects every slot by
the token drawn before it.

logits_k = base_k + W2 W1[x_{k-1}], x_0 being the anchor; confidence_k = sigmoid(w [h_k ;
W1[x_{k-1}]]). The body, its context and its pages are those of DFlash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.resolution import Resolution
from engine.default_model import resolve_model
from engine.errors import CheckpointError
from engine.models.config import from_hf
from engine.models.dflash import (
    Block,
    DFlashModel,
    DFlashOptions,
    LoadedDraft,
    choose_attention,
    target_tables,
)
from engine.models.dspark_config import DSparkConfig, parse_dspark
from engine.weights import Weights, fingerprint, read_json

# (slot number from 0, fp32 logits [blocks, head rows]) -> ids int64 [blocks]
DrawSlot = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Proposals:
    """tokens int64 [blocks, count]; logits fp32 [blocks, count, head rows], the Markov bias
    included; confidence fp32 [blocks, count], the chance that a slot is accepted once those before
    it are, or None without that head."""

    tokens: Tensor
    logits: Tensor
    confidence: Tensor | None


class DSparkModel(DFlashModel):
    """A loaded draft. `propose_logits` gives base logits; `propose` walks the Markov head."""

    def __init__(
        self,
        config: DSparkConfig,
        draft: Weights,
        embedding: Tensor,
        head: Tensor,
        options: DFlashOptions,
        attention: Resolution,
    ) -> None:
        self.dspark, body = config, config.body
        self.first_slot = config.first_slot
        table = (body.vocab_size, config.markov_rank)
        # Copies of the target's tables that this layout may hold stand in for them.
        whole = (body.vocab_size, body.hidden_size)
        if "embed_tokens.weight" in draft:
            embedding = draft.take("embed_tokens.weight", *whole)
        if "lm_head.weight" in draft:
            head = draft.take("lm_head.weight", *whole)
        self._w1 = draft.take("markov_head.markov_w1.weight", *table)
        w2 = draft.take("markov_head.markov_w2.weight", *table)
        self._confidence: tuple[Tensor, Tensor] | None = None
        if config.confidence:
            weight = draft.take("confidence_head.proj.weight", 1, config.confidence_width).float()
            name, bias = "confidence_head.proj.bias", torch.zeros(1)
            self._confidence = weight, draft.take(name, 1).float() if name in draft else bias
        super().__init__(body, draft, embedding, head, options, attention)
        self._w2 = self.kernels.pack(w2[: options.head_rows or None])

    @torch.inference_mode()
    def propose(
        self, blocks: Sequence[Block], draw: DrawSlot, count: int | None = None
    ) -> Proposals:
        """The first `count` proposals (default: all) of every block; `draw` chooses each slot's
        tokens, slot by slot, since the next slot depends on them. Raises OutOfPages."""
        count = self.max_draft_tokens if count is None else count
        states = self.states(blocks, count)
        base = self._head(states.flatten(0, 1)).view(len(blocks), count, -1)
        previous = torch.tensor([block.anchor for block in blocks])
        before, tokens, logits = [], [], []
        for slot in range(count):
            before.append(self._w1[previous].float())
            corrected = base[:, slot] + self._w2(before[-1])
            previous = draw(slot, corrected)
            tokens.append(previous)
            logits.append(corrected)
        confidence = self._accepted(states, torch.stack(before, 1))
        return Proposals(torch.stack(tokens, 1), torch.stack(logits, 1), confidence)

    def _accepted(self, states: Tensor, rows: Tensor) -> Tensor | None:
        """What the confidence head says, from states and the Markov rows of the tokens before."""
        if self._confidence is None:
            return None
        with_markov = self.dspark.confidence_with_markov
        features = torch.cat((states, rows), -1) if with_markov else states
        return F.linear(features, *self._confidence)[..., 0].sigmoid()


def load_dspark(checkpoint: Path, target: str, options: DFlashOptions | None = None) -> LoadedDraft:
    """Loads a DeepSpec style checkpoint, and embedding and head from the target's. Raises
    CheckpointError."""
    options = options or DFlashOptions()
    source = resolve_model(target)
    target_config = from_hf(read_json(source.directory / "config.json"))
    config = parse_dspark(read_json(checkpoint / "config.json"), target_config)
    if (checkpoint / "mask_embedding.pt").exists():
        raise CheckpointError("a mask vector of its own (mask_embedding.pt) is not supported")
    attention = choose_attention(config.body, options, "dspark")
    embedding, head = target_tables(source.directory, target_config, options)
    draft = Weights(checkpoint, options.weight_dtype)
    model = DSparkModel(config, draft, embedding, head, options, attention)
    return LoadedDraft(
        model, checkpoint.name, fingerprint(checkpoint), fingerprint(source.directory)
    )
