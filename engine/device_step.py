"""Steps on a GPU: one copy in, one launch sequence or CUDA graph, the tokens in the host's memory.

A step in which every item draws from all its rows (plain decoding, verify blocks) is run in a fixed
shape, `batch` spans of `width` rows, and so by a graph. Steps with prompt chunks are launched as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.api import Item, nothing
from engine.attention.base import AttentionBackend, DeviceAttention
from engine.batch import Packed, Placed, pack
from engine.block_words import BlockWords
from engine.choose import Chosen, choose, draws_of, matched, plain
from engine.colocated import Beside
from engine.device_draw import DeviceDrawer, DrawRows, draw_words, write_draws
from engine.graphs import StepGraphs, up_to
from engine.kv.cache import PagedCache
from engine.models.family import Model
from engine.models.layers import Kernels, Rows
from engine.sampling import Draw, filters
from engine.step_words import StepWords
from engine.stepper import Ran
from engine.tap_export import LateRows, TapExport

# Shapes of the graphs: a step takes the smallest that holds it.
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_WIDTHS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Device memory of one shape: logits fp32 [rows, vocab] where the host chooses from them, and
    tap rows. Otherwise the tokens are in the shape's words, and nobody holds on to the logits:
    those of all shapes would take gigabytes, so graphs share the memory. The plan owns memory that
    a graph works in, which is replaced when a larger shape comes, so it must live as long."""

    logits: Tensor | None
    tap_rows: Tensor | None
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
        self._device, self._scratch_slot = cache.device, scratch_slot
        self._pages = -(-max_length // cache.geometry.page_tokens)
        self._graphs: StepGraphs[_Outputs] = StepGraphs("step", graphs)
        self._shapes: dict[tuple[int, int], BlockWords] = {}
        self._words = StepWords(self._device)
        self._drawer = DeviceDrawer(model.kernels, self._device)
        self._export = TapExport(self._device)
        self._over: Any = None
        if self._device.type == "cuda":
            self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def once_ns(self) -> int:
        """See `Engine.once_ns`."""
        return self._graphs.spent_ns

    def shapes(self, most: int, widest: int) -> list[tuple[int, int]]:
        """Sessions and rows of each of the shapes that hold steps of up to `most` sessions with up
        to `widest` rows; none where the attention's metadata has no fixed form."""
        if not isinstance(self._backend, DeviceAttention):
            return []
        return [(b, w) for b in up_to(_BATCHES, most) for w in up_to(_WIDTHS, widest)]

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
        launched: Callable[[], None] = nothing,
        capture: bool = True,
    ) -> Ran:
        """`launched` is called before the device is waited for; without `capture` no graph is
        captured."""
        if not minimum and tap_dtype is torch.bfloat16:
            words = self._block_words(items)
            if words is not None:
                return self._run_blocks(items, words, taps, beside, launched, capture)
        packed = pack(items, self._cache.geometry.page_tokens, minimum, self._scratch_slot)
        draws = [draw for item in items for draw in draws_of(item)]
        at_once = self._drawer.fused and all(plain(item) for item in items)
        kernels = self._kernels_of(items, len(packed.ids))
        logits, tap_rows = self._run_packed(
            packed, draws if at_once else (), taps, tap_dtype, kernels
        )
        written = _written(beside, packed.placed, taps, tap_rows, self._words)
        late = LateRows(tap_rows) if tap_rows is not None else None
        if tap_dtype is torch.bfloat16:  # else somebody still computes with them
            late = self._export.take(tap_rows) if _exported(items) else None
        launched()
        if logits is None:
            return Ran(packed.placed, [Chosen()] * len(items), late, written)
        if not at_once:
            return Ran(packed.placed, choose(logits, items, self._drawer), late, written)
        filtered = any(filters(item.sampling) for item in items if item.draws)
        how = DrawRows.of(self._words.device("draws"), len(draws), filtered)
        tokens = self._drawer.draw(logits, how).tolist()
        return Ran(packed.placed, _matched(items, tokens), late, written)

    def forward(
        self, packed: Packed, taps: tuple[int, ...], tap_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `NativeEngine.forward`."""
        return self._run_packed(packed, (), taps, tap_dtype, None)

    def _kernels_of(self, items: Sequence[Item], rows: int) -> Kernels | None:
        """None: the model's own."""
        return None if any(item.exact for item in items) else self._model.kernels.loose(rows)

    def _run_packed(
        self,
        packed: Packed,
        draws: Sequence[Draw],
        taps: tuple[int, ...],
        tap_dtype: torch.dtype,
        kernels: Kernels | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits of the rows that draw and the taps of all; `draws` are sent along."""
        count, words, spans = len(packed.ids), self._words, packed.spans
        backend = self._backend if isinstance(self._backend, DeviceAttention) else None
        planned, pages = backend.capacity(spans) if backend else (0, 0)
        words.layout(
            ids=count,
            positions=count,
            slots=count,
            draw_rows=len(packed.draw_rows),
            draws=draw_words(len(draws)),
            attention=planned,
        )
        words.host("ids")[:] = packed.ids
        words.host("positions")[:] = packed.positions
        words.host("slots")[:] = packed.slots
        words.host("draw_rows")[:] = packed.draw_rows
        write_draws(words.host("draws"), len(draws), enumerate(draws))
        if backend:
            backend.fill(words.host("attention"), spans, len(spans), pages)
        words.upload()
        if backend:
            plan = backend.view(words.device("attention"), len(spans), pages, 0)
        else:
            plan = self._backend.plan(spans)
        rows = _rows(words, plan, kernels)
        wanted = words.device("draw_rows") if packed.draw_rows else None
        return self._launch(rows, wanted, taps, tap_dtype)

    def _launch(
        self, rows: Rows, wanted: Tensor | None, taps: tuple[int, ...], tap_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        tap_rows = None
        if taps:
            width = len(taps) * self._model.config.hidden_size
            tap_rows = torch.empty(len(rows.ids), width, dtype=tap_dtype, device=self._device)
        logits = self._model.forward(rows, self._cache, self._backend, wanted, taps, tap_rows)
        return logits, tap_rows

    # -- steps of a fixed shape ------------------------------------------------------------------

    def _block_words(self, items: Sequence[Item]) -> BlockWords | None:
        """Those of the smallest shape that holds these items; None: there is none."""
        if not isinstance(self._backend, DeviceAttention):
            return None
        if any(item.draws != len(item.ids) for item in items):
            return None
        widest = max(len(item.ids) for item in items)
        if len(items) > _BATCHES[-1] or widest > _WIDTHS[-1]:
            return None
        batch = next(size for size in _BATCHES if size >= len(items))
        width = next(size for size in _WIDTHS if size >= widest)
        words = self._shapes.get((batch, width))
        if words is None:
            words = BlockWords(self._backend, batch, width, self._pages, self._scratch_slot)
            self._shapes[batch, width] = words
        return words

    def _run_blocks(
        self,
        items: Sequence[Item],
        words: BlockWords,
        taps: tuple[int, ...],
        beside: Beside | None,
        launched: Callable[[], None],
        capture: bool,
    ) -> Ran:
        placed = words.fill(items)
        at_once = self._drawer.fused and all(plain(item) for item in items)
        filtered = at_once and any(filters(item.sampling) for item in items)
        kernels = self._kernels_of(items, words.rows)

        def body() -> _Outputs:
            every = words.device("draw_rows")
            rows = _rows(words, words.plan(), kernels)
            logits, tap_rows = self._launch(rows, every, taps, torch.bfloat16)
            assert logits is not None
            if at_once:
                self._drawer.draw(logits, words.draws(filtered), out=words.tokens)
                logits = None
            return _Outputs(logits, tap_rows, rows.plan)

        self._export.hold()
        key = words.rows, words.width, taps, at_once, filtered, kernels is None
        outputs = self._graphs.run(key, body, capture)
        if self._over is not None:
            self._over.record()
        used = len(items) * words.width
        # Behind the step and before it is waited for: the device goes on while the host reads.
        written = _written(beside, placed, taps, outputs.tap_rows, words)
        late = None
        if outputs.tap_rows is not None and _exported(items):
            late = self._export.take(outputs.tap_rows[:used])
        launched()
        if self._over is not None:
            self._over.synchronize()
        if outputs.logits is None:
            chosen = _matched(items, words.drawn(used), words.width)
            return Ran(placed, chosen, late, written)
        rows = [
            index * words.width + row
            for index, item in enumerate(items)
            for row in range(item.draws)
        ]
        return Ran(placed, choose(outputs.logits[rows], items, self._drawer), late, written)


def _exported(items: Sequence[Item]) -> bool:
    """Whether tap rows are wanted outside; a drafter in this process reads them where they are."""
    return any(item.taps for item in items)


def _written(
    beside: Beside | None,
    placed: Sequence[Placed],
    taps: tuple[int, ...],
    tap_rows: Tensor | None,
    words: StepWords | BlockWords,
) -> tuple[str, ...]:
    if beside is None or tap_rows is None:
        return ()
    return beside.write(placed, taps, tap_rows, words.device("positions"), words.device("slots"))


def _rows(words: StepWords | BlockWords, plan: object, kernels: Kernels | None) -> Rows:
    ids, positions, slots = (words.device(name) for name in ("ids", "positions", "slots"))
    return Rows(ids, positions, slots, plan, kernels)


def _matched(items: Sequence[Item], drawn: Sequence[int], width: int = 0) -> list[Chosen]:
    """Of plain items whose rows drew these tokens, items standing `width` rows apart (0: each
    right behind the one before)."""
    chosen, at = [], 0
    for item in items:
        draws = item.draws
        chosen.append(matched(item, drawn[at : at + draws]))
        at += width or draws
    return chosen
