"""Steps on a GPU: one copy in, one launch sequence or CUDA graph, the tokens in the host's memory.

A step is run in a fixed shape where there is one for it (`step_shapes.py`), and so by a graph. The
others are launched kernel by kernel: large ones, those of other attention, and, of steps with
prompts, those in which the host chooses from the logits or prompts are scored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.api import Item, nothing
from engine.attention.base import AttentionBackend
from engine.batch import Packed
from engine.block_words import Blocks, BlockWords
from engine.choose import Chosen, choose, plain
from engine.colocated import Beside
from engine.device_draw import DeviceDrawer
from engine.graphs import StepGraphs
from engine.kv.cache import PagedCache
from engine.models.family import Model
from engine.models.layers import Kernels, Rows
from engine.projecting import Projecting
from engine.ragged_words import RaggedWords, Room
from engine.sampling import filters
from engine.step_inputs import StepInputs
from engine.step_shapes import StepShapes
from engine.stepper import Ran
from engine.tap_export import LateRows, StepRows, TapExport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Device memory of one shape: logits fp32 [draws, vocab] where the host chooses from them, tap
    rows, and what a draft's projection makes of them. Otherwise the tokens are in the shape's
    words, and nobody holds on to the logits: those of all shapes would take gigabytes, so graphs
    share the memory. The plan owns memory that a graph works in, which is replaced when a larger
    shape comes, so it must live as long."""

    logits: Tensor | None
    tap_rows: Tensor | None
    projected: Tensor | None
    plan: Any


