"""The native engine: loads a target, owns its pages, runs steps."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from engine import selftest
from engine.api import Item, ItemResult, ModelInfo
from engine.attention.base import AttentionBackend
from engine.attention.report import AttentionReport
from engine.attention.select import make_backend
from engine.batch import Packed, Placed, pack
from engine.config import EngineConfig
from engine.default_model import resolve_model
from engine.device import kv_dtype, numerics_fingerprint, resolve_device, use_native, weight_dtype
from engine.errors import CheckpointError
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.pool import PagePool, PageTable, PoolStats
from engine.models.config import from_hf
from engine.models.layers import NATIVE, TORCH, Rows
from engine.models.llama import LlamaModel
from engine.sampling import Draw, accept, draw
from engine.tokenizer import check_vocabulary, read_document
from engine.weights import Weights, fingerprint, read_json


class NativeEngine:
    """Implements engine.api.Engine. One thread calls it."""

    def __init__(
        self,
        config: EngineConfig,
        model: LlamaModel,
        cache: KVCache,
        backend: AttentionBackend,
        report: AttentionReport,
        info: ModelInfo,
    ) -> None:
        self._config, self._model, self._cache, self._backend = config, model, cache, backend
        self._report, self._info = report, info
        # The last page of the cache belongs to no session: padding rows write there.
        self._pool = PagePool(cache.page_count - 1, config.page_tokens)
        self._scratch_slot = (cache.page_count - 1) * config.page_tokens
        self._independent = (
            model.rows_independent and backend.rows_independent and selftest.rows_independent(self)
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def attention(self) -> AttentionReport:
        return self._report

    @property
    def rows_independent(self) -> bool:
        return self._independent

    def allocate(self, length: int) -> PageTable:
        return self._pool.allocate(length)

    def block_limit(self, start: int, exact: bool) -> int:
        room = self._info.max_length - start
        if not exact or self._independent:
            return room
        bucket = self._config.kv_bucket
        return min(room, self._config.exact_width, bucket - start % bucket)

    def chunk_limit(self, start: int, exact: bool) -> int:
        chunk = self._config.prefill_chunk
        return chunk - start % chunk if exact and not self._independent else chunk

    def stats(self) -> PoolStats:
        return self._pool.stats()

    def check_integrity(self) -> None:
        self._pool.check_integrity()

    @torch.inference_mode()
    def step(self, items: Sequence[Item]) -> list[ItemResult]:
        for item in items:
            item.table.truncate(item.start)
            item.table.reserve(item.start + len(item.ids))
        if self._independent or not any(item.exact for item in items):
            return self._run(items, minimum=0)
        # Rows depend on their neighbours here: an exact item runs alone, at a width that does not
        # depend on k.
        mixed = iter(self._run([item for item in items if not item.exact], minimum=0))
        width = self._config.exact_width
        return [self._run([i], width)[0] if i.exact else next(mixed) for i in items]

    def _run(self, items: Sequence[Item], minimum: int) -> list[ItemResult]:
        if not items:
            return []
        packed = pack(items, self._config.page_tokens, minimum, self._scratch_slot)
        taps = tuple(sorted({tap for item in items for tap in item.taps}))
        logits, tap_rows = self.forward(packed, taps, torch.bfloat16)
        margins = any(item.margins for item in items)
        drawn, gaps = self._draw(logits, items, margins)
        results = []
        at = 0
        for placed in packed.placed:
            count = placed.item.draws
            own_gaps = gaps[at : at + count] if placed.item.margins else []
            rows = self._item_rows(placed, taps, tap_rows)
            results.append(self._result(placed, drawn[at : at + count], own_gaps, rows))
            at += count
        return results

    def forward(
        self, packed: Packed, taps: tuple[int, ...], tap_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits of the rows that draw and the taps of all rows (None where there is nothing to
        give).
        """
        rows = Rows(
            ids=torch.tensor(packed.ids, dtype=torch.int64),
            positions=torch.tensor(packed.positions, dtype=torch.int64),
            slots=torch.tensor(packed.slots, dtype=torch.int64),
            plan=self._backend.plan(packed.spans),
        )
        wanted = torch.tensor(packed.draw_rows, dtype=torch.int64) if packed.draw_rows else None
        width = len(taps) * self._info.hidden_size
        tap_rows = torch.empty(len(packed.ids), width, dtype=tap_dtype) if taps else None
        logits = self._model.forward(rows, self._cache, self._backend, wanted, taps, tap_rows)
        return logits, tap_rows

    def _draw(
        self, logits: Tensor | None, items: Sequence[Item], margins: bool
    ) -> tuple[list[int], list[float]]:
        if logits is None:
            return [], []
        draws = [
            # The row at position p draws the token at p + 1.
            Draw(item.sampling, item.start + len(item.ids) - item.draws + offset + 1)
            for item in items
            for offset in range(item.draws)
        ]
        return draw(logits, draws, margins, self._model.kernels.gumbel_argmax)

    def _item_rows(
        self, placed: Placed, taps: tuple[int, ...], tap_rows: Tensor | None
    ) -> Tensor | None:
        if not placed.item.taps or tap_rows is None:
            return None
        rows = tap_rows[placed.first_row : placed.first_row + len(placed.item.ids)]
        if placed.item.taps == taps:
            return rows
        hidden = self._info.hidden_size
        columns = [rows[:, (at := taps.index(t) * hidden) : at + hidden] for t in placed.item.taps]
        return torch.cat(columns, dim=1)

    def _result(
        self, placed: Placed, drawn: list[int], gaps: list[float], rows: Tensor | None
    ) -> ItemResult:
        item = placed.item
        drafts = item.ids[len(item.ids) - item.draws + 1 :] if item.draws else ()
        accepted = accept(drafts, drawn)
        valid = len(item.ids) - (len(drafts) - accepted)
        item.table.length = item.start + valid
        kept = accepted + 1 if item.draws else 0
        return ItemResult(
            tokens=tuple(drawn[:kept]),
            accepted=accepted,
            rows=None if rows is None else rows[:valid],
            margins=tuple(gaps[:kept]),
            width=placed.width,
        )


