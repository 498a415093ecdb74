"""Rounds of a session without a drafter: the next step is known before the verdict comes."""

from __future__ import annotations

from coordinator.drafting import Drafting
from specwire.v1 import target_pb2


class Plain(Drafting):
    in_hand: list[int] = []  # noqa: RUF012

    def advance(self, verdict: target_pb2.Verdict, ids: list[int], most: int | None) -> bool:
        return False

    async def proposal(self) -> list[int]:
        return []

    def believe(self, verdict: target_pb2.Verdict) -> None:
        """It brings no proposal."""
