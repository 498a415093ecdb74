"""`specwire plan --from-bench`: what the cost model says of a bench run, beside what was measured.

Nothing is predicted from itself: step times and the work of an exchange are those of the same
drafter in the *other* place, as exact. Where the two had another K, plain decoding tells what a
token more costs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.bench_modes import EXACTNESS
from coordinator.drafters import COLOCATED, PLAIN, SEPARATE
from coordinator.topology import Link
from specwire.errors import SpecwireError

_PLACES = (SEPARATE, COLOCATED)
_ACCEPTED = "a report of `specwire bench --json` with modes that decoded something"


@dataclass(frozen=True, slots=True)
class Measured:
    """Means of one mode's rounds. `outside_ms`, beyond the computing of both, is a median."""

    label: str
    method: str
    exactness: str
    k: float
    tau: float
    verify_ms: float
    draft_ms: float
    outside_ms: float
    tokens_per_s: float

    @property
    def drafter(self) -> str:
        return self.method.partition("@")[0]

    @property
    def colocated(self) -> bool:
        return self.method.endswith(f"@{COLOCATED}")


@dataclass(frozen=True, slots=True)
class Predicted:
    """`source` is the mode whose times were used."""

    measured: Measured
    source: str
    round_ms: float
    tokens_per_s: float

    @property
    def error(self) -> float:
        """Of the speed: 0.1 is a tenth too fast."""
        return self.tokens_per_s / self.measured.tokens_per_s - 1.0


def read_report(path: Path) -> list[Measured]:
    """The modes of a bench's report. Raises FIELD_INVALID for what is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SpecwireError.field("--from-bench", str(path), _ACCEPTED) from None
    try:
        environment = report["environment"]
        methods, usual = environment["methods"], str(environment["exactness"])
        return [
            _measured(label, str(methods[label]), usual, entry)
            for label, entry in report["modes"].items()
            if entry["rounds"] and entry["decode_tokens_per_s"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecwireError.field("--from-bench", f"without {error}", _ACCEPTED) from None


def _measured(label: str, method: str, usual: str, entry: Mapping[str, Any]) -> Measured:
    # The median: verdicts that come early by what others came late are cut at zero, in a mean.
    rounds, phases, outside = entry["rounds"], entry["phase_ms"], entry["outside_ms_p50"]
    tau = entry["decoded_tokens"] / rounds
    # Of both together; the phases of a separate draft and of a target have waiting in them.
    computed = 1e3 * tau / entry["decode_tokens_per_s"] - outside
    inside = method.endswith(f"@{COLOCATED}")
    verify = computed - phases["draft"] / rounds if inside else phases["verify"] / rounds
    if method == PLAIN:
        verify = computed
    return Measured(
        label=label,
        method=method,
        exactness=next((word for word in label.split("@") if word in EXACTNESS), usual),
        k=entry["draft_tokens"] / rounds,
        tau=tau,
        verify_ms=verify,
        draft_ms=computed - verify,
        outside_ms=outside,
        tokens_per_s=entry["decode_tokens_per_s"],
    )


def predict(modes: Sequence[Measured], ahead: int) -> list[Predicted]:
    """Of every drafter that the report has in both places; `ahead` as the coordinator had it."""
    found = []
    for mode in modes:
        alike = [other for other in modes if other.exactness == mode.exactness]
        plain = next((other for other in alike if other.method == PLAIN), None)
        for source in alike:
            if {mode.method, source.method} != {f"{mode.drafter}@{place}" for place in _PLACES}:
                continue
            round_ms = _round_ms(mode, source, plain, ahead)
            found.append(Predicted(mode, source.label, round_ms, 1e3 * mode.tau / round_ms))
            break
    return found


def _round_ms(mode: Measured, source: Measured, plain: Measured | None, ahead: int) -> float:
    """A round of `mode` with the times of `source`, which may have had another K."""
    exchange = source.outside_ms / 2
    if source.colocated:
        exchange = source.outside_ms / Link(exchange_ms=1.0, ahead=ahead).colocated_ms
    link = Link(exchange_ms=exchange, ahead=ahead)
    slope = (source.verify_ms - plain.verify_ms) / source.k if plain and source.k else 0.0
    outside = link.colocated_ms if mode.colocated else 2 * link.exchange_ms
    return source.verify_ms + (mode.k - source.k) * slope + source.draft_ms + outside
