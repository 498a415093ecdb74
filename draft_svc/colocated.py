"""DFlash and DSpark in their target's process: context K/V in the target's pages, written in its
steps.

The drafter never sees a session: a step gives it rows, a decided verdict asks it for a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from draft_svc.colocated_service import ColocatedServicer
from draft_svc.costs import measure
from draft_svc.loading import DEFAULT_DRAFT, DEFAULT_DSPARK, checkpoint_path, head_in_int8
from draft_svc.methods.base import (
    REASON_CAPACITY,
    REASON_K_LIMIT,
    REASON_PAGES,
    REASON_ROWS_MISSING,
    MethodInfo,
)
from draft_svc.methods.dflash import DFlashMethod
from draft_svc.methods.dflash_context import DFlashContext
from draft_svc.methods.dspark import DSparkMethod
from draft_svc.methods.first_runs import first_runs
from draft_svc.metrics import Metrics
from draft_svc.service import SERVICE_NAME
from engine.api import Ask, Proposed, Sampling, never
from engine.attention.request import KVGroup
from engine.block_call import Wanted
from engine.colocated import DrafterSettings, Group, Handles, TapRows, Target
from engine.default_model import tokenizer_document, tokenizer_hash
from engine.device import weight_dtype
from engine.errors import OutOfPages, SettingRefused
from engine.kv.pool import PageTable, PoolStats, TableView
from engine.models.dflash import Block
from engine.models.draft_context import ContextMemory
from engine.models.draft_dialects import parse_draft
from engine.models.draft_loading import DraftTarget, build_draft
from engine.models.draft_options import DFlashOptions, choose_attention
from engine.models.family import cache_geometry
from engine.weights import read_json
from specwire.v1 import draft_pb2_grpc


def dflash(settings: DrafterSettings) -> BlockDrafter:
    """Entry point of `specwire.drafters`."""
    return BlockDrafter("dflash", settings)


def dspark(settings: DrafterSettings) -> BlockDrafter:
    """Entry point of `specwire.drafters`."""
    return BlockDrafter("dspark", settings)


class BlockDrafter:
    """Implements engine.api.Drafter."""

    services = (SERVICE_NAME,)

    def __init__(self, method: str, settings: DrafterSettings) -> None:
        self.method, self._settings = method, settings
        shipped = DEFAULT_DSPARK if method == "dspark" else DEFAULT_DRAFT
        self._checkpoint = checkpoint_path("draft_checkpoint", settings.checkpoint, shipped)
        self._weight_dtype = weight_dtype(settings.dtype)
        self._info: MethodInfo | None = None
        self._metrics = Metrics()

    def register(self, server: Any, *, incarnation: int, registry: Any) -> None:
        self._metrics = Metrics(registry)
        servicer = ColocatedServicer(lambda: self._info, self._pool_stats, incarnation=incarnation)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)

    def _pool_stats(self) -> PoolStats:
        return self._model.pool.stats()

    # -- on the engine's thread, in this order ---------------------------------------------------

    def describe(self, target: Target) -> tuple[Group, ...]:
        raw = read_json(self._checkpoint / "config.json")
        self._target = DraftTarget(str(target.directory), self._weight_dtype)
        self._config = parse_draft(raw, self._target.described, self.method)
        self._options = self._options_on(target.device)
        kind = _kind(self._settings.kv_group)
        attention = choose_attention(
            self._config, self._options, self.method, target.attention, kind
        )
        group = Group(
            name=self.method,
            kind=attention.request.kv_group,
            geometry=cache_geometry(self._config, attention.geometry),
            attention=attention,
        )
        self._group = group
        return (group,)

    def _options_on(self, device: torch.device) -> DFlashOptions:
        s = self._settings
        return DFlashOptions(
            device=device,
            kv_dtype=s.kv_dtype,
            weight_dtype=self._weight_dtype,
            kernels=s.kernels,
            attention_backend=s.attention_backend,
            cuda_graph_mode=s.cuda_graph_mode,
            int8_head=head_in_int8(s.head_dtype, s.dtype, s.kernels, device),
        )

    def attach(self, handles: Handles) -> tuple[int, ...]:
        settings, group = self._settings, self._group
        memory = ContextMemory(
            handles.memory,
            handles.caches[group.name],
            handles.scratch_slot,
            handles.max_length + self._config.block_size,
        )
        self._target.share(handles.embedding, handles.head)
        loaded = build_draft(
            self._checkpoint,
            self._config,
            self._target,
            self._options,
            group.attention,
            self.method,
            memory,
        )
        self._model, self._stepper = loaded.model, loaded.stepper
        self._scratch_slot = handles.scratch_slot
        kind = DSparkMethod if self.method == "dspark" else DFlashMethod
        self._method = kind(
            loaded,
            max_draft_tokens=settings.max_draft_tokens,
            max_length=settings.max_length,
            tokenizer_hash=tokenizer_hash(tokenizer_document(settings.model)),
            confidences=settings.confidences,
        )
        self._longest = handles.max_length
        return self._config.tap_ids

    def warm_up(self, stopped: Callable[[], bool] = never) -> None:
        info = self._method.info
        tokens, longest = info.max_draft_tokens, min(info.max_length_tokens, self._longest)
        stepper, sessions = self._stepper, self._settings.warm_sessions
        if stepper is not None and sessions and self._model.device.type == "cuda":
            shapes = stepper.shapes(sessions, tokens)
            first_runs(self._method, self._filled, shapes, stopped=stopped)
        if stopped():
            return
        costs = measure(self._method, self._filled, tokens=tokens, max_length=longest)
        self._info = replace(info, costs=costs)

    def _filled(self, sessions: int, length: int) -> list[DFlashContext]:
        """Contexts of whatever the pages hold: it does not matter to the time."""
        return [
            DFlashContext([0] * length, Sampling(temperature=0.0), self._table(length - 1))
            for _ in range(sessions)
        ]

    def _table(self, length: int) -> PageTable:
        try:
            table = self._model.pool.allocate(length)
        except OutOfPages:
            return self._model.pool.allocate(0)  # this point is not measured
        table.length = length
        return table

    # -- in and between steps --------------------------------------------------------------------

    @property
    def once_ns(self) -> int:
        return self._method.once_ns

    @property
    def max_draft_tokens(self) -> int:
        return self._method.info.max_draft_tokens

    def write(self, rows: TapRows) -> None:
        positions, slots, limit = rows.positions, rows.slots, self._config.max_positions
        if rows.highest >= limit:  # no block reaches so far: what is there, nobody reads
            slots = torch.where(positions < limit, slots, self._scratch_slot)
            positions = positions.clamp(max=limit - 1)
        self._model.write_rows(rows.rows, positions, slots)

    def propose(self, asks: Sequence[Ask]) -> list[Proposed]:
        began = time.perf_counter()
        held = [(ask.table, len(ask.table.pages)) for ask in asks]
        proposed: dict[int, Proposed] = {}
        ready: list[tuple[int, Wanted]] = []
        try:
            for index, ask in enumerate(asks):
                block, reason = self._block(ask)
                if block is None:
                    proposed[index] = Proposed(reason=reason)
                else:
                    k = min(ask.k, self.max_draft_tokens)
                    ready.append((index, Wanted(block, ask.sampling, k)))
            drafts = self._method.draft([wanted for _, wanted in ready]) if ready else []
        finally:
            for table, pages in held:
                table.trim(pages)  # a block's own K/V is of no use behind it
        for (index, wanted), draft in zip(ready, drafts, strict=True):
            reason = REASON_K_LIMIT if wanted.k < asks[index].k else ""
            proposed[index] = Proposed(draft.ids, draft.confidences, reason)
        tokens = sum(len(draft.ids) for draft in drafts)
        self._metrics.proposed(self.method, tokens, time.perf_counter() - began)
        return [proposed[index] for index in range(len(asks))]

    def _block(self, ask: Ask) -> tuple[Block | None, str]:
        """The block behind the context, its pages reserved; or why there is none."""
        table, start, size = ask.table, ask.table.length, self._config.block_size
        if start + size > self._method.info.max_length_tokens:
            return None, REASON_CAPACITY
        covered = table.covered.get(self._group.name, start)
        first = -(-covered // self._model.pool.page_tokens)
        origin = first * self._model.pool.page_tokens
        if origin >= start:
            return None, REASON_ROWS_MISSING
        try:
            table.reserve(start + size)
        except OutOfPages:
            return None, REASON_PAGES
        view = TableView(table, first, self._model.pool.page_tokens) if first else table
        return Block(view, ask.anchor, start, origin), ""


def _kind(setting: str) -> KVGroup | None:
    """None leaves it to the two models' attention."""
    if setting == "auto":
        return None
    if setting not in (KVGroup.SAME_CACHE, KVGroup.POOLED):
        raise SettingRefused("draft_kv_group", setting, "auto, same_cache, pooled")
    return KVGroup(setting)
