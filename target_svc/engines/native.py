"""The native engine, loaded from the service's settings."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.api import Drafter, never
from engine.default_model import tokenizer_document
from engine.errors import BackendUnavailable, CheckpointError, EngineError
from engine.loading import load_engine
from specwire.errors import Reason, SpecwireError
from target_svc.app import Loaded
from target_svc.costs import prepared
from target_svc.draft_layers import projected_draft
from target_svc.settings import TargetSettings

log = logging.getLogger(__name__)


def load_native(
    settings: TargetSettings,
    drafter: Drafter | None = None,
    stopped: Callable[[], bool] = never,
) -> Loaded:
    """Loads the weights, warms up and measures steps, so that the first request finds everything
    warm. A `drafter` is loaded with it, and its part of a step is measured too. Once it is
    `stopped` what the first request would find warm is left out."""
    try:
        projected = projected_draft(settings)
        engine = load_engine(settings.engine_config(settings.model), drafter, stopped, projected)
        costs = prepared(engine, settings, drafter is not None, stopped=stopped)
        return Loaded(engine, tokenizer_document(settings.model), costs=costs)
    except BackendUnavailable as error:
        raise SpecwireError(Reason.BACKEND_UNAVAILABLE, str(error)) from error
    except CheckpointError as error:
        raise SpecwireError(Reason.CHECKPOINT_INVALID, str(error)) from error
    except EngineError as error:
        raise SpecwireError(Reason.SETTINGS_INVALID, str(error)) from error
