"""The Markov heads of DSpark (arXiv 2607.05147, and its published checkpoints): what the token
before a slot adds to the slot's logits.

With w = W1[token before] and h the slot's state after the final norm:

vanilla  W2 w
gated    W2 (sigmoid(G [h; w] + g) * w)
rnn      [a; c; o] = J [s; w; h] + j: W2 tanh(o), and s becomes sigmoid(a) * s +
         (1 - sigmoid(a)) * tanh(c); s is zero before the first slot that proposes
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.dflash_config import DFlashConfig
from engine.models.draft_vocabulary import DraftVocabulary
from engine.models.layers import Kernels
from engine.weights import Weights


class MarkovHead:
    """W1 [target vocabulary, rank] is indexed by the target's ids; W2 has the head's rows."""

    def __init__(
        self, config: DFlashConfig, draft: Weights, vocabulary: DraftVocabulary, kernels: Kernels
    ) -> None:
        assert config.markov is not None
        self._kernels = kernels
        self.kind, rank = config.markov.kind, config.markov.rank
        self.rank, hidden = rank, config.hidden_size
        self._w1 = draft.take("markov_head.markov_w1.weight", config.vocab_size, rank)
        w2 = draft.take("markov_head.markov_w2.weight", config.draft_vocab_size, rank)
        self._w2 = kernels.pack(vocabulary.pick(w2))
        self._joint: tuple[Tensor, Tensor] | None = None
        if self.kind == "gated":
            self._joint = _linear(draft, "gate_proj", rank, hidden + rank)
        elif self.kind == "rnn":
            self._joint = _linear(draft, "joint_proj", 3 * rank, hidden + 2 * rank)

    def begin(self, blocks: int) -> Tensor:
        """The state before the first slot."""
        return torch.zeros(blocks, self.rank, device=self._w1.device)

    def rows(self, previous: Tensor) -> Tensor:
        """W1 of ids of the target, fp32 [..., rank]."""
        return self._w1[previous].float()

    def correct(self, logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor) -> Tensor:
        """Adds to a slot's logits fp32 [blocks, head rows], in place, what follows from the tokens
        `previous` int64 [blocks] and the slot's states `hidden` [blocks, hidden]. Returns the state
        fp32 [blocks, rank] for the next slot."""
        if self._joint is None:
            self._kernels.lookup_add(self._w1, previous, self._w2, logits)
            return state
        row, hidden = self.rows(previous), hidden.float()
        if self.kind == "gated":
            gate = F.linear(torch.cat((hidden, row), -1), *self._joint).sigmoid()
            logits += self._w2(gate * row)
            return state
        joint = F.linear(torch.cat((state, row, hidden), -1), *self._joint)
        keep, candidate, out = joint.chunk(3, -1)
        keep = keep.sigmoid()
        logits += self._w2(out.tanh())
        return keep * state + (1 - keep) * candidate.tanh()


def _linear(draft: Weights, name: str, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Weight and bias, small enough for fp32."""
    prefix = f"markov_head.{name}"
    return draft.take(f"{prefix}.weight", rows, width).float(), draft.take(
        f"{prefix}.bias", rows
    ).float()
