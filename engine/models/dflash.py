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
from engine.attention.request import KVGroup
from engine.attention.resolution import Resolution
from engine.attention.select import AttentionOptions, make_backend, resolve_attention
from engine.device import use_native
from engine.kv.cache import CacheGeometry, PagedCache
from engine.kv.groups import PagedGroups
from engine.kv.pool import PagePool, PageTable, TableView
from engine.linear import Linear
from engine.models.dflash_config import DFlashConfig
from engine.models.draft_attention import draft_attention
from engine.models.draft_vocabulary import DraftVocabulary
from engine.models.family import build_cache, cache_geometry, latent_of
from engine.models.layers import NATIVE, TORCH, Kernels, Rows
from engine.weights import Weights


@dataclass(frozen=True, slots=True)
class DFlashOptions:
    """How to run a draft. `head_rows` drafts with the first rows of the head only (0: all);
    `int8_head` quantises them.
    """

    page_count: int = 2048
    page_tokens: int = 16
    kv_dtype: str = "auto"
    weight_dtype: torch.dtype = torch.bfloat16
    kernels: str = "auto"
    attention_backend: str | None = None
    cuda_graph_mode: str = "auto"
    head_rows: int = 0
    int8_head: bool = False


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
class ContextRows:
    """Rows [n, row_width] of positions [start, start + n), any float dtype: the target's taps."""

    table: PageTable
    start: int
    rows: Tensor
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


def choose_attention(
    config: DFlashConfig,
    options: DFlashOptions,
    method: str = "dflash",
    target: Resolution | None = None,
    group: KVGroup | None = None,
) -> Resolution:
    """The draft's own backend and KV, before anything is loaded. Raises AttentionRefused. `target`
    and `group`: of a draft in its target's pages, see `resolve_attention`.
    """
    return resolve_attention(
        AttentionOptions(
            options.attention_backend,
            options.kv_dtype,
            options.page_tokens,
            options.cuda_graph_mode,
        ),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        modes=config.modes,
        native=use_native(options.kernels),
        latent=latent_of(config),
        role="draft",
        method=method,
        query_tokens=config.block_size,
        target=target,
        group=group,
    )


def kernels_of(options: DFlashOptions) -> Kernels:
    return NATIVE if use_native(options.kernels) else TORCH


@dataclass(frozen=True, slots=True)
class ContextMemory:
    """Where the context K/V lives: `cache` is one of the groups under the tables of `pages`."""

    pages: PagedGroups
    cache: PagedCache

    @classmethod
    def own(cls, geometry: CacheGeometry, page_count: int) -> ContextMemory:
        """Pages of the draft alone."""
        pool, cache = PagePool(page_count, geometry.page_tokens), build_cache(geometry, page_count)
        return cls(PagedGroups(pool, {"draft": cache}), cache)


class DFlashModel:
    """A loaded draft, in pages of its own or of its target. One thread calls it."""

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
        self.kernels = kernels_of(options)
        geometry = cache_geometry(config, attention.geometry)
        memory = memory or ContextMemory.own(geometry, options.page_count)
        self._pages, self.pool, self.cache = memory.pages, memory.pages.pool, memory.cache
        self._backend, self.attention = make_backend(attention, self.cache), attention.report()
        self._embedding, self._head = tables.embedding, tables.head
        self._mask_vector, self.vocabulary = tables.mask_vector, tables.vocabulary
        d = config.hidden_size
        self._fc = self.kernels.pack(draft.take("fc.weight", d, config.row_width))
        self._hidden_norm = draft.take("hidden_norm.weight", d).float()
        self._norm = draft.take("norm.weight", d).float()
        self._layer_attention = draft_attention(config, draft, self.kernels, self.cache)
        self._layers = [self._take_layer(draft, index) for index in range(config.layer_count)]

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

    @torch.inference_mode()
    def write_contexts(self, writes: Sequence[ContextRows]) -> None:
        """The same for several sessions, each at most once, with one product for all."""
        positions: list[Tensor] = []
        for write in writes:
            first, count = write.start - write.origin, write.rows.shape[0]
            assert 0 <= first <= write.table.length, (
                f"context gap: have {write.table.length}, rows start at {first}"
            )
            write.table.truncate(first)
            write.table.reserve(first + count)
            positions.append(torch.arange(write.start, write.start + count))
        self._pages.copy_pages()
        slots = [
            write.table.slot(position - write.origin)
            for write, written in zip(writes, positions, strict=True)
            for position in written.tolist()
        ]
        self.write_rows(
            torch.cat([write.rows.float() for write in writes]),
            torch.cat(positions),
            torch.tensor(slots, dtype=torch.int64),
        )
        for write in writes:
            write.table.length = write.start - write.origin + write.rows.shape[0]

    @torch.inference_mode()
    def write_rows(self, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Stores K/V made of `rows` fp32 [n, row_width] at `positions` and flat `slots`, int64 [n];
        who calls it owns the tables."""
        c = self.config
        x = self.kernels.rms_norm(self._fc(rows), self._hidden_norm, c.rms_eps)
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
        c, b = self.config, self.config.block_size
        for block in blocks:
            assert block.start + b <= c.max_positions, (
                "a block must end inside the draft's positions"
            )
            assert block.table.length == block.start - block.origin, "context must reach the anchor"
            block.table.reserve(block.start - block.origin + b)
        self._pages.copy_pages()
        states = self._forward(blocks).view(len(blocks), b, -1)
        return states[:, self.first_slot : self.first_slot + count]

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
        return self._run(
            Rows(ids.flatten(), positions, torch.tensor(slots), self._backend.plan(spans))
        )

    def _run(self, rows: Rows) -> Tensor:
        run, eps, attention = self.kernels, self.config.rms_eps, self._layer_attention
        residual = run.embed(rows.ids, self._embedding)
        if self._mask_vector is not None:
            blocks = residual.view(-1, self.config.block_size, self.config.hidden_size)
            blocks[:, 1:] = self._mask_vector
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            into = attention.into[index]
            projected = run.norm_linear(residual, delta, layer.input_norm, eps, into)
            queries = attention.store(index, projected, rows)
            found = attention.found(index, self._backend.run(rows.plan, index, queries))
            delta = run.linear_add(found, attention.out[index], residual)
            inner = run.norm_gated(residual, delta, layer.post_norm, eps, layer.gate_up)
            delta = run.linear_add(inner, layer.down, residual)
        return run.norm(residual, delta, self._norm, eps)
