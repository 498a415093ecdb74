"""Devices as data: what an attention backend's limits are checked against, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import BackendUnavailable

# CUDA compute capability, (major, minor).
Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """`capability` is None for a CPU. `features`: instruction sets that limits name.

    `unavailable` is what this machine lacks, as (backend, why): a compiler, a package that does not
    load. A simulated profile has none.
    """

    name: str
    capability: Capability | None = None
    features: frozenset[str] = frozenset()
    simulated: bool = True
    unavailable: tuple[tuple[str, str], ...] = ()

    def why_unavailable(self, backend: str) -> tuple[str, ...]:
        return tuple(why for name, why in self.unavailable if name == backend)


@dataclass(frozen=True, slots=True)
class Range:
    """Capabilities low .. high, both included; `low` None is the CPU."""

    low: Capability | None
    high: Capability = (99, 0)

    def covers(self, device: DeviceProfile) -> bool:
        if self.low is None or device.capability is None:
            return self.low is None and device.capability is None
        return self.low <= device.capability <= self.high

    def __str__(self) -> str:
        if self.low is None:
            return "cpu"
        low = f"{self.low[0]}.{self.low[1]}"
        if self.high[0] == 99:
            return f"{low} and above"
        if self.low == (self.high[0], 0) and self.high[1] == 9:
            return f"{self.low[0]}.x"
        return f"{low}-{self.high[0]}.{'x' if self.high[1] == 9 else self.high[1]}"


CPU = Range(None)
ANY_GPU = Range((0, 0))
SM80_UP = Range((8, 0))
SM90 = Range((9, 0), (9, 9))
SM100 = Range((10, 0), (10, 9))
SM12X = Range((12, 0), (12, 9))
SM121 = Range((12, 1), (12, 1))
ANYWHERE = (CPU, ANY_GPU)

PROFILES: dict[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        DeviceProfile("cpu"),
        DeviceProfile("sm75", (7, 5)),
        DeviceProfile("sm80", (8, 0)),
        DeviceProfile("sm86", (8, 6)),
        DeviceProfile("sm89", (8, 9)),
        DeviceProfile("sm90", (9, 0)),
        DeviceProfile("sm100", (10, 0)),
        DeviceProfile("sm103", (10, 3)),
        DeviceProfile("sm120", (12, 0)),
        DeviceProfile("sm121", (12, 1)),
    )
}


def simulated(name: str) -> DeviceProfile:
    """A profile by name. Raises BackendUnavailable naming the known ones."""
    if name not in PROFILES:
        raise BackendUnavailable(f"unknown device {name!r}; accepted: {', '.join(PROFILES)}")
    return PROFILES[name]


def covered(ranges: tuple[Range, ...], device: DeviceProfile) -> bool:
    return any(item.covers(device) for item in ranges)
