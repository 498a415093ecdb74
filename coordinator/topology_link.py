"""What a round takes beside the two forwards, by topology: the work of exchanges and services, and
the wires. Times in ms. The equations stand in docs/topologies.md.
"""

from __future__ import annotations

from dataclasses import dataclass

PLAIN, SEPARATE, COLOCATED = "plain", "separate", "co-located"
_BITS_PER_MS = 1e6  # of one Gbit/s
# Share of an exchange's work that a target has between two steps even if it asks nobody.
TURN_SHARE = 0.4
# What the services do for a session in a round, by topology, in turns of a plain step: a co-located
# round has a proposal to it, a separate one three services and the rows.
_TURNS = {PLAIN: 1, COLOCATED: 2, SEPARATE: 4}


@dataclass(frozen=True, slots=True)
class Link:
    """`rtt_ms`: between the draft's host and the others; `target_rtt_ms`: between coordinator and
    target; `exchange_ms`: what an exchange takes beside the wire, both ends together; `ahead`,
    `free_run`: rounds that a target with a drafter that it asks, inside or on the stream of its
    rows, and one without a drafter, goes on for by itself; `session_ms`: what the services do for
    one more session in a plain round.
    """

    rtt_ms: float = 0.0
    bandwidth_gbit: float = 10.0
    exchange_ms: float = 0.5
    target_rtt_ms: float = 0.0
    ahead: int = 8
    session_ms: float = 0.0
    free_run: int = 32

    @property
    def turn_ms(self) -> float:
        """Between two steps of a target that goes on by itself."""
        return TURN_SHARE * self.exchange_ms

    def outside_ms(
        self, topology: str, sessions: int, device_ms: float, reads_rows: bool = False
    ) -> float:
        """What a round takes beyond the `device_ms` of both forwards, on average. A target asks a
        separate draft itself where that `reads_rows`; else the coordinator does, every round."""
        more = (sessions - 1) * self.session_ms
        wait = self.exchange_ms + self.target_rtt_ms - self.turn_ms
        if topology == SEPARATE:
            # A session that has to be asked finds the target free: the others are drafted for.
            asked = self.turn_ms + self.exchange_ms + self.rtt_ms + _TURNS[SEPARATE] * more
            return asked + wait / (1 + (self.ahead if reads_rows else 0))
        turns = _TURNS[topology] * (self.turn_ms + more)
        # Nobody waits for a session that has to be asked: it misses a round of the others.
        missed = max(wait, device_ms + turns) if sessions > 1 else wait
        return turns + missed / (1 + (self.free_run if topology == PLAIN else self.ahead))

    def transfer_ms(self, bytes_: float) -> float:
        return bytes_ * 8 / (self.bandwidth_gbit * _BITS_PER_MS)
