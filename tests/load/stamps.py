"""Part of `host_cost`: when forwards began and ended, and what of a round lies between them.

Stamps are of `perf_counter_ns`, which the processes of one host share.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

Pair = Sequence[int]  # the nanoseconds of a begin and of the end after it
_KEPT = 4096


class Stamps:
    """The latest forwards of one thread."""

    def __init__(self) -> None:
        self._pairs: deque[Pair] = deque(maxlen=_KEPT)
        self._began = 0

    def begin(self) -> None:
        """Of several in a row the last one counts."""
        self._began = time.perf_counter_ns()

    def end(self) -> None:
        self._pairs.append((self._began, time.perf_counter_ns()))

    def take(self) -> list[Pair]:
        """Those since the last time."""
        taken = list(self._pairs)
        self._pairs.clear()
        return taken


def outside(steps: Sequence[Pair], proposals: Sequence[Pair]) -> dict[str, float]:
    """Of rounds with a proposal between two steps, in milliseconds: what they take outside both,
    and how much of that before the proposal and behind it. Empty where there are none."""
    there, back, at = [], [], 0
    for (_, ended), (began, _) in pairwise(steps):
        while at < len(proposals) and proposals[at][0] < ended:
            at += 1
        if at < len(proposals) and proposals[at][1] <= began:
            there.append((proposals[at][0] - ended) / 1e6)
            back.append((began - proposals[at][1]) / 1e6)
    if len(there) < 2:
        return {}
    both = [sum(ways) for ways in zip(there, back, strict=True)]
    return {
        "rounds with a proposal": float(len(both)),
        "outside ms, p50": statistics.median(both),
        "outside ms, p90": statistics.quantiles(both, n=10)[-1],
        "step to proposal ms, p50": statistics.median(there),
        "proposal to step ms, p50": statistics.median(back),
    }
