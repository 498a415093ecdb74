"""Attention with its keys cut in parts of one given size, for tests and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

from engine.attention.kernels.schedule import RECORD, Schedule, Tiles

if TYPE_CHECKING:  # a test process must not import triton
    from engine.attention.triton_paged import TritonPaged

Backend = TypeVar("Backend", bound="TritonPaged")


@dataclass(frozen=True, slots=True)
class CutSchedule(Schedule):
    """Cuts everything in parts of `keys` keys, with room for as many as there are."""

    keys: int = 0

    def words(self, spans: int, rows: int, keys: int, pages_per_span: int) -> int:
        tiles = rows * self.group // self.tiles.rows + spans
        least = Schedule.words(self, spans, rows, keys, pages_per_span)
        return least + RECORD * tiles * -(-keys // self.keys)

    def _part_keys(self, items: Sequence[int], units: int, rows: int, room: int) -> int:
        assert items[self._sizes().index(self.keys)] <= self.slots
        return self.keys


def sizes(tiles: Tiles) -> dict[str, int]:
    """Keys of a part of every kind, 0 for all of them."""
    kinds = {"units": 1, "bundles": tiles.bundle, "chunks": tiles.chunk}
    return {"whole": 0} | {kind: units * tiles.keys for kind, units in kinds.items()}


def cut(backend: Backend, keys: int) -> Backend:
    """The backend, changed to cut keys in parts of so many; 0: never."""
    own = backend._schedule
    given = {field.name: getattr(own, field.name) for field in fields(Schedule)}
    if keys:
        backend._schedule = CutSchedule(**given, keys=keys)
    else:
        backend._schedule = Schedule(**given | {"slots": 0})
    return backend
