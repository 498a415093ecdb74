"""What a worker's part of a round costs, by draft tokens, load and context: a table measured when
the worker started gives the shape, what is seen since then corrects it. Pure: no clock, no asyncio.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from specwire.v1 import common_pb2

# Weight of the newest time in a running mean, and the most that one time may move it: a hiccup
# must not keep a K from being tried again.
_WEIGHT, _JUMP = 0.10, 2.0
# Times of all K that are worth as much as so many of its own, and where counting ends.
_POOLED, _PLAIN_POOLED, _MANY = 8.0, 1.0, 32
# Times after which the curve is made anew only once in so many.
_SETTLED = 16
# Sessions of one step that may all tell of it; of more, so many.
_TELLERS = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """One measured step: `tokens` draft tokens for each of `sessions` sessions."""

    tokens: int
    sessions: int
    context: int
    seconds: float


def from_wire(given: Iterable[common_pb2.StepCost], anchor: int) -> list[Cost]:
    """A target's rows hold the anchor and the draft tokens, a draft's the tokens proposed."""
    return [
        Cost(max(0, c.rows - anchor), c.sessions, c.context_tokens, c.compute_ns / 1e9)
        for c in given
    ]


class CostTable:
    """Seconds by draft tokens, from the measured steps nearest in load and context."""

    def __init__(self, costs: Iterable[Cost]) -> None:
        groups: dict[tuple[int, int], dict[int, float]] = {}
        for cost in costs:
            if cost.seconds > 0:
                at = groups.setdefault((cost.sessions, cost.context), {})
                at[cost.tokens] = min(cost.seconds, at.get(cost.tokens, cost.seconds))
        self._groups = {place: sorted(at.items()) for place, at in groups.items()}
        for points in self._groups.values():
            # Fewer tokens never cost more: what says so was disturbed while it was measured.
            for i in range(len(points) - 2, -1, -1):
                points[i] = (points[i][0], min(points[i][1], points[i + 1][1]))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def seconds(self, tokens: int, sessions: int, context: int) -> float:
        """Linear between the tokens measured, and on beyond them; 1.0 where nothing is known."""
        if not self._groups:
            return 1.0
        distance = {
            group: _octaves(group[0], sessions) + _octaves(group[1], context)
            for group in self._groups
        }
        return line(self._groups[min(distance, key=distance.__getitem__)], tokens)


def _octaves(a: int, b: int) -> int:
    return abs(max(a, 1).bit_length() - max(b, 1).bit_length())


def line(points: list[tuple[int, float]], x: float) -> float:
    """Through rising points; flat below the first, never falling beyond the last."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    if len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (x - x1)


@dataclass(slots=True)
class _Cell:
    """What was seen at one load and context: mean seconds by draft tokens; `shape` is the table's
    at that place, as far as it was looked up."""

    sessions: int
    context: int
    seen: dict[int, float] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)
    shape: dict[int, float] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)
    news: int = 0
    # Times that are passed over, by tokens: the others of a step have told of it.
    heard: dict[int, int] = field(default_factory=dict)


class Costs:
    """Seconds of one worker's part of a round for 0..limit draft tokens."""

    def __init__(self, table: Iterable[Cost] = ()) -> None:
        self._table = CostTable(table)
        self._cells: dict[tuple[int, int], _Cell] = {}

    def note(self, tokens: int, sessions: int, context: int, seconds: float) -> None:
        if seconds <= 0:
            return  # nothing is free, and a mean of nothing would never rise again
        cell = self._cell(sessions, context)
        if heard := cell.heard.get(tokens):
            cell.heard[tokens] = heard - 1
            return
        before = cell.seen.get(tokens, seconds)
        times = cell.times[tokens] = cell.times.get(tokens, 0) + 1
        weight = _WEIGHT if times * _WEIGHT >= 1.0 else 1.0 / times
        if seconds > _JUMP * before:
            seconds = _JUMP * before
        cell.seen[tokens] = before + weight * (seconds - before)
        cell.news += 1
        # Many sessions tell of the same step: a mean that is settled need not be read each time.
        if times < _SETTLED or cell.news >= _SETTLED:
            cell.curve, cell.news = [], 0
        if times > _SETTLED:
            cell.heard[tokens] = (sessions - 1) // _TELLERS

    def curve(self, sessions: int, context: int, limit: int) -> list[float] | None:
        """Seconds at [k] for k in 0..limit or more; None when nothing at all is known yet."""
        cell = self._cell(sessions, context)
        if len(cell.curve) <= limit:
            found = cell if cell.seen else self._nearest(sessions, context)
            if found is None and not self._table:
                return None
            # What was seen elsewhere is compared with the table there.
            ratios = self._ratios(found) if found is not None else []
            shape = [self._shape(cell, k) for k in range(limit + 1)]
            cell.curve = _corrected(shape, ratios)
        return cell.curve

    def _ratios(self, cell: _Cell) -> list[tuple[int, float]]:
        """What was seen over the table, by tokens: few times of one K are taken together with those
        of the others, since a busy machine slows them all down."""
        ratios = {k: seconds / self._shape(cell, k) for k, seconds in cell.seen.items()}
        if not self._table:
            return sorted(ratios.items())
        counts = {k: float(min(cell.times[k], _MANY)) for k in ratios}
        mean = sum(counts[k] * ratios[k] for k in ratios) / sum(counts.values())
        # A step without draft tokens has no hop that waits for them: of it the others say little.
        pooled = {k: _POOLED if k else _PLAIN_POOLED for k in ratios}
        return sorted(
            (k, (counts[k] * ratio + pooled[k] * mean) / (counts[k] + pooled[k]))
            for k, ratio in ratios.items()
        )

    def _cell(self, sessions: int, context: int) -> _Cell:
        key = (sessions.bit_length(), (context >> 9).bit_length())
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(sessions, context)
        return cell

    def _nearest(self, sessions: int, context: int) -> _Cell | None:
        """The cell with times at the nearest load and context."""
        load, length = sessions.bit_length(), (context >> 9).bit_length()
        found = [(abs(a - load) + abs(b - length), cell) for (a, b), cell in self._cells.items()]
        with_times = [entry for entry in found if entry[1].seen]
        return min(with_times, key=lambda entry: entry[0])[1] if with_times else None

    def _shape(self, cell: _Cell, tokens: int) -> float:
        known = cell.shape.get(tokens)
        if known is None:
            known = self._table.seconds(tokens, cell.sessions, cell.context)
            cell.shape[tokens] = known
        return known


def _corrected(shape: list[float], ratios: list[tuple[int, float]]) -> list[float]:
    """The shape times what was seen over it, by rising tokens: linear between them, flat outside.

    Flat beyond the most tokens seen is an optimist's guess: it makes the next K be tried, once.
    """
    if not ratios:
        return shape
    curve, right = [], 0
    for k, value in enumerate(shape):
        while right < len(ratios) and ratios[right][0] < k:
            right += 1
        if right == 0:
            ratio = ratios[0][1]
        elif right == len(ratios):
            ratio = ratios[-1][1]
        else:
            (k0, r0), (k1, r1) = ratios[right - 1], ratios[right]
            ratio = r0 + (r1 - r0) * (k - k0) / (k1 - k0)
        curve.append(value * ratio)
    return curve
