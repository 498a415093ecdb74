"""DFlash (arXiv 2602.06036): a block of masked slots filled in one forward over context made from
target hidden states.

A context vector c = RMSNorm(fc(taps)) enters every layer as keys and values only; a block [anchor,
mask, ...] is the query.
The model holds the draft's layers and, from the target's checkpoint, the embedding and the head:
no target body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.base import Span
from engine.attention.resolution import Resolution
from engine.attention.select import AttentionOptions, make_backend, resolve_attention
from engine.default_model import resolve_model
from engine.device import kv_dtype, use_native
from engine.errors import CheckpointError
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.pool import PagePool, PageTable
from engine.linear import Int8Linear, Linear
from engine.models.config import ModelConfig, from_hf
from engine.models.dflash_config import DFlashConfig, parse_dflash
from engine.models.layers import NATIVE, TORCH, HeadNorms, QkvShape, RopeTables, Rows
from engine.models.rope import rope_tables
from engine.weights import Weights, fingerprint, read_json


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

    table: PageTable
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
class _Layer:
    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


def choose_attention(
    config: DFlashConfig, options: DFlashOptions, method: str = "dflash"
) -> Resolution:
    """The draft's own backend and KV, before anything is loaded. Raises AttentionRefused."""
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
        role="draft",
        method=method,
        query_tokens=config.block_size,
    )


