"""What speculation did for one request, and where its time went."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from specwire.v1 import common_pb2, generate_pb2

# In "turn" verdicts of runs ahead wait to be read while the target goes on: beside the others, and
# no part of what a step takes outside.
PHASES = ("prefill", "draft", "verify", "link", "coordinator", "turn")

# Names that workers may make up in one count: their own are far fewer.
_MOST_NAMES = 32
_NAME = re.compile(r"[a-z0-9_]{1,40}")


def countable(name: str, counted: Collection[str]) -> str:
    """A name that a worker chose, as one to count by: "other" for one too many, and for what is no
    name. A draft must not be able to make up labels, nor to fill a client's answer.
    """
    if name in counted or (len(counted) < _MOST_NAMES and _NAME.fullmatch(name)):
        return name
    return "other"


def worked_ns(timings: common_pb2.Timings) -> int:
    """Time an item was in a worker's hands; the rest of an exchange is the link's."""
    return timings.queue_ns + timings.compute_ns


def remaining_ms(deadline: float | None) -> int:
    """What is left until a time of the loop's clock; on the wire 0 means no deadline."""
    if deadline is None:
        return 0
    left_ms = int((deadline - asyncio.get_running_loop().time()) * 1000)
    return min(max(1, left_ms), 2**32 - 1)  # what the wire holds: 49 days


@dataclass(slots=True)
class Record:
    """Filled by the session's loop. Times are nanoseconds of `time.perf_counter_ns`."""

    method: str
    started_ns: int = field(default_factory=time.perf_counter_ns)
    first_ns: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    phase_ns: Counter[str] = field(default_factory=Counter)
    # Of the accepted tokens, by the method that proposed them, where a drafter said so.
    by_source: Counter[str] = field(default_factory=Counter)
    # Times the session went on at another target.
    target_moves: int = 0
    placement: str = ""
    outside_us: list[int] = field(default_factory=list)

    def fell_back(self, cause: str) -> None:
        self.fallbacks[countable(cause, self.fallbacks)] += 1

    def came_from(self, source: str, accepted: int) -> None:
        self.by_source[countable(source, self.by_source)] += accepted

    def spent(self, phase: str, nanoseconds: int) -> None:
        if nanoseconds > 0:
            self.phase_ns[phase] += nanoseconds

    def step(self, drafted: int, accepted: int, outside_ns: int) -> None:
        """`outside_ns`: what the step took beyond the computing of target and draft."""
        self.drafted.append(drafted)
        self.accepted.append(accepted)
        outside_us = outside_ns // 1000 if outside_ns > 0 else 0
        self.outside_us.append(outside_us if outside_us < 2**32 else 2**32 - 1)

    def to_wire(self, completion_tokens: int) -> generate_pb2.AcceptanceRecord:
        rounds = len(self.drafted)
        now = time.perf_counter_ns()
        return generate_pb2.AcceptanceRecord(
            method=self.method,
            rounds=rounds,
            draft_tokens=sum(self.drafted),
            accepted_tokens=sum(self.accepted),
            tau=(completion_tokens - 1) / rounds if rounds else 0.0,
            drafted_by_position=_by_position(self.drafted),
            accepted_by_position=_by_position(self.accepted),
            fallbacks=dict(self.fallbacks),
            phase_ms={phase: self.phase_ns[phase] / 1e6 for phase in PHASES},
            per_step_drafted=self.drafted,
            per_step_accepted=self.accepted,
            ttft_ms=(self.first_ns - self.started_ns) / 1e6 if self.first_ns else 0.0,
            accepted_by_source=dict(self.by_source),
            target_moves=self.target_moves,
            placement=self.placement,
            per_step_outside_us=self.outside_us,
            total_ms=(now - self.started_ns) / 1e6,
        )


def _by_position(counts: list[int]) -> list[int]:
    """At [i]: how many of the counts are above i."""
    return [sum(count > i for count in counts) for i in range(max(counts, default=0))]
