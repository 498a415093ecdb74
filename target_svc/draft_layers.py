"""Which layers' rows draft services will ask for, as far as that is known at start."""

from __future__ import annotations

from pathlib import Path

from engine.default_model import DEFAULT
from engine.errors import CheckpointError
from engine.models.draft_dialects import parse_draft
from engine.models.draft_loading import DraftTarget
from engine.weights import read_json
from target_svc.settings import TargetSettings

# Of the drafts that come with the default model.
SHIPPED = (1, 8, 14, 20, 27)


def draft_layers(settings: TargetSettings) -> tuple[int, ...]:
    """Rising layers; none where nothing is known of a draft. Raises CheckpointError for a draft
    that cannot be read or is for another model."""
    if settings.warm_taps or settings.colocate or not settings.warm_draft:
        return settings.warm_taps
    if settings.warm_draft == DEFAULT:
        return SHIPPED if settings.model == DEFAULT else ()
    path = Path(settings.warm_draft).expanduser() / "config.json"
    if not path.is_file():
        accepted = 'a local directory with a config.json, or "default"'
        raise CheckpointError(f"warm_draft is {settings.warm_draft!r}; accepted: {accepted}")
    config = read_json(path)
    return tuple(parse_draft(config, DraftTarget(settings.model).described, "dflash").tap_ids)
