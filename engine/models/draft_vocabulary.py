"""The vocabulary of a drafting head, which may have fewer rows than the target has tokens.

A trimmed head comes with `d2t`, int64 [rows]: row i stands for the target's token i + d2t[i].
Logits are spread over the target's vocabulary before anything is drawn from them, so that noise,
filters and ties see the target's token ids.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.models.dflash_config import DFlashConfig
from engine.weights import Weights


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """`size` tokens of the target, of which the head knows `rows`.

    target_ids  int64 [rows], increasing: the token of each row; None: row i is token i
    order       int64 [rows]: which row of the file each one is; None: they lie as they should
    """

    size: int
    rows: int
    target_ids: Tensor | None = None
    order: Tensor | None = None

    @property
    def d2t_hash(self) -> str:
        """Names the map in a handshake: over its target ids in order, int64 little-endian. Empty
        where there is no map."""
        if self.target_ids is None:
            return ""
        return hashlib.sha256(self.target_ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()[
            :32
        ]

    def pick(self, weight: Tensor) -> Tensor:
        """Rows of a weight [rows of the file, ...] in the order of `target_ids`."""
        return weight[: self.rows] if self.order is None else weight[self.order]

    def widen(self, logits: Tensor) -> Tensor:
        """Logits [..., rows] -> [..., size], -inf where the head has no row; as they are where row
        i is token i."""
        if self.target_ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        wide[..., self.target_ids] = logits
        return wide


def read_vocabulary(draft: Weights, config: DFlashConfig, head_rows: int = 0) -> DraftVocabulary:
    """The map that a checkpoint ships; its first `head_rows` tokens only, where that is not 0.
    `t2d`, its reverse, must agree. Raises CheckpointError."""
    size, rows = config.vocab_size, config.draft_vocab_size
    if not 0 <= head_rows <= rows:
        raise CheckpointError(f"head_rows = {head_rows} is not supported; accepted: 0 .. {rows}")
    kept = head_rows or rows
    if "d2t" not in draft:
        if rows < size:
            raise CheckpointError(
                f"tensor d2t is missing: draft_vocab_size {rows} is less than the target's {size}"
            )
        return DraftVocabulary(size, kept)
    ids = draft.take_integers("d2t", rows) + torch.arange(rows)
    if int(ids.min()) < 0 or int(ids.max()) >= size or len(set(ids.tolist())) < rows:
        raise CheckpointError(
            f"tensor d2t gives ids {int(ids.min())} .. {int(ids.max())}; accepted: distinct ids in "
            f"[0, {size}), as offsets from the row"
        )
    if "t2d" in draft:
        known = torch.zeros(size, dtype=torch.int64)
        known[ids] = 1
        if not torch.equal(draft.take_integers("t2d", size), known):
            raise CheckpointError("tensors d2t and t2d name different tokens")
    if torch.equal(ids, torch.arange(size)):  # a whole head, each row where it belongs
        return DraftVocabulary(size, kept)
    order = ids.argsort()[:kept]
    return DraftVocabulary(size, kept, ids[order].to(draft.device), order.to(draft.device))
