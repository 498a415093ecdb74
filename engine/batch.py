"""Packs items into one ragged forward: rows, slots, spans, and which rows draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.api import Item
from engine.attention.base import Span

Rows = NDArray[np.int32]

# Rows of an item from which on their slots are found all at once.
_MANY = 64


class Placed(NamedTuple):
    """Where an item's rows stand in the packed batch; the padding lies around them."""

    item: Item
    first_row: int
    width: int


@dataclass(slots=True)
class Packed:
    """One forward on the host: ids, positions and slots of all rows, int32 [rows]. `draw_rows` are
    in the order of the items."""

    ids: Rows
    positions: Rows
    slots: Rows
    spans: list[Span]
    draw_rows: list[int]
    placed: list[Placed]


def slots_of(pages: Sequence[int], page_tokens: int, start: int, count: int) -> list[int]:
    """Flat cache slots of positions [start, start + count)."""
    page, offset = divmod(start, page_tokens)
    slots: list[int] = []
    while count > 0:  # a page at a time
        first, here = pages[page] * page_tokens + offset, min(count, page_tokens - offset)
        slots += range(first, first + here)
        page, offset, count = page + 1, 0, count - here
    return slots


def many_slots_of(pages: Sequence[int], page_tokens: int, start: int, count: int) -> Rows:
    """The same of many positions, in a fraction of the time."""
    page, offset = divmod(start, page_tokens)
    held = np.array(pages[page : -(-(start + count) // page_tokens)], dtype=np.int32)
    slots: Rows = np.add.outer(held * page_tokens, np.arange(page_tokens, dtype=np.int32)).ravel()
    return slots[offset : offset + count]


def pack(items: Sequence[Item], page_tokens: int, minimum: int, scratch_slot: int) -> Packed:
    """Lays the items one after another; one with fewer than `minimum` rows is padded.

    Padding goes in front, at the positions before the block, so that no key beyond the block is
    ever touched; only where there
    are too few positions in front does the rest go behind. Padding rows write their KV into the
    scratch page.
    """
    total = sum(max(len(item.ids), minimum) for item in items)
    ids, positions, slots = np.empty((3, total), dtype=np.int32)
    packed, first = Packed(ids, positions, slots, [], [], []), 0
    for item in items:
        count = len(item.ids)
        pad = max(0, minimum - count)
        front = min(pad, item.start)
        base, width = item.start - front, count + pad
        own, behind = first + front, first + front + count
        if pad:
            ids[first : first + width] = 0
            scratch = [scratch_slot + i % page_tokens for i in range(pad)]
            slots[first:own], slots[behind : first + width] = scratch[:front], scratch[front:]
        where = slots_of if count < _MANY else many_slots_of
        ids[own:behind] = item.ids
        positions[first : first + width] = np.arange(base, base + width)
        slots[own:behind] = where(item.table.pages, page_tokens, item.start, count)
        packed.spans.append(Span(item.table, base, first, width))
        packed.draw_rows += range(behind - item.draws, behind)
        packed.placed.append(Placed(item, own, width))
        first += width
    return packed
