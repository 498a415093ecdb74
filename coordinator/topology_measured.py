"""What was measured, for `specwire plan --from-bench`: the modes of a report of `specwire bench`,
or the cells of one of closed-loop load, which has several numbers of sessions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.bench_modes import EXACTNESS
from coordinator.drafters import COLOCATED, PLAIN
from coordinator.topology_link import COLOCATED as BESIDE
from coordinator.topology_link import PLAIN as ALONE
from coordinator.topology_link import SEPARATE as APART
from specwire.errors import SpecwireError

# Drafters that read the target's hidden states: a report tells names only.
_ROW_READERS = frozenset({"dflash", "dspark", "hybrid"})
_ACCEPTED = (
    "a report of `specwire bench --json` with modes that decoded something, or of "
    "`python -m tests.load.sessions --json`"
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Means of one mode's rounds, in ms where it says so, of which the share `drafted` had draft
    tokens. Of one session alone `outside_ms`, beyond
    the computing of both, is a median. None: the report does not tell."""

    label: str
    method: str
    exactness: str
    k: float
    tau: float
    verify_ms: float | None
    draft_ms: float | None
    outside_ms: float
    tokens_per_s: float
    sessions: int = 1
    drafted: float = 1.0

    @property
    def drafter(self) -> str:
        return self.method.partition("@")[0]

    @property
    def reads_rows(self) -> bool:
        return self.drafter in _ROW_READERS

    @property
    def topology(self) -> str:
        if self.method == PLAIN:
            return ALONE
        return BESIDE if self.method.endswith(f"@{COLOCATED}") else APART


@dataclass(frozen=True, slots=True)
class Measurements:
    """`loaded`: several numbers of sessions, where no mode tells of another."""

    modes: tuple[Measured, ...]
    loaded: bool


def read_report(path: Path) -> Measurements:
    """Raises FIELD_INVALID for what is no report."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SpecwireError.field("--from-bench", str(path), _ACCEPTED) from None
    try:
        if isinstance(report, list):
            return Measurements(tuple(_cells(report)), loaded=True)
        environment = report["environment"]
        methods, usual = environment["methods"], str(environment["exactness"])
        modes = [
            _mode(label, str(methods[label]), usual, entry)
            for label, entry in report["modes"].items()
            if entry["rounds"] and entry["decode_tokens_per_s"]
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SpecwireError.field("--from-bench", f"without {error}", _ACCEPTED) from None
    return Measurements(tuple(modes), loaded=False)


def _mode(label: str, method: str, usual: str, entry: Mapping[str, Any]) -> Measured:
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
        exactness=_exactness(label, usual),
        k=entry["draft_tokens"] / rounds,
        tau=tau,
        verify_ms=verify,
        draft_ms=computed - verify,
        outside_ms=outside,
        tokens_per_s=entry["decode_tokens_per_s"],
    )


class _Cell(BaseModel):
    """One of a report of closed-loop load, as far as it is read here."""

    model_config = ConfigDict(allow_inf_nan=False)

    mode: str
    sessions: int = Field(ge=1)
    tokens_per_s: float = Field(ge=0)
    tau: float = Field(gt=0)
    k: float = Field(ge=0)
    drafted: float = Field(1.0, ge=0, le=1)
    outside_ms: float | None = Field(ge=0)
    verify_ms: float | None = Field(None, gt=0)
    draft_ms: float | None = Field(None, ge=0)


def _cells(report: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """Of modes that did what they are named after; a drafter that switched itself off did not."""
    try:
        cells = [_Cell.model_validate(cell) for cell in report]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "a cell"
        wrong = f"{where} {first.get('input')!r:.60}" if first["loc"] else repr(first["input"])[:60]
        accepted = f"{first['msg'].lower()}; {_ACCEPTED}"
        raise SpecwireError.field("--from-bench", wrong, accepted) from None
    found = [cell for cell in cells if cell.tokens_per_s and cell.outside_ms is not None]
    if not found:
        raise KeyError("cells that were measured")
    return [_cell(cell) for cell in found]


def _cell(cell: _Cell) -> Measured:
    words = [word for word in cell.mode.split("@") if word not in EXACTNESS]
    assert cell.outside_ms is not None
    return Measured(
        label=cell.mode,
        method="@".join(words),
        exactness=_exactness(cell.mode, EXACTNESS[0]),
        k=cell.k,
        tau=cell.tau,
        verify_ms=cell.verify_ms,
        draft_ms=cell.draft_ms,
        outside_ms=cell.outside_ms,
        tokens_per_s=cell.tokens_per_s,
        sessions=cell.sessions,
        drafted=cell.drafted,
    )


def _exactness(label: str, usual: str) -> str:
    return next((word for word in label.split("@") if word in EXACTNESS), usual)