class DFlashModel:
    """A loaded draft with its own pages. One thread calls it."""

    first_slot = 1  # of a block, the first that proposes: the anchor's own proposes nothing

    def __init__(
        self,
        config: DFlashConfig,
        draft: Weights,
        embedding: Tensor,
        head: Tensor,
        options: DFlashOptions,
        attention: Resolution,
    ) -> None:
        self.config = config
        native = use_native(options.kernels)
        self.kernels = NATIVE if native else TORCH
        self.pool = PagePool(options.page_count, options.page_tokens)
        geometry = KVGeometry(
            config.layer_count,
            config.kv_heads,
            config.head_dim,
            options.page_tokens,
            kv_dtype(attention.geometry.dtype),
        )
        self.cache = KVCache(geometry, options.page_count)
        self._backend, self.attention = make_backend(attention, self.cache), attention.report()
        self._embedding = embedding
        head = head[: options.head_rows or head.shape[0]]
        self._head = Int8Linear(head) if options.int8_head else self.kernels.pack(head)
        self._rope = RopeTables(*rope_tables(config.rope, config.head_dim, config.max_positions))
        self._shape = QkvShape(config.heads, config.kv_heads, config.head_dim)
        d = config.hidden_size
        self._fc = self.kernels.pack(draft.take("fc.weight", d, config.row_width))
        self._hidden_norm = draft.take("hidden_norm.weight", d).float()
        self._norm = draft.take("norm.weight", d).float()
        self._layers: list[_Layer] = []
        context: list[Tensor] = []
        for index in range(config.layer_count):
            context.append(self._take_layer(draft, index))
        draft.finish()
        # One product gives the context keys and values of every layer.
        self._context_kv = self.kernels.pack(torch.cat(context))
        self._k_norms = torch.stack([layer.head_norms[1] for layer in self._layers])

    @property
    def max_draft_tokens(self) -> int:
        """What one block proposes."""
        return self.config.block_size - self.first_slot

    def _take_layer(self, draft: Weights, index: int) -> Tensor:
        """Reads layer `index`; returns its key and value weights."""
        c, prefix = self.config, f"layers.{index}"
        d, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
        take, pack = draft.take, self.kernels.pack
        w_q = take(f"{prefix}.self_attn.q_proj.weight", q, d)
        w_kv = torch.cat(
            [take(f"{prefix}.self_attn.{name}_proj.weight", kv, d) for name in ("k", "v")]
        )
        gate_up = torch.cat(
            [
                take(f"{prefix}.mlp.{name}_proj.weight", c.intermediate_size, d)
                for name in ("gate", "up")
            ]
        )
        self._layers.append(
            _Layer(
                input_norm=take(f"{prefix}.input_layernorm.weight", d).float(),
                qkv=pack(torch.cat((w_q, w_kv))),
                head_norms=(
                    take(f"{prefix}.self_attn.q_norm.weight", c.head_dim).float(),
                    take(f"{prefix}.self_attn.k_norm.weight", c.head_dim).float(),
                ),
                o=pack(take(f"{prefix}.self_attn.o_proj.weight", d, q)),
                post_norm=take(f"{prefix}.post_attention_layernorm.weight", d).float(),
                gate_up=pack(gate_up),
                down=pack(take(f"{prefix}.mlp.down_proj.weight", d, c.intermediate_size)),
            )
        )
        return w_kv

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
        self._copy_pages()
        slots = [
            write.table.slot(position - write.origin)
            for write, written in zip(writes, positions, strict=True)
            for position in written.tolist()
        ]
        self._write_rows(
            torch.cat([write.rows.float() for write in writes]),
            torch.cat(positions),
            torch.tensor(slots, dtype=torch.int64),
        )
        for write in writes:
            write.table.length = write.start - write.origin + write.rows.shape[0]

    def _copy_pages(self) -> None:
        """Makes shared pages writable where a table is about to write; before every write."""
        for source, to in self.pool.take_copies():
            self.cache.copy_page(source, to)

    def _write_rows(self, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
        c = self.config
        x = self.kernels.rms_norm(self._fc(rows), self._hidden_norm, c.rms_eps)
        kv, shape = self._context_kv(x), (c.kv_heads, c.head_dim)
        self.kernels.store_context(
            kv, shape, self._k_norms, c.rms_eps, self._rope, positions, slots, self.cache.data
        )

    @torch.inference_mode()
    def propose_logits(self, blocks: Sequence[Block], count: int | None = None) -> Tensor:
        """Logits [len(blocks), count, head rows] of the first `count` fill-in slots (default:
        block_size - 1), fp32.

        The whole trained block always runs, since its slots see each other; only the slots asked
        for go through the head.
        The block's own K/V is scratch behind the context: the table's length does not change.
        Raises OutOfPages.
        """
        count = self.config.max_draft_tokens if count is None else count
        states = self.states(blocks, count)
        return self._head(states.flatten(0, 1)).view(len(blocks), count, -1)

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
        self._copy_pages()
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
        run, eps = self.kernels, self.config.rms_eps
        residual = run.embed(rows.ids, self._embedding)
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv = run.norm_linear(residual, delta, layer.input_norm, eps, layer.qkv)
            pages = self.cache.k[index], self.cache.v[index]
            q = run.store(qkv, self._shape, layer.head_norms, eps, self._rope, rows, pages)
            attended = self._backend.run(rows.plan, index, q).flatten(1)
            delta = run.linear_add(attended, layer.o, residual)
            inner = run.norm_gated(residual, delta, layer.post_norm, eps, layer.gate_up)
            delta = run.linear_add(inner, layer.down, residual)
        return run.norm(residual, delta, self._norm, eps)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft and what the handshake says about it."""

    model: DFlashModel
    name: str
    fingerprint: str
    target_fingerprint: str


def target_tables(
    directory: Path, target: ModelConfig, options: DFlashOptions
) -> tuple[Tensor, Tensor]:
    """Embedding and head [vocab, hidden] of the target's checkpoint. Raises CheckpointError."""
    weights = Weights(directory, options.weight_dtype)
    shape = (target.vocab_size, target.hidden_size)
    if options.head_rows < 0 or options.head_rows > shape[0]:
        raise CheckpointError(
            f"head_rows = {options.head_rows} is not supported; accepted: 0 .. {shape[0]}"
        )
    embedding = weights.take("model.embed_tokens.weight", *shape)
    return embedding, embedding if target.tied_head else weights.take("lm_head.weight", *shape)


def load_dflash(checkpoint: Path, target: str, options: DFlashOptions | None = None) -> LoadedDraft:
    """Loads a z-lab style checkpoint, and embedding and head from the target's. Raises
    CheckpointError, and AttentionRefused before any weight is read."""
    options = options or DFlashOptions()
    source = resolve_model(target)
    target_config = from_hf(read_json(source.directory / "config.json"))
    config = parse_dflash(read_json(checkpoint / "config.json"), target_config)
    if (checkpoint / "mask_embedding.pt").exists():
        raise CheckpointError("a mask vector of its own (mask_embedding.pt) is not supported")
    attention = choose_attention(config, options)
    embedding, head = target_tables(source.directory, target_config, options)
    draft = Weights(checkpoint, options.weight_dtype)
    model = DFlashModel(config, draft, embedding, head, options, attention)
    return LoadedDraft(
        model, checkpoint.name, fingerprint(checkpoint), fingerprint(source.directory)
    )
