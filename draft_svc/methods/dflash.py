"""DFlash: a block of masked slots filled in one forward over context made from the target's hidden
states.

Confirmed rows become context K/V once; a proposal is one ragged forward over the blocks of every
session that is ready. Tokens are drawn as the target draws them: same noise, same filters, the
index of the token being drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draft_svc.methods.base import (
    REASON_CAPACITY,
    REASON_PAGES,
    REASON_ROWS_MISSING,
    Draft,
    Method,
    MethodInfo,
    Request,
    RowBlock,
    RowNeeds,
)
from engine.api import Sampling
from engine.attention.base import LayerMode
from engine.errors import OutOfPages
from engine.kernels.cpu import ops
from engine.kv.pool import PageTable, PoolStats
from engine.models.dflash import Block, LoadedDraft
from engine.sampling import Draw, draw


@dataclass(slots=True)
class DFlashContext:
    """Committed ids and the context K/V: positions [origin, end) are in `table`, `pending` rows
    follow it.
    """

    ids: list[int]
    sampling: Sampling
    table: PageTable
    origin: int = 0
    pending: list[RowBlock] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.origin + self.table.length

    def truncate(self, keep: int) -> None:
        """Forgets ids beyond `keep`, and the context of what they made: the anchor's row comes
        again.
        """
        if keep >= len(self.ids):
            return
        del self.ids[keep:]
        limit = max(keep - 1, 0)
        self.table.truncate(min(self.table.length, max(limit - self.origin, 0)))
        clipped = [block.clip(0, limit) for block in self.pending]
        self.pending = [block for block in clipped if len(block.rows)]


class DFlashMethod(Method[DFlashContext]):
    """A loaded DFlash draft. `max_length` bounds positions: no block reaches beyond it."""

    name = "dflash"

    def __init__(
        self,
        loaded: LoadedDraft,
        *,
        max_draft_tokens: int,
        max_length: int | None,
        tokenizer_hash: str,
    ) -> None:
        self._model = loaded.model
        config = loaded.model.config
        self._max_length = min(max_length or config.max_positions, config.max_positions)
        self._info = MethodInfo(
            method=self.name,
            name=loaded.name,
            max_draft_tokens=min(max_draft_tokens, config.max_draft_tokens),
            max_length_tokens=self._max_length,
            fingerprint=loaded.fingerprint,
            rows=RowNeeds(tap_ids=config.tap_ids, width=config.row_width),
            target_hidden_size=config.target_hidden_size,
            target_layer_count=config.target_layer_count,
            target_vocab_size=config.vocab_size,
            target_fingerprint=loaded.target_fingerprint,
            tokenizer_hash=tokenizer_hash,
            slot_mode="fill_in",
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            rope_style="neox",
            rope_theta=config.rope.theta,
            rope_scaling=config.rope.described,
            attention=loaded.model.attention,
            layer_attention=tuple(map(_describe, config.modes)),
        )

    @property
    def info(self) -> MethodInfo:
        return self._info

    def open(self, ids: Sequence[int], sampling: Sampling) -> DFlashContext:
        return DFlashContext(list(ids), sampling, self._model.pool.allocate(0))

    def update(
        self, context: DFlashContext, keep: int, tokens: Sequence[int], rows: Sequence[RowBlock]
    ) -> None:
        context.truncate(keep)
        context.ids += tokens
        clipped = [block.clip(0, self._max_length) for block in rows]
        context.pending += [block for block in clipped if len(block.rows)]
        self._write(context)

    def _write(self, context: DFlashContext) -> bool:
        """Turns pending rows into context K/V; False when pages are short, and the rows stay
        pending.
        """
        while context.pending:
            block = context.pending[0]
            if context.table.length == 0:
                context.origin = block.start
            try:
                self._model.write_context(
                    context.table, block.start, _tensor(block), context.origin
                )
            except OutOfPages:
                return False
            context.pending.pop(0)
        return True

    def propose(self, requests: Sequence[Request[DFlashContext]]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        ready: list[tuple[int, Request[DFlashContext]]] = []
        for index, request in enumerate(requests):
            reason = self._why_not(request.context)
            if reason:
                drafts[index] = Draft(reason=reason)
            else:
                ready.append((index, request))
        if ready:
            indices, chosen = zip(*ready, strict=True)
            drafts.update(zip(indices, self._run(chosen), strict=True))
        return [drafts[index] for index in range(len(requests))]

    def _why_not(self, context: DFlashContext) -> str:
        """Why no block can run now; empty: it can, and its pages are reserved."""
        start, size = len(context.ids) - 1, self._info.block_size
        if start + size > self._max_length:
            return REASON_CAPACITY
        if not self._write(context):
            return REASON_PAGES
        if context.end != start:
            return REASON_ROWS_MISSING
        try:
            context.table.reserve(start - context.origin + size)
        except OutOfPages:
            return REASON_PAGES
        return ""

    def _run(self, requests: Sequence[Request[DFlashContext]]) -> list[Draft]:
        contexts = [request.context for request in requests]
        blocks = [Block(c.table, c.ids[-1], len(c.ids) - 1, c.origin) for c in contexts]
        widest = max(request.k for request in requests)
        logits = self._model.propose_logits(blocks, widest)
        asked = torch.cat([logits[i, : request.k] for i, request in enumerate(requests)])
        draws = [
            Draw(request.context.sampling, len(request.context.ids) - 1 + slot)
            for request in requests
            for slot in range(1, request.k + 1)
        ]
        tokens, _ = draw(asked, draws, False, ops.gumbel_argmax)
        confidences = _probabilities(asked, draws, tokens)
        drafts, first = [], 0
        for request in requests:
            last = first + request.k
            drafts.append(Draft(tuple(tokens[first:last]), tuple(confidences[first:last])))
            first = last
        return drafts

    def close(self, context: DFlashContext) -> None:
        context.pending.clear()
        context.table.free()

    def stats(self) -> PoolStats:
        return self._model.pool.stats()

    def check_integrity(self) -> None:
        self._model.pool.check_integrity()

    def warm_up(self) -> None:
        """One round on zeros: packs, plans and allocates what the first session would wait for."""
        info = self._info
        assert info.rows is not None
        context = self.open([0, 0], Sampling(temperature=0.0))
        rows = torch.zeros(1, info.rows.width, dtype=torch.bfloat16).view(torch.uint16).numpy()
        self.update(context, 2, (), [RowBlock(0, rows)])
        self.propose([Request(context, info.max_draft_tokens)])
        self.close(context)


def _tensor(block: RowBlock) -> Tensor:
    """bf16 rows as they came; numpy carries the bits as uint16, and torch wants memory it may
    write.
    """
    return torch.from_numpy(block.rows.copy()).view(torch.bfloat16)


def _probabilities(logits: Tensor, draws: Sequence[Draw], tokens: Sequence[int]) -> list[float]:
    """The draft's own probability of each token, filters and temperature included."""
    scale = torch.tensor([1 / (d.sampling.temperature or 1.0) for d in draws])
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    if bool((scale != 1).any()):
        logits, chosen = logits * scale[:, None], chosen * scale
    probabilities: list[float] = (chosen - logits.logsumexp(1)).exp().tolist()
    return probabilities


def _describe(mode: LayerMode) -> str:
    kind = "causal" if mode.causal else "non-causal"
    return kind if mode.window is None else f"{kind} window={mode.window}"
