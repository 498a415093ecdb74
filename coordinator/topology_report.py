"""What `specwire plan` found, as one value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from coordinator.footprint import Room
from coordinator.topology import (
    Round,
    Work,
    best_colocated,
    best_separate,
    break_even_ms,
    plain,
)
from coordinator.topology_link import Link


@dataclass(frozen=True, slots=True)
class Report:
    """Break-even round trips to the draft: None where separate is slower at any. `better` is the
    topology with the most tokens/s, `plain` among them."""

    plain: Round
    separate: Round
    colocated: Round
    even_with_colocated_ms: float | None
    even_with_plain_ms: float | None
    rooms: list[Room]
    notes: list[str]

    @property
    def rounds(self) -> tuple[Round, Round, Round]:
        return self.plain, self.separate, self.colocated

    @property
    def better(self) -> str:
        return max(self.rounds, key=lambda one: one.tokens_per_s).topology

    def to_json(self, work: Work, link: Link) -> dict[str, Any]:
        return {
            "better": self.better,
            "batch": work.batch,
            "row_bytes": work.row_bytes,
            "link": asdict(link),
            "rounds": {one.topology: asdict(one) for one in self.rounds},
            "break_even_rtt_ms": {
                "co-located": self.even_with_colocated_ms,
                "plain": self.even_with_plain_ms,
            },
            "rooms": [asdict(room) for room in self.rooms],
            "notes": self.notes,
        }


def compare(work: Work, link: Link, rooms: list[Room]) -> Report:
    alone, beside, without = (
        best_separate(work, link),
        best_colocated(work, link),
        plain(work, link),
    )
    return Report(
        plain=without,
        separate=alone,
        colocated=beside,
        even_with_colocated_ms=break_even_ms(work, link, beside),
        even_with_plain_ms=break_even_ms(work, link, without),
        rooms=rooms,
        notes=_notes(work),
    )


def _notes(work: Work) -> list[str]:
    """Where times are guesses: beyond the sessions that they are known for."""
    known = {"verify": work.verify, "draft": work.draft, "co-located draft": work.colocated_draft}
    return [
        f"{name}: no times of more than {times.most_sessions} sessions at once; {work.batch} are a "
        "guess from those"
        for name, times in known.items()
        if times.most_sessions < work.batch and not (name != "draft" and times is work.draft)
    ]
