"""What a worker's part of a round costs, by who drives the rounds."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.costs import Cost, Costs


class RoundCosts:
    """Rounds that are asked for one by one (`driven`) and rounds that the target goes on for by
    itself (`ahead`) have other hops between them, so neither says what the other costs. The table
    measured at start is of the work alone, and the same for both. Plain steps that pay come
    unasked in either case."""

    def __init__(self, table: Iterable[Cost] = ()) -> None:
        measured = list(table)
        self.driven, self.ahead = Costs(measured, plain_apart=True), Costs(measured)

    def of(self, ahead: bool) -> Costs:
        return self.ahead if ahead else self.driven

    def note(
        self, tokens: int, sessions: int, context: int, seconds: float, ahead: bool | None
    ) -> None:
        """`ahead`: which rounds took so long; None: it is the same for both."""
        if ahead is not True:
            self.driven.note(tokens, sessions, context, seconds)
        if ahead is not False:
            self.ahead.note(tokens, sessions, context, seconds)
