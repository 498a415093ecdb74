"""DFlash (arXiv 2602.06036): a block of masked slots filled in one forward over context made from
target hidden states.

A context vector c = RMSNorm(fc(taps)) enters every layer as keys and values only; a block [anchor,
mask, ...] is the query.
The model holds the draft's layers, an embedding and a head, no target body; `draft_loading.py`
makes one from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import Span
from engine.attention.resolution import Resolution
from engine.attention.select import make_backend
from engine.batch import slots_of
from engine.device import kernel_mode
from engine.device_draw import DeviceDrawer
from engine.draw_rows import DrawRows
from engine.kv.pool import PageTable, TableView
from engine.linear import Linear
from engine.models.dflash_config import DFlashConfig
from engine.models.draft_attention import draft_attention
from engine.models.draft_context import ContextMemory, ContextRows, ContextWriter
from engine.models.draft_options import DFlashOptions
from engine.models.draft_vocabulary import DraftVocabulary
from engine.models.family import cache_geometry
from engine.models.kernel_sets import kernels_for
from engine.models.layers import Rows
from engine.models.row_projection import RowProjection
from engine.weights import Weights


@dataclass(frozen=True, slots=True)
class Block:
    """One session's block. Context K/V covers positions [origin, start); `anchor` stands at
    position `start`.

    Position p lives at index p - origin of `table`, so that a context may begin late.
    """

    table: PageTable | TableView
    anchor: int
    start: int
    origin: int = 0


@dataclass(frozen=True, slots=True)
class DraftTables:
    """embedding [vocabulary, hidden]; `head` with the rows that `vocabulary` has; `mask_vector`
    fp32 [hidden], what masked slots are made of where it is not the embedding of the mask id."""

    embedding: Tensor
    head: Linear
    vocabulary: DraftVocabulary
    mask_vector: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class SlotDraws:
    """tokens int64 [blocks, slots]; chances fp32 [blocks, slots] that each is accepted once those
    before it are, or None."""

    tokens: Tensor
    chances: Tensor | None


def own_chances(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
    """The draft's own probability fp32 [rows] of each token at its temperature (0: at 1), filters
    left out. Logits fp32 [rows, vocabulary]."""
    scale = 1 / torch.where(temperatures > 0, temperatures, 1.0)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return (chosen * scale - (logits * scale[:, None]).logsumexp(1)).exp()


class DFlashModel:
    """A loaded draft, in pages of its own or of its target. One thread calls it. `slot_by_slot`
    says whether a slot's draw depends on the one before it."""

    slot_by_slot = False

    def __init__(
        self,
        config: DFlashConfig,
        draft: Weights,
        tables: DraftTables,
        options: DFlashOptions,
        attention: Resolution,
        memory: ContextMemory | None = None,
    ) -> None:
        """Without `memory` the draft gets pages of its own."""
        self.config, self.first_slot = config, config.first_slot
        self.device = draft.device
        self.kernels = kernels_for(kernel_mode(options.kernels, self.device), options.weight_dtype)
        if memory is None:
            geometry = cache_geometry(config, attention.geometry)
            memory = ContextMemory.own(geometry, options.page_count, self.device)
        self.memory, self.pool, self.cache = memory, memory.pages.pool, memory.cache
        self.backend, self.attention = make_backend(attention, self.cache), attention.report()
        self.captures = attention.graphs.decode == "FULL"
        self._embedding, self._head = tables.embedding, tables.head
        self._mask_vector, self.vocabulary = tables.mask_vector, tables.vocabulary
        d = config.hidden_size
        self._project = RowProjection(config, draft, self.kernels)
        self._norm = draft.take("norm.weight", d).float()
        self._layer_attention = draft_attention(config, draft, self.kernels, self.cache)
        self._layers = [self._take_layer(draft, index) for index in range(config.layer_count)]
        self._writer: ContextWriter | None = None
        if self.device.type == "cuda" or self.kernels.mode == "triton":
            scratch = memory.scratch_slot
            self._writer = ContextWriter(self.write_rows, scratch, self.device, self.captures)

    @property
    def max_draft_tokens(self) -> int:
        """What one block proposes."""
        return self.config.max_draft_tokens

    def _take_layer(self, draft: Weights, index: int) -> _Layer:
        """Layer `index` but for its attention."""
        c, prefix = self.config, f"layers.{index}"
        d, take, pack = c.hidden_size, draft.take, self.kernels.pack
        gate_up = torch.cat(
            [
                take(f"{prefix}.mlp.{name}_proj.weight", c.intermediate_size, d)
                for name in ("gate", "up")
            ]
        )
        return _Layer(
            input_norm=take(f"{prefix}.input_layernorm.weight", d).float(),
            post_norm=take(f"{prefix}.post_attention_layernorm.weight", d).float(),
            gate_up=pack(gate_up),
            down=pack(take(f"{prefix}.mlp.down_proj.weight", d, c.intermediate_size)),
        )

    def write_context(self, table: PageTable, start: int, rows: Tensor, origin: int = 0) -> None:
        """Stores K/V of positions [start, start + len(rows)) and sets the table's length to their
        end. Raises OutOfPages and writes nothing when pages are short.
        """
        self.write_contexts([ContextRows(table, start, rows, origin)])

    def write_contexts(self, writes: Sequence[ContextRows]) -> None:
        """The same for several sessions, each at most once, with one product for all whose rows are
        alike."""
        for write in writes:
            first, count = write.start - write.origin, write.rows.shape[0]
            assert 0 <= first <= write.table.length, (
                f"context gap: have {write.table.length}, rows start at {first}"
            )
            write.table.truncate(first)
            write.table.reserve(first + count)
        self.memory.pages.copy_pages()
        for projected in (False, True):
            if alike := [write for write in writes if write.projected is projected]:
                self._write_alike(alike, projected)
        for write in writes:
            write.table.length = write.start - write.origin + write.rows.shape[0]

    def _write_alike(self, writes: Sequence[ContextRows], projected: bool) -> None:
        positions: list[int] = []
        slots: list[int] = []
        for write in writes:
            first, count = write.start - write.origin, write.rows.shape[0]
            positions += range(write.start, write.start + count)
            slots += slots_of(write.table.pages, self.pool.page_tokens, first, count)
        if self._writer is not None:
            self._writer(writes, positions, slots)
        else:
            rows = torch.cat([write.tensor().float() for write in writes])
            self.write_rows(rows, torch.tensor(positions), torch.tensor(slots), projected)

    def capture_writes(self) -> None:
        """Captures the graphs by which few bf16 rows are taken in, where the draft runs by any."""
        c = self.config
        if self._writer is not None:
            for width, projected in ((c.row_width, False), (c.hidden_size, True)):
                self._writer.capture(width, projected)

    def over(self) -> None:
        """Tells that everything launched so far is over: the next write need not ask."""
        if self._writer is not None:
            self._writer.over()

    @torch.inference_mode()
    def write_rows(
        self, rows: Tensor, positions: Tensor, slots: Tensor, projected: bool = False
    ) -> None:
        """Stores K/V made of `rows` [n, row_width], any float dtype, at `positions` and flat
        `slots`, int64 [n] (on a GPU int32 too); who calls it owns the tables. `projected`: they
        are [n, hidden], what `RowProjection` made. Does not wait for the device."""
        x = rows if projected else self._project(rows)
        self._layer_attention.write_context(x, positions, slots)

    @torch.inference_mode()
    def propose_logits(self, blocks: Sequence[Block], count: int | None = None) -> Tensor:
        """Logits [len(blocks), count, vocabulary] of the first `count` slots that propose (default:
        all), fp32; with `head_rows` the vocabulary ends there.

        The whole trained block always runs, since its slots see each other; only the slots asked
        for go through the head.
        The block's own K/V is scratch behind the context: the table's length does not change.
        Raises OutOfPages.
        """
        count = self.config.max_draft_tokens if count is None else count
        states = self.states(blocks, count)
        logits = self._head(states.flatten(0, 1)).view(len(blocks), count, -1)
        return self.vocabulary.widen(logits)

    @torch.inference_mode()
    def states(self, blocks: Sequence[Block], count: int) -> Tensor:
        """Final states [len(blocks), count, hidden] of the first `count` proposing slots; what
        `propose_logits` says holds here too.
        """
        self.reserve(blocks)
        states = self._forward(blocks).view(len(blocks), self.config.block_size, -1)
        return states[:, self.first_slot : self.first_slot + count]

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Makes the pages behind the contexts writable for the blocks. Raises OutOfPages."""
        c, b = self.config, self.config.block_size
        for block in blocks:
            assert block.start + b <= c.max_positions, (
                "a block must end inside the draft's positions"
            )
            assert block.table.length == block.start - block.origin, "context must reach the anchor"
            block.table.reserve(block.start - block.origin + b)
        self.memory.pages.copy_pages()

    def _forward(self, blocks: Sequence[Block]) -> Tensor:
        """Final-norm states [len(blocks) * block_size, hidden]."""
        c, b = self.config, self.config.block_size
        ids = torch.full((len(blocks), b), c.mask_token_id)
        ids[:, 0] = torch.tensor([block.anchor for block in blocks])
        steps = torch.arange(b)
        starts = torch.tensor([block.start for block in blocks])
        positions = (starts[:, None] + steps).flatten()
        spans, slots = [], []
        for row, block in enumerate(blocks):
            first = block.start - block.origin
            spans.append(Span(block.table, first, row * b, b))
            slots += [block.table.slot(first + s) for s in range(b)]
        ids, positions, flat = (
            values.to(self.device) for values in (ids.flatten(), positions, torch.tensor(slots))
        )
        return self.run_blocks(Rows(ids, positions, flat, self.backend.plan(spans)))

    def run_blocks(self, rows: Rows) -> Tensor:
        """Final-norm states [blocks * block_size, hidden] of whole blocks one after another."""
        run, eps, attention = self.kernels, self.config.rms_eps, self._layer_attention
        residual = run.embed(rows.ids, self._embedding)
        if self._mask_vector is not None:
            blocks = residual.view(-1, self.config.block_size, self.config.hidden_size)
            blocks[:, 1:] = self._mask_vector
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            queries = attention.enter(index, residual, delta, layer.input_norm, rows)
            found = attention.found(index, self.backend.run(rows.plan, index, queries))
            delta = run.linear_add(found, attention.out[index], residual)
            inner = run.norm_gated(residual, delta, layer.post_norm, eps, layer.gate_up)
            delta = run.linear_add(inner, layer.down, residual)
        return run.norm(residual, delta, self._norm, eps)

    def draw_slots(
        self, states: Tensor, anchors: Tensor, how: DrawRows, drawer: DeviceDrawer, chances: bool
    ) -> SlotDraws:
        """Tokens of states [blocks, slots, hidden], all on the device and nothing read by the host.
        `anchors` int64 [blocks] stand before slot 0. `how` has a row for each block and slot or,
        where the draft draws `slot_by_slot`, for each block's slot 0."""
        logits = self.vocabulary.widen(self._head(states.flatten(0, 1)))
        tokens = drawer.draw(logits, how)
        sure = own_chances(logits, tokens, how.temperature) if chances else None
        shape = states.shape[:2]
        return SlotDraws(tokens.view(shape), None if sure is None else sure.view(shape))
