"""What was measured, for `specwire plan --from-bench`: the modes of a report of `specwire bench`,
or the cells of one of closed-loop load, which has several numbers of sessions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

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
    except OSError as error:
        raise _refused(path, f"a file that can be read ({error.strerror})") from None
    except ValueError as error:
        raise _refused(path, f"JSON ({error})") from None
    except RecursionError:
        raise _refused(path, "JSON that is not nested so deeply") from None
    try:
        if isinstance(report, list):
            return Measurements(tuple(_cells(report)), loaded=True)
        return Measurements(tuple(_modes(_Bench.model_validate(report))), loaded=False)
    except ValidationError as error:
        raise _refused(path, _wanted(error)) from None
    except LookupError as error:
        raise _refused(path, str(error.args[0])) from None


def _refused(path: Path, accepted: str) -> SpecwireError:
    return SpecwireError.field("--from-bench", str(path), f"{accepted}; {_ACCEPTED}")


def _wanted(error: ValidationError) -> str:
    """What should be where, and what is there."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "all of it"
    if first["type"] == "missing":
        return f"a value for {where}"
    if first["type"] in ("model_type", "dict_type"):
        return f"an object for {where} (now {first.get('input')!r:.60})"
    kind = re.sub(r"^Input should be |, unable to parse .*$", "", first["msg"])
    return f"{kind} for {where} (now {first.get('input')!r:.60})"


# Of the rounds in a phase: the coordinator measures one and the client the other.
_LONGEST = 1.25
# No more than can be computed with.
_Count = Annotated[int, Field(ge=0, le=10**12)]
_Figure = Annotated[float, Field(ge=0, le=1e12)]


class _Mode(BaseModel):
    """One of a report of a bench run, as far as it is read here."""

    model_config = ConfigDict(allow_inf_nan=False)

    rounds: _Count
    decoded_tokens: _Count
    draft_tokens: _Count
    decode_tokens_per_s: _Figure | None
    outside_ms_p50: _Figure | None
    phase_ms: dict[str, _Figure]


class _Environment(BaseModel):
    methods: dict[str, str]
    exactness: str


class _Bench(BaseModel):
    environment: _Environment
    modes: dict[str, _Mode]


def _modes(report: _Bench) -> Iterator[Measured]:
    environment = report.environment
    found = {
        label: mode
        for label, mode in report.modes.items()
        if mode.rounds and mode.decode_tokens_per_s and mode.outside_ms_p50 is not None
    }
    if not found:
        raise LookupError("modes that were measured")
    for label, mode in found.items():
        if label not in environment.methods:
            raise LookupError(f"environment.methods with the mode {label!r}")
        yield _mode(label, environment.methods[label], environment.exactness, mode)


def _mode(label: str, method: str, usual: str, mode: _Mode) -> Measured:
    assert mode.decode_tokens_per_s and mode.outside_ms_p50 is not None
    # The median: verdicts that come early by what others came late are cut at zero, in a mean.
    rounds, outside = mode.rounds, mode.outside_ms_p50
    tau = mode.decoded_tokens / rounds
    # Of both together; the phases of a separate draft and of a target have waiting in them.
    round_ms = 1e3 * tau / mode.decode_tokens_per_s
    computed = round_ms - outside
    phase = "draft" if method.endswith(f"@{COLOCATED}") else "verify"
    verify = computed
    if method != PLAIN:
        if phase not in mode.phase_ms:
            raise LookupError(f"modes.{label}.phase_ms with {phase!r}")
        known = mode.phase_ms[phase] / rounds
        if known > _LONGEST * round_ms:
            of_rounds = f"no more than its rounds, {rounds * round_ms:.6g} ms"
            raise LookupError(f"modes.{label}.phase_ms.{phase} with {of_rounds}")
        verify = computed - known if phase == "draft" else known
    return Measured(
        label=label,
        method=method,
        exactness=_exactness(label, usual),
        k=mode.draft_tokens / rounds,
        tau=tau,
        verify_ms=verify,
        draft_ms=computed - verify,
        outside_ms=outside,
        tokens_per_s=mode.decode_tokens_per_s,
    )


class _Cell(BaseModel):
    """One of a report of closed-loop load, as far as it is read here."""

    model_config = ConfigDict(allow_inf_nan=False)

    mode: str
    sessions: int = Field(ge=1, le=10**6)
    tokens_per_s: _Figure
    tau: _Figure = Field(gt=0)
    k: _Figure
    drafted: float = Field(1.0, ge=0, le=1)
    outside_ms: _Figure | None
    verify_ms: _Figure | None = Field(None, gt=0)
    draft_ms: _Figure | None = None


def _cells(report: Sequence[Any]) -> list[Measured]:
    """Of modes that did what they are named after; a drafter that switched itself off did not."""
    cells = TypeAdapter(list[_Cell]).validate_python(report)
    found = [cell for cell in cells if cell.tokens_per_s and cell.outside_ms is not None]
    if not found:
        raise LookupError("cells that were measured")
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
