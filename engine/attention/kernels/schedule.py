"""How one step's attention is shared out, as int32 words that the kernels read.

Layout of the words: a header of 8 (items, tiles to combine), the page table [spans,
pages_per_span], then items of 8 words each from there on, and, from the end of the words downwards,
tiles to combine of 8 words each. So both lists have fixed places whatever their capacities are. The
records are described in `paged.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from engine.attention.base import Span
from engine.attention.kernels.part_times import FEW_ROWS, predicted

Words = NDArray[np.int32]

HEADER = RECORD = 8
# Bundles of a program at most, where parts are those; where parts are units it has one.
_BUNDLES = 2


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shapes of the kernels, fixed by head size and dtype, never by a batch: they are part of the
    result. `rows` folded rows (M) by `keys` (N, a unit); a chunk has `chunk` units, 8 or 16.
    `warps` and `stages` are of `_attend`, `programs` those that a multiprocessor is given,
    `registers` the most of a thread where a tile has 16 rows (None: any number): like `stages` they
    change no bit."""

    rows: int
    keys: int
    chunk: int
    warps: int
    stages: int
    programs: int = 8
    registers: int | None = None

    def __post_init__(self) -> None:
        # Sums of a chunk are laid out in bundles of two or four units: `parts._merge_parts`.
        assert self.chunk in (8, 16), self.chunk

    @property
    def bundle(self) -> int:
        """Units of a bundle, of which a chunk has four."""
        return self.chunk // 4


