"""What a worker's part of a round costs, by who drives the rounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from coordinator.costs import Cost, Costs


class Curves(NamedTuple):
    """Seconds at [k] for k in 0..limit or more."""

    driven: list[float]
    ahead: list[float]


class RoundCosts:
    """Rounds that are asked for (`driven`) and rounds that the target goes on for by itself
    (`ahead`) have other hops between them, so neither says what the other costs. The table measured
    at start is of the work alone, and the same for both."""

    def __init__(self, table: Iterable[Cost] = ()) -> None:
        measured = list(table)
        self.driven, self.ahead = Costs(measured), Costs(measured)

    def note(
        self,
        tokens: int,
        sessions: int,
        context: int,
        seconds: float,
        ahead: bool | None = None,
    ) -> None:
        """`ahead`: which rounds took so long; None: it is the same for both."""
        if ahead is not True:
            self.driven.note(tokens, sessions, context, seconds)
        if ahead is not False:
            self.ahead.note(tokens, sessions, context, seconds)

    def curves(self, sessions: int, context: int, limit: int) -> Curves | None:
        """Either stands for the other while nothing is known of that; None: nothing of both."""
        driven = self.driven.curve(sessions, context, limit)
        ahead = self.ahead.curve(sessions, context, limit)
        if driven is None or ahead is None:
            driven = ahead = driven or ahead
        return None if driven is None or ahead is None else Curves(driven, ahead)
