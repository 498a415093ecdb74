"""`specwire plan --from-bench`: what the cost model says of a run, beside what was measured.

Step times that are given, by hand or by workers, are those of every mode. Without them no mode of a
bench run is predicted from itself: step times and the work of an exchange are those of the same
drafter in the *other* place, as exact. Where the two had another K, plain decoding tells what a
token more costs. Of a run with many sessions the step times are each mode's own: what is predicted
is all that a round takes beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.topology import Work
from coordinator.topology_inputs import missing
from coordinator.topology_link import COLOCATED, PLAIN, SEPARATE, Link
from coordinator.topology_measured import Measured, Measurements

GIVEN, OWN = "times given", "its own steps"


@dataclass(frozen=True, slots=True)
class Predicted:
    """`source` is the mode whose step times were used, or says where they are from."""

    measured: Measured
    source: str
    round_ms: float

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.measured.sessions * self.measured.tau / self.round_ms

    @property
    def error(self) -> float:
        """Of the speed: 0.1 is a tenth too fast."""
        return self.tokens_per_s / self.measured.tokens_per_s - 1.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_s": self.tokens_per_s, "error": self.error}


def predict(found: Measurements, link: Link, given: Work | None, drafter: str) -> list[Predicted]:
    """Every mode that can be told; with a `drafter` its modes and plain decoding only."""
    modes = [mode for mode in found.modes if mode.drafter in (drafter, PLAIN) or not drafter]
    if given is not None:
        return [_of_steps(mode, GIVEN, link, *_given(mode, given)) for mode in modes]
    if found.loaded:
        return [_of_steps(mode, OWN, link, *_own(mode)) for mode in modes]
    return _by_the_other(modes, link)


def _given(mode: Measured, given: Work) -> tuple[float, float]:
    """Ms of verify and draft."""
    if mode.topology == PLAIN:
        return given.verify.ms(0, mode.sessions), 0.0
    draft = given.draft if mode.topology == SEPARATE else given.colocated_draft
    return given.verify.ms(mode.k, mode.sessions), draft.ms(mode.k, mode.sessions)


def _own(mode: Measured) -> tuple[float, float]:
    if mode.verify_ms is None:
        raise missing("--verify-ms", "step times beside --from-bench: this report tells none")
    return mode.verify_ms, mode.draft_ms or 0.0


def _of_steps(
    mode: Measured, source: str, link: Link, verify_ms: float, draft_ms: float
) -> Predicted:
    """Rounds in which the drafter was not asked are plain ones."""
    device_ms = verify_ms + draft_ms
    asked = link.outside_ms(mode.topology, mode.sessions, device_ms, mode.reads_rows)
    plain = link.outside_ms(PLAIN, mode.sessions, device_ms)
    share = mode.drafted if mode.topology != PLAIN else 0.0
    return Predicted(mode, source, device_ms + share * asked + (1 - share) * plain)


def _by_the_other(modes: Sequence[Measured], link: Link) -> list[Predicted]:
    """Of every drafter that is there in both places."""
    found = []
    for mode in modes:
        alike = [other for other in modes if other.exactness == mode.exactness]
        plain = next((other for other in alike if other.topology == PLAIN), None)
        for source in alike:
            places = {mode.topology, source.topology}
            if source.drafter == mode.drafter and places == {SEPARATE, COLOCATED}:
                found.append(Predicted(mode, source.label, _round_ms(mode, source, plain, link)))
                break
    return found


def _round_ms(mode: Measured, source: Measured, plain: Measured | None, link: Link) -> float:
    """A round of `mode` with the times of `source`, which may have had another K."""
    assert source.verify_ms is not None and source.draft_ms is not None
    unit = Link(exchange_ms=1.0, ahead=link.ahead, free_run=link.free_run)
    here, there = (unit.outside_ms(m.topology, 1, 0.0, m.reads_rows) for m in (mode, source))
    outside = source.outside_ms * here / there
    slope = 0.0
    if plain is not None and plain.verify_ms is not None and source.k:
        slope = (source.verify_ms - plain.verify_ms) / source.k
    return source.verify_ms + (mode.k - source.k) * slope + source.draft_ms + outside
