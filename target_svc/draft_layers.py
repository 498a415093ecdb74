"""The draft that draft services are expected to host, as far as the target looks into it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from engine.default_model import DEFAULT
from engine.device import resolve_device
from engine.errors import CheckpointError, SettingRefused
from engine.models.draft_dialects import read_draft
from engine.models.draft_loading import DraftTarget
from engine.weights import read_json
from target_svc.settings import TargetSettings

_PACKAGE, _SHIPPED = "draft_svc", Path("checkpoints", "smollm2-135m-dflash")
_ACCEPTED = 'a local directory with a config.json, or "default"'


def draft_layers(settings: TargetSettings) -> tuple[int, ...]:
    """Layers whose rows draft services will ask for, rising; none where nothing is known of a
    draft. Raises CheckpointError for a draft that cannot be read or is for another model."""
    if settings.warm_taps or settings.colocate:
        return settings.warm_taps
    checkpoint = expected_draft(settings)
    if checkpoint is None:
        return ()
    config = read_json(checkpoint / "config.json")
    return read_draft(config, DraftTarget(settings.model).described).tap_ids


def projected_draft(settings: TargetSettings) -> Path | None:
    """The checkpoint whose projection rows go through; None: they do not. Raises CheckpointError,
    BackendUnavailable for a device that cannot be had, and SettingRefused where rows are to go
    through one and there is none."""
    asked = settings.project_rows
    if asked is None:
        # On a CPU the tokens of each step would wait for the product.
        asked = not settings.colocate and resolve_device(settings.device).type == "cuda"
    checkpoint = expected_draft(settings) if asked else None
    if settings.project_rows is None and checkpoint is not None and not _has_weights(checkpoint):
        return None  # its config alone says which layers to warm up for
    if checkpoint is None and settings.project_rows:
        accepted = f"false, or with warm_draft: {_ACCEPTED}, for the default model"
        raise SettingRefused("project_rows", True, accepted)
    return checkpoint


def expected_draft(settings: TargetSettings) -> Path | None:
    """The checkpoint that `warm_draft` names. Raises CheckpointError where there is none."""
    if settings.warm_draft == DEFAULT:
        return _shipped() if settings.model == DEFAULT else None
    if not settings.warm_draft:
        return None
    checkpoint = Path(settings.warm_draft).expanduser()
    if not (checkpoint / "config.json").is_file():
        raise CheckpointError(f"warm_draft is {settings.warm_draft!r}; accepted: {_ACCEPTED}")
    return checkpoint


def _has_weights(checkpoint: Path) -> bool:
    return any(checkpoint.glob("*.safetensors"))


def _shipped() -> Path | None:
    """Of the drafts beside the default model, found without importing them; None where they are
    not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    places = (
        [Path(place, _SHIPPED) for place in spec.submodule_search_locations or ()] if spec else ()
    )
    return next((place for place in places if (place / "config.json").is_file()), None)
