"""The native engine: owns a loaded target's pages and runs its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from engine import selftest, warm
from engine.api import Drafter, Item, ItemResult, ModelInfo, TokenLogprobs, WarmUp, nothing
from engine.attention.base import AttentionBackend
from engine.attention.report import AttentionReport
from engine.batch import Packed, Placed, pack
from engine.choose import Chosen, choose
from engine.colocated import TARGET_GROUP, Beside, Group, Handles
from engine.compiling import compile_first
from engine.config import EngineConfig
from engine.device import use_device
from engine.device_step import DeviceStepper
from engine.kv.cache import PagedCache
from engine.kv.groups import PagedGroups
from engine.kv.pool import PagePool, PageTable, PoolStats
from engine.logprobs import score_rows
from engine.models.family import Model
from engine.models.layers import Rows
from engine.projecting import Projecting
from engine.row_bits import RowBits
from engine.sampling import draw
from engine.tap_export import LateRows, StepRows

_ANY_ROWS = 1 << 30


class NativeEngine:
    """Implements engine.api.Engine. One thread calls it."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        cache: PagedCache,
        backend: AttentionBackend,
        report: AttentionReport,
        info: ModelInfo,
        beside: Mapping[str, PagedCache] = MappingProxyType({}),
        stepper: DeviceStepper | None = None,
        projecting: Projecting | None = None,
    ) -> None:
        """`beside` are the caches of other KV groups under the same page tables."""
        self._projecting = projecting
        self._config, self._model, self._cache, self._backend = config, model, cache, backend
        self._report, self._stepper = report, stepper
        loose = stepper is not None and model.kernels.loose(_ANY_ROWS) is not None
        projection = projecting.info if projecting is not None else None
        self._info = replace(info, loose=loose, projection=projection)
        # The last page of the cache belongs to no session: padding rows write there.
        self._pool = PagePool(cache.page_count - 1, config.page_tokens)
        self._memory = PagedGroups(self._pool, {TARGET_GROUP: cache, **beside})
        self._beside: Beside | None = None
        self._scratch_slot = (cache.page_count - 1) * config.page_tokens
        self._independent = model.rows_independent and backend.rows_independent
        if self._independent:
            compile_first(info.device, partial(selftest.rows_independent, self))
            self._independent = selftest.rows_independent(self)

    def attach(self, drafter: Drafter, groups: Sequence[Group]) -> None:
        """Lets a drafter keep its context in `groups` from the next step on. Raises
        CheckpointError, or BackendUnavailable where memory and layout disagree."""
        handles = Handles(
            embedding=self._model.embedding,
            head=self._model.head,
            caches={group.name: self._memory.caches[group.name] for group in groups},
            memory=self._memory,
            max_length=self._info.max_length,
            scratch_slot=self._scratch_slot,
        )
        self._beside = Beside(drafter, groups, handles)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def attention(self) -> AttentionReport:
        return self._report

    @property
    def rows_independent(self) -> bool:
        return self._independent

    @property
    def once_ns(self) -> int:
        return self._stepper.once_ns if self._stepper is not None else 0

    def allocate(self, length: int) -> PageTable:
        return self._pool.allocate(length)

    def block_limit(self, start: int, exact: bool) -> int:
        room = self._info.max_length - start
        if not exact or self._independent:
            return room
        bucket = self._config.kv_bucket
        return min(room, self._config.exact_width, bucket - start % bucket)

    def chunk_limit(self, start: int, exact: bool) -> int:
        chunk = self._info.prefill_chunk
        return chunk - start % chunk if exact and not self._independent else chunk

    def stats(self) -> PoolStats:
        return self._pool.stats()

    def check_integrity(self) -> None:
        self._pool.check_integrity()

    def admit_thread(self) -> bool:
        use_device(self._cache.device)
        return self._cache.device.type == "cuda"

    def warm_up(self, wanted: WarmUp) -> int:
        if self._stepper is None:
            return 0
        return warm.run(self, self._stepper, wanted, self._info.prefill_chunk, self._step)

    def step(
        self, items: Sequence[Item], launched: Callable[[], None] = nothing
    ) -> list[ItemResult]:
        return self._step(items, launched)

    @torch.inference_mode()
    def _step(
        self,
        items: Sequence[Item],
        launched: Callable[[], None] = nothing,
        capture: bool = True,
    ) -> list[ItemResult]:
        """`step`; without `capture` of a graph where it meets a new shape."""
        for item in items:
            table, start = item.table, item.start
            table.truncate(start)
            table.reserve(start + len(item.ids))
        self._memory.copy_pages()
        if self._independent or not any(item.exact for item in items):
            return self._run(items, 0, launched, capture)
        # Rows depend on their neighbours here: an exact item runs alone, at a width that does not
        # depend on k.
        loose = [item for item in items if not item.exact]
        mixed = iter(self._run(loose, 0, launched, capture))
        width = self._config.exact_width
        return [
            self._run([i], width, launched, capture)[0] if i.exact else next(mixed) for i in items
        ]

    def _run(
        self,
        items: Sequence[Item],
        minimum: int,
        launched: Callable[[], None],
        capture: bool,
    ) -> list[ItemResult]:
        if not items:
            return []
        scored = any(item.prompt_logprobs is not None for item in items)
        # The last layer's outputs are what the head turns into logits: prompt rows are scored from
        # them piece by piece, in full precision.
        last = {self._info.layer_count - 1} if scored else set()
        beside = self._beside if any(item.drafted for item in items) else None
        drafter_taps = beside.taps if beside is not None else ()
        taps = tuple(sorted(last.union(drafter_taps, *(item.taps for item in items))))
        tap_dtype = torch.float32 if scored else torch.bfloat16
        project = self._projecting if any(item.projected for item in items) else None
        if self._stepper is not None:
            ran = self._stepper.run(
                items, minimum, taps, tap_dtype, beside, project, launched, capture
            )
            return self._results(ran.placed, ran.chosen, taps, ran.rows, ran.written)
        packed = pack(items, self._config.page_tokens, minimum, self._scratch_slot)
        rows = self._rows(packed)
        launched()
        logits, tap_rows = self._forward(rows, packed, taps, tap_dtype)
        written: tuple[str, ...] = ()
        if beside is not None and tap_rows is not None:
            # Before anything is read back: the device has work while the host chooses.
            written = beside.write(packed.placed, taps, tap_rows, rows.positions, rows.slots)
        drawer = partial(draw, gumbel_argmax=self._model.kernels.gumbel_argmax)
        chosen = [Chosen()] * len(items) if logits is None else choose(logits, items, drawer)
        rows_here = StepRows.here(tap_rows, None if project is None else partial(project, taps))
        return self._results(packed.placed, chosen, taps, rows_here, written)

    def forward(
        self, packed: Packed, taps: tuple[int, ...], tap_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits of the rows that draw and the taps of all rows (None where there is nothing to
        give).
        """
        if self._stepper is not None:
            return self._stepper.forward(packed, taps, tap_dtype)
        return self._forward(self._rows(packed), packed, taps, tap_dtype)

    def _rows(self, packed: Packed) -> Rows:
        return Rows(
            ids=torch.tensor(packed.ids, dtype=torch.int64),
            positions=torch.tensor(packed.positions, dtype=torch.int64),
            slots=torch.tensor(packed.slots, dtype=torch.int64),
            plan=self._backend.plan(packed.spans),
        )

    def _forward(
        self, rows: Rows, packed: Packed, taps: tuple[int, ...], tap_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        wanted = torch.tensor(packed.draw_rows, dtype=torch.int64) if packed.draw_rows else None
        width = len(taps) * self._info.hidden_size
        tap_rows = torch.empty(len(packed.ids), width, dtype=tap_dtype) if taps else None
        logits = self._model.forward(rows, self._cache, self._backend, wanted, taps, tap_rows)
        return logits, tap_rows

    def _late_rows(
        self, placed: Placed, taps: tuple[int, ...], step_rows: LateRows, valid: int
    ) -> Callable[[], RowBits]:
        """The item's first rows; those of layers with the columns of its own taps, out of those of
        all `taps`."""
        first, wanted = placed.first_row, placed.item.taps
        whole = placed.item.projected or wanted == taps

        def rows() -> RowBits:
            found = step_rows.bits(first, first + valid)
            if whole:
                return found
            return np.concatenate([found[:, self._columns(tap, taps)] for tap in wanted], axis=1)

        if step_rows.arrived is not None:
            return rows
        here = rows()
        return lambda: here

    def _columns(self, tap: int, taps: tuple[int, ...]) -> slice:
        at = taps.index(tap) * self._info.hidden_size
        return slice(at, at + self._info.hidden_size)

    def _results(
        self,
        every: Sequence[Placed],
        chosen: Sequence[Chosen],
        taps: tuple[int, ...],
        rows: StepRows,
        written: tuple[str, ...],
    ) -> list[ItemResult]:
        results = []
        for placed, (tokens, accepted, margins, logprobs) in zip(every, chosen, strict=True):
            item = placed.item
            valid = len(item.ids) - max(item.draws - 1, 0) + accepted
            item.table.extend(item.start + valid, written if item.drafted else ())
            late: Callable[[], RowBits] | None = None
            scores: tuple[TokenLogprobs, ...] = ()
            own = rows.projected if item.projected else rows.taps
            if item.taps:
                assert own is not None
                late = self._late_rows(placed, taps, own, valid)
            if item.prompt_logprobs is not None:
                assert rows.taps is not None
                scores = self._prompt_logprobs(placed, item.prompt_logprobs, taps, rows.taps)
            results.append(
                ItemResult(tokens, accepted, late, margins, placed.width, logprobs, scores)
            )
        return results

    def _prompt_logprobs(
        self, placed: Placed, top: int, taps: tuple[int, ...], tap_rows: LateRows
    ) -> tuple[TokenLogprobs, ...]:
        """Row i of a prompt chunk scores the prompt's token after it."""
        item = placed.item
        following = item.context[item.start + 1 : item.prompt_len][: len(item.ids)]
        last = self._columns(self._info.layer_count - 1, taps)
        first, end = placed.first_row, placed.first_row + len(item.ids)
        rows = tap_rows.get()[first:end, last]
        return score_rows(rows, self._model.logits_of, following, top)
