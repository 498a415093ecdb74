"""How long a step of attention takes by the size of its parts; it is the schedule that asks.

Small parts use all of the device; large ones spare it starts of programs, and partial results. All
numbers are microseconds, fitted to times on an H200 of kernels that knew units and chunks only;
where they do not fit a step takes longer, with the same bits.
"""

from __future__ import annotations

FEW_ROWS = 8  # folded rows of a span whose parts `combine._finish` adds up
# A unit has about 32 KB of keys and values: how soon a program gets through with one, how often a
# multiprocessor gets one while all of them read, and what a program takes besides.
_UNIT, _UNIT_READ, _PROGRAM = 1.5, 1.2, 5.0
# Programs that a multiprocessor holds at once, by shared memory: of 16 rows, of 32.
_HELD_FEW, _HELD = 3, 2
# Adding up: a part of few rows in its row's sum; otherwise a launch, a part in its row's sum, and
# the memory's time for a part of a multiprocessor, which is up to what a unit has.
_FEW_SUM, _COMBINE, _SUM, _PART = 0.01, 2.0, 0.06, 0.5


def predicted(each: int, units: int, size: int, few: bool) -> float:
    """Of a step whose longest span has `units` units, in parts of `size` of them, `each` parts for
    a multiprocessor, but for what every step takes. few: no span has more than FEW_ROWS rows.

    Programs run in rounds, each at the pace of one program, or all at that of the memory.
    """
    parts, size = -(-units // size), min(size, units)
    rounds = -(-each // (_HELD_FEW if few else _HELD))
    time = max(_PROGRAM + each * size * _UNIT_READ, rounds * (_PROGRAM + size * _UNIT))
    if parts == 1:
        return time
    return time + (parts * _FEW_SUM if few else _COMBINE + parts * _SUM + each * _PART)