class DeviceStepper:
    """Runs items on a GPU (or under Triton's interpreter)."""

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        backend: AttentionBackend,
        max_length: int,
        scratch_slot: int,
        graphs: bool,
    ) -> None:
        self._model, self._cache, self._backend = model, cache, backend
        self._device = cache.device
        self._graphs: StepGraphs[_Outputs] = StepGraphs("step", graphs)
        pages = -(-max_length // cache.geometry.page_tokens)
        self._shapes = StepShapes(backend, model.config.hidden_size, pages, scratch_slot)
        # Of steps that have no shape.
        self._words = RaggedWords(backend, scratch_slot)
        self._drawer = DeviceDrawer(model.kernels, self._device)
        self._export = TapExport(self._device)
        self._over: Any = None
        if self._device.type == "cuda":
            self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def once_ns(self) -> int:
        """See `Engine.once_ns`."""
        return self._graphs.spent_ns

    def shapes(self, sessions: int, widest: int) -> list[Blocks]:
        """See `StepShapes.blocks`."""
        return self._shapes.blocks(sessions, widest)

    def prompt_shapes(self, rows: int, draws: int) -> list[Room]:
        """See `StepShapes.ragged`; none where prompts are launched."""
        return self._shapes.ragged(rows, draws) if self._pads_prompts else []

    @property
    def _pads_prompts(self) -> bool:
        """Padding pays with a graph only, and logits for the host are of one step."""
        return self._graphs.enabled and self._drawer.fused

    def loose(self, rows: int) -> bool:
        """Whether a step of so many rows runs other kernels where none of them need be exact."""
        return self._model.kernels.loose(rows) is not None

    def run(
        self,
        items: Sequence[Item],
        minimum: int,
        taps: tuple[int, ...],
        tap_dtype: torch.dtype,
        beside: Beside | None = None,
        project: Projecting | None = None,
        launched: Callable[[], None] = nothing,
        capture: bool = True,
    ) -> Ran:
        """`project`: some items want such rows. `launched` is called before the device is waited
        for; without `capture` no graph is captured."""
        at_once = self._drawer.fused and all(plain(item) for item in items)
        shaped = None
        if not minimum and tap_dtype is torch.bfloat16:
            shaped = self._shapes.words_of(items, at_once and self._pads_prompts)
        words: StepInputs = self._words if shaped is None else shaped
        placed = self._words.fill(items, minimum) if shaped is None else shaped.fill(items)
        drawing = [item for item in items if item.draws]
        filtered = at_once and any(filters(item.sampling) for item in drawing)
        if isinstance(shaped, RaggedWords):
            filtered = True  # one graph for both: few rows draw where there are prompts
        kernels = self._kernels_of(items, words.rows)

        def body() -> _Outputs:
            words.send()
            rows = _rows(words, kernels)
            logits, tap_rows = self._launch(rows, words.wanted(), taps, tap_dtype)
            if at_once and logits is not None:
                self._drawer.draw(logits, words.draws(filtered), out=words.tokens)
                logits = None
            projected = None
            if project is not None and tap_rows is not None:
                projected = project(taps, tap_rows)
            return _Outputs(logits, tap_rows, projected, rows.plan)

        self._export.hold()
        if shaped is None:
            outputs = body()
        else:
            key = words.shape, taps, at_once, filtered, kernels is None, project is None
            replayed = self._replayed(shaped, key, body, capture)
            if replayed is None:
                return self.run(items, minimum, taps, tap_dtype, beside, project, launched, capture)
            outputs = replayed
        if self._over is not None:
            self._over.record()
        # Behind the step and before it is waited for: the device goes on while the host reads.
        written: tuple[str, ...] = ()
        if beside is not None and outputs.tap_rows is not None:
            places = words.device("positions"), words.device("slots")
            written = beside.write(placed, taps, outputs.tap_rows, *places)
        late = self._late(items, outputs, words.used)
        launched()
        if not drawing:  # nobody waits: the next step is filled meanwhile
            return Ran(placed, [Chosen()] * len(items), late, written)
        if self._over is not None:
            self._over.synchronize()
        if outputs.logits is None:
            return Ran(placed, words.matched(items), late, written)
        logits = words.logits_of(items, outputs.logits)
        return Ran(placed, choose(logits, items, self._drawer), late, written)

    def _replayed(
        self,
        words: BlockWords | RaggedWords,
        key: Hashable,
        body: Callable[[], _Outputs],
        capture: bool,
    ) -> _Outputs | None:
        """None where a room finds no memory, now and from now on: it takes more than steps in it
        need, and a graph keeps it. A block's rows are its own, with a graph or without."""
        try:
            return self._graphs.run(key, body, capture, needed=isinstance(words, RaggedWords))
        except torch.OutOfMemoryError:
            if not isinstance(words, RaggedWords):
                raise
        # Behind the handler: the error holds on to what the body had.
        log.warning("no memory for steps of %s: they are launched kernel by kernel", words.shape)
        self._shapes.leave_out(words.shape)
        if self._over is not None:
            torch.cuda.empty_cache()
        return None

    def _late(self, items: Sequence[Item], outputs: _Outputs, used: int) -> StepRows:
        """The rows of a step that are wanted outside; a drafter in this process reads them where
        they are."""
        tap_rows, projected = outputs.tap_rows, outputs.projected
        if tap_rows is None:
            return StepRows()
        if tap_rows.dtype is not torch.bfloat16:  # somebody still computes with them
            return StepRows(LateRows(tap_rows), None if projected is None else LateRows(projected))
        raw = any(item.taps and not item.projected for item in items)
        return StepRows(
            self._export.take(tap_rows[:used]) if raw else None,
            self._export.take(projected[:used]) if projected is not None else None,
        )

    def forward(
        self, packed: Packed, taps: tuple[int, ...], tap_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `NativeEngine.forward`."""
        self._words.fill_packed(packed)
        return self._launch(_rows(self._words, None), self._words.wanted(), taps, tap_dtype)

    def _kernels_of(self, items: Sequence[Item], rows: int) -> Kernels | None:
        """None: the model's own."""
        return None if any(item.exact for item in items) else self._model.kernels.loose(rows)

    def _launch(
        self, rows: Rows, wanted: Tensor | None, taps: tuple[int, ...], tap_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits of the rows that are `wanted` and the taps of all."""
        tap_rows = None
        if taps:
            width = len(taps) * self._model.config.hidden_size
            tap_rows = torch.empty(len(rows.ids), width, dtype=tap_dtype, device=self._device)
        logits = self._model.forward(rows, self._cache, self._backend, wanted, taps, tap_rows)
        return logits, tap_rows


def _rows(words: StepInputs, kernels: Kernels | None) -> Rows:
    ids, positions, slots = (words.device(name) for name in ("ids", "positions", "slots"))
    return Rows(ids, positions, slots, words.plan(), kernels)
