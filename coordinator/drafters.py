"""Drafters as their process describes them: which of them fit a target, and what is known of each.

A separate drafter has a process of its own and follows sessions of any target that it fits. A
co-located one lives in a target's process, reads that target's pages and hidden states where they
are, and serves its sessions only.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.acceptance import Acceptance
from coordinator.breaker import Breaker
from coordinator.costs import from_wire
from coordinator.handshake import check_drafter
from coordinator.round_costs import RoundCosts
from coordinator.settings import CoordinatorSettings
from coordinator.standing import Standing
from specwire.errors import SpecwireError
from specwire.v1 import draft_pb2, target_pb2

PLAIN = "plain"
COLOCATED, SEPARATE = "colocated", "separate"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for: `dflash`, or `dflash@colocated` or `dflash@separate`."""

    method: str
    placement: str = ""

    @classmethod
    def parse(cls, text: str) -> Wanted:
        method, _, placement = text.partition("@")
        # With nothing behind the sign it is no placement, but a name that nobody has.
        return cls(method, placement) if placement else cls(text)

    def fits(self, method: str, placement: str) -> bool:
        return method == self.method and self.placement in ("", placement)


class Drafters:
    """The drafters of one process, judged for each target that it meets."""

    def __init__(
        self,
        info: draft_pb2.DraftServiceGetInfoResponse,
        placement: str,
        settings: CoordinatorSettings,
        before: Drafters | None = None,
    ) -> None:
        """`before`: those that were at the address until now."""
        self.info, self.placement = info, placement
        known: dict[str, Standing] = before.standings if before is not None else {}
        self.standings: dict[str, Standing] = {
            d.method: _standing(d, known.get(d.method), settings) for d in info.drafters
        }
        self._judged: dict[int, tuple[dict[str, draft_pb2.DrafterInfo], dict[str, str]]] = {}

    @property
    def incarnation(self) -> int:
        return int(self.info.worker.incarnation)

    def judge(
        self, target: target_pb2.TargetServiceGetInfoResponse
    ) -> tuple[dict[str, draft_pb2.DrafterInfo], dict[str, str]]:
        """Those that fit the target, and the refusals of the others, by method."""
        found = self._judged.get(target.worker.incarnation)
        if found is None:
            found = self._judged[target.worker.incarnation] = self._judge(target)
        return found

    def _judge(
        self, target: target_pb2.TargetServiceGetInfoResponse
    ) -> tuple[dict[str, draft_pb2.DrafterInfo], dict[str, str]]:
        fitting: dict[str, draft_pb2.DrafterInfo] = {}
        refused: dict[str, str] = {}
        for drafter in self.info.drafters:
            try:
                check_drafter(target, drafter, colocated=self.placement == COLOCATED)
                fitting[drafter.method] = drafter
            except SpecwireError as error:
                refused[drafter.method] = error.message
        return fitting, refused


def _standing(
    drafter: draft_pb2.DrafterInfo, known: Standing | None, settings: CoordinatorSettings
) -> Standing:
    """A new process owes nothing for the old one's lateness; how good it is, is known."""
    return Standing(
        breaker=Breaker(settings.breaker_lates, settings.breaker_open_ms / 1000),
        costs=RoundCosts(from_wire(drafter.costs, anchor=0)),
        past=known.past if known is not None else Acceptance(),
    )
