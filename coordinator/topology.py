"""What a round costs where the draft runs beside the target and where it runs on its own: the model
behind `specwire plan`. Times in ms. The equations stand in docs/topologies.md. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from coordinator.costs import Cost, line
from coordinator.topology_link import COLOCATED, PLAIN, SEPARATE, Link


class StepTimes:
    """Ms of a step by draft tokens and sessions: linear between what was measured."""

    def __init__(self, costs: Iterable[Cost], context_tokens: int = 0) -> None:
        """For every number of sessions, the times at the context nearest to `context_tokens`."""
        levels: dict[int, dict[int, list[Cost]]] = {}
        for cost in costs:
            levels.setdefault(cost.sessions, {}).setdefault(cost.context, []).append(cost)
        self._levels: list[tuple[int, list[tuple[int, float]]]] = []
        for sessions, contexts in sorted(levels.items()):
            nearest = contexts[min(contexts, key=lambda c: (abs(c - context_tokens), c))]
            points = {cost.tokens: cost.seconds * 1e3 for cost in nearest}
            self._levels.append((sessions, sorted(points.items())))

    def __bool__(self) -> bool:
        return bool(self._levels)

    @property
    def most_sessions(self) -> int:
        return self._levels[-1][0]

    def ms(self, tokens: float, sessions: int) -> float:
        points = [(level, line(times, tokens)) for level, times in self._levels]
        return line(points, sessions)


@dataclass(frozen=True, slots=True)
class Work:
    """One pair under a load of `batch` sessions. `taus[k]` are the tokens that a round of k draft
    tokens is expected to bring, for the k that may be chosen; `row_bytes` is one hidden-state row.
    """

    verify: StepTimes
    draft: StepTimes
    colocated_draft: StepTimes
    taus: dict[int, float]
    batch: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Round:
    """`groups`: 2 where one half of the sessions is verified while the other is drafted for.
    `rows_ms`: how long the draft waits for rows that come later than the word to go on.
    """

    topology: str
    k: int
    tau: float
    groups: int
    verify_ms: float
    draft_ms: float
    exchanges_ms: float
    rows_ms: float
    cycle_ms: float
    tokens_per_s: float


def tau(chances: Sequence[float], k: int) -> float:
    """Tokens a round of k draft tokens: 1 + a1 + a1 a2 + ..; the last chance holds beyond it."""
    padded = [chances[min(i, len(chances) - 1)] for i in range(k)]
    return 1.0 + float(sum(accumulate(padded, mul)))


def plain(work: Work, link: Link) -> Round:
    """Decoding without a draft; the target runs ahead, so exchanges are hardly waited for."""
    step = work.verify.ms(0, work.batch)
    outside = link.outside_ms(PLAIN, work.batch, step)
    return _round(PLAIN, work, 0, 1.0, 1, (step, 0.0, outside, 0.0), step + outside)


def colocated(work: Work, link: Link, k: int) -> Round:
    """Verify and draft take turns on one device. An exchange brings verdict and proposal, and most
    rounds need none."""
    verify, draft = work.verify.ms(k, work.batch), work.colocated_draft.ms(k, work.batch)
    exchanges = link.outside_ms(COLOCATED, work.batch, verify + draft)
    parts = (verify, draft, exchanges, 0.0)
    return _round(COLOCATED, work, k, work.taus[k], 1, parts, sum(parts))


def separate(work: Work, link: Link, k: int, groups: int) -> Round:
    parts, busy_ms = _separate(work, link, k, groups)
    return _round(SEPARATE, work, k, work.taus[k], groups, parts, max(busy_ms, sum(parts)))


def best_colocated(work: Work, link: Link) -> Round:
    return max((colocated(work, link, k) for k in work.taus), key=_speed)


def best_separate(work: Work, link: Link) -> Round:
    return max((separate(work, link, k, g) for k, g in _choices(work)), key=_speed)


def break_even_ms(work: Work, link: Link, rival: Round) -> float | None:
    """The round trip time to the draft at which separate is as fast as `rival`; above it, it is
    slower. None: it is slower at any.
    """
    at_zero = replace(link, rtt_ms=0.0)
    found = []
    for k, groups in _choices(work):
        allowed = 1e3 * work.batch * work.taus[k] / rival.tokens_per_s
        parts, busy_ms = _separate(work, at_zero, k, groups)
        if busy_ms <= allowed:
            found.append(allowed - sum(parts))
    best = max(found, default=-1.0)
    return best if best >= 0.0 else None


def _choices(work: Work) -> list[tuple[int, int]]:
    return [(k, groups) for k in work.taus for groups in (1, 2) if groups <= work.batch]


def _separate(
    work: Work, link: Link, k: int, groups: int
) -> tuple[tuple[float, float, float, float], float]:
    """Verify, draft, exchanges and wait for rows of one group, one after the other; and the least
    that a cycle of all groups takes because one device or the wire does nothing else."""
    sessions = -(-work.batch // groups)
    verify, draft = work.verify.ms(k, sessions), work.draft.ms(k, sessions)
    exchanges = link.outside_ms(SEPARATE, sessions, verify + draft, work.row_bytes > 0)
    transfer = link.transfer_ms(sessions * work.taus[k] * work.row_bytes)
    # Rows leave with the verdict. A question of the target's is behind them; one that is not has
    # the coordinator to pass through on its way.
    wait = transfer
    if not link.ahead:
        wait = max(0.0, transfer - (link.exchange_ms + link.target_rtt_ms) / 2)
    busy = groups * max(verify, draft, transfer)
    return (verify, draft, exchanges, wait), busy


def _round(
    topology: str,
    work: Work,
    k: int,
    tau: float,
    groups: int,
    parts: tuple[float, float, float, float],
    cycle_ms: float,
) -> Round:
    speed = 1e3 * work.batch * tau / cycle_ms
    return Round(topology, k, tau, groups, *parts, cycle_ms, speed)


def _speed(one: Round) -> float:
    return one.tokens_per_s
