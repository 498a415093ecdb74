"""The fixed shapes that steps run in, so that a CUDA graph can hold each, and the words of each.

A step in which every item draws from all its rows (plain decoding, verify blocks) is `batch` spans
of `width` rows. One with prompts has any spans, in a room of so many rows, spans and draws. Larger
steps, and those of attention whose metadata has no fixed form, have no shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import Item
from engine.attention.base import AttentionBackend, DeviceAttention
from engine.block_words import Blocks, BlockWords
from engine.graphs import up_to
from engine.ragged_words import RaggedWords, Room

# A step takes the smallest that holds it.
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_WIDTHS = (1, 2, 4, 8, 16)
# Padding is less than half of a step's rows, less than a third of most.
_ROWS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1280, 2048)
_DRAWS = (128, 512, 2048)
_SPANS = 136
# Rows times hidden size squared up to which launches take longer than what they launch: a row of a
# layer is some 11 times its hidden size squared of multiply-adds. Behind it the device is busy in
# any case, and padding would cost more than a graph saves.
_ROW_WORK = 5 * 10**9


class StepShapes:
    """Words by shape, made when it is first met: their places on the device are a graph's."""

    def __init__(
        self, backend: AttentionBackend, hidden_size: int, pages_per_span: int, scratch_slot: int
    ) -> None:
        self._backend = backend if isinstance(backend, DeviceAttention) else None
        self._most_rows = _ROW_WORK // hidden_size**2
        self._pages, self._scratch_slot = pages_per_span, scratch_slot
        self._blocks: dict[Blocks, BlockWords] = {}
        self._ragged: dict[Room, RaggedWords] = {}
        # The device may still read and write their words, which are therefore kept.
        self._left_out: set[Room] = set()

    def blocks(self, sessions: int, widest: int) -> list[Blocks]:
        """Shapes that hold blocks of up to `widest` rows of up to so many sessions."""
        if self._backend is None:
            return []
        return [Blocks(b, w) for b in up_to(_BATCHES, sessions) for w in up_to(_WIDTHS, widest)]

    def ragged(self, rows: int, draws: int) -> list[Room]:
        """Shapes that hold steps with prompts of up to so many rows and draws."""
        if self._backend is None:
            return []
        sizes = up_to(self._sizes(), rows)
        return list(dict.fromkeys(_room(r, d) for r in sizes for d in up_to(_DRAWS, draws)))

    def words_of(self, items: Sequence[Item], ragged: bool) -> BlockWords | RaggedWords | None:
        """Those of the smallest shape that holds these items; None: there is none. Without `ragged`
        blocks only."""
        if self._backend is None:
            return None
        blocks = _blocks_of(items)
        if blocks is not None:
            words = self._blocks.get(blocks)
            if words is None:
                words = BlockWords(self._backend, blocks, self._pages, self._scratch_slot)
                self._blocks[blocks] = words
            return words
        room = self._room_of(items) if ragged else None
        if room is None or room in self._left_out:
            return None
        held = self._ragged.get(room)
        if held is None:
            held = RaggedWords(self._backend, self._scratch_slot, room, self._pages)
            self._ragged[room] = held
        return held

    def leave_out(self, room: Room) -> None:
        """From now on steps that would take it have no shape."""
        self._left_out.add(room)

    def _sizes(self) -> tuple[int, ...]:
        return tuple(rows for rows in _ROWS if rows <= self._most_rows)

    def _room_of(self, items: Sequence[Item]) -> Room | None:
        rows = next((n for n in self._sizes() if n >= sum(len(item.ids) for item in items)), 0)
        draws = next((n for n in _DRAWS if n >= sum(item.draws for item in items)), 0)
        return _room(rows, draws) if rows and draws and len(items) <= _SPANS else None


def _room(rows: int, draws: int) -> Room:
    return Room(rows, min(rows, _SPANS), min(rows, draws))


def _blocks_of(items: Sequence[Item]) -> Blocks | None:
    if any(item.draws != len(item.ids) for item in items):
        return None
    widest = max(len(item.ids) for item in items)
    if len(items) > _BATCHES[-1] or widest > _WIDTHS[-1]:
        return None
    batch = next(size for size in _BATCHES if size >= len(items))
    return Blocks(batch, next(size for size in _WIDTHS if size >= widest))
