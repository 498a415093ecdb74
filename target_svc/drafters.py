"""Finds the drafter that is to run in the target's process; neither package knows the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from engine.api import Drafter
from engine.colocated import DrafterSettings
from engine.errors import EngineError
from specwire.errors import Reason, SpecwireError
from target_svc.settings import TargetSettings

GROUP = "specwire.drafters"

Factory = Callable[[DrafterSettings], Drafter]


def find_drafter(
    settings: TargetSettings, factories: Mapping[str, Factory] | None = None
) -> Drafter | None:
    """The drafter that the settings name, not loaded yet; without `factories` it is looked up among
    the entry points that packages have registered. Raises SpecwireError."""
    name = settings.colocate
    if not name:
        return None
    known: Mapping[str, Any] = _installed() if factories is None else factories
    if name not in known:
        accepted = ", ".join(sorted(known)) or f"nothing: no package registers {GROUP}"
        raise SpecwireError.field("colocate", name, accepted, Reason.METHOD_UNKNOWN)
    factory: Factory = known[name].load() if factories is None else known[name]
    try:
        return factory(settings.drafter_settings())
    except EngineError as error:
        raise SpecwireError(Reason.SETTINGS_INVALID, f"{name}: {error}") from error


def _installed() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=GROUP)}
