"""Packs items into one ragged forward: rows, slots, spans, and which rows draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.api import Item
from engine.attention.base import Span


class Placed(NamedTuple):
    """Where an item's rows stand in the packed batch; the padding lies around them."""

    item: Item
    first_row: int
    width: int


@dataclass(slots=True)
class Packed:
    """Host lists of one forward. `draw_rows` are in the order of the items."""

    ids: list[int]
    positions: list[int]
    slots: list[int]
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


def pack(items: Sequence[Item], page_tokens: int, minimum: int, scratch_slot: int) -> Packed:
    """Lays the items one after another; one with fewer than `minimum` rows is padded.

    Padding goes in front, at the positions before the block, so that no key beyond the block is
    ever touched; only where there
    are too few positions in front does the rest go behind. Padding rows write their KV into the
    scratch page.
    """
    packed = Packed([], [], [], [], [], [])
    for item in items:
        count = len(item.ids)
        pad = max(0, minimum - count)
        front = min(pad, item.start)
        base, first, width = item.start - front, len(packed.ids), count + pad
        scratch = [scratch_slot + i % page_tokens for i in range(pad)]
        own = slots_of(item.table.pages, page_tokens, item.start, count)
        packed.ids += [0] * front + list(item.ids) + [0] * (pad - front)
        packed.positions += range(base, base + width)
        packed.slots += scratch[:front] + own + scratch[front:]
        packed.spans.append(Span(item.table, base, first, width))
        end = first + front + count
        packed.draw_rows += range(end - item.draws, end)
        packed.placed.append(Placed(item, first + front, width))
    return packed