def tiles_for(group: int, head_dim: int, half: bool) -> Tiles:
    """`group`: query heads of a KV head; `half`: 16-bit products, otherwise fp32 ones."""
    if not half:
        return Tiles(16, 64 if head_dim <= 64 else 32, 16, 4, 2)
    rows = 16 if group <= 2 else 32
    # With five stages two units of keys are on their way: the page ids take up the other stages.
    # So many registers let three programs of 16 rows run at once, as shared memory does.
    if head_dim <= 64:
        return Tiles(rows, 128, 8, 4, 5, registers=168)
    if head_dim <= 128:
        return Tiles(rows, 64, 16, 4, 5, registers=168)
    return Tiles(rows, 64, 8, 8, 3)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Shares out work over `programs` programs for each KV head, about two times what the device
    holds at once; `group` query heads a KV head. At most `slots` partial results exist at once."""

    tiles: Tiles
    group: int
    programs: int
    slots: int

    def tiles_of(self, rows: int) -> int:
        return -(-rows * self.group // self.tiles.rows)

    def words(self, spans: int, rows: int, keys: int, pages_per_span: int) -> int:
        """Words that any step within these capacities needs; `keys` is the longest span."""
        tiles = rows * self.group // self.tiles.rows + spans
        units, bundles, chunks = (-(-keys // size) for size in self._sizes())
        parts = max(
            min(tiles * units, self.programs),
            min(tiles * bundles, self.programs * _BUNDLES),
            min(tiles * chunks, self.slots),
        )
        # Every program reads an item before it knows how many there are.
        return HEADER + spans * pages_per_span + RECORD * max(2 * tiles + parts, 1)

    def records(self, words: int, spans: int, pages_per_span: int) -> int:
        """Records that fit behind the table."""
        return (words - HEADER - spans * pages_per_span) // RECORD

    def whole(self, spans: int, width: int, keys: int, records: int) -> bool:
        """Whether a step of up to `width` rows a span (0: any) may have items of several chunks."""
        chunks = -(-keys // (self.tiles.keys * self.tiles.chunk))
        tiles = self.tiles_of(width)
        room = min(records - 2 * spans * tiles, self.slots)
        fits = spans * tiles * chunks <= room and tiles * 4 < self.programs
        return chunks > 1 and not (width and fits)

    def fill(
        self, words: Words, spans: Sequence[Span], capacity: int, pages_per_span: int, page: int
    ) -> None:
        """Writes the words of a step. `page`: tokens a page."""
        assert len(spans) <= capacity, f"{len(spans)} spans, room for {capacity}"
        if len(spans) == 1 and spans[0].row_count:
            self.fill_one(words, spans[0], capacity, pages_per_span, page)
        else:
            self.fill_many(words, spans, capacity, pages_per_span, page)

    def fill_one(
        self, words: Words, span: Span, capacity: int, pages_per_span: int, page: int
    ) -> None:
        """What `fill_many` writes for this span alone, in a tenth of the time: at one session that
        is a good part of what a step costs the host."""
        end, rows = span.start + span.row_count, span.row_count
        tiles, held = self.tiles_of(rows), -(-end // page)
        assert held <= pages_per_span, "a span has more pages than the plan has room"
        at = HEADER + pages_per_span * capacity
        room = min(self.records(len(words), capacity, pages_per_span) - 2 * tiles, self.slots)
        chunk = self.tiles.keys * self.tiles.chunk
        counts = [max(-(-end // size), 1) for size in self._sizes()]  # a shard may have no keys
        size = self._part_keys([tiles * count for count in counts], counts[0], rows, room)
        parts = counts[self._sizes().index(size)]
        if size == chunk and (tiles * 4 >= self.programs or (parts > 1 and tiles * parts > room)):
            parts = 1
        size = size if parts > 1 else end
        tail = (span.start, rows, span.first_row)
        items: list[int] = []
        for part in range(parts):
            for tile in range(tiles):
                slot = tile * parts + part if parts > 1 else -1
                items += (0, tile, part * size, (part + 1) * size, slot, *tail)
        words[HEADER : HEADER + held] = span.pages(page)
        words[at : at + len(items)] = items
        ended = range(tiles - 1, -1, -1) if parts > 1 else ()
        sums = [n for t in ended for n in (t * parts, t, chunk // size, *tail, 0, 0)]
        if sums:
            words[len(words) - len(sums) :] = sums
        words[0], words[1] = tiles * parts, len(ended)

    def _sizes(self) -> tuple[int, int, int]:
        """Keys of a part of every kind: a unit, a bundle, a chunk."""
        keys = self.tiles.keys
        return keys, keys * self.tiles.bundle, keys * self.tiles.chunk

    def _part_keys(self, items: Sequence[int], units: int, rows: int, room: int) -> int:
        """Keys of a part with which a step is over soonest: with chunks, or with smaller parts
        where those find room and are not many for a program.

        items: how many a KV head has with every kind of part; units and rows are those of the
        longest and the widest span.
        """
        sizes, room = self._sizes(), min(room, self.slots)
        fits = min(self.programs, room), min(self.programs * _BUNDLES, room), items[2]
        offered = []
        for size, count, fit in zip(sizes, items, fits, strict=True):
            if count <= fit:  # always with chunks
                each = -(-count * self.tiles.programs // self.programs)
                few = rows * self.group <= FEW_ROWS
                offered.append((predicted(each, units, size // sizes[0], few), size))
        return min(offered)[1]

    def fill_many(
        self, words: Words, spans: Sequence[Span], capacity: int, pages_per_span: int, page: int
    ) -> None:
        shape = np.array([(s.start, s.row_count, s.first_row) for s in spans], dtype=np.int32)
        start, rows, first_row = shape.reshape(-1, 3).T
        ends = start + rows
        self._fill_table(words, spans, ends, pages_per_span, page)
        span = np.flatnonzero(rows)
        start, rows, first_row, ends = start[span], rows[span], first_row[span], ends[span]
        tiles = -(-rows * self.group // self.tiles.rows)
        room = self.records(len(words), capacity, pages_per_span) - 2 * int(tiles.sum())
        parts, unit = self._parts(tiles, ends, room, int(rows.max(initial=1)))

        # One item for each part of each tile; tiles of one part of the keys stand side by side, so
        # that they find the keys in the L2 cache.
        each = tiles * parts
        of = np.repeat(np.arange(len(span)), each)
        within = np.arange(len(of)) - np.repeat(np.cumsum(each) - each, each)
        part, tile = np.divmod(within, tiles[of])
        partial = each * (parts > 1)
        base = (np.cumsum(partial) - partial).astype(np.int32)
        several = parts[of] > 1
        size = np.where(several, unit, ends[of])
        at = HEADER + capacity * pages_per_span
        items = words[at : at + len(of) * RECORD].reshape(-1, RECORD)
        items[:, 0], items[:, 1] = span[of], tile
        items[:, 2], items[:, 3] = part * size, (part + 1) * size
        items[:, 4] = np.where(several, base[of] + tile * parts[of] + part, -1)
        items[:, 5], items[:, 6], items[:, 7] = start[of], rows[of], first_row[of]

        last = several & (part == 0)
        of, tile = of[last], tile[last]
        count = len(of)
        ended = words[len(words) - count * RECORD :].reshape(-1, RECORD)[::-1]
        ended[:, 0], ended[:, 1] = base[of] + tile * parts[of], tile
        ended[:, 2] = self.tiles.chunk * self.tiles.keys // unit
        ended[:, 3], ended[:, 4], ended[:, 5] = start[of], rows[of], first_row[of]
        ended[:, 6:] = 0
        words[0], words[1] = len(several), count

    def _parts(self, tiles: Words, ends: Words, room: int, rows: int) -> tuple[Words, int]:
        """Parts of every span's tiles, and the keys of a part; some spans are in one part where
        parts are chunks: those of many tiles, and where partial results abound."""
        counts = [np.maximum(-(-ends // size), 1) for size in self._sizes()]
        items = [int((tiles * count).sum()) for count in counts]
        size = self._part_keys(items, int(counts[0].max(initial=1)), rows, room)
        parts = counts[self._sizes().index(size)]
        if size < self._sizes()[2]:
            return parts, size
        # So many tiles of one span, as a prompt has, fill the device by themselves.
        parts = np.where(tiles * 4 >= self.programs, 1, parts)
        needed = np.cumsum(tiles * parts * (parts > 1))
        return np.where(needed > min(room, self.slots), 1, parts), size

    def _fill_table(
        self, words: Words, spans: Sequence[Span], ends: Words, pages_per_span: int, page: int
    ) -> None:
        held = np.maximum(-(-ends // page), 0)
        assert held.max(initial=0) <= pages_per_span, "a span has more pages than the plan has room"
        lists = [s.table.pages[:n] for s, n in zip(spans, held.tolist(), strict=True)]
        total = int(held.sum())
        if sum(map(len, lists)) < total:  # padding stands behind what a table holds
            lists = [s.pages(page) for s in spans]
        pages = np.fromiter(chain.from_iterable(lists), np.int32, total)
        row = np.repeat(np.arange(len(spans)), held)
        column = np.arange(total) - np.repeat(np.cumsum(held) - held, held)
        words[HEADER + row * pages_per_span + column] = pages
