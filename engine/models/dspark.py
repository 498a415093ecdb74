"""DSpark (arXiv 2607.05147): a DFlash block, then a left-to-right pass that corrects every slot by
the token drawn before it.

logits_k = base_k + bias(x_{k-1}, h_k), x_0 being the anchor; confidence_k = sigmoid(w [h_k ;
W1[x_{k-1}]]). The body, its context and its pages are those of DFlash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.resolution import Resolution
from engine.device_draw import DeviceDrawer
from engine.draw_rows import DrawRows
from engine.models.dflash import Block, DFlashModel, DraftTables, SlotDraws, own_chances
from engine.models.dflash_config import DFlashConfig
from engine.models.draft_context import ContextMemory
from engine.models.draft_options import DFlashOptions
from engine.models.markov import MarkovHead
from engine.weights import Weights

# (slot number from 0, fp32 logits [blocks, vocabulary]) -> ids of the target, int64 [blocks]
DrawSlot = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Proposals:
    """tokens int64 [blocks, count]; logits fp32 [blocks, count, vocabulary], the Markov bias
    included; confidence fp32 [blocks, count], the chance that a slot is accepted once those before
    it are, or None without that head."""

    tokens: Tensor
    logits: Tensor
    confidence: Tensor | None


class DSparkModel(DFlashModel):
    """A loaded draft. `propose_logits` gives base logits; `propose` walks the Markov head."""

    slot_by_slot = True

    def __init__(
        self,
        config: DFlashConfig,
        draft: Weights,
        tables: DraftTables,
        options: DFlashOptions,
        attention: Resolution,
        memory: ContextMemory | None = None,
    ) -> None:
        super().__init__(config, draft, tables, options, attention, memory)
        self._markov = MarkovHead(config, draft, tables.vocabulary, self.kernels)
        self._confidence: tuple[Tensor, Tensor] | None = None
        if config.confidence is not None:
            weight = draft.take("confidence_head.proj.weight", 1, config.confidence_width).float()
            name, bias = "confidence_head.proj.bias", torch.zeros(1, device=draft.device)
            self._confidence = weight, draft.take(name, 1).float() if name in draft else bias

    @torch.inference_mode()
    def propose(
        self, blocks: Sequence[Block], draw: DrawSlot, count: int | None = None
    ) -> Proposals:
        """The first `count` proposals (default: all) of every block; `draw` chooses each slot's
        tokens, slot by slot, since the next slot depends on them. Raises OutOfPages."""
        count = self.max_draft_tokens if count is None else count
        states = self.states(blocks, count)
        base = self._head(states.flatten(0, 1)).view(len(blocks), count, -1)
        anchors = torch.tensor([block.anchor for block in blocks], device=self.device)
        before, logits = [anchors], []
        state = self._markov.begin(len(blocks))
        for slot in range(count):
            own = base[:, slot]
            state = self._markov.correct(own, before[-1], states[:, slot], state)
            logits.append(self.vocabulary.widen(own))
            before.append(draw(slot, logits[-1]))
        confidence = self._accepted(states, torch.stack(before[:-1], 1))
        return Proposals(torch.stack(before[1:], 1), torch.stack(logits, 1), confidence)

    def _accepted(self, states: Tensor, before: Tensor) -> Tensor | None:
        """What the confidence head says [...], from states [..., hidden] and the tokens before."""
        if self._confidence is None or self.config.confidence is None:
            return None
        features = states.float()
        if self.config.confidence.with_markov:
            features = torch.cat((features, self._markov.rows(before)), -1)
        return F.linear(features, *self._confidence)[..., 0].sigmoid()

    def draw_slots(
        self, states: Tensor, anchors: Tensor, how: DrawRows, drawer: DeviceDrawer, chances: bool
    ) -> SlotDraws:
        """From left to right; the chances are those of the confidence head where there is one."""
        blocks, slots = states.shape[:2]
        by_slot = states.transpose(0, 1).contiguous()
        base = self._head(by_slot.flatten(0, 1)).view(slots, blocks, -1)
        # Every slot's from a multiple of 16 bytes on: a kernel is compiled for where they begin.
        room = blocks + blocks % 2
        tokens = torch.empty(slots + 1, room, dtype=torch.int64, device=base.device)[:, :blocks]
        tokens[0] = anchors
        own, state = [], self._markov.begin(blocks)
        for slot in range(slots):
            state = self._markov.correct(base[slot], tokens[slot], by_slot[slot], state)
            logits = self.vocabulary.widen(base[slot])
            drawer.draw(logits, how, out=tokens[slot + 1], shift=slot)
            if chances and self._confidence is None:
                own.append(own_chances(logits, tokens[slot + 1], how.temperature))
        before, drawn = tokens[:-1].T, tokens[1:].T
        return SlotDraws(drawn, torch.stack(own, 1) if own else self._accepted(states, before))
