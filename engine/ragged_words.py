"""The words of steps with prompts: spans of any lengths, one right behind the other.

In a fixed room they serve a CUDA graph: the rows behind a step's own write nothing that counts and
belong to no span, the draws behind its own are greedy ones of its first row, and neither is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.api import Item
from engine.attention.base import AttentionBackend, DeviceAttention
from engine.batch import Packed, Placed, pack
from engine.choose import Chosen, matched
from engine.draw_rows import DrawRows, DrawWords, draw_words
from engine.step_words import StepWords


class Room(NamedTuple):
    """Most rows, spans and drawing rows of a step."""

    rows: int
    spans: int
    draws: int


class RaggedWords:
    """Words and drawn tokens of a step, on the host and on the device."""

    def __init__(
        self,
        backend: AttentionBackend,
        scratch_slot: int,
        room: Room | None = None,
        pages_per_span: int = 0,
    ) -> None:
        """`room` and `pages_per_span` are those of every step (with a DeviceAttention only);
        without them each step has what it needs."""
        cache = backend.cache
        self._backend, self._scratch_slot, self._fixed = backend, scratch_slot, room is not None
        self._page_tokens = cache.geometry.page_tokens
        self._pinned = cache.device.type == "cuda"
        self._words = StepWords(cache.device)
        self._plan: object = None
        # Rows of the last step that are its own.
        self.used = 0
        # The kernel that draws writes into the host's memory itself: there is nothing to copy.
        self._drawn = torch.zeros(0, dtype=torch.int64)
        self._make_room(room or Room(0, 0, 0), pages_per_span)

    def _make_room(self, room: Room, pages_per_span: int) -> None:
        """Waits until the last step's words were read."""
        attention = 0
        if isinstance(self._backend, DeviceAttention):
            attention = self._backend.words(room.spans, room.rows, pages_per_span)
        self.shape, self._pages = room, pages_per_span
        self._counts = {
            "ids": room.rows,
            "positions": room.rows,
            "slots": room.rows,
            "draw_rows": room.draws,
            "draws": draw_words(room.draws),
            "attention": attention,
        }
        self._words.layout(**self._counts)
        if len(self._drawn) < room.draws:
            count = room.draws if self._fixed else 1 << (room.draws - 1).bit_length()
            self._drawn = torch.zeros(count, dtype=torch.int64, pin_memory=self._pinned)
        self.tokens = self._drawn[: room.draws]

    @property
    def rows(self) -> int:
        """Padding included."""
        return self.shape.rows

    def fill(self, items: Sequence[Item], minimum: int = 0) -> list[Placed]:
        """Writes a step and sends it to the device; see `pack` for `minimum`."""
        packed = pack(items, self._page_tokens, minimum, self._scratch_slot)
        self.fill_packed(packed, items)
        return packed.placed

    def fill_packed(self, packed: Packed, items: Sequence[Item] = ()) -> None:
        """The same of rows that are laid out; without `items` they draw greedily."""
        self._fit(packed)
        self.used, words = len(packed.ids), self._words
        for name, own, padding in (
            ("ids", packed.ids, 0),
            ("positions", packed.positions, 0),
            ("slots", packed.slots, self._scratch_slot),
            ("draw_rows", packed.draw_rows, 0),
        ):
            field = words.host(name)
            field[: len(own)], field[len(own) :] = own, padding
        draws = DrawWords(words.host("draws"), self.shape.draws)
        draws.clear()
        for item, at in _places(items):
            # The row at position p draws the token at p + 1.
            first = item.start + len(item.ids) - item.draws + 1
            draws.write(at, item.draws, item.sampling, first)
        if isinstance(self._backend, DeviceAttention):
            attention = words.host("attention")
            self._backend.fill(attention, packed.spans, self.shape.spans, self._pages)
        else:
            self._plan = self._backend.plan(packed.spans)
        words.upload()

    def _fit(self, packed: Packed) -> None:
        room = Room(len(packed.ids), len(packed.spans), len(packed.draw_rows))
        if self._fixed:
            assert all(n <= most for n, most in zip(room, self.shape, strict=True)), room
            self._words.layout(**self._counts)
            return
        pages = 0
        if isinstance(self._backend, DeviceAttention):
            _, pages = self._backend.capacity(packed.spans)
        self._make_room(room, pages)

    def send(self) -> None:
        """Nothing: the next step may be filled while this one runs, so `fill` sent it."""

    def device(self, name: str) -> Tensor:
        """ids, positions or slots: int32 [rows]."""
        return self._words.device(name)

    def wanted(self) -> Tensor | None:
        """Rows whose logits are made, int32 [draws]; None: of none."""
        return self._words.device("draw_rows") if self.shape.draws else None

    def plan(self) -> object:
        """The attention's plan of whatever was filled last."""
        if not isinstance(self._backend, DeviceAttention):
            return self._plan
        words = self._words.device("attention")
        return self._backend.view(words, self.shape.spans, self._pages, 0)

    def draws(self, filtered: bool) -> DrawRows:
        return DrawRows.of(self._words.device("draws"), self.shape.draws, filtered)

    def matched(self, items: Sequence[Item]) -> list[Chosen]:
        """What `plain` items get of `tokens`, once the step is over."""
        drawn = self.tokens[: sum(item.draws for item in items)].tolist()
        return [matched(item, drawn[at : at + item.draws]) for item, at in _places(items)]

    def logits_of(self, items: Sequence[Item], logits: Tensor) -> Tensor:
        """The items' own of logits [draws, vocabulary], item after item."""
        return logits[: sum(item.draws for item in items)]


def _places(items: Sequence[Item]) -> Iterator[tuple[Item, int]]:
    """Items with the place of each one's first draw."""
    at = 0
    for item in items:
        yield item, at
        at += item.draws
