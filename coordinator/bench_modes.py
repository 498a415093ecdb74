"""The modes that `specwire bench` compares: which drafter, where it is, and how exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.drafters import COLOCATED, PLAIN, SEPARATE
from coordinator.local import COLOCATED_METHOD, OWN_METHODS, colocatable
from specwire.client import ServerInfo
from specwire.errors import SpecwireError

EXACTNESS = ("exact", "fast")
_FORMS = "NAME, NAME@exact, NAME@fast, NAME@colocated or NAME@separate, by commas"


@dataclass(frozen=True)
class Mode:
    """One column. `draft` is the default drafter; `plain@fast` has its own exactness."""

    label: str
    method: str
    exactness: str
    placement: str = ""

    @property
    def request(self) -> str:
        """The method as a request names it."""
        return f"{self.method}@{self.placement}" if self.placement else self.method

    def twin(self, other: Mode) -> bool:
        """Whether the two are the same but for the place of the drafter."""
        return replace(self, label="", placement="") == replace(other, label="", placement="")


def parse_modes(text: str, exactness: str) -> list[Mode]:
    if exactness not in EXACTNESS:
        raise SpecwireError.field("--exactness", exactness, ", ".join(EXACTNESS))
    modes: list[Mode] = []
    for label in (part.strip() for part in text.split(",")):
        name, *chosen = label.split("@")
        mode = Mode(label, "" if name == "draft" else name, exactness)
        for word in chosen:
            if word in EXACTNESS:
                mode = replace(mode, exactness=word)
            elif word in (COLOCATED, SEPARATE) and name != PLAIN:
                mode = replace(mode, placement=word)
            else:
                raise SpecwireError.field("--modes", text, _FORMS)
        if not name or label in (known.label for known in modes):
            raise SpecwireError.field("--modes", text, _FORMS + ", each once")
        modes.append(mode)
    return modes


def check_own(modes: Sequence[Mode]) -> None:
    """Refuses, before any service is started, what deployments of the bench's own do not have."""
    for mode in modes:
        inside = mode.placement == COLOCATED
        method = mode.method or (COLOCATED_METHOD if inside else OWN_METHODS[-1])
        known = colocatable() if inside else [PLAIN, *OWN_METHODS]
        if method not in known:
            names = ", ".join(f"{name}@{COLOCATED}" if inside else name for name in known)
            accepted = f"{names}, which bench starts by itself; with --address what is there"
            raise SpecwireError.field("--modes", mode.label, accepted)


def not_there(mode: Mode, offered: str) -> SpecwireError:
    """Of a mode that the deployment refuses, which has what is `offered`."""
    accepted = f"what this deployment has: {offered}"
    if mode.placement == COLOCATED and mode.method in colocatable():
        accepted += (
            ". Where none runs and no --address is given, bench starts one for each place by "
            f"itself; or start `specwire up --colocate {mode.method}` and name it with --address"
        )
    return SpecwireError.field("--modes", mode.label, accepted)


def wants_colocated(modes: Sequence[Mode]) -> bool:
    return any(mode.placement == COLOCATED for mode in modes)


def colocated_methods(
    modes: Sequence[Mode], default: str, known: Sequence[str], *, both: bool
) -> list[str]:
    """Drafters that modes want in a target's process, each once; `both`: those of the other modes
    too, as far as they are `known` to be able to live there. `default` is what `draft` means."""
    wanted = [
        mode.method or default
        for mode in modes
        if mode.placement == COLOCATED
        or (both and not mode.placement and (mode.method or default) in known)
    ]
    return list(dict.fromkeys(wanted))


def placed(modes: Sequence[Mode], servers: Sequence[ServerInfo], *, both: bool) -> list[Mode]:
    """The modes as requests; the default method is the first server's. `both`: each drafter that is
    in both places is measured in both. A mode that names no place stands for the separate drafter
    beside its co-located twin."""
    inside, beside = _methods(servers, COLOCATED), _methods(servers, SEPARATE)
    name, _, place = servers[0].default_method.partition("@")
    found: list[Mode] = []
    for mode in modes:
        if not mode.method:
            mode = replace(mode, method=name, placement=mode.placement or place)
        found.append(mode)
        label = f"{mode.label}@{COLOCATED}"
        known = any(other.label == label for other in modes)
        if both and not (mode.placement or known) and mode.method in inside:
            found.append(replace(mode, label=label, placement=COLOCATED))
    if both and not wants_colocated(found):
        offered = ", ".join(sorted(inside)) or "none"
        names = ",".join(mode.label for mode in modes)
        raise SpecwireError.field("--modes", names, f"with --colocate, one of: {offered}")
    twins = [mode for mode in found if mode.placement == COLOCATED]
    return [
        replace(mode, placement=SEPARATE)
        if not mode.placement and mode.method in beside and any(mode.twin(t) for t in twins)
        else mode
        for mode in found
    ]


def pairs(modes: Sequence[Mode]) -> list[tuple[str, str]]:
    """Labels of (separate, co-located) modes that are the same otherwise."""
    return [
        (one.label, two.label)
        for one in modes
        for two in modes
        if one.placement == SEPARATE and two.placement == COLOCATED and one.twin(two)
    ]


def rotated(modes: Sequence[Mode], turn: int) -> list[Mode]:
    """Each mode is first equally often: who goes second finds warmer caches."""
    at = turn % len(modes)
    return [*modes[at:], *modes[:at]]


def _methods(servers: Sequence[ServerInfo], placement: str) -> set[str]:
    return {
        method
        for server in servers
        for worker in server.workers
        if worker.placement == placement
        for method in worker.methods
    }