@torch.inference_mode()
def load_engine(config: EngineConfig) -> NativeEngine:
    """Loads the model, allocates pages, chooses the attention backend, checks row independence."""
    resolve_device(config.device)
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    native = use_native(config.kernels)
    source = resolve_model(config.model)
    model_config = from_hf(read_json(source.directory / "config.json"))
    limit = min(config.max_length or model_config.default_length, model_config.max_positions)
    document = read_document(source.directory)
    check_vocabulary(document, model_config.vocab_size)
    geometry = KVGeometry(
        layers=model_config.layer_count,
        kv_heads=model_config.kv_heads,
        head_dim=model_config.head_dim,
        page_tokens=config.page_tokens,
        dtype=kv_dtype(config.kv_dtype),
    )
    cache = KVCache(geometry, page_count(config, geometry) + 1)
    backend, report = make_backend(
        config.attention_backend,
        cache,
        model_config.heads,
        model_config.modes,
        native,
        config.kv_bucket,
    )
    weights = Weights(source.directory, weight_dtype(config.dtype))
    kernels = NATIVE if native else TORCH
    # Padding rows of a short block may stand past the limit.
    model = LlamaModel(model_config, weights, kernels, limit, padding=config.exact_width)
    special = json.loads(document)["special"]
    info = ModelInfo(
        name=source.name,
        fingerprint=fingerprint(source.directory),
        numerics=numerics_fingerprint(
            config, native, report.chosen, limit if model_config.rope.kind == "dynamic" else 0
        ),
        vocab_size=model_config.vocab_size,
        hidden_size=model_config.hidden_size,
        layer_count=model_config.layer_count,
        max_length=limit,
        eos_token_ids=tuple(special["eos_token_ids"]) or model_config.eos_token_ids,
        device="cpu",
        dtype=str(weight_dtype(config.dtype)).removeprefix("torch."),
    )
    return NativeEngine(config, model, cache, backend, report, info)


def page_count(config: EngineConfig, geometry: KVGeometry) -> int:
    """Pages that the settings ask for; at least one."""
    if config.kv_pages is not None:
        return config.kv_pages
    count = config.kv_memory_mb * 2**20 // (geometry.bytes_per_token * geometry.page_tokens)
    if count < 1:
        raise CheckpointError(f"kv_memory_mb = {config.kv_memory_mb} holds no page of this model")
    return count
