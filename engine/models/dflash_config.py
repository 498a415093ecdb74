"""The explicit internal description of a block draft, DFlash or DSpark, whatever layout its
checkpoint has; `draft_dialects.py` reads the layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.attention.mode import LayerMode
from engine.models.latent_config import LatentConfig
from engine.models.rope import Rope

MARKOV_HEADS = ("vanilla", "gated", "rnn")
MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, slots=True)
class MarkovConfig:
    """The head that corrects a slot by the token before it: see `markov.py`."""

    kind: MarkovKind
    rank: int


@dataclass(frozen=True, slots=True)
class ConfidenceConfig:
    """The head that says how likely a slot is accepted; it reads the slot's state, and the Markov
    row of the token before it when `with_markov`."""

    with_markov: bool


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A block has `block_size` slots, [anchor, mask, ...].

    tap_ids            0-based target layers whose output, before any final norm, is read, in order
    next_token         slot s predicts the token at anchor + s + 1 and every slot proposes; else it
                       predicts the token at anchor + s (fill-in), and the anchor's proposes nothing
    modes              causality and window, a layer each
    rope_interleaved   pairs of the checkpoint's rotation lie side by side; else half a head apart
    vocab_size         the target's; ids of anchors, of proposals and of Markov rows are below it
    latent             its dimensions where the attention is latent: then kv_heads is 1 and head_dim
                       what is cached
    draft_vocab_size   rows of the drafting head; fewer than vocab_size: `d2t` says whose they are
    """

    hidden_size: int
    intermediate_size: int
    layer_count: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    rope_interleaved: bool
    max_positions: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    next_token: bool
    mask_token_id: int
    tap_ids: tuple[int, ...]
    modes: tuple[LayerMode, ...]
    target_hidden_size: int
    target_layer_count: int
    markov: MarkovConfig | None = None
    confidence: ConfidenceConfig | None = None
    latent: LatentConfig | None = None

    @property
    def row_width(self) -> int:
        """Values of one hidden-state row: every tap, concatenated in the order of `tap_ids`."""
        return len(self.tap_ids) * self.target_hidden_size

    @property
    def first_slot(self) -> int:
        """Of a block, the first slot that proposes."""
        return 0 if self.next_token else 1

    @property
    def max_draft_tokens(self) -> int:
        return self.block_size - self.first_slot

    @property
    def slot_mode(self) -> str:
        return "next_token" if self.next_token else "fill_in"

    @property
    def rope_style(self) -> str:
        """Of the checkpoint, for a handshake."""
        return "interleaved" if self.rope_interleaved else "neox"

    @property
    def confidence_width(self) -> int:
        """Features of the confidence head."""
        with_markov = self.confidence is not None and self.confidence.with_markov
        rank = self.markov.rank if self.markov is not None and with_markov else 0
        return self.hidden_size + rank
